"""The file of the learner's journal after a power cut."""

from __future__ import annotations

import os
import subprocess
import sys

_OPEN = """
import sys
from pathlib import Path
from vagen.common.metrics import Metrics
from vagen.learner.journal import StepJournal

StepJournal(Path("run/learner/metrics.jsonl"), Metrics("vagen_learner", "run")).close()
"""


def test_the_name_of_the_journal_outlasts_a_power_cut(power_cut, tmp_path):
    (tmp_path / "run").mkdir()
    environment = {**os.environ, **power_cut.environment}
    subprocess.run([sys.executable, "-c", _OPEN], cwd=tmp_path, env=environment, check=True, timeout=120)
    power_cut.apply(tmp_path / "run")
    assert (tmp_path / "run" / "learner" / "metrics.jsonl").exists()
