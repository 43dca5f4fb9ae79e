"""A text model through the whole pipeline: no pictures, no image processor, no token that only a template may place."""

from __future__ import annotations

import json

import pytest

from vagen.common.config import read_recipe
from vagen.tools.imitation import imitate_archive
from vagen.tools.sft import run_sft

SETTINGS = [
    "env.config.observation=text",
    "sft.turns=200",
    "sft.steps=20",
    "learner.total_steps=3",
    "learner.archive=archive",
]


@pytest.mark.slow
def test_a_text_model_is_warmed_up_trained_and_imitated(make_pipeline, tmp_path):
    warm, again = tmp_path / "warm", tmp_path / "again"
    recipe = read_recipe("frozenlake", SETTINGS)
    run_sft(recipe, warm, on_step=lambda progress: None)
    assert json.loads((warm / "config.json").read_text())["model_type"] == "qwen3"
    assert not (warm / "preprocessor_config.json").exists()
    with make_pipeline(SETTINGS, model=warm) as pipeline:
        for name in ("buffer", "engine", "learner", "actor"):
            pipeline.start(name)
        pipeline.wait(lambda: len(pipeline.lines()) == 3, "3 steps", 120)
        pipeline.wait_for_end("learner")
        assert pipeline.stop("actor") == 0
        accounting, lines, run = pipeline.audit(), pipeline.lines(), pipeline.run
    assert accounting.identity_holds and accounting.trained == 3 * 16 and accounting.refused == 0
    assert max(line["probe_mismatch"] for line in lines if line["probe_mismatch"] is not None) < 1e-4
    assert lines[0]["mismatch_current_version"] < 1e-4
    assert json.loads((run.root / "learner" / "export" / "config.json").read_text())["model_type"] == "qwen3"
    imitated = imitate_archive(recipe, run.root / "archive", warm, again, on_step=lambda progress: None)
    assert imitated["trajectories"] == 3 * 16 and again.is_dir()
