"""What an episode needs of an engine, and the client of one over SGLang's HTTP API (the local engine speaks the same).

Owns retries with one engine and the resumption of generations that it aborted. Several engines are
`vagen.actor.engines.pool`'s; requests and the checks of answers are `vagen.actor.engines.exchange`'s.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from dataclasses import dataclass
from typing import Protocol

from vagen.actor.engines.exchange import Exchange, FinishReason, Partial, Piece
from vagen.actor.engines.http import EngineHttp
from vagen.actor.rendering import ChatRenderer, Prompt
from vagen.common.errors import EngineAbortedError, EngineUnavailableError
from vagen.common.trajectory import EngineIdentity, SamplingParams

logger = logging.getLogger(__name__)

MAX_ABORTS_WITHOUT_PROGRESS = 8
_FIRST_BACKOFF_S = 0.1
_MAX_BACKOFF_S = 2.0


@dataclass(frozen=True, slots=True)
class Generation:
    """One response. `versions[i]` is the policy version that sampled `token_ids[i]`."""

    token_ids: list[int]
    logprobs: list[float]
    versions: list[int]
    finish_reason: str
    """`stop` or `length`."""
    engine_s: float

    @classmethod
    def of(cls, partial: Partial, finish_reason: FinishReason, engine_s: float) -> Generation:
        """The response that `partial` has become."""
        return cls(partial.token_ids, partial.logprobs, partial.versions, finish_reason, engine_s)


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


class HttpEngineClient:
    """The client of one engine. `refresh` or `connect` first: an identity is known only from the engine."""

    def __init__(self, url: str, renderer: ChatRenderer, *, api_key: str = "", retries: int = 4) -> None:
        self._renderer = renderer
        self._retries = retries
        self._http = EngineHttp(url, api_key)
        self._exchange = Exchange(self._http, renderer)
        self._identity: EngineIdentity | None = None

    @property
    def url(self) -> str:
        """Base URL of the engine."""
        return self._http.url

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
                    raise no_engine(self.url, timeout_s, error) from error
            await asyncio.sleep(min(0.2, timeout_s))

    async def refresh(self) -> EngineIdentity:
        """Read the engine's identity again; its incarnation changes when it was restarted."""
        identity = await self._http.identity(self._renderer.model_hash, self._renderer.tokenizer_hash)
        if self._identity is not None and identity.incarnation != self._identity.incarnation:
            logger.warning("engine %s was restarted: incarnation %s", self.url, identity.incarnation)
        self._identity = identity
        return identity

    async def generate(
        self, prompt: Prompt, *, sampling: SamplingParams, max_new_tokens: int, rid: str, timeout_s: float
    ) -> Generation:
        """See `EngineClient`. A generation that the engine aborts goes on from the tokens it had."""
        started = time.monotonic()
        deadline = started + timeout_s
        partial = Partial(max_new_tokens)
        incarnation = self.identity.incarnation
        aborts = 0
        for request in itertools.count():
            before = len(partial.token_ids)
            piece = await self._ask(prompt, partial, sampling, f"{rid}.{request}", deadline, incarnation)
            reason = partial.add(piece)
            if reason != "abort":
                return Generation.of(partial, reason, time.monotonic() - started)
            aborts = aborts + 1 if len(partial.token_ids) == before else 1
            if aborts > MAX_ABORTS_WITHOUT_PROGRESS:
                raise EngineAbortedError(f"{self.url}: aborted {rid} {aborts} times in a row without a token")
            await back_off(aborts, deadline, f"{self.url}: aborted {rid}")
        raise AssertionError("unreachable: the loop returns or raises")

    async def close(self) -> None:
        """Close the connections."""
        await self._http.close()

    async def _ask(
        self,
        prompt: Prompt,
        partial: Partial,
        sampling: SamplingParams,
        rid: str,
        deadline: float,
        incarnation: str,
    ) -> Piece:
        """One request, retried while the engine cannot be reached and is still the same engine."""
        for attempt in range(self._retries + 1):
            left = deadline - time.monotonic()
            if left <= 0:
                raise EngineUnavailableError(f"{self.url}: no answer within the time-out")
            # A new id each time: the engine may still hold the request whose answer was lost.
            tried = f"{rid}.{attempt}"
            try:
                return await self._exchange.send(prompt, partial, sampling=sampling, rid=tried, timeout_s=left)
            except EngineUnavailableError as error:
                # Its answer was lost; by its own id, since SGLang knows no prefixes of ids.
                await self._http.abort(tried)
                if attempt == self._retries or time.monotonic() >= deadline:
                    raise
                logger.warning("generation %s, try %d of %d: %s", rid, attempt + 1, self._retries + 1, error)
            except asyncio.CancelledError:
                await asyncio.shield(self._http.abort(tried))
                raise
            await back_off(attempt + 1, deadline, f"{self.url}: unreachable")
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


def no_engine(url: str, timeout_s: float, cause: Exception) -> EngineUnavailableError:
    """What to say when nothing answers at the start."""
    return EngineUnavailableError(
        f"no engine answers at {url} within {timeout_s:g} s ({cause}); "
        "start one with `vagen-actor engine --model DIR --port N`, or pass --engine local"
    )


async def back_off(failures: int, deadline: float, what: str) -> None:
    """Wait before the next try, longer after each failure. Raises `EngineUnavailableError` when no time is left."""
    pause = min(_FIRST_BACKOFF_S * 2 ** (failures - 1), _MAX_BACKOFF_S)
    if time.monotonic() + pause >= deadline:
        raise EngineUnavailableError(f"{what}, and the time-out leaves no further try")
    await asyncio.sleep(pause)
