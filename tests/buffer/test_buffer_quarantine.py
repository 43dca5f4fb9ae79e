"""Refused payloads are kept for a person to look at, and neither fill the disk nor hold up the ingest."""

from __future__ import annotations

import json
import threading

import msgspec
import pytest
from typer.testing import CliRunner
from ulid import ULID

from vagen.buffer import quarantine as module
from vagen.buffer.quarantine import Quarantine, read_quarantine, summarize
from vagen.buffer.requests import BadPut
from vagen.buffer.service import quarantine_dir
from vagen.common.metrics import Metrics
from vagen.common.wire import Envelope, decode_envelope, encode_trajectory
from vagen.tools.cli import app

LIMIT = 1 << 18


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


@pytest.fixture
def keep(tmp_path):
    """A quarantine of 256 KiB with the clock in the test's hand; made anew, it continues the same folder."""
    made = []

    def make(limit=LIMIT):
        made.append(Quarantine(tmp_path / "quarantine", limit, Metrics("vagen_buffer", "run"), clock=Clock()))
        return made[-1]

    yield make
    for quarantine in made:
        if quarantine._thread.is_alive():
            quarantine.close()


@pytest.fixture
def hanging(keep, monkeypatch):
    """A quarantine on a disk that does not answer before the test ends."""
    release = threading.Event()
    monkeypatch.setattr(module, "_write_new", lambda path, content: release.wait(60))
    yield keep
    release.set()


def refused(size=10_000, **fields):
    payload = memoryview(b"\x81" * size)
    name = str(ULID())
    envelope = Envelope(
        trajectory_id=ULID.from_str(name).bytes, actor_seq=3, oldest_version=1, num_bytes=size, checksum=5
    )
    return BadPut(b"peer", name, "rows", "bad", None, payload, envelope)


def offer(quarantine, *puts):
    for put in puts:
        quarantine.offer(put, put.field, put.problem)


