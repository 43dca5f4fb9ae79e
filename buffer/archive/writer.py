"""Writes an archive, part by part; a part is complete or not there.

    records -> row groups in hidden `.partial` files -> fsync -> rename images -> rename trajectories -> fsync folder

A kill in between leaves the parts before it, hidden files, and perhaps images that no trajectory refers to; the next
writer of the folder clears both. Memory is bounded by one row group.
"""

from __future__ import annotations

import fcntl
import logging
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import TracebackType

from vagen.buffer.archive.layout import IMAGES_NAME, TRAJECTORIES_NAME, number_of, parts
from vagen.buffer.archive.part import Part
from vagen.buffer.archive.reader import read_column
from vagen.buffer.archive.record import NO_STEP, ArchivedTrajectory
from vagen.common.errors import ArchiveError

__all__ = ["ArchiveWriter"]

logger = logging.getLogger(__name__)


class ArchiveWriter:
    """Appends to one folder, which it locks against other writers. Use it as a context, or call `close`."""

    def __init__(self, folder: Path) -> None:
        """Creates the folder, or continues the archive in it.

        Raises `ArchiveError` when another process writes there, or when what is there cannot be read.
        """
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self._lock = _lock(folder)
        try:
            self._next = 1 + max((number_of(path) for path in parts(folder, TRAJECTORIES_NAME)), default=-1)
            self._clear_leftovers()
            self._steps = set(read_column(folder, TRAJECTORIES_NAME, "step").to_pylist()) - {NO_STEP}
            self._images = set(read_column(folder, IMAGES_NAME, "content_hash").to_pylist())
        except BaseException:
            self.close()
            raise

    @property
    def steps(self) -> frozenset[int]:
        """Learner steps that the archive holds."""
        return frozenset(self._steps)

    def write_step(self, step: int, items: Iterable[ArchivedTrajectory]) -> int:
        """The trajectories of one learner step as a part of their own; durable once this returns.

        A step that the archive holds is left alone. Returns how many trajectories were written.
        """
        return self.write_steps({step: items})

    def write_steps(self, steps: Mapping[int, Iterable[ArchivedTrajectory]]) -> int:
        """Several learner steps as one part, in order; those that the archive holds are left alone.

        Raises `ArchiveError` for an item of another step, else as `write_part`.
        """
        wanted = {step: items for step, items in steps.items() if step not in self._steps}
        return self.write_part(_of_step(step, item) for step, items in wanted.items() for item in items)

    def write_part(self, items: Iterable[ArchivedTrajectory]) -> int:
        """One part, all of it or nothing; no items make no part. Returns how many trajectories were written.

        Raises `TrajectoryError` for an invalid trajectory, `OSError` when the disk takes no more.
        """
        part = Part(self.folder, self._next, self._images)
        try:
            for item in items:
                part.add(item)
            part.finish()
        except BaseException:
            part.discard()
            raise
        if part.num_trajectories:
            self._next += 1
            self._steps |= part.steps
            self._images |= part.new_images
        return part.num_trajectories

    def close(self) -> None:
        """Let another process write to the folder."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def __enter__(self) -> ArchiveWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.close()

    def _clear_leftovers(self) -> None:
        orphans = [path for path in parts(self.folder, IMAGES_NAME) if number_of(path) >= self._next]
        for path in (*self.folder.glob(".*.partial"), *orphans):
            logger.info("%s is left of a part that was not finished: removed", path)
            path.unlink()


def _of_step(step: int, item: ArchivedTrajectory) -> ArchivedTrajectory:
    if item.step != step:
        raise ArchiveError(f"trajectory {item.trajectory.trajectory_id}: expected step {step}, got {item.step}")
    return item


def _lock(folder: Path) -> int:
    lock = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        raise ArchiveError(f"{folder}: another process writes to this archive") from None
    return lock
