"""Engines and actors that join and leave a run: from the list of engines to requests, with a real store between."""

from __future__ import annotations

import asyncio
import time
from contextlib import AsyncExitStack, asynccontextmanager

import pytest

from vagen.actor.engines.config import EnginesConfig
from vagen.actor.engines.episode import EpisodeClient
from vagen.actor.engines.pool import EnginePool
from vagen.actor.engines.roster import Roster
from vagen.actor.messages import Message, Picture
from vagen.actor.rendering import ChatRenderer
from vagen.common.metrics import Metrics
from vagen.common.trajectory import SamplingParams
from vagen.learner.config import BroadcastConfig

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("endless")]
JOIN_S = 30.0


class Actor:
    """A pool that plays all the time, and tells the ingest of its engines as an actor's heartbeat does."""

    def __init__(self, name, pool, renderer, metrics, lab, fleet):
        self.name, self.pool, self.answers, self.beats = name, pool, [], 0
        self._renderer, self._metrics, self._lab, self._fleet = renderer, metrics, lab, fleet

    async def play(self, lane):
        for turn in range(10_000):
            message = Message("user", (Picture(self._lab.png(8 * turn + lane), (56, 56)), "w30"))
            self.answers.append(
                await EpisodeClient(self.pool).generate(
                    self._renderer.render((message,)),
                    sampling=SamplingParams(),
                    max_new_tokens=20,
                    rid=f"{self.name}-{lane}-{turn}",
                    timeout_s=60,
                )
            )

    async def beat(self):
        while True:
            self.pool.admit(await asyncio.to_thread(self._fleet.beat, self.name, self.pool.announcements))
            self.beats += 1
            await self.pool.changed.wait(1.0)

    def requests(self, engine, outcome="length"):
        labels = {"run": "run", "engine": engine.url, "outcome": outcome}
        return self._metrics.registry.get_sample_value("vagen_actor_engine_requests_total", labels) or 0


@asynccontextmanager
async def acting(name, file, model_dir, lab, fleet):
    """An actor with four episodes at a time, over the engines of a file."""
    renderer, metrics = ChatRenderer.load(model_dir), Metrics("vagen_actor", "run")
    config = EnginesConfig(probe_s=0.1, file=str(file))
    async with AsyncExitStack() as stack:
        pool = EnginePool(Roster([], str(file)), renderer, config, metrics)
        stack.push_async_callback(pool.close)
        await pool.connect(20)
        actor = Actor(name, pool, renderer, metrics, lab, fleet)
        work = [pool.run(), actor.beat(), *(actor.play(lane) for lane in range(4))]
        tasks = [asyncio.create_task(each) for each in work]
        try:
            yield actor
            assert not any(task.done() for task in tasks), [task for task in tasks if task.done()]
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


async def until(holds, what, timeout_s=JOIN_S / 2):
    """Half of the promised bound, unless told otherwise; the time that it took."""
    start = time.monotonic()
    while not holds():
        assert time.monotonic() - start < timeout_s, f"not within {timeout_s} s: {what}"
        await asyncio.sleep(0.02)
    return time.monotonic() - start


@asynccontextmanager
async def tending(fleet):
    """The learner between two publishes."""

    async def tend():
        while True:
            await asyncio.to_thread(fleet.publisher.tend_members)
            await asyncio.sleep(0.1)

    task = asyncio.create_task(tend())
    try:
        yield
        assert not task.done(), task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def test_an_engine_and_an_actor_join_and_leave_while_the_others_work(valkey, start_engines, lab, tmp_path):
    """Three engines and an actor work; a fourth engine and a second actor join, play, and leave."""
    fleet = lab.fleet(valkey.url, BroadcastConfig(broadcast_timeout_s=20.0))
    *members, joiner = start_engines(4, max_context=256, max_new_tokens_limit=200)
    file = tmp_path / "engines.txt"

    def write(*engines):
        partial = file.with_suffix(".partial")
        partial.write_text("".join(f"{engine.url}\n" for engine in engines))
        partial.replace(file)

    def paused():
        return [engine.metric("vagen_engine_paused_seconds_total") for engine in members]

    async def main():
        model, weights = lab.new_weights(joiner)
        write(*members)
        async with AsyncExitStack() as run:
            first = await run.enter_async_context(acting("first", file, joiner.model_dir, lab, fleet))
            await until(lambda: len(first.pool.announcements) == 3, "announced")
            # Those whose heartbeat comes later join.
            await asyncio.to_thread(fleet.publisher.publish, weights, 0)
            version = fleet.publisher.version
            await run.enter_async_context(tending(fleet))
            await until(lambda: all(first.requests(engine) for engine in members), "all members play")
            before, pauses = len(first.answers), await asyncio.to_thread(paused)
            write(*members, joiner)
            async with acting("second", file, joiner.model_dir, lab, fleet) as second:
                await until(lambda: first.requests(joiner) and second.requests(joiner), "both actors use the joiner")
                await until(lambda: all(second.requests(engine) for engine in members), "the actor that joined plays")
                assert len(first.answers) > before
                await asyncio.to_thread(lab.assert_serves, joiner, model, version)
            # The second actor is gone, and the fourth engine is taken off the list.
            write(*members)
            await until(lambda: joiner.url not in first.pool.urls, "off the list")
            await until(lambda: not first.pool._leaving, "what ran there has ended")
            # A heartbeat that is under way may still name it; the one after does not.
            beats = first.beats
            await until(lambda: first.beats >= beats + 2, "told the ingest")
            await asyncio.to_thread(fleet.leave_all_but, *members)
            await until(lambda: joiner.url not in fleet.publisher.members, "the learner forgets it")
            count, ended = len(first.answers), first.requests(joiner)
            await until(lambda: len(first.answers) >= count + 20, "the others go on")
            assert first.requests(joiner) == ended
            assert await asyncio.to_thread(paused) == pauses, "nobody was paused"
            for actor in (first, second):
                assert {version for answer in actor.answers for version in answer.versions} == {version}
                assert not any(actor.requests(engine, "failed") for engine in (*members, joiner)), "nothing was lost"

    try:
        asyncio.run(main())
    finally:
        fleet.publisher.close()
