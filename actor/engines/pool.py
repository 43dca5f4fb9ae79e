"""Several engines as one: members that come and go, their health, and slots for requests.

    part      consumes                            waits for           is unblocked by
    run       the list of engines                 probe_s             time, a failed request, SIGHUP
    _probe    /ready, /metrics, /server_info      probe_timeout_s     the answer, or time
    acquire   slots, first come first served      a slot, `deadline`  the end of a request, a probe, an admission

An engine takes requests while its last probe answered, it is not in quarantine, and the buffer says that this very
start of it holds weights whose checksum matched. Owns no request: see `vagen.actor.engines.episode`.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass

from vagen.actor.client import no_engine
from vagen.actor.engines.config import EnginesConfig
from vagen.actor.engines.conversation import Conversation
from vagen.actor.engines.member import Member
from vagen.actor.engines.roster import Roster
from vagen.actor.engines.routing import choose
from vagen.actor.rendering import ChatRenderer
from vagen.actor.signals import Signal
from vagen.common.errors import EngineUnavailableError
from vagen.common.metrics import Metrics
from vagen.common.wire import EngineAnnouncement, EngineStatus

__all__ = ["EnginePool"]

logger = logging.getLogger(__name__)

_FIRST_LOOKS_S = 0.2
_GAUGES = tuple(f"vagen_actor_engine_{name}" for name in ("in_flight", "limit", "kv_usage", "usable"))


@dataclass(eq=False, slots=True)
class _Waiter:
    """A request without a slot."""

    home: Member | None
    avoid: Member | None
    slot: asyncio.Future[Member]


class EnginePool:
    """See the module. `connect`, then `run` as a task; everything belongs to one event loop."""

    def __init__(
        self,
        roster: Roster,
        renderer: ChatRenderer,
        config: EnginesConfig,
        metrics: Metrics,
        *,
        api_key: str = "",
        retries: int = 4,
    ) -> None:
        """`retries` bounds the further tries of one response after failed requests."""
        self.changed = Signal()
        """Notified after each probe."""
        self.config = config
        self.metrics = metrics
        self.retries = retries
        self._roster = roster
        self._renderer = renderer
        self._api_key = api_key
        self._members: dict[str, Member] = {}
        self._leaving: set[Member] = set()
        self._probed: set[Member] = set()
        self._waiters: deque[_Waiter] = deque()
        self._admissions: dict[str, EngineStatus] = {}
        self._looks = Signal()
        self._side_work: set[asyncio.Task[None]] = set()

    # -- members ------------------------------------------------------------------------------------------------

    async def connect(self, timeout_s: float) -> None:
        """Wait for the first answer of any engine.

        Raises `ConfigError` for a list that cannot be used, `EngineRefusedError` for a server that is no engine to
        train with, and `EngineUnavailableError` that says what to start.
        """
        self._follow(await self._roster.read())
        deadline = time.monotonic() + timeout_s
        while True:
            members = list(self._members.values())
            results = await asyncio.gather(*(member.look() for member in members), return_exceptions=True)
            failures = [result for result in results if isinstance(result, BaseException)]
            final = next((f for f in failures if not isinstance(f, EngineUnavailableError)), None)
            if final is not None:
                raise final
            if len(failures) < len(members):
                return
            if time.monotonic() >= deadline:
                assert isinstance(failures[0], EngineUnavailableError)
                raise no_engine(", ".join(self._members), timeout_s, failures[0]) from failures[0]
            await asyncio.sleep(min(_FIRST_LOOKS_S, timeout_s))

    @property
    def urls(self) -> Sequence[str]:
        """Engines of the list, whatever their state."""
        return list(self._members)

    @property
    def announcements(self) -> tuple[EngineAnnouncement, ...]:
        """The engines that answer: what the learner is to publish to."""
        return tuple(
            EngineAnnouncement(url=m.url, kind=m.identity.kind, incarnation=m.identity.incarnation)
            for m in self._members.values()
            if m.identity is not None
        )

    @property
    def startable(self) -> tuple[str, ...]:
        """URLs of the engines on which new episodes may be played."""
        return tuple(member.url for member in self._members.values() if member.may_start)

    def admit(self, statuses: Sequence[EngineStatus]) -> None:
        """Take note of which engines may take traffic, and with which weights."""
        self._admissions = {status.url: status for status in statuses}
        for member in self._members.values():
            member.admission = self._admissions.get(member.url)
        self._hand_out()

    def look_now(self) -> None:
        """Probe, and read the list of engines, without waiting for the interval to end."""
        self._looks.notify()

    async def run(self) -> None:
        """Follow the list and probe its engines until cancelled."""
        async with asyncio.TaskGroup() as group:
            while True:
                urls = await self._roster.changes()
                if urls is not None:
                    self._follow(urls)
                await self._let_go()
                for member in self._members.values():
                    if member.probe_due and member not in self._probed:
                        # Each by itself: one that hangs must not keep the others from being looked at.
                        group.create_task(self._probe(member), name=f"probe {member.url}")
                await self._looks.wait(self.config.probe_s)

    async def close(self) -> None:
        """Close the connections."""
        for task in self._side_work:
            task.cancel()
        await asyncio.gather(*self._side_work, return_exceptions=True)
        for member in (*self._members.values(), *self._leaving):
            await member.http.close()
        if self._roster.router is not None:
            await self._roster.router.close()

    def _follow(self, urls: Sequence[str]) -> None:
        """Make the members those of the list. One that leaves ends what it has and gets nothing new."""
        for url in self._members.keys() - set(urls):
            member = self._members.pop(url)
            member.is_leaving = True
            self._leaving.add(member)
            for name in _GAUGES:
                self.metrics.forget(name, engine=url)
            logger.info("engine %s leaves, %d requests under way", url, member.in_flight)
        for url in urls:
            if url not in self._members:
                logger.info("engine %s joins", url)
                member = self._members[url] = Member(
                    url, self._renderer, self.config, self._api_key, self._roster.router
                )
                member.admission = self._admissions.get(url)

    async def _probe(self, member: Member) -> None:
        self._probed.add(member)
        try:
            await member.probe()
        finally:
            self._probed.discard(member)
        self._hand_out()
        self._report(member)
        self.changed.notify()

    async def _let_go(self) -> None:
        """Close the connections to engines that have left, once nothing runs there."""
        for member in [member for member in self._leaving if member.in_flight == 0]:
            self._leaving.discard(member)
            await member.http.close()

    # -- slots --------------------------------------------------------------------------------------------------

    async def acquire(self, home: Member | None, avoid: Member | None, deadline: float) -> Member:
        """A slot of an engine, to be `release`d. Raises `EngineUnavailableError` when `deadline` passes first."""
        waiter = _Waiter(home, avoid, asyncio.get_running_loop().create_future())
        self._waiters.append(waiter)
        self._hand_out()
        has_slot = False
        try:
            async with asyncio.timeout(max(0.0, deadline - time.monotonic())):
                member = await waiter.slot
                has_slot = True
        except TimeoutError:
            raise EngineUnavailableError(f"no engine took the request within the time-out: {self._state()}") from None
        finally:
            if not has_slot:
                self._give_up(waiter)
        return member

    def release(self, member: Member) -> None:
        """Give a slot back."""
        member.in_flight -= 1
        self._hand_out()

    def is_alone(self, member: Member) -> bool:
        """Whether no other engine could take a request in place of `member`."""
        return not any(other.is_usable for other in self._members.values() if other is not member)

    def abort(self, member: Member, rid: str) -> None:
        """Tell in the background whoever may have a request that nobody waits for it any more."""
        for holder in self._members.values() if member.is_routed else (member,):
            self._in_background(holder.http.abort(rid))

    def end(self, conversation: Conversation) -> None:
        """Tell in the background the engine that keeps a conversation that nobody goes on with it."""
        self._in_background(conversation.close())

    def oldest_version(self, member: Member) -> int:
        """The least version that an answer to a request with a slot of `member` may have."""
        if not member.is_routed:
            return member.version
        return min((m.version for m in self._members.values() if m.is_usable), default=member.version)

    def _in_background(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        self._side_work.add(task)
        task.add_done_callback(self._side_work.discard)

    def _give_up(self, waiter: _Waiter) -> None:
        if waiter.slot.done() and not waiter.slot.cancelled():
            self.release(waiter.slot.result())
        elif waiter in self._waiters:
            self._waiters.remove(waiter)

    def _hand_out(self) -> None:
        """Slots to those who wait, first come first served: where one finds no room, nobody would."""
        while self._waiters:
            waiter = self._waiters[0]
            member = choose(self._members.values(), waiter.home, waiter.avoid)
            if member is None:
                return
            self._waiters.popleft()
            if waiter.slot.done():
                continue
            member.in_flight += 1
            waiter.slot.set_result(member)

    def _state(self) -> str:
        """Each engine and what keeps it from taking requests."""
        return ", ".join(f"{member.url} {member.state}" for member in self._members.values()) or "the list is empty"

    def _report(self, member: Member) -> None:
        if member.is_leaving:
            return
        values = (member.in_flight, member.limit.value, member.load.kv_usage, float(member.is_usable))
        for name, value in zip(_GAUGES, values, strict=True):
            self.metrics.gauge(name, value, engine=member.url)
        self.metrics.gauge("vagen_actor_engine_waiting", len(self._waiters))
