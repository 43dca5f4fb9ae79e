"""`vagen buffer load` against a real `vagen-buffer`: what is loaded is checked, counted once and can be claimed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from typer.testing import CliRunner

from vagen.buffer.accounting import Accounting, audit
from vagen.buffer.archive.record import ArchivedTrajectory
from vagen.buffer.archive.writer import ArchiveWriter
from vagen.buffer.learner_store import LearnerStore
from vagen.common.trajectory import Trajectory
from vagen.common.wire import CreditRequest, decode_trajectory
from vagen.tools.cli import app

TIMEOUT_S = 90.0
COMMAND = [sys.executable, "-c", "from vagen.tools.cli import app; app()", "buffer", "load"]


class Live:
    """A service with a learner at step 5, whose version 1 is of step 3."""

    def __init__(self, service: Any, tmp_path: Path, make: Callable[..., Trajectory]) -> None:
        self.service, self.folder, self.make = service, tmp_path / "archive", make
        self.learner = LearnerStore.connect(service.ready.redis_url, "run", timeout_s=10)
        self.learner.register("learner", step=5, batch_size=4, max_staleness=2)
        assert self.learner.next_version() == 1
        self.learner.record_version(1, "learner", 3, "checksum")

    def archive(self, trajectories: Sequence[Trajectory], step_of_version: int = 3) -> None:
        with ArchiveWriter(self.folder) as writer:
            writer.write_part(
                ArchivedTrajectory(trajectory=t, version_steps={v: step_of_version for v in t.versions if v >= 0})
                for t in trajectories
            )

    def spawn(self, *words: str) -> subprocess.Popen[str]:
        argv = [*COMMAND, str(self.folder), "--run-dir", str(self.service.run_dir), *words]
        return subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ)

    def load(self, *words: str, code: int = 0) -> Any:
        words = (str(self.folder), "--run-dir", str(self.service.run_dir), *words, "--json")
        done = CliRunner().invoke(app, ["buffer", "load", *words])
        assert done.exit_code == code, (done.output, done.exception)
        return json.loads(done.stdout) if code == 0 else done.stderr

    def audit(self) -> Accounting:
        return audit(self.service.ready.redis_url, "run")


@pytest.fixture
def live(service, tmp_path, make_trajectory) -> Callable[..., Live]:
    return lambda **buffer: Live(service(**buffer), tmp_path, make_trajectory)


def test_a_foreign_archive_counts_as_the_step_that_is_said(live):
    buffer = live()
    taken = [buffer.make(version=[1, 2, 2], run_id="elsewhere", task_index=n) for n in range(40)]
    buffer.archive(taken)
    assert buffer.load("--as-step", "4") == {"stored": 40, "known": 0, "refused": {}}
    manifest = buffer.learner.claim(5, 40, timeout_s=10)
    assert manifest is not None and sorted(manifest.ids) == sorted(t.trajectory_id for t in taken)
    assert {(entry.oldest_step, entry.staleness) for entry in manifest.entries} == {(4, 1)}
    by_id = {t.trajectory_id: t for t in taken}
    for payload in buffer.learner.fetch(manifest.ids):
        stored = decode_trajectory(payload)
        before = by_id[stored.trajectory_id]
        assert stored.run_id == "run" and stored.images == before.images
        # Two new numbers, of this run and later than all of it; everything else of the rows as it was.
        assert stored.versions == [2, 3]
        for row, other in zip(stored.rows, before.rows, strict=True):
            assert (row.policy_versions[row.policy_mask == 1] - 1 == other.policy_versions[row.policy_mask == 1]).all()
            assert np.array_equal(row.behaviour_logprobs, other.behaviour_logprobs)
    accounting = buffer.audit()
    assert accounting.identity_holds and accounting.produced == 40 and accounting.in_flight == 0


def test_ids_that_the_buffer_knows_are_left_out(live):
    buffer = live()
    trajectories = [buffer.make() for _ in range(3)]
    buffer.archive([*trajectories[:2], trajectories[0]])
    assert buffer.load("--same-run") == {"stored": 2, "known": 1, "refused": {}}
    buffer.archive([trajectories[2]])
    assert buffer.load("--same-run") == {"stored": 1, "known": 3, "refused": {}}
    accounting = buffer.audit()
    assert accounting.identity_holds and accounting.produced == accounting.ready == 3
    assert accounting.duplicates == 0 and len(accounting.actors) == 1


def test_what_is_refused_is_said_with_its_reason(live):
    buffer = live()
    unknown = buffer.make()
    (row,) = unknown.rows
    nan = np.where(row.policy_mask, np.nan, 0).astype(np.float32)
    nothing = np.full(len(row.token_ids), -1, np.int32)
    unknown = msgspec.structs.replace(
        unknown, rows=(msgspec.structs.replace(row, behaviour_logprobs=nan, policy_versions=nothing),)
    )
    buffer.learner.record_version(2, "learner", 0, "checksum")
    buffer.archive([buffer.make()])
    assert buffer.load("--same-run")["stored"] == 1
    # The learner's claim says what is too old.
    assert buffer.learner.claim(5, 1, timeout_s=10) is not None
    buffer.archive([buffer.make(), unknown, buffer.make(version=7)])
    buffer.archive([buffer.make(version=2)], step_of_version=0)
    buffer.archive([buffer.make(version=1)], step_of_version=0)
    report = buffer.load("--same-run")
    assert report["stored"] == 1 and report["known"] == 1
    assert report["refused"] == {
        "rows[0].behaviour_logprobs: NaN: the behaviour policy is unknown, no ratio can be computed": 1,
        "policy_versions: version 7 was never published": 1,
        "policy_versions: oldest learner step 0 is below 3": 1,
        "policy_versions: version 1 is of learner step 3 here, of 0 in the archive: this is another run, pass "
        "--as-step": 1,
    }
    accounting = buffer.audit()
    assert accounting.identity_holds and accounting.refused == 1 and accounting.stale == 1
    # Once more: a refusal that the buffer remembers is not put to it, and counted, again.
    again = buffer.load("--same-run")
    assert again["stored"] == 0 and again["known"] == 3 and sum(again["refused"].values()) == 3
    assert buffer.audit().identity_holds and buffer.audit().refused == 1


def test_what_versions_mean_must_be_said(live):
    buffer = live()
    buffer.archive([buffer.make()])
    for words in ((), ("--same-run", "--as-step", "0")):
        error = buffer.load(*words, code=2)
        assert "expected either --same-run" in error and error.count("\n") == 1
    assert "--as-step: expected 0 <= int <= 5, the learner's step, got 6" in buffer.load("--as-step", "6", code=2)
    assert buffer.audit().produced == 0


def test_a_loaded_trajectory_ends_no_task_of_the_run(live, connect, heartbeat, eventually):
    buffer = live()
    buffer.learner.record_version(1, "learner", 3, "checksum")
    actor = connect(buffer.service.ready.endpoint)
    actor.ask(heartbeat())
    assert buffer.learner.admit_engine("http://engine", "e1", 1)
    grant = actor.ask(CreditRequest(run_id="run", actor_id="actor-0", want=1))
    (task,) = grant.tasks
    buffer.archive([buffer.make(task_index=task.task_index, attempt=task.attempt)])
    assert buffer.load("--same-run")["stored"] == 1
    assert buffer.learner.status().running == 1


@pytest.mark.slow
def test_a_killed_load_goes_on_where_it_was(live, eventually):
    buffer = live()
    buffer.archive([buffer.make(num_bytes=30000 + n, task_index=n) for n in range(300)])
    first = buffer.spawn("--as-step", "4")
    eventually(lambda: buffer.learner.status().ready >= 20, "some are stored", TIMEOUT_S)
    first.kill()
    first.communicate()
    left = 300 - buffer.learner.status().ready
    assert left > 0, "the load was over before it was killed"
    report = buffer.load("--as-step", "4")
    assert report["stored"] + report["known"] == 300 and report["refused"] == {}
    accounting = buffer.audit()
    assert accounting.identity_holds and accounting.produced == accounting.ready == 300


def test_a_full_buffer_is_said_and_the_rest_kept(live):
    buffer = live(capacity_bytes=1 << 18)
    buffer.archive([buffer.make(num_bytes=50000) for _ in range(8)])
    error = buffer.load("--same-run", "--timeout", "2", code=1)
    assert "has taken nothing for 2 s: is it full?" in error and "the same command goes on" in error
    stored = buffer.learner.status().ready
    assert 0 < stored < 8
    assert buffer.learner.claim(5, stored, timeout_s=10) is not None
    buffer.learner.done([5])
    report = buffer.load("--same-run")
    assert report["stored"] == 8 - stored
    assert buffer.audit().identity_holds
