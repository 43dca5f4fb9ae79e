"""One request for tokens: the body that asks, and the checks that make an answer fit to be trained on.

The tokens of an answer join a `Partial` all together, by its owner, once every check holds. Owns no
retries: see `vagen.actor.client` for one engine and `vagen.actor.engines.episode` for several.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

from vagen.actor.engines.conversation import Addition, Conversation
from vagen.actor.engines.http import EngineHttp
from vagen.actor.rendering import ChatRenderer, Prompt
from vagen.common.errors import EngineError, EngineRefusedError
from vagen.common.trajectory import SamplingParams
from vagen.common.vocabulary import forbidding_bias

__all__ = ["Exchange", "FinishReason", "Partial", "Piece"]

FinishReason = Literal["stop", "length", "abort"]


class _Span(msgspec.Struct):
    version: str | int
    start: int
    end: int


class _Finish(msgspec.Struct):
    type: FinishReason


class _Meta(msgspec.Struct):
    finish_reason: _Finish
    output_token_logprobs: list[tuple[float | None, int, Any]] = []
    weight_versions: list[_Span] = []
    prompt_tokens: int = -1


class _Answer(msgspec.Struct):
    """The part of an answer of `/generate` that is read."""

    output_ids: list[int]
    meta_info: _Meta


@dataclass(frozen=True, slots=True)
class Piece:
    """What one answer adds to a response."""

    token_ids: list[int]
    logprobs: list[float]
    versions: list[int]
    finish_reason: FinishReason


@dataclass(slots=True)
class Partial:
    """Tokens of one response so far, over all the requests that it took and all the engines that answered them."""

    max_new_tokens: int
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)

    @property
    def missing(self) -> int:
        """Tokens that may still come."""
        return self.max_new_tokens - len(self.token_ids)

    def add(self, piece: Piece) -> FinishReason:
        """Append an answer; returns why the response ended there, `length` for an abort after the last token."""
        self.token_ids += piece.token_ids
        self.logprobs += piece.logprobs
        self.versions += piece.versions
        return "length" if piece.finish_reason == "abort" and self.missing == 0 else piece.finish_reason


class Exchange:
    """Requests to one engine for one model's vocabulary."""

    def __init__(self, http: EngineHttp, renderer: ChatRenderer) -> None:
        self.http = http
        self._renderer = renderer

    async def send(
        self,
        prompt: Prompt,
        partial: Partial,
        *,
        sampling: SamplingParams,
        rid: str,
        timeout_s: float,
        oldest_version: int = 0,
        conversation: Conversation | None = None,
    ) -> Piece:
        """Ask once for what is missing of a response; `partial` is not changed. The prompt must go on from
        `conversation`, which notes an answer that others may be built upon.

        Raises an `EngineError`, also for tokens of a version below `oldest_version`, which the engine cannot have
        unless it was restarted.
        """
        self._check_prompt(prompt)
        ids = prompt.token_ids + partial.token_ids
        said = (
            Addition(ids, prompt.pictures, {}) if conversation is None else conversation.addition(ids, prompt.pictures)
        )
        body = self._body(said, partial, sampling, rid)
        answer = self.http.decode(await self.http.call("POST", "/generate", body, timeout_s), _Answer)
        piece = self._check(answer, partial.missing, oldest_version)
        if piece.finish_reason != "abort" and not (partial.token_ids or piece.token_ids):
            raise EngineError(f"{self.http.url}: a response without tokens (finish reason {piece.finish_reason})")
        if conversation is not None:
            self._check_length(answer, self._renderer.expanded_length(prompt) + len(partial.token_ids))
            if piece.finish_reason != "abort":
                conversation.note_answer(rid, ids + piece.token_ids, prompt.pictures)
        return piece

    def _check_prompt(self, prompt: Prompt) -> None:
        """Engines hang on surplus placeholders and silently ignore surplus images: neither may be sent."""
        vision = self._renderer.vision
        found = prompt.token_ids.count(vision.image_token_id) if vision else 0
        if found != len(prompt.pictures):
            raise EngineRefusedError(f"prompt has {found} image placeholders and {len(prompt.pictures)} images")

    def _check_length(self, answer: _Answer, expected: int) -> None:
        """SGLang joined the prompt itself: that it has as many tokens as ours is all that it says of it."""
        found = answer.meta_info.prompt_tokens
        if found != expected:
            raise EngineError(f"{self.http.url}: its conversation has {found} tokens, and ours {expected}")

    def _body(self, said: Addition, partial: Partial, sampling: SamplingParams, rid: str) -> dict[str, Any]:
        body: dict[str, Any] = {
            "rid": rid,
            "input_ids": list(said.token_ids),
            "sampling_params": {
                "max_new_tokens": partial.missing,
                "temperature": sampling.temperature,
                "stop_token_ids": list(self._renderer.stop_token_ids),
                "skip_special_tokens": False,
                "no_stop_trim": True,
            },
            "return_logprob": True,
            "logprob_start_len": -1,
        }
        plain = SamplingParams()
        for name in ("top_p", "top_k", "min_p"):
            # Only evaluation samples otherwise, and not every engine knows all of them.
            if getattr(sampling, name) != getattr(plain, name):
                body["sampling_params"][name] = getattr(sampling, name)
        if self._renderer.vision is not None:
            bias = forbidding_bias(self._renderer.vision.forbidden_token_ids)
            body["sampling_params"]["logit_bias"] = bias
        if said.pictures:
            body["image_data"] = [picture.base64 for picture in said.pictures]
        if said.session_params:
            body["session_params"] = dict(said.session_params)
        return body

    def _check(self, answer: _Answer, budget: int, oldest_version: int) -> Piece:
        """What an answer adds, once all checks hold."""
        url = self.http.url
        ids, entries = answer.output_ids, answer.meta_info.output_token_logprobs
        if len(entries) != len(ids) or any(entry[1] != token for entry, token in zip(entries, ids, strict=True)):
            raise EngineError(f"{url}: {len(entries)} logprobs do not match the {len(ids)} output ids")
        if len(ids) > budget:
            raise EngineError(f"{url}: {len(ids)} tokens, asked for at most {budget}")
        logprobs = [entry[0] for entry in entries if entry[0] is not None and math.isfinite(entry[0])]
        if len(logprobs) != len(ids):
            raise EngineError(f"{url}: {len(ids) - len(logprobs)} non-finite logprobs of {len(ids)}")
        versions = self._versions(answer.meta_info.weight_versions, len(ids))
        if versions and min(versions) < oldest_version:
            raise EngineError(
                f"{url}: tokens of version {min(versions)}, admitted with {oldest_version}; was the engine restarted?"
            )
        vision = self._renderer.vision
        sampled = set(ids).intersection(vision.forbidden_token_ids) if vision else set()
        if sampled:
            raise EngineError(f"{url}: the policy sampled vision tokens {sorted(sampled)}")
        return Piece(ids, logprobs, versions, answer.meta_info.finish_reason.type)

    def _versions(self, spans: Sequence[_Span], num_tokens: int) -> list[int]:
        """Version of each token. From spans only: a version read after the fact may not have sampled the token."""
        url = self.http.url
        versions: list[int] = []
        for span in spans:
            if not str(span.version).isdecimal():
                raise EngineError(
                    f"{url}: weight version {span.version!r} is no version of the learner's; "
                    "was anything published to this engine?"
                )
            if span.start != len(versions) or not span.start <= span.end <= num_tokens:
                raise EngineError(f"{url}: weight_versions have a gap at [{span.start}, {span.end})")
            versions += [int(span.version)] * (span.end - span.start)
        if len(versions) != num_tokens:
            raise EngineError(f"{url}: weight_versions cover {len(versions)} of {num_tokens} tokens")
        return versions
