"""When a checkpoint is durable: writes one at a time beside training, and says which steps it holds once it is there.

    save    drain what is being written, then a snapshot of the state; training goes on while threads write it
    poll    after each step and while waiting for data: once all ranks have written, it gets its name, and its steps
            are `done`
    drain   the same, waiting for it: before the next, where the buffer needs room, and at the end

A learner that is killed meanwhile, or whose disk takes no more, has the checkpoint before, and the steps since are in
the buffer. All methods but `close` are collective over all ranks.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from vagen.common.errors import CheckpointError
from vagen.learner.checkpoints import CheckpointFolder
from vagen.learner.model.checkpoint_io import Beside, PendingCheckpoint, begin_checkpoint
from vagen.learner.model.collectives import count_votes
from vagen.learner.model.optimizer import Trainer

__all__ = ["Checkpointer", "DurableCheckpoint"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class DurableCheckpoint:
    """One that will be found after a power cut. Seconds: of its files in the background, and those of them during
    which training went on."""

    step: int
    write_s: float
    hidden_s: float


@dataclass(frozen=True)
class _InFlight:
    step: int
    steps: tuple[int, ...]
    pending: PendingCheckpoint


class Checkpointer:
    """At most one checkpoint in the making."""

    def __init__(
        self,
        folder: CheckpointFolder,
        trainer: Trainer,
        *,
        asynchronous: bool,
        on_durable: Callable[[DurableCheckpoint, Sequence[int]], None],
    ) -> None:
        """`on_durable` is given each durable checkpoint and the steps since the one before, on every rank."""
        self._folder = folder
        self._trainer = trainer
        self._asynchronous = asynchronous
        self._on_durable = on_durable
        self._in_flight: _InFlight | None = None
        self._blocked_s = 0.0

    @property
    def is_writing(self) -> bool:
        """Whether one is in the making; the same on all ranks."""
        return self._in_flight is not None

    def take_blocked_s(self) -> float:
        """Seconds that the loop was held up since the last call."""
        blocked_s, self._blocked_s = self._blocked_s, 0.0
        return blocked_s

    def save(
        self,
        step: int,
        steps: Sequence[int],
        record: Mapping[str, Any],
        beside: Beside = MappingProxyType({}),
    ) -> None:
        """Begin the checkpoint before `step`, which holds `steps` more than the one before.

        `record` and `beside` are `begin_checkpoint`'s. Raises CheckpointError where it, or the one that was in the
        making, cannot be written.
        """
        self.drain()
        started = time.perf_counter()
        path = self._folder.path_of(step)
        if path.exists():
            # Of the start, or of a wait for data in which no step was trained.
            self._on_durable(DurableCheckpoint(step=step, write_s=0.0, hidden_s=0.0), steps)
            return
        with self._naming_the_newest():
            pending = begin_checkpoint(path, self._trainer.model, self._trainer, record, beside)
        self._in_flight = _InFlight(step, tuple(steps), pending)
        self._blocked_s += time.perf_counter() - started
        if not self._asynchronous:
            self.drain()

    def poll(self) -> None:
        """Finish the one in the making if all ranks have written it. Raises CheckpointError where one could not."""
        if self._in_flight is None:
            return
        (writing,) = count_votes(not self._in_flight.pending.is_written)
        if not writing:
            self.drain()

    def drain(self) -> None:
        """Finish the one in the making. Raises CheckpointError where a rank could not write its part."""
        if self._in_flight is None:
            return
        in_flight, self._in_flight = self._in_flight, None
        started = time.perf_counter()
        was_written = in_flight.pending.is_written
        in_flight.pending.wait()
        waited_s = 0.0 if was_written else time.perf_counter() - started
        with self._naming_the_newest():
            in_flight.pending.finish()
        write_s = in_flight.pending.seconds
        durable = DurableCheckpoint(step=in_flight.step, write_s=write_s, hidden_s=max(0.0, write_s - waited_s))
        logger.info("checkpoint of step %d: %.2f s, %.2f of them hidden", durable.step, write_s, durable.hidden_s)
        self._on_durable(durable, in_flight.steps)
        self._blocked_s += time.perf_counter() - started

    def close(self) -> None:
        """Wait until no thread writes. What is not finished is left incomplete: its steps were never `done`."""
        if self._in_flight is not None:
            self._in_flight.pending.wait()

    @contextmanager
    def _naming_the_newest(self) -> Iterator[None]:
        """Say what a run would go on from, where a checkpoint cannot be written."""
        try:
            yield
        except CheckpointError as error:
            newest = self._folder.newest()
            rest = f"{newest} is the newest that is complete" if newest else "there is none before it"
            raise CheckpointError(f"{error}; {rest}") from error
