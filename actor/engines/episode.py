"""The engines as one episode sees them: a response is sampled by one engine, or by several, one after the other.

    acquire a slot -> request what is missing of the response -> stop or length: done
         ^                 |                 |
         |                 | abort           | failure, time-out, engine lost
         +--- with the tokens so far <-------+--- none of the request's tokens, and elsewhere if there is an elsewhere

Tokens of an answer count once, with the versions and log-probabilities that came with them; whatever a request whose
answer did not arrive has sampled is discarded, and its engine is told to give it up.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time

from vagen.actor.client import MAX_ABORTS_WITHOUT_PROGRESS, Generation, back_off
from vagen.actor.engines.conversation import Conversation
from vagen.actor.engines.exchange import FinishReason, Partial, Piece
from vagen.actor.engines.member import Member
from vagen.actor.engines.pool import EnginePool
from vagen.actor.rendering import Prompt
from vagen.common.errors import EngineAbortedError, EngineError, EngineRefusedError, EngineUnavailableError
from vagen.common.trajectory import EngineIdentity, SamplingParams

__all__ = ["EpisodeClient"]

logger = logging.getLogger(__name__)


class EpisodeClient:
    """An `EngineClient` for one episode; `pool` is connected and runs. `close` it when the episode has ended."""

    def __init__(self, pool: EnginePool) -> None:
        self._pool = pool
        self._conversation: Conversation | None = None
        self._home: Member | None = None
        self._identity: EngineIdentity | None = None

    @property
    def identity(self) -> EngineIdentity:
        """The engine that sampled the first tokens of the episode, whichever went on."""
        assert self._identity is not None, "no engine has answered this episode yet"
        return self._identity

    async def generate(
        self, prompt: Prompt, *, sampling: SamplingParams, max_new_tokens: int, rid: str, timeout_s: float
    ) -> Generation:
        """See `EngineClient`."""
        started = time.monotonic()
        deadline = started + timeout_s
        partial = Partial(max_new_tokens)
        failures = aborts = 0
        avoid: Member | None = None
        for request in itertools.count():
            member = await self._pool.acquire(self._home, avoid, deadline)
            identity = member.identity
            try:
                piece = await self._ask(member, prompt, partial, sampling, f"{rid}.{request}", deadline)
            except EngineRefusedError:
                raise  # the request itself is wrong, wherever it is sent
            except EngineError as error:
                failures += 1
                self._note_failure(member, error)
                if failures > self._pool.retries or time.monotonic() >= deadline:
                    raise
                logger.warning("generation %s, try %d of %d: %s", rid, failures, self._pool.retries + 1, error)
                avoid = member
                if self._pool.is_alone(member):
                    await back_off(failures, deadline, f"{member.url}: unreachable")
                continue
            reason = partial.add(piece)
            self._identity = self._identity or identity
            self._note_answer(member, reason)
            if reason != "abort":
                return Generation.of(partial, reason, time.monotonic() - started)
            aborts = 1 if piece.token_ids else aborts + 1
            if aborts > MAX_ABORTS_WITHOUT_PROGRESS:
                raise EngineAbortedError(f"{member.url}: aborted {rid} {aborts} times in a row without a token")
            await back_off(aborts, deadline, f"{member.url}: aborted {rid}")
        raise AssertionError("unreachable: the loop returns or raises")

    def close(self) -> None:
        """The episode has ended."""
        if self._conversation is not None:
            self._pool.end(self._conversation)
            self._conversation = None

    async def _ask(
        self, member: Member, prompt: Prompt, partial: Partial, sampling: SamplingParams, rid: str, deadline: float
    ) -> Piece:
        """One request, in the slot that was acquired for it. Ends early when the engine does not answer its probes."""
        is_answered = False
        timeout_s = min(self._pool.config.request_timeout_s, max(0.001, deadline - time.monotonic()))
        request = self._send(member, prompt, partial, sampling, rid, timeout_s)
        sending, losing = asyncio.ensure_future(request), asyncio.ensure_future(member.lost.wait())
        try:
            await asyncio.wait({sending, losing}, return_when=asyncio.FIRST_COMPLETED)
            if member.is_routed:
                await asyncio.wait({sending})  # it may be with any engine
            if not sending.done():
                raise EngineUnavailableError(f"{member.url}: does not answer its probes")
            piece = sending.result()
            is_answered = True
            return piece
        finally:
            losing.cancel()
            if not is_answered:
                sending.cancel()
                self._pool.abort(member, rid)
            self._pool.release(member)

    async def _send(
        self, member: Member, prompt: Prompt, partial: Partial, sampling: SamplingParams, rid: str, timeout_s: float
    ) -> Piece:
        """The whole prompt, or what is new of it where the engine keeps the conversation."""
        until = time.monotonic() + timeout_s

        async def send(conversation: Conversation | None) -> Piece:
            oldest = self._pool.oldest_version(member)
            return await member.exchange.send(
                prompt,
                partial,
                sampling=sampling,
                rid=rid,
                timeout_s=max(0.001, until - time.monotonic()),
                oldest_version=oldest,
                conversation=conversation,
            )

        if self._pool.config.conversations == "client":
            return await send(None)
        # Not on hold while it is used: a request that is given up may still run, and then nobody may close it.
        conversation = self._take_conversation(member, prompt, partial)
        if conversation is not None and conversation.is_begun:
            try:
                return self._keep(conversation, await send(conversation))
            except EngineRefusedError as error:
                logger.info("%s: the whole prompt, as it refuses to go on: %s", rid, error)
        conversation = await Conversation.open(member.http, self._pool.config.conversation_idle_s)
        return self._keep(conversation, await send(conversation))

    def _take_conversation(self, member: Member, prompt: Prompt, partial: Partial) -> Conversation | None:
        """The one to go on with, if this engine has it and the prompt begins with it; another one is closed."""
        conversation, self._conversation = self._conversation, None
        if conversation is None:
            return None
        ids = prompt.token_ids + partial.token_ids
        if conversation.http is member.http and conversation.is_continued_by(ids, prompt.pictures):
            return conversation
        self._pool.end(conversation)
        return None

    def _keep(self, conversation: Conversation, piece: Piece) -> Piece:
        """Go on with a conversation at the next turn, unless the engine aborted this one."""
        if piece.finish_reason == "abort":
            self._pool.end(conversation)
        else:
            self._conversation = conversation
        return piece

    def _note_answer(self, member: Member, reason: FinishReason) -> None:
        member.note_answer()
        if self._home not in (None, member):
            self._pool.metrics.count("vagen_actor_engine_moves_total", engine=member.url)
        self._home = member
        self._pool.metrics.count("vagen_actor_engine_requests_total", engine=member.url, outcome=reason)

    def _note_failure(self, member: Member, error: EngineError) -> None:
        self._pool.metrics.count("vagen_actor_engine_requests_total", engine=member.url, outcome="failed")
        member.note_failure(error, "request")
        self._pool.look_now()
