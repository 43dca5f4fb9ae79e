"""Evaluation with any server that speaks OpenAI's chat completions, such as vLLM.

Text in, text out: the server renders its own template and says neither which tokens it sampled nor with which weights.
So its responses are judged, and never trained on: the log-probabilities are NaN, the versions -1.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from vagen.actor.client import Generation, back_off
from vagen.actor.engines.http import EngineHttp
from vagen.actor.messages import Conversation, Message, Picture
from vagen.actor.rendering import ChatRenderer, Prompt
from vagen.common.errors import EngineError, EngineUnavailableError, ObservationError
from vagen.common.trajectory import EngineIdentity, SamplingParams

__all__ = ["Completion", "OpenAIClient", "chat_messages"]

logger = logging.getLogger(__name__)

_FORBID = -100
"""The least bias that the protocol has."""


class _Said(msgspec.Struct):
    content: str | None = None


class _Choice(msgspec.Struct):
    message: _Said
    finish_reason: str | None = None


class _Completed(msgspec.Struct):
    choices: list[_Choice]


class _Model(msgspec.Struct):
    id: str


class _Models(msgspec.Struct):
    data: list[_Model]


@dataclass(frozen=True, slots=True)
class Completion:
    """One response as text."""

    text: str
    finish_reason: Literal["stop", "length"]


class OpenAIClient:
    """An `EngineClient` for evaluation. `connect` first."""

    def __init__(self, url: str, renderer: ChatRenderer, *, api_key: str = "", retries: int = 4) -> None:
        """`url` is the server's, without `/v1`; the first model that it serves is used."""
        self._http = EngineHttp(url.rstrip("/").removesuffix("/v1"), api_key)
        self._renderer = renderer
        self._retries = retries
        self._model = ""

    @property
    def identity(self) -> EngineIdentity:
        """The server and its model; it announces no restart."""
        return EngineIdentity(
            kind="openai",
            incarnation=f"{self._http.url} {self._model}",
            model_hash=self._renderer.model_hash,
            tokenizer_hash=self._renderer.tokenizer_hash,
        )

    async def connect(self, timeout_s: float) -> EngineIdentity:
        """Wait for the server's list of models. Raises an `EngineError`."""
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                models = self._http.decode(await self._http.call("GET", "/v1/models"), _Models).data
                break
            except EngineUnavailableError as error:
                await back_off(1, deadline, f"{error} within {timeout_s:g} s")
        if not models:
            raise EngineError(f"{self._http.url}/v1/models: the server has no model")
        self._model = models[0].id
        return self.identity

    async def generate(
        self, prompt: Prompt, *, sampling: SamplingParams, max_new_tokens: int, rid: str, timeout_s: float
    ) -> Generation:
        """See `EngineClient`; the ids are those that the text encodes to."""
        started = time.monotonic()
        completion = await self.complete(
            prompt.conversation, sampling=sampling, max_new_tokens=max_new_tokens, timeout_s=timeout_s
        )
        try:
            ids = self._renderer.encode_response(completion.text)
        except ObservationError as error:
            raise EngineError(f"{self._http.url}: {error}") from error
        if completion.finish_reason == "length":
            ids = ids[:-1] or ids
        nothing = [math.nan] * len(ids)
        return Generation(ids, nothing, [-1] * len(ids), completion.finish_reason, time.monotonic() - started)

    async def complete(
        self, conversation: Conversation, *, sampling: SamplingParams, max_new_tokens: int, timeout_s: float
    ) -> Completion:
        """The response as the server words it. Raises an `EngineError`."""
        body: dict[str, Any] = {
            "model": self._model,
            "messages": list(chat_messages(conversation, self._renderer)),
            "max_tokens": max_new_tokens,
            "temperature": sampling.temperature,
        }
        plain = SamplingParams()
        body |= {n: getattr(sampling, n) for n in ("top_p", "top_k") if getattr(sampling, n) != getattr(plain, n)}
        if self._renderer.vision is not None:
            body["logit_bias"] = {str(token): _FORBID for token in self._renderer.vision.forbidden_token_ids}
        deadline = time.monotonic() + timeout_s
        failures = 0
        while True:
            left = max(0.001, deadline - time.monotonic())
            try:
                raw = await self._http.call("POST", "/v1/chat/completions", body, left)
                break
            except EngineUnavailableError as error:
                failures += 1
                if failures > self._retries:
                    raise
                logger.warning("completion, try %d of %d: %s", failures, self._retries + 1, error)
                await back_off(failures, deadline, f"{self._http.url}: unreachable")
        choices = self._http.decode(raw, _Completed).choices
        if not choices:
            raise EngineError(f"{self._http.url}: a completion without a choice")
        reason: Literal["stop", "length"] = "length" if choices[0].finish_reason == "length" else "stop"
        return Completion(choices[0].message.content or "", reason)

    async def close(self) -> None:
        """Close the connections."""
        await self._http.close()


def chat_messages(conversation: Conversation, renderer: ChatRenderer) -> Iterable[dict[str, Any]]:
    """A conversation as the protocol words it; pictures are data URLs."""
    for item in conversation:
        if not isinstance(item, Message):
            yield {"role": "assistant", "content": renderer.decode(item.token_ids)}
        elif item.pictures:
            yield {"role": item.role, "content": [_part(part) for part in item.parts]}
        else:
            yield {"role": item.role, "content": "".join(part for part in item.parts if isinstance(part, str))}


def _part(part: str | Picture) -> dict[str, Any]:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{part.base64}"}}
