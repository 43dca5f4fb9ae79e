"""Which checkpoints exist, which one a run resumes from, and which are deleted.

Owns names and retention; what is in a checkpoint is `vagen.learner.model.checkpoint_io`'s.
"""

from __future__ import annotations

import logging
import re
import shutil
from pathlib import Path

__all__ = ["CheckpointFolder"]

logger = logging.getLogger(__name__)

_NAME = re.compile(r"step-(\d{8})")


class CheckpointFolder:
    """The folder of one run's checkpoints, one directory for each."""

    def __init__(self, path: Path, keep: int) -> None:
        """`keep` newest ones survive `prune`."""
        self._path = path
        self._keep = keep

    @classmethod
    def of_run(cls, run_dir: Path, keep: int) -> CheckpointFolder:
        """Where the learner of a run keeps them."""
        return cls(run_dir / "learner" / "checkpoints", keep)

    def path_of(self, step: int) -> Path:
        """Where the checkpoint goes that is taken before learner step `step`."""
        return self._path / f"step-{step:08d}"

    def steps(self) -> list[int]:
        """Steps of the complete checkpoints, ascending."""
        if not self._path.is_dir():
            return []
        found = (_NAME.fullmatch(item.name) for item in self._path.iterdir())
        return sorted(int(match[1]) for match in found if match)

    def newest(self) -> Path | None:
        """The checkpoint to resume from."""
        steps = self.steps()
        return self.path_of(steps[-1]) if steps else None

    def clear_incomplete(self) -> None:
        """Delete what a learner that was killed in mid-save left; not while one is being written."""
        for path in self._path.glob(".step-*.incomplete"):
            logger.info("%s was not finished", path)
            shutil.rmtree(path, ignore_errors=True)

    def prune(self) -> None:
        """Delete all but the newest; a directory that cannot be deleted is left and logged."""
        for step in self.steps()[: -self._keep]:
            try:
                shutil.rmtree(self.path_of(step))
            except OSError as error:
                logger.warning("could not delete %s: %s", self.path_of(step), error)
