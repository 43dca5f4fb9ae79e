"""A saved buffer as the learner's source of batches: in the order of its own steps, or drawn from it.

    archive    learner step s trains archived step s: the same trajectories, order, versions and staleness
    shuffled   whole groups in an order that the seed decides, one pass over the archive an epoch

Both are functions of (archive, seed, step), so that a learner which is killed draws the same again. Nothing is evicted:
what is staler than `max_staleness` is trained, counted in the journal and reported.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from vagen.buffer.archive.reader import Archive
from vagen.buffer.archive.record import NO_STEP, ArchivedTrajectory
from vagen.buffer.learner_store import Manifest, ManifestEntry
from vagen.common.config import require
from vagen.common.errors import ArchiveError, ConfigError
from vagen.common.trajectory import Trajectory
from vagen.common.wire import encode_trajectory

__all__ = ["ArchiveSource", "Draws", "ReplayOptions", "ReplayOrder", "refuse_unknown_behaviour"]

logger = logging.getLogger(__name__)

ReplayOrder = Literal["archive", "shuffled"]


@dataclass(frozen=True, kw_only=True)
class ReplayOptions:
    """What `vagen-learner run --replay` was asked for."""

    path: Path
    order: ReplayOrder | None = None
    """None: `archive` where every trajectory has a learner step, else `shuffled`."""
    epochs: int = 1
    """Passes over the archive; for `shuffled` alone."""

    def __post_init__(self) -> None:
        require(self.epochs >= 1, "replay.epochs", self.epochs, "int >= 1")

    def resolve(self, archive: Archive) -> ReplayOrder:
        """The order to train in. Raises `ConfigError` for several passes in the archive's order."""
        order = self.order or ("archive" if archive.steps and NO_STEP not in _steps(archive) else "shuffled")
        require(
            order == "shuffled" or self.epochs == 1,
            "replay.epochs",
            self.epochs,
            "1 in the archive's order (several passes are drawn: --replay-order shuffled)",
        )
        return order


class Draws:
    """Batches of whole groups: a function of (groups of the archive, seed, batch size)."""

    def __init__(self, archive: Archive, *, seed: int, batch_size: int, epochs: int) -> None:
        """Raises `ConfigError` when the archive holds less than a batch."""
        require(
            archive.num_trajectories >= batch_size,
            "learner.batch_size",
            batch_size,
            f"int <= {archive.num_trajectories}, the trajectories in {archive.path}",
        )
        table = archive.table(["run_id", "group_id"])
        names = list(zip(table["run_id"].to_pylist(), table["group_id"].to_pylist(), strict=True))
        numbers = {name: number for number, name in enumerate(dict.fromkeys(names))}
        group_of = np.array([numbers[name] for name in names])
        self._members = np.split(np.argsort(group_of, kind="stable"), np.cumsum(np.bincount(group_of))[:-1])
        self._batches = [(epoch, batch) for epoch in range(epochs) for batch in self._epoch(seed, epoch, batch_size)]

    def __len__(self) -> int:
        """Batches of all epochs."""
        return len(self._batches)

    def __getitem__(self, index: int) -> tuple[int, np.ndarray]:
        """Epoch, and numbers of the batch's trajectories in the archive."""
        return self._batches[index]

    def _epoch(self, seed: int, epoch: int, batch_size: int) -> Iterator[np.ndarray]:
        """A batch is full with the group that reaches `batch_size`; what is left at the end waits for another epoch."""
        batch: list[np.ndarray] = []
        for group in np.random.default_rng((seed, epoch)).permutation(len(self._members)):
            batch.append(self._members[group])
            if sum(map(len, batch)) >= batch_size:
                yield np.concatenate(batch)
                batch = []


