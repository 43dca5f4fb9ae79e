"""The learner's archive on a real Valkey: each trained step once, in order, whatever dies in between."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from vagen.buffer.archive.layout import TRAJECTORIES_NAME, part_path, partial_of
from vagen.buffer.archive.reader import open_archive
from vagen.buffer.config import BufferConfig
from vagen.buffer.learner_store import LearnerStore
from vagen.buffer.manifest import Manifest
from vagen.buffer.store import IngestStore
from vagen.common.errors import BufferUnavailableError, ConfigError
from vagen.common.metrics import Metrics
from vagen.learner.archiver import StepArchiver

TIMEOUT_S = 30.0


class Live:
    """A buffer with claimed steps, and the archiver over it."""

    def __init__(self, url: str, folder: Path, make: Callable, put_of: Callable) -> None:
        self.url, self.folder, self.make, self.put_of = url, folder, make, put_of
        self.ingest = IngestStore(url, "run", BufferConfig())
        self.store = self.connect()
        self.store.register("learner", step=0, batch_size=4, max_staleness=8)
        self.metrics = Metrics("vagen_learner", "run")
        self.number = 0

    def connect(self) -> LearnerStore:
        return LearnerStore.connect(self.url, "run", timeout_s=1)

    def claim(self, step: int, count: int = 4) -> Manifest:
        version = self.store.next_version()
        self.store.record_version(version, "learner", step, "checksum")
        puts = []
        for _ in range(count):
            self.number += 1
            trajectory = self.make(self.number, version=version)
            puts.append(self.put_of(trajectory))
        assert {o.verdict for o in self.ingest.commit(puts, time.time()).outcomes} == {"stored"}
        manifest = self.store.claim(step, count, timeout_s=TIMEOUT_S)
        assert manifest is not None
        return manifest

    def archiver(self, first_step: int) -> StepArchiver:
        return StepArchiver(self.folder, self.connect(), self.metrics, first_step=first_step)

    def counted(self, fate: str) -> float:
        value = self.metrics.registry.get_sample_value("vagen_learner_archived_total", {"run": "run", "fate": fate})
        return value or 0.0


@pytest.fixture
def live(valkey, tmp_path, varied, put_of) -> Live:
    return Live(valkey.url, tmp_path / "archive", varied, put_of)


def test_trained_steps_are_archived_in_manifest_order_and_then_freed(live):
    manifests = [live.claim(step) for step in range(3)]
    archiver = live.archiver(first_step=0)
    archiver.submit([0, 1])
    archiver.drain()
    archive = open_archive(live.folder)
    assert archive.steps == (0, 1)
    for manifest in manifests[:2]:
        records = archive.read_step(manifest.step)
        assert [record.trajectory.trajectory_id for record in records] == manifest.ids
        assert [record.position for record in records] == [0, 1, 2, 3]
        for record, entry in zip(records, manifest.entries, strict=True):
            assert (record.oldest_step, record.staleness) == (entry.oldest_step, entry.staleness)
            assert record.version_steps == {record.trajectory.oldest_version: manifest.step}
    assert live.store.pending_manifests() == [2]
    assert live.store.accounting().trained == 8 == live.counted("written")
    archiver.close()


def test_a_payload_stays_until_its_step_is_archived(live, monkeypatch):
    live.claim(0)
    archiver = live.archiver(first_step=0)
    in_write, go_on = threading.Event(), threading.Event()
    write_steps = archiver._writer.write_steps

    def slow(steps):
        in_write.set()
        assert go_on.wait(TIMEOUT_S)
        return write_steps(steps)

    monkeypatch.setattr(archiver._writer, "write_steps", slow)
    archiver.submit([0])
    assert in_write.wait(TIMEOUT_S)
    assert live.store.pending_manifests() == [0]
    go_on.set()
    archiver.close()
    assert live.store.pending_manifests() == []
    assert open_archive(live.folder).steps == (0,)


@pytest.mark.parametrize("died", ["before the part", "before done"])
def test_a_restart_archives_what_the_checkpoint_holds_once(live, died):
    for step in range(3):
        live.claim(step)
    first = live.archiver(first_step=0)
    first.submit([0])
    first.drain()
    if died == "before done":
        # The part is there, Redis still holds the step.
        first._store = live.connect()
        first._store.done = lambda steps: None  # type: ignore[method-assign]
        first.submit([1])
        first.drain()
        assert open_archive(live.folder).steps == (0, 1)
    assert live.store.pending_manifests() == [1, 2]
    first.close()
    second = live.archiver(first_step=2)
    second.submit([step for step in live.store.pending_manifests() if step < 2])
    second.close()
    archive = open_archive(live.folder)
    assert archive.steps == (0, 1) and archive.num_trajectories == 8
    assert live.store.pending_manifests() == [2]


def test_a_full_disk_is_counted_and_training_goes_on(live, caplog):
    if not Path("/dev/full").exists():
        pytest.skip("needs /dev/full")
    live.claim(0, count=40)
    live.claim(1)
    archiver = live.archiver(first_step=0)
    partial_of(part_path(live.folder, TRAJECTORIES_NAME, 0)).symlink_to("/dev/full")
    archiver.submit([0])
    archiver.drain()
    assert live.counted("lost") == 40 and live.counted("written") == 0
    assert "40 trajectories of steps 0-0 are NOT archived" in caplog.text and "No space left" in caplog.text
    assert live.store.pending_manifests() == [1]
    archiver.submit([1])
    archiver.close()
    assert open_archive(live.folder).steps == (1,)
    assert sorted(path.name for path in live.folder.glob("*.parquet")) == [
        "images-000000.parquet",
        "trajectories-000000.parquet",
    ]


def test_a_buffer_that_is_gone_stops_the_learner_and_loses_nothing(live, valkey):
    live.claim(0)
    archiver = live.archiver(first_step=0)
    valkey.stop()
    archiver.submit([0])
    with pytest.raises(BufferUnavailableError):
        archiver.drain()
    with pytest.raises(BufferUnavailableError):
        archiver.submit([1])
    archiver.close()
    valkey.start()
    again = live.archiver(first_step=1)
    again.submit(live.store.pending_manifests())
    again.close()
    assert open_archive(live.folder).steps == (0,)


def test_the_archive_of_another_run_is_refused(live, archive_of):
    live.folder = archive_of(steps=3)
    with pytest.raises(ConfigError, match=r"\$.learner.archive: .* holds step 2, but this run goes on at step 1"):
        live.archiver(first_step=1)
    live.archiver(first_step=3).close()
    (live.folder / "file").write_text("")
    live.folder = live.folder / "file"
    with pytest.raises(ConfigError, match=r"\$.learner.archive: .*file"):
        live.archiver(first_step=0)
