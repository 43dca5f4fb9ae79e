from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from vagen.actor.config import ActorConfig, EnvSection, HarnessConfig
from vagen.actor.engines.config import EnginesConfig
from vagen.actor.engines.pool import EnginePool
from vagen.actor.engines.roster import Roster
from vagen.actor.loop import ActorLoop, plan_task
from vagen.actor.rendering import ChatRenderer
from vagen.actor.sender import Presence, Sender
from vagen.actor.spool import Spool
from vagen.common.config import RunConfig
from vagen.common.errors import EnvironmentFailure
from vagen.common.metrics import Metrics
from vagen.common.wire import EngineStatus, TaskGrant

GOES_ON = ({"task": 0.0}, False, False)
WON = ({"task": 1.0}, True, False)


def tasks(count: int, first: int = 0) -> list[TaskGrant]:
    return [TaskGrant(task_index=first + i, attempt=0) for i in range(count)]


@pytest.fixture
def make_env(monkeypatch: pytest.MonkeyPatch, fakes: ModuleType) -> SimpleNamespace:
    """Environments of the loop: `made` lists them, `turns` and `on_step` may be set before they are made."""
    kit = SimpleNamespace(made=[], turns=[GOES_ON, WON], on_step=None)

    def make(name: str, config: Any, executor: Any) -> Any:
        number = len(kit.made)
        hook = kit.on_step
        env = fakes.ScriptedEnvironment(kit.turns)
        env.on_step = (lambda turn: hook(env, number, turn)) if hook else None
        kit.made.append(env)
        return env

    monkeypatch.setattr("vagen.actor.environments.make_environment", make)
    return kit


class Rig(SimpleNamespace):
    """A running loop against a scripted engine and a scripted ingest."""

    def value(self, name: str, **labels: str) -> float:
        return self.metrics.registry.get_sample_value(name, {"run": "run", **labels}) or 0.0


@asynccontextmanager
async def acting(
    fakes: ModuleType,
    renderer: ChatRenderer,
    folder: Path,
    *,
    script: Callable[..., Any] | None = None,
    ingest_options: dict[str, Any] | None = None,
    **options: Any,
) -> AsyncIterator[Rig]:
    config = ActorConfig(
        **{
            "concurrency": 4,
            "max_new_tokens": 8,
            "heartbeat_s": 0.05,
            "credit_retry_s": 0.05,
            "engines": EnginesConfig(probe_s=0.05),
            "engine_retries": 1,
            "drain_s": 5.0,
        }
        | options
    )
    eot = renderer.end_of_turn_id
    script = script or (lambda body, number: fakes.generated([70, eot]))
    async with (
        fakes.ScriptedIngest(**(ingest_options or {})) as ingest,
        fakes.ScriptedEngine(script) as engine,
    ):
        metrics, presence = Metrics("vagen_actor", "run"), Presence()
        spool = Spool(folder, "run", config.spool_max_bytes)
        sender = Sender(
            ingest.endpoint, spool, presence, metrics, run_id="run", window=8, heartbeat_s=config.heartbeat_s
        )
        roster = Roster((engine.url,))
        engines = EnginePool(roster, renderer, config.engines, metrics, retries=config.engine_retries)
        await engines.connect(5.0)
        presence.engines = engines.announcements
        sender.open()
        serving = asyncio.create_task(sender.run())
        await sender.wait_for_buffer(5.0)
        loop = ActorLoop(
            run=RunConfig(name="run"),
            config=config,
            env=EnvSection(name="frozen_lake"),
            harness=HarnessConfig(),
            renderer=renderer,
            engines=engines,
            spool=spool,
            sender=sender,
            presence=presence,
            metrics=metrics,
        )
        stop = asyncio.Event()
        running = asyncio.create_task(loop.run(stop))
        try:
            yield Rig(
                ingest=ingest, engine=engine, metrics=metrics, spool=spool, stop=stop, running=running, sender=sender
            )
        finally:
            stop.set()
            await asyncio.wait({running}, timeout=20.0)
            serving.cancel()
            await asyncio.gather(serving, return_exceptions=True)
            await sender.close()
            await engines.close()
            await spool.close()
            running.result()


def test_granted_tasks_become_trajectories_and_members_of_a_group_share_a_seed(
    fakes: ModuleType, renderer: ChatRenderer, make_env: SimpleNamespace, tmp_path: Path
) -> None:
    async def main() -> None:
        options = {"tasks": tasks(6)}
        async with acting(
            fakes, renderer, tmp_path, ingest_options=options, group_size=2, base_seed=100, concurrency=3
        ) as rig:
            await rig.ingest.until(lambda: len(rig.ingest.stored) == 6)
            await rig.ingest.until(lambda: rig.ingest.heartbeats[-1].in_flight == 0)
            stored = sorted(rig.ingest.stored.values(), key=lambda t: t.task_index)
            assert [t.seed for t in stored] == [100, 100, 101, 101, 102, 102]
            assert [t.group_id for t in stored] == ["run-0", "run-0", "run-1", "run-1", "run-2", "run-2"]
            assert {t.group_size for t in stored} == {2}
            assert {t.actor_id for t in stored} == {rig.spool.actor_id}
            assert sorted(t.actor_seq for t in stored) == [1, 2, 3, 4, 5, 6]
            assert {t.engine.incarnation for t in stored} == {"first"}
            assert max(rig.ingest.wants) <= 3 and len(make_env.made) <= 3
            assert rig.value("vagen_actor_episodes_total", outcome="terminated") == 6
            assert rig.value("vagen_actor_turns_total") == 12
            assert rig.value("vagen_actor_tokens_total") == 24
            assert rig.value("vagen_actor_wait_seconds_total", what="engine") > 0
            await rig.ingest.until(lambda: len(rig.ingest.wants) > 5)
            assert rig.value("vagen_actor_wait_seconds_total", what="credit") > 0

    asyncio.run(main())


