"""One row of an archive: a trajectory, and what the learner knew of it when it trained it."""

from __future__ import annotations

from vagen.common.trajectory import Record, Trajectory

__all__ = ["NO_STEP", "ArchivedTrajectory"]

NO_STEP = -1
"""Where there is no learner step: not trained, or of unknown policy versions."""


class ArchivedTrajectory(Record, frozen=True, kw_only=True):
    """A trajectory and the circumstances of its training."""

    trajectory: Trajectory
    step: int = NO_STEP
    """Learner step that trained it; -1 where none did."""
    position: int = 0
    """In the batch of `step`: the order of its manifest."""
    oldest_step: int = NO_STEP
    """Learner step of the version of its oldest policy token; -1 where unknown."""
    staleness: int = -1
    """In learner steps, as of the claim; -1 where no step has claimed it."""
    version_steps: dict[int, int] = {}
    """Policy version -> learner step of its weights, for the versions of its tokens that were known."""
    weight: float = 1.0
    """What it counted in the loss, as its manifest says; less than 1 where it was drawn more often than others."""
