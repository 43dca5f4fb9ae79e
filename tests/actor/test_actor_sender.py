from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.builders import make_text_trajectory
from vagen.actor.sender import Presence, Sender
from vagen.actor.spool import Spool
from vagen.common.errors import BufferUnavailableError, ConfigError
from vagen.common.metrics import Metrics
from vagen.common.trajectory import Trajectory
from vagen.common.wire import EngineAnnouncement, Kind, TaskGrant


@asynccontextmanager
async def sending(url: str, folder: Path, *, window: int = 4, heartbeat_s: float = 0.05) -> AsyncIterator[Any]:
    """A running sender; yields (sender, spool, presence, value of a fate)."""
    spool, presence, metrics = Spool(folder, "run", 1 << 30), Presence(), Metrics("vagen_actor", "run")
    sender = Sender(url, spool, presence, metrics, run_id="run", window=window, heartbeat_s=heartbeat_s)

    def fate(name: str) -> float:
        labels = {"run": "run", "fate": name}
        return metrics.registry.get_sample_value("vagen_actor_trajectories_total", labels) or 0.0

    sender.open()
    work = asyncio.create_task(sender.run())
    try:
        yield sender, spool, presence, fate
    finally:
        work.cancel()
        await asyncio.gather(work, return_exceptions=True)
        await sender.close()
        await spool.close()


@pytest.mark.parametrize("endpoint", ["tcp://127.0.0.1:*", "tcp://[::1]:*"])
def test_what_is_put_is_journalled_sent_acked_and_forgotten(fakes: ModuleType, tmp_path: Path, endpoint: str) -> None:
    async def main() -> None:
        async with fakes.ScriptedIngest(endpoint) as ingest, sending(ingest.endpoint, tmp_path) as parts:
            sender, spool, _, fate = parts
            trajectories = [make_text_trajectory(i) for i in range(20)]
            await sender.wait_for_buffer(5.0)
            await asyncio.gather(*map(sender.put, trajectories))
            assert await sender.flush(10.0)
            assert ingest.stored.keys() == {t.trajectory_id for t in trajectories}
            assert sorted(t.actor_seq for t in ingest.stored.values()) == list(range(1, 21))
            assert (spool.in_flight, spool.journalled, sender.in_window) == (0, 20, 0)
            assert (fate("journalled"), fate("acked"), fate("refused")) == (20, 20, 0)
            await ingest.until(lambda: (ingest.heartbeats[-1].journalled, ingest.heartbeats[-1].in_flight) == (20, 0))

    asyncio.run(main())


def test_at_most_a_window_is_unacked_and_the_order_is_kept(fakes: ModuleType, tmp_path: Path) -> None:
    async def main() -> None:
        async with fakes.ScriptedIngest(acks=False) as ingest, sending(ingest.endpoint, tmp_path, window=3) as parts:
            sender, spool, _, _ = parts
            await sender.wait_for_buffer(5.0)
            for i in range(8):
                await sender.put(make_text_trajectory(i))
            await ingest.until(lambda: len(ingest.puts) == 3)
            beats = len(ingest.heartbeats)
            await ingest.until(lambda: len(ingest.heartbeats) >= beats + 3)
            assert (len(ingest.puts), sender.in_window, spool.in_flight) == (3, 3, 8)
            assert [ingest.stored[key].actor_seq for key in ingest.puts] == [1, 2, 3]
            # Unacked tasks keep their leases.
            assert ingest.heartbeats[-1].running_tasks == tuple(range(8))

    asyncio.run(main())


def test_everything_unacked_is_sent_again_after_the_ingest_restarts(fakes: ModuleType, tmp_path: Path) -> None:
    async def main() -> None:
        async with fakes.ScriptedIngest(acks=False) as first:
            context = sending(first.endpoint, tmp_path)
            sender, spool, _, fate = await context.__aenter__()
            await sender.wait_for_buffer(5.0)
            for i in range(6):
                await sender.put(make_text_trajectory(i))
            await first.until(lambda: len(first.puts) == 4)
        await sender.put(make_text_trajectory(6))  # while there is no buffer
        async with fakes.ScriptedIngest(first.endpoint) as second:
            assert await sender.flush(20.0)
            assert [second.stored[key].actor_seq for key in second.puts] == [1, 2, 3, 4, 5, 6, 7]
            assert (fate("resent"), fate("acked"), spool.in_flight) == (4, 7, 0)
            await context.__aexit__(None, None, None)

    asyncio.run(main())


