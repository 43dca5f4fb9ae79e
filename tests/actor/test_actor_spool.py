from __future__ import annotations

import asyncio
import os
import random
import resource
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
from ulid import ULID

from tests.builders import make_text_trajectory
from vagen.actor.service import choose_endpoint
from vagen.actor.spool import Spool
from vagen.common.errors import ConfigError, TrajectoryError
from vagen.common.trajectory import Trajectory
from vagen.common.validation import validate_trajectory
from vagen.common.wire import check_payload, decode_envelope, decode_trajectory, encode_trajectory

MANY = 1 << 30
TESTS = Path(__file__).parents[1]


def key_of(trajectory: Trajectory) -> bytes:
    return ULID.from_str(trajectory.trajectory_id).bytes


def test_sequences_and_identity_outlive_the_process_and_the_rows(tmp_path: Path) -> None:
    async def main() -> None:
        spool = Spool(tmp_path, "run", MANY)
        actor_id = spool.actor_id
        trajectories = [make_text_trajectory(i) for i in range(5)]
        entries = await asyncio.gather(*map(spool.journal, trajectories))
        assert sorted(entry.actor_seq for entry in entries) == [1, 2, 3, 4, 5]
        for trajectory in trajectories:
            assert spool.release(key_of(trajectory)) is not None
            assert spool.release(key_of(trajectory)) is None
        await spool.close()

        spool = Spool(tmp_path, "run", MANY)
        assert (spool.actor_id, spool.journalled, spool.in_flight, spool.num_bytes) == (actor_id, 5, 0, 0)
        assert (await spool.journal(make_text_trajectory())).actor_seq == 6
        await spool.close()

    asyncio.run(main())


def test_what_is_unacked_is_found_again_as_it_was_sent(tmp_path: Path) -> None:
    async def main() -> None:
        spool = Spool(tmp_path, "run", MANY)
        trajectories = [make_text_trajectory(i) for i in range(3)]
        frames = [await spool.load((await spool.journal(t)).actor_seq) for t in trajectories]
        spool.release(key_of(trajectories[1]))
        await spool.close()

        spool = Spool(tmp_path, "run", MANY)
        assert [entry.actor_seq for entry in spool.entries()] == [1, 3]
        assert [await spool.load(1), await spool.load(3)] == [frames[0], frames[2]]
        envelope, payload = await spool.load(3)
        head = decode_envelope(envelope)
        check_payload(head, payload)
        decoded = decode_trajectory(payload)
        validate_trajectory(decoded)
        assert (head.actor_seq, decoded.actor_seq, decoded.trajectory_id) == (3, 3, trajectories[2].trajectory_id)
        assert spool.num_bytes == sum(entry.num_bytes for entry in spool.entries()) > 0
        await spool.close()

    asyncio.run(main())


