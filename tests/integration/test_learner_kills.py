"""kill -9 of the real learner at random moments of a whole pipeline: no step is trained twice in its checkpoints."""

from __future__ import annotations

import json
import os
import random

import pytest

from vagen.learner.checkpoints import CheckpointFolder
from vagen.learner.model.checkpoint_io import read_record

SAME = ("num_trajectories", "reward_mean", "policy_tokens", "staleness", "loss", "grad_norm")


@pytest.fixture
def pipeline(run_pipeline):
    with run_pipeline() as pipeline:
        yield pipeline


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_no_batch_is_trained_twice_whenever_the_learner_is_killed(pipeline, watch_manifests):
    seed = int(os.environ.get("KILL_SEED", random.randrange(1 << 32)))
    print(f"KILL_SEED={seed}")
    rng = random.Random(seed)
    watch = watch_manifests(pipeline)
    checkpoints = CheckpointFolder(pipeline.run.root / "learner" / "checkpoints", keep=2)
    folder = pipeline.run.root / "learner" / "checkpoints"

    def saving():
        pipeline.wait(lambda: any(folder.glob(".*.incomplete")), "a checkpoint in the making", 180)

    def claiming():
        newest = max(watch.seen)
        pipeline.wait(lambda: max(watch.seen) > newest, "a claim", 180)

    def recording():
        pipeline.wait_for_steps(1, 180)

    moments = [saving, claiming, recording, rng.choice([saving, claiming, recording])]
    rng.shuffle(moments)
    for moment in moments:
        pipeline.wait_for_steps(rng.randint(1, 4), 180)
        moment()
        pipeline.kill("learner")
        pipeline.start("learner")
    furthest = max(line["step"] for line in pipeline.lines())
    pipeline.wait(lambda: pipeline.lines()[-1]["step"] > furthest, "a step that none had taken before a kill", 180)
    assert pipeline.stop("actor") == 0
    assert pipeline.stop("learner") == 0
    watch.close()
    assert_trained_once(pipeline, watch.seen, read_record(checkpoints.newest()))


def assert_trained_once(pipeline, seen, record):
    by_step: dict[int, list[dict]] = {}
    for line in pipeline.lines():
        by_step.setdefault(line["step"], []).append(line)
    assert sorted(by_step) == list(range(record["step"]))
    repeats = [(first, again) for first, *more in by_step.values() for again in more]
    assert repeats, "some kill fell between a step and its checkpoint"
    for first, again in repeats:
        assert {key: again[key] for key in SAME} == {key: first[key] for key in SAME}
    updates = sum(lines[-1]["num_updates"] for lines in by_step.values())
    assert record["num_updates"] == updates, "the checkpoint has each step once"

    manifests = {step: found for step, found in seen.items() if step < record["step"]}
    assert sorted(manifests) == sorted(by_step)
    assert all(len(found) == 1 for found in seen.values()), "a step is claimed again identically"
    ids = [entry["trajectory_id"] for (text,) in seen.values() for entry in json.loads(text)["entries"]]
    assert len(ids) == len(set(ids)), "in two steps"
    trained = sum(len(json.loads(text)["entries"]) for (text,) in manifests.values())
    accounting = pipeline.audit()
    assert accounting.identity_holds, accounting
    assert (accounting.trained, accounting.in_flight, accounting.refused) == (trained, 0, 0)
