"""Priority, a filter and replay through the whole pipeline: every step is full and every trajectory accounted for."""

from __future__ import annotations

import pytest

STEPS = 6


@pytest.mark.slow
def test_chooses_filters_and_replays(run_pipeline):
    settings = [
        "actor.group_size=4",
        "buffer.priority.function=surprise",
        "learner.selection.order=priority",
        "learner.selection.filters=[{name: starpo_s, options: {share: 0.5}}]",
        "learner.selection.replay.share=0.25",
        f"learner.total_steps={STEPS}",
    ]
    with run_pipeline(settings) as pipeline:
        pipeline.wait(lambda: len(pipeline.lines()) == STEPS, f"{STEPS} steps", 240)
        pipeline.wait_for_end("learner")
        accounting = pipeline.drain_and_audit()
        chosen = [line["selection"] for line in pipeline.lines()]
        assert all(line["num_trajectories"] >= 16 for line in pipeline.lines())
    assert accounting.identity_holds and accounting.refused == 0
    trained = sum(line["num_trajectories"] for line in pipeline.lines())
    assert accounting.trained + accounting.replayed == trained
    assert accounting.replayed == sum(one["replayed"] for one in chosen)
    assert accounting.filtered_by_reason == {"starpo_s": accounting.filtered}
    assert sum(one["filtered"]["starpo_s"] for one in chosen) <= accounting.filtered
    assert all(one["filtered_share"] >= 0.5 and 0 < one["weight_ess"] < 1 for one in chosen)