def test_a_new_process_sends_what_the_last_one_left(fakes: ModuleType, tmp_path: Path) -> None:
    async def main() -> None:
        left = [make_text_trajectory(i) for i in range(3)]
        async with fakes.ScriptedIngest(acks=False) as ingest, sending(ingest.endpoint, tmp_path) as (sender, *_):
            await sender.wait_for_buffer(5.0)
            for trajectory in left:
                await sender.put(trajectory)
        async with fakes.ScriptedIngest() as ingest, sending(ingest.endpoint, tmp_path) as (sender, *_):
            assert await sender.flush(10.0)
            assert list(ingest.stored) == [trajectory.trajectory_id for trajectory in left]
        incarnations = {beat.incarnation for beat in ingest.heartbeats}
        assert len(incarnations) == 1

    asyncio.run(main())


def test_a_refused_trajectory_is_dropped_and_counted_with_its_reason(
    fakes: ModuleType, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(trajectory: Trajectory) -> tuple[str, str] | None:
        return ("policy_versions", "too old") if trajectory.task_index == 1 else None

    async def main() -> None:
        async with fakes.ScriptedIngest(refuse=refuse) as ingest, sending(ingest.endpoint, tmp_path) as parts:
            sender, spool, _, fate = parts
            await sender.wait_for_buffer(5.0)
            for i in range(3):
                await sender.put(make_text_trajectory(i))
            assert await sender.flush(10.0)
            assert (fate("acked"), fate("refused"), spool.in_flight) == (2, 1, 0)
            assert spool.entries() == []

    with caplog.at_level(logging.WARNING):
        asyncio.run(main())
    assert "policy_versions: too old" in caplog.text


def test_credits_are_granted_to_who_asks(fakes: ModuleType, tmp_path: Path) -> None:
    async def main() -> None:
        tasks = [TaskGrant(task_index=i, attempt=0) for i in range(5)]
        async with fakes.ScriptedIngest(tasks=tasks) as ingest, sending(ingest.endpoint, tmp_path) as (sender, *_):
            await sender.wait_for_buffer(5.0)
            assert [task.task_index for task in await sender.request(3)] == [0, 1, 2]
            assert [task.task_index for task in await sender.request(3)] == [3, 4]
            assert await sender.request(3) == ()
            assert ingest.wants == [3, 3, 3]

    asyncio.run(main())


def test_a_grant_that_comes_too_late_for_its_request_is_not_lost(fakes: ModuleType, tmp_path: Path) -> None:
    async def main() -> None:
        tasks = [TaskGrant(task_index=i, attempt=0) for i in range(2)]
        async with fakes.ScriptedIngest(tasks=tasks) as ingest, sending(ingest.endpoint, tmp_path) as (sender, *_):
            await sender.wait_for_buffer(5.0)
            asking = asyncio.create_task(sender.request(2))
            await asyncio.sleep(0)  # it has asked, and gives up before the answer
            asking.cancel()
            await ingest.until(lambda: ingest.wants == [2])
            beats = len(ingest.heartbeats)
            await ingest.until(lambda: len(ingest.heartbeats) >= beats + 2)
            assert [task.task_index for task in await sender.request(2)] == [0, 1]
            assert ingest.wants == [2]

    asyncio.run(main())


def test_heartbeats_say_what_runs_and_the_last_one_is_closing(fakes: ModuleType, tmp_path: Path) -> None:
    async def main() -> None:
        async with fakes.ScriptedIngest() as ingest:
            async with sending(ingest.endpoint, tmp_path) as (sender, spool, presence, _):
                await sender.wait_for_buffer(5.0)
                presence.running.update({(4, 0), (2, 1)})
                presence.engines = (EngineAnnouncement(url="http://e", kind="local", incarnation="i"),)
                await ingest.until(lambda: ingest.heartbeats[-1].running_tasks == (2, 4))
                beat = ingest.heartbeats[-1]
                assert (beat.run_id, beat.actor_id, beat.closing) == ("run", spool.actor_id, False)
                assert beat.engines[0].url == "http://e"
                assert sender.status is not None
            await ingest.until(lambda: ingest.heartbeats[-1].closing)

    asyncio.run(main())


def test_a_missing_buffer_is_an_error_within_seconds_that_says_what_to_start(tmp_path: Path) -> None:
    async def main() -> None:
        async with sending("tcp://127.0.0.1:9", tmp_path) as (sender, *_):
            await sender.wait_for_buffer(0.5)

    started = time.monotonic()
    with pytest.raises(BufferUnavailableError, match=r"tcp://127.0.0.1:9 within 0.5 s; start one with `vagen-buffer"):
        asyncio.run(main())
    assert time.monotonic() - started < 5


def test_a_malformed_address_is_a_config_error(tmp_path: Path) -> None:
    async def main() -> None:
        async with sending("127.0.0.1", tmp_path):
            pass

    with pytest.raises(ConfigError, match="expected tcp://HOST:PORT"):
        asyncio.run(main())


def test_bytes_that_are_no_message_change_nothing(fakes: ModuleType, tmp_path: Path) -> None:
    hostile = [
        [b"A", b"short"],
        [b"A"],
        [b"Z", b""],
        [b"S", b"\xc1"],
        [b"G", b"\x80"],
        [Kind.ACK.value, bytes(16)],
        [Kind.REFUSE.value, b"\x93\x01\x02\x03"],
    ]

    async def main() -> None:
        async with fakes.ScriptedIngest() as ingest:
            answer = ingest._answer
            ingest._answer = lambda kind, frames: [*(hostile if kind == Kind.HEARTBEAT else ()), *answer(kind, frames)]
            async with sending(ingest.endpoint, tmp_path) as (sender, spool, _, fate):
                await sender.wait_for_buffer(5.0)
                await sender.put(make_text_trajectory())
                assert await sender.flush(10.0)
                assert (fate("acked"), spool.in_flight) == (1, 0)

    asyncio.run(main())


def test_nothing_piles_up_in_the_socket_while_there_is_no_buffer(fakes: ModuleType, tmp_path: Path) -> None:
    async def main() -> None:
        async with fakes.ScriptedIngest() as first:
            context = sending(first.endpoint, tmp_path, heartbeat_s=0.01)
            sender, *_ = await context.__aenter__()
            await sender.wait_for_buffer(5.0)
        await asyncio.sleep(0.5)  # fifty heartbeats' time, which nobody hears
        for i in range(3):
            await sender.put(make_text_trajectory(i))
        async with fakes.ScriptedIngest(first.endpoint) as second:
            assert await sender.flush(20.0)
            assert len(second.heartbeats) < 20
            assert len(second.puts) == 3
            await context.__aexit__(None, None, None)

    asyncio.run(main())


def test_one_whose_answer_was_lost_on_a_standing_connection_is_sent_again(
    fakes: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vagen.actor.sender._RESEND_S", 0.2)

    async def main() -> None:
        async with fakes.ScriptedIngest(acks=False) as ingest, sending(ingest.endpoint, tmp_path) as parts:
            sender, *_ = parts
            await sender.wait_for_buffer(5.0)
            await sender.put(make_text_trajectory())
            await ingest.until(lambda: len(ingest.puts) == 1)
            ingest.acks = True
            assert await sender.flush(10.0)
            assert len(ingest.puts) == 2 and len(ingest.stored) == 1

    asyncio.run(main())


def test_a_silent_peer_is_connected_to_again(
    fakes: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vagen.actor.sender._SILENCE_S", 0.3)

    async def main() -> None:
        async with fakes.ScriptedIngest() as ingest, sending(ingest.endpoint, tmp_path) as (sender, *_):
            await sender.wait_for_buffer(5.0)
            answer = ingest._answer
            seen: list[bytes] = []

            def mute_at_first(kind: bytes, frames: list[bytes]) -> list[tuple[bytes, bytes]]:
                seen.append(kind)
                replies = answer(kind, frames)
                return replies if seen.count(Kind.PUT.value) > 1 else []

            ingest._answer = mute_at_first
            await sender.put(make_text_trajectory())
            assert await sender.flush(10.0)
            assert len(ingest.puts) == 2 and len(ingest.stored) == 1

    asyncio.run(main())


def test_a_cancelled_put_is_sent_all_the_same(fakes: ModuleType, tmp_path: Path) -> None:
    async def main() -> None:
        async with fakes.ScriptedIngest() as ingest, sending(ingest.endpoint, tmp_path) as (sender, spool, *_):
            await sender.wait_for_buffer(5.0)
            putting = asyncio.create_task(sender.put(make_text_trajectory()))
            await asyncio.sleep(0)
            putting.cancel()
            await ingest.until(lambda: len(ingest.stored) == 1)
            assert await sender.flush(10.0)
            assert spool.journalled == 1

    asyncio.run(main())


def test_a_failed_episode_is_reported(fakes: ModuleType, tmp_path: Path) -> None:
    async def main() -> None:
        async with fakes.ScriptedIngest() as ingest, sending(ingest.endpoint, tmp_path) as (sender, spool, *_):
            await sender.wait_for_buffer(5.0)
            await sender.report_failure(TaskGrant(task_index=7, attempt=2), "EngineError: x" + "y" * 10_000)
            await ingest.until(lambda: bool(ingest.failures))
            (failed,) = ingest.failures
            assert (failed.actor_id, failed.task_index, failed.attempt) == (spool.actor_id, 7, 2)
            assert failed.error.startswith("EngineError: x") and len(failed.error) <= 500

    asyncio.run(main())