def test_what_memory_has_no_room_for_is_read_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        spool = Spool(tmp_path, "run", MANY)
        trajectories = [make_text_trajectory(i, num_tokens=400) for i in range(6)]
        entries = [await spool.journal(trajectory) for trajectory in trajectories]
        # Room for two: the oldest, which are sent first, and as they go, no other's frames.
        assert list(spool._kept) == [1, 2]
        for entry, trajectory in zip(entries, trajectories, strict=True):
            envelope, payload = await spool.load(entry.actor_seq)
            check_payload(decode_envelope(envelope), payload)
            assert decode_trajectory(payload).trajectory_id == trajectory.trajectory_id
            spool.release(key_of(trajectory))
        assert (spool._kept, spool._kept_bytes) == ({}, 0)
        await spool.close()

    size = len(encode_trajectory(make_text_trajectory(num_tokens=400))[1])
    monkeypatch.setattr("vagen.actor.spool._KEPT_BYTES", 2 * size + size // 2)
    asyncio.run(main())


@pytest.mark.skipif(not Path("/proc/self/io").exists(), reason="counts written bytes by Linux's /proc")
def test_a_payload_is_written_about_once(tmp_path: Path) -> None:
    def written() -> int:
        lines = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
        return int(lines["wchar"])

    async def main() -> float:
        spool = Spool(tmp_path, "run", MANY)
        num_bytes, before = 0, written()
        for start in range(0, 400, 8):
            trajectories = [make_text_trajectory(start + i, num_tokens=20_000) for i in range(8)]
            entries = await asyncio.gather(*map(spool.journal, trajectories))
            num_bytes += sum(entry.num_bytes for entry in entries)
            for trajectory in trajectories:
                spool.release(key_of(trajectory))
        await spool.close()
        return (written() - before) / num_bytes

    assert asyncio.run(main()) < 1.05


def test_it_is_full_by_bytes(tmp_path: Path) -> None:
    async def main() -> None:
        spool = Spool(tmp_path, "run", 2000)
        trajectory = make_text_trajectory(num_tokens=200)
        await spool.journal(trajectory)
        assert spool.is_full
        spool.release(key_of(trajectory))
        assert not spool.is_full
        await spool.close()

    asyncio.run(main())


def test_one_too_large_is_refused_and_takes_no_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vagen.common.wire.MAX_PAYLOAD_BYTES", 3000)

    async def main() -> None:
        spool = Spool(tmp_path, "run", MANY)
        outcomes = await asyncio.gather(
            spool.journal(make_text_trajectory()),
            spool.journal(make_text_trajectory(num_tokens=4000)),
            spool.journal(make_text_trajectory()),
            return_exceptions=True,
        )
        assert [getattr(outcome, "actor_seq", None) for outcome in outcomes] == [1, None, 2]
        assert isinstance(outcomes[1], TrajectoryError)
        assert (spool.in_flight, spool.journalled) == (2, 2)
        await spool.close()

    asyncio.run(main())


def test_two_processes_cannot_share_a_folder(tmp_path: Path) -> None:
    async def main() -> None:
        spool = Spool(tmp_path, "run", MANY)
        with pytest.raises(ConfigError, match=rf"{tmp_path}: in use by another vagen-actor"):
            Spool(tmp_path, "run", MANY)
        await spool.close()
        await Spool(tmp_path, "run", MANY).close()

    asyncio.run(main())


def test_a_folder_belongs_to_one_run(tmp_path: Path) -> None:
    async def main() -> None:
        await Spool(tmp_path, "run", MANY).close()
        with pytest.raises(ConfigError, match="belongs to run 'run', this is run 'other'"):
            Spool(tmp_path, "other", MANY)
        await Spool(tmp_path, "run", MANY).close()  # the failed attempt has let go of the lock

    asyncio.run(main())


def test_a_file_that_is_no_spool_is_named(tmp_path: Path) -> None:
    (tmp_path / "journal-00000001.log").write_bytes(b"something else entirely" * 100)
    with pytest.raises(ConfigError, match="journal-00000001.log: not a journal"):
        Spool(tmp_path, "run", MANY)


def test_a_failing_disk_reaches_the_caller(tmp_path: Path) -> None:
    async def main() -> None:
        spool = Spool(tmp_path, "run", MANY)
        await spool.journal(make_text_trajectory())
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (200, limits[1]))
        try:
            with pytest.raises(ConfigError, match="cannot be written"):
                await spool.journal(make_text_trajectory())
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        # The disk has room again, but what was written of the last one is in the way.
        with pytest.raises(ConfigError, match="cannot be written"):
            await spool.journal(make_text_trajectory())
        await spool.close()
        spool = Spool(tmp_path, "run", MANY)
        assert [entry.actor_seq for entry in spool.entries()] == [1]
        assert (await spool.journal(make_text_trajectory())).actor_seq == 2
        await spool.close()

    asyncio.run(main())


_WRITER = """
    import asyncio, sys
    from pathlib import Path
    import vagen.actor.journal
    from vagen.actor.spool import Spool

    sys.path.append(sys.argv[1])
    from builders import make_text_trajectory

    async def produce(spool, worker):
        for index in range(10**6):
            trajectory = make_text_trajectory(worker, num_tokens=500 + 1000 * worker)
            entry = await spool.journal(trajectory)
            print("journalled", entry.actor_seq, trajectory.trajectory_id, flush=True)
            if index % 3 == 2:
                print("releasing", entry.actor_seq, flush=True)
                spool.release(entry.trajectory_id)

    if sys.argv[3:]:
        vagen.actor.journal.sync = lambda file: None
    vagen.actor.journal.SEGMENT_BYTES = 200_000

    async def main():
        spool = Spool(Path(sys.argv[2]), "run", 1 << 30)
        await asyncio.gather(*(produce(spool, worker) for worker in range(4)))

    asyncio.run(main())
"""


