"""One publish to several engines in one process group: each bucket is sent once and passed on from engine to engine.

    all: /server_info -> what frozen weights do they lack -> group, unless there is that of the publish before -> pause
    -> begin
    -> for each bucket: announcement to all and one broadcast, side by side -> end
    each: continue -> compare checksums

All engines take each step together, within `_STEP_SHARE` of the time-out, which bounds the collectives of both sides
where an engine lets it. Engines that fail a step are lost to this publish, the group is left, and those that remain
begin anew in a group of a new name. Who is to blame is told by the answers alone: an engine that waits behind a lost
one fails too, but says so. SGLang, whose waits have no bound, may not, and is then lost as well.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

from vagen.common.errors import EngineError, EngineUnavailableError
from vagen.learner.config import BroadcastConfig
from vagen.learner.engine_links import EngineLinks, Link, retrieve
from vagen.learner.engine_visit import RESUME_SHARE, TRANSFER_SHARE, EngineVisit
from vagen.learner.weight_buckets import Deliveries, Delivery

__all__ = ["publish_together"]

T = TypeVar("T")

_STEP_SHARE, _ANSWER_SHARE = 0.2, 0.1
"""Of the time-out: what a step may block, and how long after it those may answer that were blocked."""


class _LostError(Exception):
    """A step failed; `reasons` has the engines that are to blame, at least one."""

    def __init__(self, reasons: Mapping[EngineVisit, str]) -> None:
        super().__init__()
        self.reasons = reasons


async def publish_together(
    visits: Sequence[EngineVisit], deliveries: Deliveries, links: EngineLinks, config: BroadcastConfig
) -> list[str | None]:
    """Bring the same to all visited engines: stage and reason of each one's failure, or None, in the order given."""
    start = asyncio.get_running_loop().time()
    failures: dict[EngineVisit, str] = {}

    async def finish(visit: EngineVisit) -> str | None:
        failure = failures.get(visit)
        failure = await visit.bounded(start, RESUME_SHARE, visit.resume(failure)) or failure
        failure = failure or await visit.bounded(start, 1.0, visit.verify())
        if failure is not None:
            links.drop(visit.engine.url)
        return failure

    attempts = _Attempts(deliveries, links, config.broadcast_timeout_s, start)
    left = sorted(visits, key=lambda visit: visit.engine.url)
    try:
        while left:
            try:
                await attempts.make(left)
                break
            except _LostError as lost:
                failures.update(lost.reasons)
                links.drop_shared()
                left = [visit for visit in left if visit not in failures]
    except BaseException:
        failures.update({visit: "cancelled" for visit in left})
        raise
    finally:
        finished = await asyncio.gather(*map(finish, visits))
    return finished


