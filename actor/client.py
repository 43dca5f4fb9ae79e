"""The engine client: one response for one prompt, over SGLang's HTTP API (the local engine speaks the same).

Owns requests, retries, the resumption of aborted generations, and the checks that make an answer fit to be trained
on. Does not own the text of prompts (`rendering`), nor which engine may take traffic (`loop`).
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, TypeVar

import aiohttp
import msgspec

from vagen.actor.rendering import ChatRenderer, Prompt
from vagen.common.engines import incarnation_of
from vagen.common.errors import (
    EngineAbortedError,
    EngineError,
    EngineRefusedError,
    EngineUnavailableError,
)
from vagen.common.trajectory import EngineIdentity, SamplingParams
from vagen.common.vocabulary import forbidding_bias

logger = logging.getLogger(__name__)

_FIRST_BACKOFF_S = 0.1
_MAX_BACKOFF_S = 2.0
_MAX_ABORTS_WITHOUT_PROGRESS = 8
_SIDE_CALL_TIMEOUT_S = 5.0
_CONNECT_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True)
class Generation:
    """One response. `versions[i]` is the policy version that sampled `token_ids[i]`."""

    token_ids: list[int]
    logprobs: list[float]
    versions: list[int]
    finish_reason: str
    """`stop` or `length`."""
    engine_s: float


class EngineClient(Protocol):
    """What an episode needs of an engine."""

    @property
    def identity(self) -> EngineIdentity:
        """Which engine answers now."""
        ...

    async def generate(
        self, prompt: Prompt, *, sampling: SamplingParams, max_new_tokens: int, rid: str, timeout_s: float
    ) -> Generation:
        """Sample one response. Raises an `EngineError`; a failed call leaves no tokens behind."""
        ...


class _Span(msgspec.Struct):
    version: str | int
    start: int
    end: int


class _FinishReason(msgspec.Struct):
    type: Literal["stop", "length", "abort"]


class _Meta(msgspec.Struct):
    finish_reason: _FinishReason
    output_token_logprobs: list[tuple[float | None, int, Any]] = []
    weight_versions: list[_Span] = []


class _Answer(msgspec.Struct):
    """The part of an answer of `/generate` that is read."""

    output_ids: list[int]
    meta_info: _Meta


A = TypeVar("A")


@dataclass(slots=True)
class _Partial:
    """Tokens of one response so far, over all the requests that it took."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)