def test_a_slow_episode_blocks_no_other(
    fakes: ModuleType, renderer: ChatRenderer, make_env: SimpleNamespace, tmp_path: Path
) -> None:
    async def main() -> None:
        release = asyncio.Event()

        async def slow_first(env: Any, number: int, turn: int) -> None:
            if number == 0 and turn == 0:
                await release.wait()

        make_env.on_step = slow_first
        async with acting(fakes, renderer, tmp_path, ingest_options={"tasks": tasks(9)}) as rig:
            await rig.ingest.until(lambda: len(rig.ingest.stored) == 8)
            assert 0 not in {t.task_index for t in rig.ingest.stored.values()}
            await rig.ingest.until(lambda: rig.ingest.heartbeats[-1].running_tasks == (0,))
            release.set()
            await rig.ingest.until(lambda: len(rig.ingest.stored) == 9)

    asyncio.run(main())


def test_no_episode_starts_before_this_very_engine_is_admitted_and_not_late(
    fakes: ModuleType, renderer: ChatRenderer, make_env: SimpleNamespace, tmp_path: Path
) -> None:
    async def main() -> None:
        options = {"tasks": tasks(1), "admits_announced": False}
        async with acting(fakes, renderer, tmp_path, ingest_options=options) as rig:
            ingest, url = rig.ingest, rig.engine.url

            async def some_heartbeats() -> None:
                count = len(ingest.heartbeats)
                await ingest.until(lambda: len(ingest.heartbeats) >= count + 4)

            await some_heartbeats()
            ingest.engines = (EngineStatus(url=url, incarnation="an earlier one", policy_version=3),)
            await some_heartbeats()
            ingest.engines = (EngineStatus(url=url, incarnation="first", policy_version=3, is_late=True),)
            await some_heartbeats()
            assert ingest.wants == [] and make_env.made == []
            ingest.engines = (EngineStatus(url=url, incarnation="first", policy_version=3),)
            await ingest.until(lambda: len(ingest.stored) == 1)
            assert rig.value("vagen_actor_wait_seconds_total", what="admission") > 0

    asyncio.run(main())


def test_a_restarted_engine_waits_for_its_weights(
    fakes: ModuleType, renderer: ChatRenderer, make_env: SimpleNamespace, tmp_path: Path
) -> None:
    async def main() -> None:
        async with acting(
            fakes, renderer, tmp_path, ingest_options={"tasks": tasks(2), "admits_announced": False}
        ) as rig:
            ingest, url = rig.ingest, rig.engine.url
            ingest.engines = (EngineStatus(url=url, incarnation="first", policy_version=3),)
            await ingest.until(lambda: len(ingest.stored) == 2)
            rig.engine.incarnation = "second"
            await ingest.until(lambda: ingest.heartbeats[-1].engines[0].incarnation == "second")
            wants = len(ingest.wants)
            ingest.tasks = tasks(1, first=2)
            count = len(ingest.heartbeats)
            await ingest.until(lambda: len(ingest.heartbeats) >= count + 4)
            assert len(ingest.wants) <= wants + 1 and len(ingest.stored) == 2
            ingest.engines = (EngineStatus(url=url, incarnation="second", policy_version=3),)
            await ingest.until(lambda: len(ingest.stored) == 3)
            assert sorted(t.engine.incarnation for t in ingest.stored.values()) == ["first", "first", "second"]

    asyncio.run(main())


def test_a_failed_environment_is_reported_and_not_used_again(
    fakes: ModuleType, renderer: ChatRenderer, make_env: SimpleNamespace, tmp_path: Path
) -> None:
    async def main() -> None:
        async def first_dies(env: Any, number: int, turn: int) -> None:
            if number == 0 and turn == 1:
                raise EnvironmentFailure("simulator died")

        make_env.on_step = first_dies
        options = {"tasks": tasks(1)}
        async with acting(fakes, renderer, tmp_path, ingest_options=options, concurrency=1) as rig:
            ingest = rig.ingest
            await ingest.until(lambda: bool(ingest.failures))
            (failed,) = ingest.failures
            assert (failed.task_index, failed.attempt) == (0, 0)
            assert failed.error == "EnvironmentFailure: simulator died"
            # A heartbeat after the report must not claim the task again, even while the slot pauses.
            count = len(ingest.heartbeats)
            await ingest.until(lambda: len(ingest.heartbeats) > count)
            assert ingest.heartbeats[count].running_tasks == ()
            ingest.tasks = [TaskGrant(task_index=0, attempt=1)]
            await ingest.until(lambda: len(ingest.stored) == 1)
            (stored,) = ingest.stored.values()
            assert (stored.task_index, stored.attempt) == (0, 1)
            assert make_env.made[0].closed and len(make_env.made) == 2
            assert rig.value("vagen_actor_episodes_total", outcome="EnvironmentFailure") == 1

    asyncio.run(main())


