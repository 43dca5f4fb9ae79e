"""The pool over real engines that die, hang, leave and join while they generate."""

from __future__ import annotations

import asyncio
import itertools
import signal
import time
from contextlib import asynccontextmanager
from types import SimpleNamespace

import aiohttp
import pytest
from aiohttp import web

from vagen.actor.engines.config import EnginesConfig
from vagen.actor.engines.episode import EpisodeClient
from vagen.actor.engines.http import EngineHttp
from vagen.actor.engines.pool import EnginePool
from vagen.actor.engines.roster import Roster
from vagen.actor.messages import Message, Picture
from vagen.actor.rendering import ChatRenderer
from vagen.common.errors import EngineError, EngineUnavailableError
from vagen.common.metrics import Metrics
from vagen.common.trajectory import SamplingParams
from vagen.common.wire import EngineStatus

pytestmark = pytest.mark.usefixtures("endless")
TOLERANCE = 2e-5
BOUND_S = 30.0
QUICK = {"probe_s": 0.1, "probe_timeout_s": 2.0, "failures": 2, "quarantine_s": 0.2, "quarantine_max_s": 1.0}


class Running(SimpleNamespace):
    """A pool that runs, and what its tests ask of it."""

    def value(self, name, **labels):
        return self.metrics.registry.get_sample_value(name, {"run": "run", **labels}) or 0.0

    def admit(self, *engines, versions=None):
        """As the buffer does once a checksum matched."""
        now = {a.url: a.incarnation for a in self.pool.announcements}
        versions = versions or [int(engine.version()) for engine in engines]
        self.pool.admit(
            [
                EngineStatus(url=engine.url, incarnation=now[engine.url], policy_version=version)
                for engine, version in zip(engines, versions, strict=True)
            ]
        )

    async def until(self, holds, what, timeout_s=BOUND_S):
        deadline = time.monotonic() + timeout_s
        while not holds():
            assert time.monotonic() < deadline, f"not within {timeout_s} s: {what}"
            assert not self.work.done(), self.work.exception()
            await self.pool.changed.wait(0.1)

    async def on(self, engine, call):
        """Something that blocks, off the loop."""
        return await asyncio.get_running_loop().run_in_executor(engine.threads, call)

    def play(self, lab, seed, num_tokens, client=None):
        """A response to a prompt of its own with a picture, as a task."""
        prompt = self.renderer.render((Message("user", (Picture(lab.png(seed), (56, 56)), "w30")),))
        client = client or EpisodeClient(self.pool)
        call = client.generate(
            prompt, sampling=SamplingParams(), max_new_tokens=num_tokens, rid=f"e{seed}", timeout_s=90
        )
        task = asyncio.create_task(call)
        task.client, task.prompt, task.images = client, prompt, [lab.png(seed)]
        return task


@asynccontextmanager
async def pooled(*engines, file=None, router=None, admit=True, **config):
    settings = EnginesConfig(**(QUICK | config))
    renderer = ChatRenderer.load(engines[0].model_dir)
    metrics = Metrics("vagen_actor", "run")
    own = [engine.url for engine in engines] if file is None and router is None else ()
    roster = Roster(own, file and str(file), router and EngineHttp(router))
    pool = EnginePool(roster, renderer, settings, metrics, api_key=engines[0].api_key or "")
    await pool.connect(10)
    work = asyncio.create_task(pool.run())
    running = Running(pool=pool, metrics=metrics, renderer=renderer, work=work)
    try:
        await running.until(lambda: len(pool.announcements) == len(engines), "every engine answers")
        if admit:
            running.admit(*engines)
        yield running
    finally:
        work.cancel()
        await asyncio.gather(work, return_exceptions=True)
        await pool.close()


