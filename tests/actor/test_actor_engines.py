"""The parts of the engines' pool, each alone: limits, quarantine, routing, the list, what servers say of themselves."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from aiohttp import web
from PIL import Image

from vagen.actor.client import Generation
from vagen.actor.engines.config import EnginesConfig
from vagen.actor.engines.episode import EpisodeClient
from vagen.actor.engines.http import EngineHttp
from vagen.actor.engines.limit import Limit
from vagen.actor.engines.load import Load, parse_load
from vagen.actor.engines.member import Member
from vagen.actor.engines.pool import EnginePool
from vagen.actor.engines.roster import Roster
from vagen.actor.engines.routing import choose
from vagen.actor.messages import Message, Picture
from vagen.actor.rendering import ChatRenderer, Prompt
from vagen.common.config import convert
from vagen.common.errors import ConfigError, EngineRefusedError, EngineUnavailableError
from vagen.common.metrics import Metrics
from vagen.common.trajectory import EngineIdentity, SamplingParams
from vagen.common.wire import EngineStatus
from vagen.envs.base import encode_png

CALM, FULL = Load(kv_usage=0.5), Load(kv_usage=0.95)


def member(renderer: ChatRenderer, name: str, *, version: int = 1, is_late: bool = False, **config: Any) -> Member:
    """An engine that has answered and is admitted."""
    made = Member(f"http://{name}", renderer, EnginesConfig(**config), "")
    made.identity = EngineIdentity(kind="local", incarnation=name, model_hash="m", tokenizer_hash="t")
    made.admission = EngineStatus(url=made.url, incarnation=name, policy_version=version, is_late=is_late)
    return made


def test_a_limit_grows_by_one_and_halves() -> None:
    limit = Limit(EnginesConfig(min_in_flight=2, max_in_flight=20, kv_high=0.9))
    assert limit.value == 20
    seen = []
    for load, in_flight in (
        (FULL, 20),
        (FULL, 15),
        (CALM, 12),
        (CALM, 10),
        (CALM, 10),
        (FULL, 3),
        (FULL, 1),
        (FULL, 0),
    ):
        limit.adapt(load, in_flight)
        seen.append(limit.value)
    #       halved, waits twice for its effect,  +1, +1, half of the 3 that ran, never below the least
    assert seen == [10, 10, 10, 11, 12, 2, 2, 2]
    for _ in range(30):
        limit.adapt(CALM, 1)
    assert limit.value == 20


def test_a_limit_halves_when_requests_were_retracted_and_not_when_the_engine_was_restarted() -> None:
    limit = Limit(EnginesConfig(max_in_flight=16))
    for retractions, expected in ((0.0, 16), (3.0, 8), (3.0, 9), (0.0, 10), (1.0, 5)):
        limit.adapt(Load(retractions=retractions), min(16, limit.value))
        assert limit.value == expected


def test_loads_of_both_engines_are_understood() -> None:
    sglang = """\
