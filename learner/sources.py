"""Where a learner's batches come from: the buffer that actors fill, or a saved one.

Owns the contract between the loop and either of them. Preparing batches is `vagen.learner.feeder`'s, replaying an
archive `vagen.learner.replay`'s.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from vagen.buffer.manifest import Manifest, ManifestEntry
from vagen.buffer.selection.live import LiveSelector
from vagen.buffer.sharded_store import Store
from vagen.common.trajectory import Trajectory
from vagen.common.wire import decode_trajectory
from vagen.learner.archiver import StepArchiver

__all__ = ["BatchSource", "BufferSource"]


class BatchSource(Protocol):
    """Batches by learner step. `take`, `read` and `notes` are called by the feeder's thread, the rest by the loop."""

    def take(self, step: int, timeout_s: float) -> Manifest | None:
        """The batch of a step, the same again however often it is asked for; None when it is not there in time."""

    def read(self, entries: Sequence[ManifestEntry]) -> list[Trajectory]:
        """Trajectories of the manifest that was taken last, in the order of `entries`."""

    def notes(self, manifest: Manifest) -> Mapping[str, Any] | None:
        """What the journal adds to the step's line under `replay`; None for live data."""

    def version_before(self, manifest: Manifest) -> int | None:
        """Policy version of the weights that the step starts from, where the source says it; -1 for one that sampled
        nothing here, None where the publisher knows."""

    def mark_trained(self, step: int, step_s: float | None) -> None:
        """The optimizer has used the step's batch; `step_s` are the loop's own seconds of a step, where known."""

    def needs_checkpoint(self, *, is_waiting: bool) -> bool:
        """Whether so much is taken and not `done` that a checkpoint must free it, before it is due. `is_waiting` for
        the next batch."""

    def why_stuck(self) -> str | None:
        """What keeps a batch that is waited for from ever being complete; None while it may still come."""

    def tend(self) -> None:
        """Called while the loop waits for a batch, by the first rank."""

    def done(self, steps: Sequence[int]) -> None:
        """A durable checkpoint holds these steps."""


class BufferSource:
    """The live buffer: a sealed manifest a step, claimed again identically after a kill."""

    def __init__(
        self,
        store: Store,
        feeder_store: Store,
        *,
        batch_size: int,
        selector: LiveSelector | None,
        archiver: StepArchiver | None = None,
    ) -> None:
        """A connection for each of the two threads. The first rank chooses by its `selector`; the others have none and
        wait for what it seals. Nor have they an archiver, whose connection is its own.
        """
        self._store = store
        self._archiver = archiver
        self._feeder_store = feeder_store
        self._batch_size = batch_size
        self._selector = selector

    def take(self, step: int, timeout_s: float) -> Manifest | None:
        if self._selector is None:
            return self._feeder_store.wait_sealed(step, timeout_s)
        return self._selector.claim(step, self._batch_size, timeout_s)

    def read(self, entries: Sequence[ManifestEntry]) -> list[Trajectory]:
        return [decode_trajectory(payload) for payload in self._feeder_store.read(entries)]

    def notes(self, manifest: Manifest) -> None:
        return None

    def version_before(self, manifest: Manifest) -> None:
        return None

    def mark_trained(self, step: int, step_s: float | None) -> None:
        self._store.mark_trained(step, step_s)

    def needs_checkpoint(self, *, is_waiting: bool) -> bool:
        """True above half of a shard's capacity. Below, the next batch may still not fit; a full buffer alone is no
        reason, since it is what a learner sees that is slower than its actors."""
        if self._archiver is not None and self._is_crowded(is_waiting):
            # What is waiting to be archived is in a checkpoint already: another would free nothing more.
            self._archiver.drain()
        return self._is_crowded(is_waiting)

    def why_stuck(self) -> str | None:
        status = self._store.status()
        if not status.is_full or status.claimed or status.awaiting_group or status.ready >= self._batch_size:
            return None
        if status.num_bytes < status.capacity_bytes / 2:
            return None  # it was full when the ingest ended
        return (
            f"$.buffer.capacity_bytes: {status.capacity_bytes} are full with {status.ready} of {self._batch_size} "
            "trajectories of a batch, and nothing is left to free; raise it or lower $.learner.batch_size"
        )

    def tend(self) -> None:
        self._store.balance()

    def done(self, steps: Sequence[int]) -> None:
        if self._archiver is not None:
            self._archiver.submit(steps)
        else:
            self._store.done(steps)

    def _is_crowded(self, is_waiting: bool) -> bool:
        return any(
            0 < status.capacity_bytes / 2 < status.claimed_bytes or (is_waiting and status.is_full)
            for status in self._store.statuses()
        )
