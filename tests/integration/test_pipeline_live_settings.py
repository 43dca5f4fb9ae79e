"""Settings that a person changes while the whole pipeline runs reach the learner, and its journal says so."""

from __future__ import annotations

import subprocess
import sys

import pytest

FILTERS = "[{name: reward_variance, options: {min_variance: 0.0}}]"


@pytest.mark.slow
def test_staleness_and_filters_change_while_the_run_goes_on(run_pipeline):
    with run_pipeline(["actor.group_size=2"]) as pipeline:
        pipeline.wait(lambda: len(pipeline.lines()) >= 1, "the first step", 240)
        assert all("settings" not in line for line in pipeline.lines())
        command = [sys.executable, "-c", "from vagen.tools.cli import app; app()", "buffer", "set"]
        words = ["max_staleness=5", f"filters={FILTERS}", "--run-dir", str(pipeline.run.root)]
        done = subprocess.run([*command, *words], capture_output=True, text=True, timeout=240)
        assert done.returncode == 0, done.stderr

        def told() -> dict:
            return {name: value for line in pipeline.lines() for name, value in line.get("settings", {}).items()}

        pipeline.wait(lambda: {"max_staleness", "filters"} <= set(told()), "both settings in the journal", 240)
        assert told()["max_staleness"] == {"value": 5, "source": "live"}
        chosen = [{"name": "reward_variance", "options": {"min_variance": 0.0}}]
        assert told()["filters"] == {"value": chosen, "source": "live"}
        pipeline.wait(lambda: pipeline.lines()[-1]["selection"]["considered"] > 0, "a step that was filtered", 240)
        assert pipeline.lines()[0]["selection"]["considered"] == 0