# HELP sglang:token_usage The token usage.
sglang:num_running_reqs{engine_type="unified",model_name="a b",tp_rank="0"} 3.0
sglang:num_running_reqs{engine_type="unified",model_name="a b",tp_rank="1"} 2.0
sglang:num_queue_reqs{tp_rank="0"} 4.0 1700000000
sglang:token_usage{tp_rank="0"} 0.25
sglang:num_retracted_requests_total{tp_rank="0"} 7.0
sglang:token_usage_other 9
"""
    assert parse_load(sglang) == Load(running=3, waiting=4, kv_usage=0.25, retractions=7)
    local = (
        'vagen_engine_running_requests{run="r"} 2\nvagen_engine_kv_usage{run="r"} 0.5\nbroken{\nvagen_engine_kv_usage'
    )
    assert parse_load(local) == Load(running=2, kv_usage=0.5)


def test_failures_in_a_row_quarantine_for_longer_and_longer(renderer: ChatRenderer, monkeypatch: Any) -> None:
    clock = [100.0]
    monkeypatch.setattr("vagen.actor.engines.member.time.monotonic", lambda: clock[0])
    engine = member(renderer, "a", failures=3, quarantine_s=1.0, quarantine_max_s=3.0)
    error = EngineUnavailableError("silent")
    for _ in range(2):
        engine.note_failure(error, "request")
    engine.note_answer()
    for _ in range(2):
        engine.note_failure(error, "request")
    assert engine.is_usable, "an answer ends the series"
    pauses = []
    for _ in range(1100):  # hours of an engine that does not come back
        identity = EngineIdentity(kind="local", incarnation="a", model_hash="m", tokenizer_hash="t")
        while engine.is_usable:
            engine.note_failure(error, "probe")
        assert not engine.is_usable and not engine.probe_due and engine.lost.is_set()
        began = clock[0]
        while not engine.probe_due:
            clock[0] += 0.25
        pauses.append(clock[0] - began)
        engine.identity = identity  # a probe answered, requests have not yet
        engine.lost.clear()
    assert pauses[:4] == [1.0, 2.0, 3.0, 3.0] and set(pauses[4:]) == {3.0}


def test_requests_that_fail_do_not_give_up_those_that_run(renderer: ChatRenderer) -> None:
    engine = member(renderer, "a", failures=1)
    engine.note_failure(EngineUnavailableError("wrong answer"), "request")
    assert not engine.is_usable and not engine.lost.is_set()


def test_routing(renderer: ChatRenderer) -> None:
    a, b, c = (member(renderer, name, max_in_flight=10) for name in "abc")
    a.in_flight, b.in_flight, c.in_flight = 3, 2, 1
    assert choose([a, b, c], None, None) is c, "the least pressed"
    c.load = Load(kv_usage=0.9)
    assert choose([a, b, c], None, None) is b, "by its cache too"
    assert choose([a, b, c], a, None) is a, "its prefix is worth more than a small difference"
    a.in_flight = 7
    assert choose([a, b, c], a, None) is b, "but not more than a large one: 0.7 > 2 * 0.2 + 0.25"
    a.in_flight = 3
    assert choose([a, b, c], a, a) is b, "it has failed this response"
    assert choose([a], a, a) is a, "there is no other"
    b.in_flight = 10
    assert choose([a, b, c], b, None) is a, "no room"
    a.in_flight = c.in_flight = 10
    assert choose([a, b, c], a, None) is None


def test_routing_prefers_the_newest_weights_and_avoids_late_ones(renderer: ChatRenderer) -> None:
    new, old = member(renderer, "new", version=4), member(renderer, "old", version=3)
    late = member(renderer, "late", version=2, is_late=True)
    new.in_flight = 100
    assert choose([late, old, new], None, None) is new
    new.in_flight = 256
    assert choose([late, old, new], None, None) is old
    assert choose([late, old, new], late, None) is old, "its prefix does not keep an episode on late weights"
    assert choose([late], None, None) is late, "an episode that runs may end there"
    assert not late.may_start and old.may_start
    assert choose([late], old, None) is late, "its engine is off the list"


def test_a_list_of_engines_changes_while_it_is_read(tmp_path: Path) -> None:
    file = tmp_path / "engines.txt"

    async def main() -> None:
        roster = Roster(("http://first",), str(file))
        with pytest.raises(ConfigError, match="engines.txt: cannot read the list of engines"):
            await roster.read()
        file.write_text("# ours\nhttp://b:1/  # a note\n\nhttp://first\n")
        assert await roster.read() == ["http://first", "http://b:1"]
        assert await roster.changes() is None
        file.write_text("b:1\n")
        assert await roster.changes() is None, "a list that cannot be used changes nothing"
        file.write_text("http://c\n")
        assert await roster.changes() == ["http://first", "http://c"]
        with pytest.raises(ConfigError, match="line 1: expected http://HOST:PORT, got 'b:1'"):
            file.write_text("b:1\n")
            await roster.read()
        file.write_text("\n".join(f"http://e{i}" for i in range(64)))
        with pytest.raises(ConfigError, match="expected at most 64 engines, got 65"):
            await roster.read()

    asyncio.run(main())


async def connect(renderer: ChatRenderer, *urls: str) -> None:
    pool = EnginePool(Roster(urls), renderer, EnginesConfig(), Metrics("vagen_actor", "run"))
    try:
        await pool.connect(0.5)
    finally:
        await pool.close()


def test_vllm_is_refused_in_one_sentence(fakes: ModuleType, renderer: ChatRenderer) -> None:
    async def serve(routes: list[Any]) -> None:
        runner = web.AppRunner(web.Application())
        runner.app.add_routes(routes)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        try:
            await connect(renderer, f"http://127.0.0.1:{runner.addresses[0][1]}")
        finally:
            await runner.cleanup()

    def answers(body: dict[str, Any]) -> Any:
        async def answer(request: web.Request) -> web.Response:
            return web.json_response(body)

        return answer

    alive = [web.get(path, answers({})) for path in ("/ready", "/metrics")]
    says = "train with SGLang or the local engine; `vagen eval --api openai` evaluates with it"
    with pytest.raises(EngineRefusedError, match="is vLLM 0.11.0, which neither says which weights") as refused:
        asyncio.run(serve([*alive, web.get("/version", answers({"version": "0.11.0"}))]))
    assert says in str(refused.value)
    with pytest.raises(EngineRefusedError, match="is vLLM, which"):
        asyncio.run(serve([*alive, web.get("/server_info", answers({"vllm_config": "..."}))]))
    with pytest.raises(EngineRefusedError, match="HTTP 404"):
        asyncio.run(serve(alive))


def test_sglang_with_vision_is_refused_behind_a_router_that_drops_logit_bias(renderer: ChatRenderer) -> None:
    async def main() -> None:
        async def answer(request: web.Request) -> web.Response:
            workers = [{"url": f"http://127.0.0.1:{port}"}]
            return web.json_response({"workers": workers} if request.path == "/workers" else {"port": port})

        runner = web.AppRunner(web.Application())
        runner.app.add_routes([web.get("/{path}", answer)])
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        port = runner.addresses[0][1]
        roster = Roster((), None, EngineHttp(f"http://127.0.0.1:{port}"))
        pool = EnginePool(roster, renderer, EnginesConfig(), Metrics("vagen_actor", "run"))
        try:
            await pool.connect(5)
        finally:
            await pool.close()
            await runner.cleanup()

    with pytest.raises(EngineRefusedError, match="router, which drops logit_bias"):
        asyncio.run(main())


def test_one_engine_that_answers_is_enough_to_begin(fakes: ModuleType, renderer: ChatRenderer, tmp_path: Path) -> None:
    async def main() -> None:
        async with fakes.ScriptedEngine(lambda body, n: fakes.generated([5])) as engine:
            await connect(renderer, "http://127.0.0.1:9", engine.url)
            with pytest.raises(EngineUnavailableError, match="no engine answers at http://127.0.0.1:9 within 0.5 s"):
                await connect(renderer, "http://127.0.0.1:9")

    asyncio.run(main())


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ({"probe_s": 0}, r"\$.actor.engines.probe_s: expected float > 0, got 0"),
        ({"kv_high": 1.5}, r"\$.actor.engines.kv_high: expected 0 < float <= 1"),
        (
            {"min_in_flight": 9, "max_in_flight": 8},
            r"\$.actor.engines.max_in_flight: expected int >= min_in_flight \(9\)",
        ),
        ({"quarantine_s": 60}, r"\$.actor.engines.quarantine_max_s: expected float >= quarantine_s \(60\)"),
        ({"url": "x"}, r"\$.actor.engines.url: unknown key"),
    ],
)
def test_settings(raw: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        convert(raw, EnginesConfig, "$.actor.engines")


@asynccontextmanager
async def scripted_pool(fakes: ModuleType, renderer: ChatRenderer, script: Any, **config: Any) -> AsyncIterator[Any]:
    """A pool over one scripted engine, admitted; yields pool and engine."""
    async with fakes.ScriptedEngine(script) as engine:
        settings = EnginesConfig(probe_s=0.05, quarantine_s=0.05, **config)
        pool = EnginePool(Roster((engine.url,)), renderer, settings, Metrics("vagen_actor", "run"), retries=2)
        await pool.connect(5)
        pool.admit([EngineStatus(url=engine.url, incarnation="first", policy_version=3)])
        work = asyncio.create_task(pool.run())
        try:
            yield pool, engine
        finally:
            work.cancel()
            await asyncio.gather(work, return_exceptions=True)
            await pool.close()


async def respond(pool: EnginePool, renderer: ChatRenderer, prompt: Prompt | None = None) -> Generation:
    prompt = prompt or renderer.render((Message("user", ("look",)),))
    call = EpisodeClient(pool).generate(prompt, sampling=SamplingParams(), max_new_tokens=4, rid="r", timeout_s=20)
    return await call


def test_slots_come_back_however_a_request_ends(fakes: ModuleType, renderer: ChatRenderer) -> None:
    async def main() -> None:
        release = asyncio.Event()

        async def hold(body: dict[str, Any], number: int) -> Any:
            await release.wait()
            return fakes.generated([5])

        async with scripted_pool(fakes, renderer, hold, max_in_flight=1) as (pool, engine):
            first, *waiting = [asyncio.create_task(respond(pool, renderer)) for _ in range(4)]
            while not engine.requests:
                await asyncio.sleep(0.01)
            waiting[0].cancel()  # while it waits for a slot
            first.cancel()  # while it has the only one, which the next in line gets
            await asyncio.gather(first, waiting[0], return_exceptions=True)
            with pytest.raises(EngineRefusedError, match="1 images"):
                picture = Picture(encode_png(Image.new("RGB", (56, 56))), (56, 56))
                release.set()
                await respond(pool, renderer, Prompt([5], (picture,)))
            answers = await asyncio.gather(*waiting[1:])
            assert [answer.token_ids for answer in answers] == [[5], [5]]
            (member,) = pool._members.values()
            assert member.in_flight == 0 and len(engine.requests) == 3
            assert len((await respond(pool, renderer)).token_ids) == 1

    asyncio.run(main())


def test_a_response_that_outlives_its_engines_quarantine_keeps_the_name_of_the_engine(
    fakes: ModuleType, renderer: ChatRenderer
) -> None:
    async def main() -> None:
        async def answer(body: dict[str, Any], number: int) -> Any:
            (member,) = pool._members.values()
            for _ in range(pool.config.failures):
                member.note_failure(EngineUnavailableError("others got no answer"), "request")
            assert member.identity is None
            return fakes.generated([5])

        async with scripted_pool(fakes, renderer, answer) as (made, _):
            pool = made
            client = EpisodeClient(pool)
            prompt = renderer.render((Message("user", ("look",)),))
            await client.generate(prompt, sampling=SamplingParams(), max_new_tokens=4, rid="r", timeout_s=20)
            assert client.identity.incarnation == "first"

    asyncio.run(main())