def disk_bytes(folder):
    return sum(-(-file.stat().st_size // 4096) * 4096 for file in folder.iterdir())


def fate(quarantine, which):
    return quarantine._metrics.registry.get_sample_value(
        "vagen_buffer_quarantined_total", {"run": "run", "fate": which}
    )


def test_bound_holds_and_the_oldest_go_first(keep, tmp_path):
    quarantine = keep()
    puts = [refused() for _ in range(40)]
    for put in puts:
        quarantine._clock.now += 60
        offer(quarantine, put)
    quarantine.close()
    folder = tmp_path / "quarantine"
    kept = {file.stem for file in folder.glob("*.json")}
    assert kept == {file.stem for file in folder.glob("*.payload")}
    assert kept == {put.trajectory_id for put in puts[-16:]}, "16 KiB each"
    assert disk_bytes(folder) == quarantine.num_bytes <= LIMIT
    assert all(file.stat().st_mode & 0o077 == 0 for file in folder.iterdir())


def test_small_ones_count_as_what_they_take_on_the_disk(keep, tmp_path):
    quarantine = keep()
    for _ in range(100):
        quarantine._clock.now += 60
        offer(quarantine, refused(size=10))
    quarantine.close()
    assert len(list((tmp_path / "quarantine").iterdir())) == 2 * LIMIT // 8192


def test_flood_writes_no_more_than_the_bound_a_minute(keep):
    quarantine = keep()
    offer(quarantine, *(refused() for _ in range(50)))
    quarantine.close()
    assert (fate(quarantine, "kept"), fate(quarantine, "skipped")) == (16, 34)
    again = keep()
    again._allowance = 0
    again._clock.now += 15
    offer(again, *(refused() for _ in range(50)))
    again.close()
    assert fate(again, "kept") == 4, "a quarter of a minute, a quarter of the bound"


def test_disk_that_hangs_holds_nobody_up(hanging):
    quarantine = hanging(1 << 30)
    offer(quarantine, *(refused(size=100) for _ in range(200)))
    assert fate(quarantine, "skipped") >= 200 - module._MAX_QUEUED - 1


def test_memory_that_waits_is_bounded(hanging):
    quarantine = hanging(1 << 30)
    offer(quarantine, *(refused(size=20 << 20) for _ in range(6)))
    assert fate(quarantine, "skipped") == 3


def test_full_disk_is_survived(keep, tmp_path, monkeypatch):
    def fail(path, content):
        raise OSError(28, "No space left on device")

    quarantine = keep()
    with monkeypatch.context() as patch:
        patch.setattr(module, "_write_new", fail)
        offer(quarantine, refused())
        quarantine.close()
    assert (fate(quarantine, "skipped"), quarantine.num_bytes) == (1, 0)
    again = keep()
    offer(again, refused())
    again.close()
    assert fate(again, "kept") == 1


def test_next_process_continues_and_removes_what_a_crash_left(keep, tmp_path):
    folder = tmp_path / "quarantine"
    quarantine = keep()
    first, second = refused(), refused()
    offer(quarantine, first)
    quarantine.close()
    (folder / f"{second.trajectory_id}.payload").write_bytes(b"x")
    (folder / f"{second.trajectory_id}.partial").write_bytes(b"x")
    again = keep()
    offer(again, first)
    again.close()
    assert {file.name for file in folder.iterdir()} == {f"{first.trajectory_id}.{end}" for end in ("json", "payload")}
    assert fate(again, "kept") is None, "a resend is not written again"
    keep(8192).close()
    assert list(folder.iterdir()) == [], "a lower bound holds at once"


def test_one_larger_than_the_bound_leaves_its_reason(keep, tmp_path):
    quarantine = keep()
    offer(quarantine, refused(size=LIMIT + 1))
    quarantine.close()
    (entry,) = read_quarantine(tmp_path / "quarantine")
    assert (entry.has_payload, entry.num_bytes) == (False, LIMIT + 1)
    assert "larger than" in summarize(tmp_path / "quarantine", entry)["error"]
    assert disk_bytes(tmp_path / "quarantine") == 4096


def test_service_keeps_what_it_refuses_and_the_command_lists_it(learner, connect, make_trajectory, eventually):
    running, _ = learner()
    client = connect(running.ready.endpoint)
    folder = quarantine_dir(running.run_dir)
    hostile = make_trajectory(run_id="another\x1b[2J\nrun")
    unknown = make_trajectory(version=9, actor_seq=2)
    for trajectory in (hostile, unknown, hostile):
        client.refused.clear()
        client.put(trajectory)
        client.wait_refused(trajectory.trajectory_id)
    envelope, payload = encode_trajectory(make_trajectory(actor_seq=3))
    cut = str(ULID.from_bytes(decode_envelope(envelope).trajectory_id))
    client.put_frames(envelope, payload[:100])
    client.wait_refused(cut)
    client.socket.send_multipart([b"P", b"no envelope", b"no message of ours"])
    good = make_trajectory(actor_seq=4)
    client.put(good)
    client.wait_acked(good.trajectory_id)
    eventually(lambda: len(list(folder.glob("*.json"))) == 3, "three entries")

    done = CliRunner().invoke(app, ["buffer", "quarantine", "--run-dir", str(running.run_dir)])
    assert done.exit_code == 0 and "\x1b" not in done.stdout and len(done.stdout.splitlines()) == 4
    assert "policy_versions: version 9 was never published" in done.stdout
    done = CliRunner().invoke(app, ["buffer", "quarantine", "--run-dir", str(running.run_dir), "--json"])
    entries = {entry["trajectory_id"]: entry for entry in json.loads(done.stdout)}
    assert set(entries) == {hostile.trajectory_id, unknown.trajectory_id, cut}
    assert (entries[unknown.trajectory_id]["actor_id"], entries[unknown.trajectory_id]["is_intact"]) == (
        "actor-0",
        True,
    )
    assert entries[unknown.trajectory_id]["decoded"]["env_name"] == "frozen_lake"
    assert entries[hostile.trajectory_id]["field"] == "run_id"
    assert (entries[cut]["is_intact"], entries[cut]["actor_id"], entries[cut]["num_bytes"]) == (False, None, 100)
    assert "WireError" in entries[cut]["decoded"]["error"]
    kept = (folder / f"{unknown.trajectory_id}.payload").read_bytes()
    assert kept == encode_trajectory(unknown)[1], "as it came"


def test_zero_turns_it_off(learner, connect, make_trajectory):
    running, _ = learner(quarantine_bytes=0)
    client = connect(running.ready.endpoint)
    bad = msgspec.structs.replace(make_trajectory(), run_id="another")
    client.put(bad)
    client.wait_refused(bad.trajectory_id)
    assert running.stop() == 0
    assert not quarantine_dir(running.run_dir).exists()
    done = CliRunner().invoke(app, ["buffer", "quarantine", "--run-dir", str(running.run_dir)])
    assert (done.exit_code, "nothing is quarantined" in done.stdout) == (0, True)
    done = CliRunner().invoke(app, ["buffer", "quarantine", "--run-dir", str(running.run_dir / "none")])
    assert (done.exit_code, done.stderr.count("\n")) == (2, 1)
