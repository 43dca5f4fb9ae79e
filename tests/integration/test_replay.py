"""A live run is trained again from its archive, bit by bit, and a live run goes on where a replay stopped."""

from __future__ import annotations

import json

import pytest

from vagen.common.config import read_recipe
from vagen.learner.replay import ReplayOptions
from vagen.learner.replay_run import run_replay

pytestmark = pytest.mark.slow

NUM_STEPS = 6
NOT_REPRODUCED = ("time", "wall_s", "seconds", "checkpoint", "version", "publishes", "probe_mismatch", "replay")
"""Clocks, and what only a run with engines has."""


@pytest.fixture(scope="module")
def live(run_pipeline):
    """A finished run with its archive."""
    with run_pipeline(["learner.archive=archive", f"learner.total_steps={NUM_STEPS}"]) as pipeline:
        pipeline.wait(lambda: len(pipeline.lines()) == NUM_STEPS, f"{NUM_STEPS} steps", 240)
        pipeline.wait_for_end("learner")
        yield pipeline


def numbers(lines):
    return [{key: value for key, value in line.items() if key not in NOT_REPRODUCED} for line in lines]


def test_a_replay_reproduces_the_run_bit_by_bit(live, tmp_path):
    run = live.run
    run_replay(read_recipe(run.recipe), run.model, tmp_path, ReplayOptions(path=run.root / "archive"))
    replayed = [json.loads(line) for line in (tmp_path / "learner" / "metrics.jsonl").read_text().splitlines()]
    assert len({line["loss"]["total"] for line in replayed}) == NUM_STEPS
    assert any(line["mismatch_stale"] is not None for line in replayed), "some data was stale"
    assert numbers(replayed) == numbers(live.lines())
    for name in ("model.safetensors", "value_head.safetensors"):
        assert (tmp_path / "learner" / "export" / name).read_bytes() == (run.export / name).read_bytes()


def test_a_live_run_goes_on_where_a_replay_stopped(live, run_pipeline):
    def replay(run) -> None:
        reached = run_replay(
            read_recipe(run.recipe), run.model, run.root, ReplayOptions(path=live.run.root / "archive")
        )
        assert reached == NUM_STEPS

    with run_pipeline(prepare=replay) as pipeline:
        assert json.loads(pipeline.run.ready("learner").read_text())["first_step"] == NUM_STEPS
        pipeline.wait(lambda: len(pipeline.lines()) >= NUM_STEPS + 3, "3 live steps", 240)
        accounting = pipeline.drain_and_audit()
        lines = pipeline.lines()
    assert accounting.identity_holds and accounting.trained > 0 and accounting.refused == 0
    assert [line["step"] for line in lines] == list(range(len(lines)))
    assert all("replay" in line and line["version"] is None for line in lines[:NUM_STEPS])
    went_on = lines[NUM_STEPS:]
    assert not any("replay" in line for line in went_on)
    # Engines sample from the weights that the replay reached: nothing is stale, and both sides agree.
    assert went_on[0]["staleness"] == {"0": went_on[0]["num_trajectories"]}
    assert went_on[0]["mismatch_current_version"] < 1e-4
    assert max(line["probe_mismatch"] for line in went_on if line["probe_mismatch"] is not None) < 1e-4
