"""One rank of `test_layouts.py`, started by torchrun: `layout_worker.py JOBS MODEL_DIR`.

JOBS is a json file: a list of (run folder, archive, settings), each replayed to the archive's end by all ranks.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from vagen.common.config import read_recipe
from vagen.learner.replay import ReplayOptions
from vagen.learner.replay_run import run_replay


def replay(run_dir: Path, archive: Path, settings: list[str], model_dir: Path) -> int:
    """The demo's recipe over an archive, resuming where the run folder has a checkpoint."""
    return run_replay(read_recipe("frozenlake", settings), model_dir, run_dir, ReplayOptions(path=archive))


if __name__ == "__main__":
    for run_dir, archive, settings in json.loads(Path(sys.argv[1]).read_text()):
        replay(Path(run_dir), Path(archive), settings, Path(sys.argv[2]))