def check_logprobs(lab, engine, task, *parts):
    """Each part of the response, `(model, start, end)`, has the log-probabilities of its model; what a second answer
    had been mixed into would not."""
    answer = task.result()
    for model, start, end in parts:
        expected = lab.logprobs_of(
            model, task.prompt.token_ids, task.images, answer.token_ids, forbidden=engine.forbidden
        )
        difference = max(abs(a - b) for a, b in zip(answer.logprobs[start:end], expected[start:end], strict=True))
        assert difference < TOLERANCE


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_responses_of_a_lost_engine_are_sampled_anew_by_another(start_engines, lab, number):
    async def main():
        lost, other = start_engines(2)
        async with pooled(lost, other) as running:
            tasks = [running.play(lab, seed, 400) for seed in range(8)]
            await running.on(lost, lambda: (lost.wait_running(2), other.wait_running(2)))
            lost.signal(number)
            started = time.monotonic()
            answers = await asyncio.gather(*tasks)
            assert time.monotonic() - started < BOUND_S
            moved = running.value("vagen_actor_engine_requests_total", engine=lost.url, outcome="failed")
            assert moved >= 2
            # Answers of the other alone: nothing of the lost requests is in them, and each was answered once.
            assert running.value("vagen_actor_engine_requests_total", engine=other.url, outcome="length") == 8
            for task, answer in zip(tasks, answers, strict=True):
                assert len(answer.token_ids) == len(answer.logprobs) == len(answer.versions) == 400
                assert set(answer.versions) == {0} and answer.finish_reason == "length"
                check_logprobs(lab, other, task, (other.reference, 0, 400))
            assert [a.url for a in running.pool.announcements] == [other.url], "the learner need not wait for it"
            if number == signal.SIGSTOP:
                lost.signal(signal.SIGCONT)
                await running.until(lambda: lost.url in running.pool.startable, "it serves again")

    asyncio.run(main())


def test_an_aborted_response_goes_on_at_another_engine_with_its_tokens_and_versions(start_engines, lab, publish_to):
    async def main():
        first, second = start_engines(2)
        new = second.perturbed()
        await asyncio.to_thread(publish_to, second, new, "1")
        async with pooled(first, second, admit=False) as running:
            running.admit(first)
            incarnation = next(a.incarnation for a in running.pool.announcements if a.url == first.url)
            tasks = [running.play(lab, seed, 600) for seed in range(3)]
            await running.on(first, lambda: first.wait_running(3))
            running.admit(first, second)
            first.signal(signal.SIGTERM)  # an orderly end answers with what there is
            for task in tasks:
                answer = await task
                cut = answer.versions.index(1)
                assert answer.versions == [0] * cut + [1] * (600 - cut) and 0 < cut < 600
                check_logprobs(lab, first, task, (first.reference, 0, cut), (new, cut, 600))
                assert task.client.identity.incarnation == incarnation
            assert running.value("vagen_actor_engine_moves_total", engine=second.url) == 3

    asyncio.run(main())


def test_a_request_that_takes_too_long_is_asked_for_elsewhere(start_engines, lab):
    async def main():
        hung, other = start_engines(2)
        async with pooled(hung, other, probe_s=60.0, probe_timeout_s=60.0, request_timeout_s=2.0) as running:
            running.admit(hung)
            hung.signal(signal.SIGSTOP)
            task = running.play(lab, 1, 20)
            await asyncio.sleep(0)
            running.admit(hung, other, versions=[0, 0])
            answer = await task
            assert 2.0 < answer.engine_s < 20
            check_logprobs(lab, other, task, (other.reference, 0, 20))
            hung.signal(signal.SIGCONT)

    asyncio.run(main())