class _Attempts:
    """To bring a delivery to engines that share a group."""

    def __init__(self, deliveries: Deliveries, links: EngineLinks, timeout_s: float, start: float) -> None:
        self._deliveries = deliveries
        self._threads = deliveries.threads
        self._links = links
        self._step_s, self._answer_s = _STEP_SHARE * timeout_s, _ANSWER_SHARE * timeout_s
        self._deadline = start + TRANSFER_SHARE * timeout_s

    async def make(self, visits: Sequence[EngineVisit]) -> None:
        """Take all steps up to the end of the update. Raises _LostError."""
        await self._together(visits, EngineVisit.inform, _nothing)
        delivery = await self._common_delivery(visits)
        link = await self._link(visits, delivery.buckets.is_cuda)
        await self._together(visits, EngineVisit.pause, _nothing)
        await self._together(visits, EngineVisit.begin, _nothing)
        for index in range(len(delivery.buckets)):
            announce = partial(EngineVisit.announce, index=index, group_name=link.name)
            await self._together(visits, announce, delivery.sending(link, index))
            delivery.buckets.release(index)
        await self._together(visits, EngineVisit.end, _nothing)

    async def _common_delivery(self, visits: Sequence[EngineVisit]) -> Delivery:
        """What all of these get: whatever one of them lacks. Raises _LostError where their dtypes differ."""
        if len({self._deliveries.form_of(visit.info) for visit in visits}) > 1:
            named = ", ".join(sorted({str(visit.info.get("dtype")) for visit in visits}))
            message = f"group: the engines have dtypes {named}, and one group has one; use topology star"
            raise _LostError(dict.fromkeys(visits, message))
        adds = all(visit.can_add for visit in visits)
        if self._deliveries.frozen.names:
            await self._together(visits, partial(EngineVisit.compare, adds=adds), _nothing)
        missing = frozenset[str]().union(*(visit.missing for visit in visits))
        delivery = await self._deliveries.of(visits[0].info, missing, adds=adds)
        for visit in visits:
            visit.delivery = delivery
        return delivery

    async def _link(self, visits: Sequence[EngineVisit], is_cuda: bool) -> Link:
        """The group of the publish before, if it is of the same engines, else a new one, with ranks in this order."""
        infos = {visit.engine.url: visit.info for visit in visits}
        known = self._links.find(infos)
        if known is not None:
            return known
        try:
            plan = self._links.plan(infos, is_cuda, timeout_s=self._step_s)
        except EngineError as error:
            raise _LostError({visit: f"group: {error}" for visit in visits}) from error
        group = await self._together(visits, partial(EngineVisit.join, plan=plan), plan.join)
        return self._links.keep(plan, group)

    async def _together(
        self,
        visits: Sequence[EngineVisit],
        step: Callable[[EngineVisit], Awaitable[None]],
        ours: Callable[[], T],
    ) -> T:
        """Have all engines take a step while our end blocks in a thread; what that returns. Raises _LostError."""
        theirs: dict[asyncio.Future[None], EngineVisit]
        theirs = {asyncio.ensure_future(step(visit)): visit for visit in visits}
        answered: list[asyncio.Future[Any]] = []
        for task in theirs:
            task.add_done_callback(answered.append)
        blocking = asyncio.wrap_future(self._threads.submit(ours))
        try:
            _, pending = await asyncio.wait(theirs, timeout=self._time_left(self._step_s))
            if pending:
                # Whoever waits for us rather than for a lost engine learns that there is nothing to wait for.
                self._links.drop_shared()
                await asyncio.wait(pending, timeout=self._time_left(self._answer_s))
            self._judge(theirs, answered)
            # All have what we sent or joined what we join: there is nothing left that could hang.
            await asyncio.wait([blocking], timeout=self._time_left(self._answer_s))
            if not blocking.done() or blocking.exception() is not None:
                reason = blocking.exception() if blocking.done() else "blocked"
                raise _LostError({visit: f"{visit.stage}: our side: {reason}" for visit in visits})
            return blocking.result()
        finally:
            ends: list[asyncio.Future[Any]] = [*theirs, blocking]
            for end in ends:
                end.cancel()
                end.add_done_callback(retrieve)

    def _time_left(self, wanted_s: float) -> float:
        return max(0.0, min(wanted_s, self._deadline - asyncio.get_running_loop().time()))

    def _judge(
        self, theirs: Mapping[asyncio.Future[None], EngineVisit], answered: Sequence[asyncio.Future[None]]
    ) -> None:
        """Raise _LostError when an engine failed: for those that did not answer, or else for the first that refused."""
        failures = {task: task.exception() for task in answered}
        lost: dict[EngineVisit, str] = {}
        for task, visit in theirs.items():
            if task not in failures:
                lost[visit] = f"{visit.stage}: no answer within {self._step_s + self._answer_s:.1f} s"
            elif isinstance(failures[task], EngineUnavailableError):
                lost[visit] = f"{visit.stage}: {failures[task]}"
        for task, failure in failures.items():
            if failure is not None and not isinstance(failure, RuntimeError):  # not EngineError, nor torch's
                raise failure
            if failure is not None and not lost:
                visit = theirs[task]
                lost[visit] = f"{visit.stage}: {failure}"
        if lost:
            raise _LostError(lost)


def _nothing() -> None:
    """Our part in a step that is the engines' alone."""