class HttpEngineClient:
    """The client of one engine. `refresh` or `connect` first: an identity is known only from the engine."""

    def __init__(self, url: str, renderer: ChatRenderer, *, api_key: str = "", retries: int = 4) -> None:
        self.url = url.rstrip("/")
        self._renderer = renderer
        self._retries = retries
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._session: aiohttp.ClientSession | None = None
        self._identity: EngineIdentity | None = None

    @property
    def identity(self) -> EngineIdentity:
        """As of the last `refresh`."""
        assert self._identity is not None, "connect() first"
        return self._identity

    async def connect(self, timeout_s: float) -> EngineIdentity:
        """Wait for the engine's first answer. Raises `EngineUnavailableError` that says what to start."""
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                return await self.refresh()
            except EngineUnavailableError as error:
                if time.monotonic() >= deadline:
                    raise EngineUnavailableError(
                        f"no engine answers at {self.url} within {timeout_s:g} s ({error}); "
                        "start one with `vagen-actor engine --model DIR --port N`, or pass --engine local"
                    ) from error
            await asyncio.sleep(min(0.2, timeout_s))

    async def refresh(self) -> EngineIdentity:
        """Read the engine's identity again; its incarnation changes when it was restarted."""
        body = await self._call("GET", "/server_info", None, _SIDE_CALL_TIMEOUT_S)
        info = self._decode(body, dict[str, Any])
        identity = EngineIdentity(
            kind=str(info.get("kind", "sglang")),
            incarnation=incarnation_of(info),
            model_hash=str(info.get("model_hash") or self._renderer.model_hash),
            tokenizer_hash=self._renderer.tokenizer_hash,
        )
        if self._identity is not None and identity.incarnation != self._identity.incarnation:
            logger.warning("engine %s was restarted: incarnation %s", self.url, identity.incarnation)
        self._identity = identity
        return identity

    async def generate(
        self, prompt: Prompt, *, sampling: SamplingParams, max_new_tokens: int, rid: str, timeout_s: float
    ) -> Generation:
        """See `EngineClient`. A generation that the engine aborts goes on from the tokens it had."""
        self._check_prompt(prompt)
        started = time.monotonic()
        deadline = started + timeout_s
        partial = _Partial()
        incarnation = self.identity.incarnation
        aborts = 0
        for request in itertools.count():
            budget = max_new_tokens - len(partial.token_ids)
            body = self._body(prompt, partial, sampling, budget, f"{rid}.{request}")
            answer = self._decode(await self._generate_once(body, deadline, incarnation), _Answer)
            before = len(partial.token_ids)
            reason = self._take(answer, partial, budget)
            if reason == "abort" and len(partial.token_ids) == max_new_tokens:
                reason = "length"
            if reason != "abort":
                if not partial.token_ids:
                    raise EngineError(f"{self.url}: a response without tokens (finish reason {reason})")
                return Generation(
                    partial.token_ids, partial.logprobs, partial.versions, reason, time.monotonic() - started
                )
            aborts = aborts + 1 if len(partial.token_ids) == before else 1
            if aborts > _MAX_ABORTS_WITHOUT_PROGRESS:
                raise EngineAbortedError(f"{self.url}: aborted {rid} {aborts} times in a row without a token")
            await _back_off(aborts, deadline, f"{self.url}: aborted {rid}")
        raise AssertionError("unreachable: the loop returns or raises")

    async def abort(self, rid: str) -> None:
        """Ask the engine to give up a request that nobody waits for; best effort."""
        try:
            await self._call("POST", "/abort_request", {"rid": rid}, _SIDE_CALL_TIMEOUT_S)
        except EngineError as error:
            logger.info("abort of %s at %s: %s", rid, self.url, error)

    async def close(self) -> None:
        """Close the connections."""
        if self._session is not None:
            await self._session.close()

    def _check_prompt(self, prompt: Prompt) -> None:
        """Engines hang on surplus placeholders and silently ignore surplus images: neither may be sent."""
        vision = self._renderer.vision
        found = prompt.token_ids.count(vision.image_token_id) if vision else 0
        if found != len(prompt.pictures):
            raise EngineRefusedError(f"prompt has {found} image placeholders and {len(prompt.pictures)} images")

    def _body(
        self, prompt: Prompt, partial: _Partial, sampling: SamplingParams, budget: int, rid: str
    ) -> dict[str, Any]:
        body: dict[str, Any] = {
            "rid": rid,
            "input_ids": prompt.token_ids + partial.token_ids,
            "sampling_params": {
                "max_new_tokens": budget,
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
        if prompt.pictures:
            body["image_data"] = [picture.base64 for picture in prompt.pictures]
        return body

    async def _generate_once(self, body: Mapping[str, Any], deadline: float, incarnation: str) -> bytes:
        """One request, retried while the engine cannot be reached and is still the same engine."""
        for attempt in range(self._retries + 1):
            left = deadline - time.monotonic()
            if left <= 0:
                raise EngineUnavailableError(f"{self.url}: no answer within the time-out")
            # A new id each time: the engine may still hold the request whose answer was lost.
            rid = f"{body['rid']}.{attempt}"
            try:
                return await self._call("POST", "/generate", {**body, "rid": rid}, left)
            except EngineUnavailableError as error:
                # Its answer was lost; by its own id, since SGLang knows no prefixes of ids.
                await self.abort(rid)
                if attempt == self._retries or time.monotonic() >= deadline:
                    raise
                logger.warning("generation %s, try %d of %d: %s", body["rid"], attempt + 1, self._retries + 1, error)
            except asyncio.CancelledError:
                await asyncio.shield(self.abort(rid))
                raise
            await _back_off(attempt + 1, deadline, f"{self.url}: unreachable")
            await self._check_incarnation(incarnation)
        raise AssertionError("unreachable: the last attempt returns or raises")

    async def _check_incarnation(self, incarnation: str) -> None:
        """A restarted engine has other weights until the learner has published to it."""
        try:
            now = (await self.refresh()).incarnation
        except EngineUnavailableError:
            return
        if now != incarnation:
            raise EngineUnavailableError(f"{self.url}: the engine was restarted during the response")

    async def _call(self, method: str, path: str, body: object, timeout_s: float) -> bytes:
        if self._session is None:
            # The number of episodes is the bound on connections.
            self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), headers=self._headers)
        url = self.url + path
        timeout = aiohttp.ClientTimeout(total=timeout_s, sock_connect=_CONNECT_TIMEOUT_S)
        try:
            async with self._session.request(method, url, json=body, timeout=timeout) as response:
                answer = await response.read()
        except TimeoutError as error:
            raise EngineUnavailableError(f"{url}: no answer within {timeout_s:.1f} s") from error
        except (aiohttp.ClientError, OSError) as error:
            raise EngineUnavailableError(f"{url}: {type(error).__name__}: {error}") from error
        if response.status >= 400:
            text = answer[:300].decode(errors="replace")
            kind = EngineUnavailableError if response.status >= 500 else EngineRefusedError
            raise kind(f"{url}: HTTP {response.status}: {text}")
        return answer

    def _decode(self, body: bytes, kind: type[A]) -> A:
        try:
            return msgspec.json.decode(body, type=kind)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise EngineError(f"{self.url}: not the answer of an engine: {error}") from error

    def _take(self, answer: _Answer, partial: _Partial, budget: int) -> str:
        """Append an answer's tokens to `partial` once all checks hold; returns the finish reason."""
        ids, entries = answer.output_ids, answer.meta_info.output_token_logprobs
        if len(entries) != len(ids) or any(entry[1] != token for entry, token in zip(entries, ids, strict=True)):
            raise EngineError(f"{self.url}: {len(entries)} logprobs do not match the {len(ids)} output ids")
        if len(ids) > budget:
            raise EngineError(f"{self.url}: {len(ids)} tokens, asked for at most {budget}")
        logprobs = [entry[0] for entry in entries if entry[0] is not None and math.isfinite(entry[0])]
        if len(logprobs) != len(ids):
            raise EngineError(f"{self.url}: {len(ids) - len(logprobs)} non-finite logprobs of {len(ids)}")
        versions = self._versions(answer.meta_info.weight_versions, len(ids))
        vision = self._renderer.vision
        sampled = set(ids).intersection(vision.forbidden_token_ids) if vision else set()
        if sampled:
            raise EngineError(f"{self.url}: the policy sampled vision tokens {sorted(sampled)}")
        partial.token_ids += ids
        partial.logprobs += logprobs
        partial.versions += versions
        return answer.meta_info.finish_reason.type

    def _versions(self, spans: Sequence[_Span], num_tokens: int) -> list[int]:
        """Version of each token. From spans only: a version read after the fact may not have sampled the token."""
        versions: list[int] = []
        for span in spans:
            if not str(span.version).isdecimal():
                raise EngineError(
                    f"{self.url}: weight version {span.version!r} is no version of the learner's; "
                    "was anything published to this engine?"
                )
            if span.start != len(versions) or not span.start <= span.end <= num_tokens:
                raise EngineError(f"{self.url}: weight_versions have a gap at [{span.start}, {span.end})")
            versions += [int(span.version)] * (span.end - span.start)
        if len(versions) != num_tokens:
            raise EngineError(f"{self.url}: weight_versions cover {len(versions)} of {num_tokens} tokens")
        return versions


async def _back_off(failures: int, deadline: float, what: str) -> None:
    pause = min(_FIRST_BACKOFF_S * 2 ** (failures - 1), _MAX_BACKOFF_S)
    if time.monotonic() + pause >= deadline:
        raise EngineUnavailableError(f"{what}, and the time-out leaves no further try")
    await asyncio.sleep(pause)