def test_engines_join_and_leave_a_running_pool(start_engines, lab, tmp_path):
    async def main():
        file = tmp_path / "engines.txt"
        engines = start_engines(4)
        file.write_text("# four\n" + "".join(f"{engine.url}\n" for engine in engines))
        async with pooled(*engines, file=file) as running:
            failures, answers = 0, []

            async def play_on(lane):
                for turn in range(10_000):
                    answers.append(await running.play(lab, 8 * turn + lane, 30))

            lanes = [asyncio.create_task(play_on(lane)) for lane in range(8)]
            (fifth,) = await running.on(engines[0], lambda: start_engines(1))
            before = len(answers)
            started = time.monotonic()
            file.write_text("".join(f"{engine.url}\n" for engine in (*engines, fifth)))
            await running.until(lambda: len(running.pool.announcements) == 5, "announced")
            running.admit(*engines, fifth)
            played = {"engine": fifth.url, "outcome": "length"}
            await running.until(
                lambda: running.value("vagen_actor_engine_requests_total", **played) >= 4, "takes traffic"
            )
            assert time.monotonic() - started < BOUND_S
            assert len(answers) > before, "the others went on"

            left = engines[0]
            file.write_text("".join(f"{engine.url}\n" for engine in (*engines[1:], fifth)))
            await running.until(lambda: left.url not in running.pool.urls, "off the list")
            await running.until(lambda: not running.pool._leaving, "what ran there has ended")
            ended = running.value("vagen_actor_engine_requests_total", engine=left.url, outcome="length")
            count = len(answers)
            await running.until(lambda: len(answers) >= count + 20, "the others go on")
            assert running.value("vagen_actor_engine_requests_total", engine=left.url, outcome="length") == ended
            for lane in lanes:
                assert not lane.done(), lane.exception()
                lane.cancel()
            for engine in (*engines, fifth):
                failures += running.value("vagen_actor_engine_requests_total", engine=engine.url, outcome="failed")
            assert failures == 0, "nobody lost a request"

    asyncio.run(main())


def test_turns_of_an_episode_stay_where_its_prefix_is(start_engines, lab):
    async def main():
        engines = start_engines(3)
        async with pooled(*engines) as running:
            clients = [EpisodeClient(running.pool) for _ in range(9)]
            for turn in range(4):
                tasks = [running.play(lab, seed, 10, client) for seed, client in enumerate(clients)]
                await asyncio.gather(*tasks)
                counts = [await running.on(e, lambda e=e: e.metric("vagen_engine_requests_total")) for e in engines]
                assert sum(counts) == 9 * (turn + 1)
                if turn == 0:
                    assert min(counts) >= 2, "new episodes are spread"
                    first = counts
            assert counts == [4 * count for count in first]
            moves = [running.value("vagen_actor_engine_moves_total", engine=engine.url) for engine in engines]
            assert moves == [0, 0, 0]
            incarnations = {a.url: a.incarnation for a in running.pool.announcements}
            gone = next(e for e in engines if incarnations[e.url] == clients[0].identity.incarnation)
            running.admit(*(engine for engine in engines if engine is not gone))
            before = await running.on(gone, lambda: gone.metric("vagen_engine_requests_total"))
            await running.play(lab, 0, 10, clients[0])
            assert await running.on(gone, lambda: gone.metric("vagen_engine_requests_total")) == before
            moves = [running.value("vagen_actor_engine_moves_total", engine=engine.url) for engine in engines]
            assert sorted(moves) == [0, 0, 1]

    asyncio.run(main())


def test_the_limit_follows_the_kv_cache(start_engines, lab):
    async def main():
        (engine,) = start_engines(max_running=8, max_context=256, max_new_tokens_limit=256)
        async with pooled(engine, max_in_flight=16, min_in_flight=2, kv_high=0.3) as running:
            (member,) = running.pool._members.values()
            assert member.limit.value == 16
            tasks = [running.play(lab, seed, 200) for seed in range(32)]
            await running.until(lambda: member.limit.value < 16, "halved under load")
            assert member.load.kv_usage > 0.3
            limits = []
            while not all(task.done() for task in tasks):
                assert member.in_flight <= 16
                limits.append(member.limit.value)
                await running.pool.changed.wait(1.0)
            assert min(limits) >= 2 and min(limits) < 8
            await asyncio.gather(*tasks)
            await running.until(lambda: member.limit.value == 16, "one more each interval without load")
            assert member.load.kv_usage == 0.0
            assert running.value("vagen_actor_engine_in_flight", engine=engine.url) == 0

    asyncio.run(main())


def test_a_restarted_engine_gets_nothing_before_it_is_admitted_anew(start_engines, lab):
    async def main():
        (engine,) = start_engines()
        async with pooled(engine) as running:
            await running.play(lab, 0, 5)
            engine.process.kill()
            engine.process.wait()
            again = await running.on(engine, lambda: start_engines.again(engine))
            (before,) = running.pool._admissions.values()
            await running.until(
                lambda: [a.incarnation for a in running.pool.announcements] not in ([], [before.incarnation]), "seen"
            )
            assert running.pool.startable == ()
            task = running.play(lab, 0, 5)
            await running.pool.changed.wait(1.0)
            assert not task.done() and again.metric("vagen_engine_requests_total") == 0
            running.admit(again)
            assert len((await task).token_ids) == 5

    asyncio.run(main())