class ArchiveSource:
    """Batches of one archive; see `vagen.learner.sources.BatchSource`."""

    def __init__(
        self, archive: Archive, draws: Draws | None, *, first_draw: int, max_staleness: int, publish_every: int
    ) -> None:
        """Draws are counted from learner step `first_draw`; without `draws` steps are the archive's own.

        Raises `ArchiveError` for trajectories that do not say what sampled them.
        """
        refuse_unknown_behaviour(archive)
        self._archive = archive
        self._draws = draws
        self._first_draw = first_draw
        self._max_staleness = max_staleness
        self._publish_every = publish_every
        self._taken: list[ArchivedTrajectory] = []
        self._has_reported = False

    def last_step(self, first_step: int, total_steps: int) -> int:
        """The step before which data or `total_steps` end.

        Raises `ConfigError` when the archive has nothing for `first_step`, unless training is complete.
        """
        if first_step >= total_steps:
            return total_steps
        if self._draws is not None:
            return min(total_steps, self._first_draw + len(self._draws))
        held = set(self._archive.steps)
        if first_step not in held and first_step != 1 + max(held, default=NO_STEP):
            raise ConfigError(
                f"{self._archive.path}: expected its steps to go on from learner step {first_step}, got "
                f"{_ranges(self._archive.steps)}; --replay-order shuffled trains at any step"
            )
        last = first_step
        while last < total_steps and last in held:
            last += 1
        if last < min(total_steps, max(held)):
            logger.warning("%s: step %d is missing, the replay ends there", self._archive.path, last)
        return last

    def take(self, step: int, timeout_s: float) -> Manifest:
        """Batch of a step, read from the archive; never waits."""
        if self._draws is None:
            self._taken = self._archive.read_step(step)
        else:
            self._taken = self._archive.read(self._draws[step - self._first_draw][1])
        entries = tuple(self._entry(item, step) for item in self._taken)
        return Manifest(step=step, entries=entries, sealed_at=0.0)

    def read(self, entries: Sequence[ManifestEntry]) -> list[Trajectory]:
        by_id = {item.trajectory.trajectory_id: item.trajectory for item in self._taken}
        return [by_id[entry.trajectory_id] for entry in entries]

    def notes(self, manifest: Manifest) -> Mapping[str, Any]:
        """`order`, the epoch of a draw, and how many trajectories are staler than a live run would have trained."""
        stale = sum(entry.staleness > self._max_staleness for entry in manifest.entries)
        if stale and not self._has_reported:
            self._has_reported = True
            logger.warning(
                "step %d: %d of %d trajectories are staler than learner.max_staleness %d; a replay trains them and "
                "counts them in the journal",
                manifest.step,
                stale,
                len(manifest.entries),
                self._max_staleness,
            )
        order = "archive" if self._draws is None else "shuffled"
        epoch = {} if self._draws is None else {"epoch": self._draws[manifest.step - self._first_draw][0]}
        return {"order": order, **epoch, "beyond_max_staleness": stale}

    def version_before(self, manifest: Manifest) -> int:
        """In the archive's order what the live learner had published last, if it sampled part of the batch."""
        if self._draws is not None:
            return -1
        published_at = manifest.step - manifest.step % self._publish_every
        versions = [
            version for item in self._taken for version, step in item.version_steps.items() if step == published_at
        ]
        return max(versions, default=-1)

    def mark_trained(self, step: int, step_s: float | None) -> None:
        """Nothing waits for it."""

    def needs_checkpoint(self, *, is_waiting: bool) -> bool:
        return False

    def why_stuck(self) -> None:
        return None

    def tend(self) -> None:
        """Nothing changes while a replay waits."""

    def done(self, steps: Sequence[int]) -> None:
        """The archive keeps all."""

    def _entry(self, item: ArchivedTrajectory, step: int) -> ManifestEntry:
        trajectory = item.trajectory
        return ManifestEntry(
            trajectory_id=trajectory.trajectory_id,
            num_bytes=len(encode_trajectory(trajectory)[1]),
            # The split over data-parallel ranks depends on it, as the live run's does.
            num_tokens=trajectory.num_tokens,
            oldest_step=item.oldest_step,
            staleness=self._staleness(item, step),
            group_id=trajectory.group_id,
            weight=item.weight,
        )

    def _staleness(self, item: ArchivedTrajectory, step: int) -> int:
        """In the archive's order as recorded; of a draw the steps between this learner and the one that sampled, which
        may also be behind."""
        if self._draws is None:
            return item.staleness
        if item.oldest_step == NO_STEP:
            raise ArchiveError(
                f"{self._archive.path}: trajectory {item.trajectory.trajectory_id} has no learner step of its oldest "
                "policy version, so its staleness is unknown"
            )
        return abs(step - item.oldest_step)


def refuse_unknown_behaviour(archive: Archive) -> None:
    """Raise `ArchiveError` where trajectories do not say with which probability their tokens were sampled."""
    known = archive.table(["behaviour_known"])["behaviour_known"].to_numpy()
    if not known.all():
        raise ArchiveError(
            f"{archive.path}: {int((~known).sum())} of {len(known)} trajectories do not say with which probability "
            "their tokens were sampled, so no importance ratio can be computed; `vagen sft --archive` may use "
            "them, `vagen buffer filter` leaves them out"
        )


def _steps(archive: Archive) -> set[int]:
    return set(archive.table(["step"])["step"].to_pylist())


def _ranges(steps: Sequence[int]) -> str:
    """`0-3, 7` for 0, 1, 2, 3, 7."""
    runs: list[list[int]] = []
    for step in steps:
        if runs and step == runs[-1][-1] + 1:
            runs[-1].append(step)
        else:
            runs.append([step])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs) or "none"
