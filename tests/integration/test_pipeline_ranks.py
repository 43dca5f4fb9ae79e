"""A live run whose learner lies on several ranks: weights are gathered from all of them and sent by the first, a batch
is claimed once for all, and a rank that is killed ends the others, whereupon the run goes on with identical batches.
"""

from __future__ import annotations

import pytest

TOTAL_STEPS = 10
SAME = ("num_trajectories", "reward_mean", "policy_tokens", "staleness", "loss", "grad_norm")


@pytest.fixture
def pipeline(make_pipeline):
    overrides = ["learner.tensor_parallel_size=2", f"learner.total_steps={TOTAL_STEPS}"]
    with make_pipeline(overrides, torchrun=("--nproc-per-node=2",)) as pipeline:
        for name in ("buffer", "engine", "learner", "actor"):
            pipeline.start(name)
        yield pipeline


def finish(pipeline) -> list[dict]:
    """The journal of the run, whose books are balanced."""
    pipeline.wait(lambda: pipeline.lines()[-1]["step"] == TOTAL_STEPS - 1, "the last step", 180)
    pipeline.wait_for_end("learner")
    assert pipeline.stop("actor") == 0
    accounting = pipeline.audit()
    assert accounting.identity_holds, accounting
    assert (accounting.trained, accounting.in_flight, accounting.refused) == (TOTAL_STEPS * 16, 0, 0)
    assert (pipeline.run.export / "model.safetensors").is_file()
    return pipeline.lines()


def assert_goes_on_identically(lines: list[dict], manifests: dict[int, set[bytes]]) -> None:
    by_step: dict[int, list[dict]] = {}
    for line in lines:
        by_step.setdefault(line["step"], []).append(line)
    assert sorted(by_step) == list(range(TOTAL_STEPS))
    repeats = [(first, again) for first, *more in by_step.values() for again in more]
    assert repeats, "the kill fell between a step and its checkpoint"
    for first, again in repeats:
        assert {key: again[key] for key in SAME} == {key: first[key] for key in SAME}
    assert all(len(found) == 1 for found in manifests.values()), "a step is claimed again identically"


def assert_engine_has_the_learners_weights(lines: list[dict]) -> None:
    publishes = [publish for line in lines for publish in line["publishes"]]
    assert publishes[-1]["step"] == TOTAL_STEPS
    assert all(len(publish["ok"]) == 1 and not publish["failed"] for publish in publishes), "checksums matched"
    versions = [publish["version"] for publish in publishes]
    assert versions == sorted(set(versions)) and len(versions) > TOTAL_STEPS / 2
    mismatches = [line["probe_mismatch"] for line in lines if line["probe_mismatch"] is not None]
    assert mismatches and max(mismatches) < 1e-4
    assert max(line["mismatch_current_version"] or 0.0 for line in lines) < 1e-4


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_shards_publish_and_the_same_command_goes_on_after_a_rank_was_killed(pipeline, watch_manifests):
    watch = watch_manifests(pipeline)
    pipeline.wait_for_steps(5)
    pipeline.rank(1).kill()
    assert pipeline.end_of("learner", 60) == 1
    said = (pipeline.run.root / "learner.out").read_text()
    (error,) = [line for line in said.splitlines() if line.startswith("error: ")]
    assert error.startswith("error: the learner has lost one of its 2 ranks (")
    assert "exitcode  : -9" in said, "torchrun says which"
    pipeline.start("learner")
    lines = finish(pipeline)
    watch.close()
    assert_goes_on_identically(lines, watch.seen)
    assert_engine_has_the_learners_weights(lines)