def test_a_failed_engine_is_reported_as_such(
    fakes: ModuleType, renderer: ChatRenderer, make_env: SimpleNamespace, tmp_path: Path
) -> None:
    async def main() -> None:
        def script(body: dict[str, Any], number: int) -> Any:
            return fakes.generated([5], versions=[("default", 0, 1)])

        async with acting(fakes, renderer, tmp_path, script=script, ingest_options={"tasks": tasks(1)}) as rig:
            await rig.ingest.until(lambda: bool(rig.ingest.failures))
            assert "no version of the learner's" in rig.ingest.failures[0].error
            assert rig.ingest.stored == {}

    asyncio.run(main())


def test_no_episode_starts_while_the_spool_is_full(
    fakes: ModuleType, renderer: ChatRenderer, make_env: SimpleNamespace, tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.setattr(Spool, "is_full", property(lambda spool: spool.in_flight >= 2))

    async def main() -> None:
        options = {"tasks": tasks(6), "acks": False}
        async with acting(fakes, renderer, tmp_path, ingest_options=options, concurrency=1, drain_s=0.1) as rig:
            ingest = rig.ingest
            await ingest.until(lambda: len(ingest.puts) == 2)
            count = len(ingest.heartbeats)
            await ingest.until(lambda: len(ingest.heartbeats) >= count + 5)
            assert len(ingest.wants) == 2 and len(ingest.tasks) == 4

    asyncio.run(main())


def test_an_orderly_stop_lets_episodes_end_and_starts_no_other(
    fakes: ModuleType, renderer: ChatRenderer, make_env: SimpleNamespace, tmp_path: Path
) -> None:
    async def main() -> None:
        reached, release = asyncio.Event(), asyncio.Event()

        async def hold(env: Any, number: int, turn: int) -> None:
            reached.set()
            await release.wait()

        make_env.on_step = hold
        async with acting(fakes, renderer, tmp_path, ingest_options={"tasks": tasks(2)}, concurrency=1) as rig:
            await asyncio.wait_for(reached.wait(), 10)
            rig.stop.set()
            await asyncio.sleep(0)
            release.set()
            await asyncio.wait_for(rig.running, 10)
            assert [t.task_index for t in rig.ingest.stored.values()] == [0]
            assert rig.spool.in_flight == 0
            assert make_env.made[0].closed

    asyncio.run(main())


def test_an_orderly_stop_is_bounded(
    fakes: ModuleType, renderer: ChatRenderer, make_env: SimpleNamespace, tmp_path: Path
) -> None:
    async def main() -> None:
        reached = asyncio.Event()

        async def hang(env: Any, number: int, turn: int) -> None:
            reached.set()
            await asyncio.sleep(600)

        make_env.on_step = hang
        async with acting(fakes, renderer, tmp_path, ingest_options={"tasks": tasks(1)}, drain_s=0.2) as rig:
            await asyncio.wait_for(reached.wait(), 10)
            rig.stop.set()
            await asyncio.wait_for(rig.running, 5)
            assert rig.ingest.stored == {}
            assert make_env.made[0].closed
            assert rig.value("vagen_actor_episodes_total", outcome="cancelled") == 1

    asyncio.run(main())


def test_a_bug_ends_the_process_instead_of_hiding(
    fakes: ModuleType, renderer: ChatRenderer, make_env: SimpleNamespace, tmp_path: Path
) -> None:
    async def main() -> None:
        async def bug(env: Any, number: int, turn: int) -> None:
            raise KeyError("unforeseen")

        make_env.on_step = bug
        async with acting(fakes, renderer, tmp_path, ingest_options={"tasks": tasks(1)}) as rig:
            await asyncio.wait({rig.running}, timeout=10)

    with pytest.raises(ExceptionGroup) as caught:
        asyncio.run(main())
    assert caught.group_contains(KeyError)


def test_shards_play_disjoint_groups_that_cover_the_run() -> None:
    config = ActorConfig(group_size=2)

    def play(shard: int, index: int) -> tuple[str, int]:
        grant = TaskGrant(task_index=index, attempt=0)
        task = plan_task(grant, run=RunConfig(name="r"), config=config, env_name="e", actor_id="a", shard=(shard, 3))
        return task.group_id, task.seed

    groups = [[play(shard, index) for index in range(8)] for shard in range(3)]
    for of_shard in groups:
        assert of_shard[::2] == of_shard[1::2], "members of a group share group and seed"
    assert sorted(seed for of_shard in groups for _, seed in of_shard[::2]) == list(range(12))