def test_nothing_that_was_journalled_is_lost_to_kill_9(tmp_path: Path) -> None:
    rng = random.Random(5)
    told: dict[int, str] = {}
    released: set[int] = set()
    for _ in range(6):
        command = [sys.executable, "-c", textwrap.dedent(_WRITER), str(TESTS), str(tmp_path / "data")]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as writer:
            assert writer.stdout is not None
            lines = [writer.stdout.readline() for _ in range(rng.randint(1, 60))]
            writer.send_signal(signal.SIGKILL)
            lines += writer.stdout.read().splitlines(keepends=True)
            writer.wait(10)
        for line in (line for line in lines if line.endswith("\n")):
            kind, number, *rest = line.split()
            if kind == "journalled":
                assert int(number) not in told, "a sequence number was given twice"
                told[int(number)] = rest[0]
            else:
                released.add(int(number))

        async def check() -> None:
            spool = Spool(tmp_path / "data", "run", MANY)
            entries = {entry.actor_seq: entry for entry in spool.entries()}
            assert told.keys() - released <= entries.keys()
            assert spool.journalled >= max(told)
            for number, entry in entries.items():
                envelope, payload = await spool.load(number)
                check_payload(decode_envelope(envelope), payload)
                trajectory = decode_trajectory(payload)
                assert trajectory.actor_seq == number
                assert key_of(trajectory) == entry.trajectory_id
                if number in told:
                    assert trajectory.trajectory_id == told[number]
                else:
                    told[number] = trajectory.trajectory_id  # durable, and killed before it could say so
            await spool.close()

        asyncio.run(check())
    assert len(told) > 50


def told_before_the_power_cut(power_cut: Any, folder: Path, *weakened: str) -> set[int]:
    """Sequence numbers that a writer reported, whose files are then cut to what had been flushed."""
    command = [sys.executable, "-c", textwrap.dedent(_WRITER), str(TESTS), str(folder / "actor" / "data"), *weakened]
    environment = {**os.environ, **power_cut.environment}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as writer:
        assert writer.stdout is not None
        lines = [writer.stdout.readline() for _ in range(40)]
        writer.send_signal(signal.SIGKILL)
        writer.wait(10)
    words = [line.split() for line in lines]
    released = {int(word[1]) for word in words if word[0] == "releasing"}
    power_cut.apply(folder / "actor")
    return {int(word[1]) for word in words if word[0] == "journalled"} - released


def found(folder: Path) -> set[int]:
    async def main() -> set[int]:
        spool = Spool(folder / "actor" / "data", "run", MANY)
        entries = {entry.actor_seq for entry in spool.entries()}
        for number in entries:
            await spool.load(number)
        await spool.close()
        return entries

    return asyncio.run(main())


def test_nothing_that_was_journalled_is_lost_to_a_power_cut(power_cut: Any, tmp_path: Path) -> None:
    told = told_before_the_power_cut(power_cut, tmp_path)
    assert len(told) > 10
    assert told <= found(tmp_path)


def test_the_power_cut_is_real(power_cut: Any, tmp_path: Path) -> None:
    """The control: without fsyncs the same cut loses what was journalled, or leaves no journal at all."""
    told = told_before_the_power_cut(power_cut, tmp_path, "no fsync")
    try:
        kept = found(tmp_path)
    except ConfigError:
        kept = set()
    assert not told <= kept


def test_what_is_in_flight_stays_with_its_shard(tmp_path: Path) -> None:
    async def main() -> None:
        spool = Spool(tmp_path, "run", MANY)
        spool.assign((1, 3))
        entry = await spool.journal(make_text_trajectory())
        with pytest.raises(ConfigError, match="1 trajectories .* shard 1 of 3 .* this is shard 0 of 3"):
            spool.assign((0, 3))
        await spool.close()

        spool = Spool(tmp_path, "run", MANY)
        assert spool.shard == (1, 3)
        assert choose_endpoint("a,b,c", "actor-2", spool) == "b"
        spool.release(entry.trajectory_id)
        assert [choose_endpoint("a,b,c", f"actor-{i}", spool) for i in range(4)] == ["a", "b", "c", "a"]
        spool.assign((0, 3))
        await spool.close()
        spool = Spool(tmp_path, "run", MANY)
        assert spool.shard == (0, 3)
        await spool.close()

    asyncio.run(main())
