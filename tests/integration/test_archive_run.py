"""A learner with `learner.archive`, killed again and again: the archive holds each trained step once, in order."""

from __future__ import annotations

import pytest

from vagen.buffer.archive.reader import open_archive


@pytest.fixture(scope="module")
def pipeline(run_pipeline):
    with run_pipeline(["learner.archive=archive"]) as pipeline:
        pipeline.wait_for_steps(3, timeout_s=400)
        yield pipeline


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_killed_learner_leaves_each_step_in_the_archive_once(pipeline):
    for _ in range(2):
        pipeline.kill("learner")
        pipeline.start("learner", timeout_s=400)
        pipeline.wait_for_steps(5, timeout_s=600)
    assert pipeline.stop("learner", timeout_s=300) == 0
    archive = open_archive(pipeline.run.root / "archive")
    lines = {line["step"]: line for line in pipeline.lines()}
    assert archive.steps == tuple(range(max(lines) + 1))
    assert archive.table(["step"])["step"].to_pylist() == sorted(archive.table(["step"])["step"].to_pylist())
    ids = archive.table(["trajectory_id"])["trajectory_id"].to_pylist()
    assert len(set(ids)) == len(ids) == pipeline.audit().trained
    for step, line in lines.items():
        records = archive.read_step(step)
        assert [record.position for record in records] == list(range(len(records)))
        assert len(records) == line["num_trajectories"]
        staleness = [record.staleness for record in records]
        assert {int(key): count for key, count in line["staleness"].items()} == {
            value: staleness.count(value) for value in set(staleness)
        }
        assert sum(r.trajectory.total_reward for r in records) / len(records) == pytest.approx(line["reward_mean"])