def test_tokens_of_weights_that_the_engine_cannot_have_are_discarded(start_engines, lab):
    async def main():
        (engine,) = start_engines()
        async with pooled(engine) as running:
            running.admit(engine, versions=[5])  # restarted so lately that nobody has noticed
            with pytest.raises(EngineError, match=r"tokens of version 0, admitted with 5; was the engine restarted\?"):
                await running.play(lab, 0, 5)

    asyncio.run(main())


def test_a_response_without_any_engine_fails_at_its_time_out(start_engines, lab):
    async def main():
        (engine,) = start_engines()
        async with pooled(engine, admit=False) as running:
            prompt = running.renderer.render((Message("user", ("w30",)),))
            client = EpisodeClient(running.pool)
            started = time.monotonic()
            with pytest.raises(EngineUnavailableError, match=f"{engine.url} is not admitted"):
                await client.generate(prompt, sampling=SamplingParams(), max_new_tokens=5, rid="e", timeout_s=0.5)
            assert time.monotonic() - started < 5

    asyncio.run(main())


WRITTEN_BY_ROUTER = ("return_text_in_logprobs", "stream", "return_hidden_states", "background", "no_logs")
WRITTEN_BY_ROUTER += ("return_bytes", "return_entropy")


@asynccontextmanager
async def router_of(engines):
    """What SGLang's router (0.3.2) does: it writes what it knows of a request anew and goes round the engines.

    Engines that are added to the list are in it from then on.
    """
    turn = itertools.count()

    async def workers(request):
        found = [{"id": str(i), "url": e.url, "is_healthy": True, "load": 0} for i, e in enumerate(engines)]
        return web.json_response({"workers": found, "total": len(found), "stats": {"regular_count": len(found)}})

    async def generate(request):
        body = await request.json() | dict.fromkeys(WRITTEN_BY_ROUTER, False) | {"model": None, "log_metrics": True}
        del body["sampling_params"]["logit_bias"]
        url = engines[next(turn) % len(engines)].url
        try:
            async with session.post(f"{url}/generate", json=body) as answer:
                return web.json_response(await answer.json(), status=answer.status)
        except aiohttp.ClientError as error:
            return web.json_response({"error": {"message": str(error)}}, status=502)

    app = web.Application(client_max_size=1 << 24)
    app.add_routes([web.get("/workers", workers), web.post("/generate", generate)])
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    async with aiohttp.ClientSession() as session:
        try:
            yield f"http://127.0.0.1:{runner.addresses[0][1]}"
        finally:
            await runner.cleanup()


def test_a_router_takes_the_requests_and_names_the_engines(start_engines, lab, publish_to):
    async def main():
        first, second, joiner = start_engines(3)
        model = first.perturbed()
        for engine in (first, second):
            await asyncio.to_thread(publish_to, engine, model, "1")
        behind = [first, second]
        async with router_of(behind) as router, pooled(first, second, router=router) as running:
            tasks = [running.play(lab, seed, 30) for seed in range(8)]
            await asyncio.gather(*tasks)
            for task in tasks:
                assert set(task.result().versions) == {1}
                check_logprobs(lab, first, task, (model, 0, 30))
            counts = [await running.on(e, lambda e=e: e.metric("vagen_engine_requests_total")) for e in behind]
            assert counts == [4, 4]
            # A joiner behind the router gets requests before it has weights: what it samples is discarded.
            behind.append(joiner)
            await running.until(lambda: len(running.pool.announcements) == 3, "announced")
            tasks = [running.play(lab, seed, 30) for seed in range(6)]
            await asyncio.gather(*tasks)
            assert await running.on(joiner, lambda: joiner.metric("vagen_engine_requests_total")) >= 2
            assert {version for task in tasks for version in task.result().versions} == {1}
            assert len(running.pool.startable) == 2, "nobody is in quarantine for what the router did"

    asyncio.run(main())
