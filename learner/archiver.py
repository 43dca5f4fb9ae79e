"""Keeps what was trained: writes the steps of each durable checkpoint into an archive, in a thread of its own.

    loop    checkpoint is durable -> submit(steps)        waits only while two checkpoints are queued already
    thread  manifest and payloads from the buffer -> one part of the archive -> `done`, which frees the payloads

A payload stays in the buffer until its step is archived, so a learner killed at any point archives on its next start
what its newest checkpoint holds and the archive does not: each step once, in order. When the disk takes no more, the
part is given up, said and counted, and training goes on; later checkpoints are tried again.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from vagen.buffer.archive.record import ArchivedTrajectory
from vagen.buffer.archive.writer import ArchiveWriter
from vagen.buffer.sharded_store import Store
from vagen.common.errors import ArchiveError, ConfigError
from vagen.common.metrics import Metrics
from vagen.common.wire import decode_trajectory

__all__ = ["StepArchiver", "archived_step"]

logger = logging.getLogger(__name__)

_QUEUED_CHECKPOINTS = 2
_CHUNK = 16


class StepArchiver:
    """One thread over one archive. Only the first rank has one."""

    def __init__(self, folder: Path, store: Store, metrics: Metrics, *, first_step: int) -> None:
        """`store` becomes the thread's; `first_step` is the learner's next.

        Raises `ConfigError` for a folder that holds steps which this run has not made durable, or that cannot be
        written to.
        """
        try:
            self._writer = ArchiveWriter(folder)
        except (ArchiveError, OSError) as error:
            raise ConfigError(f"$.learner.archive: {error}") from error
        newest = max(self._writer.steps, default=-1)
        if newest >= first_step:
            self._writer.close()
            raise ConfigError(
                f"$.learner.archive: {folder} holds step {newest}, but this run goes on at step {first_step}: "
                "it is another run's; name another folder"
            )
        self._store = store
        self._metrics = metrics
        self._queue: queue.Queue[list[int] | None] = queue.Queue(_QUEUED_CHECKPOINTS)
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._serve, name="archiver", daemon=True)
        self._thread.start()

    def submit(self, steps: Sequence[int]) -> None:
        """Archive and free these steps, which a durable checkpoint holds. Raises what the thread ended with."""
        self._put(list(steps))

    def drain(self) -> None:
        """Wait until everything submitted is archived and freed. Raises what the thread ended with."""
        self._queue.join()
        self._raise_failure()

    def close(self) -> None:
        """Finish what was submitted and stop. What cannot be finished is left to the next start."""
        if self._thread.is_alive():
            self._queue.put(None)
            self._thread.join()
        self._writer.close()

    def _put(self, steps: list[int]) -> None:
        self._raise_failure()
        self._queue.put(steps)

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _serve(self) -> None:
        while (steps := self._queue.get()) is not None:
            try:
                if self._failure is None:
                    self._archive(steps)
            except BaseException as error:
                # For the loop's thread, which raises it; what was submitted stays in the buffer.
                logger.exception("the archive of steps %s failed", steps)
                self._failure = error
            finally:
                self._queue.task_done()

    def _archive(self, steps: list[int]) -> None:
        started = time.perf_counter()
        wanted = [step for step in steps if step not in self._writer.steps]
        try:
            count = self._writer.write_steps({step: archived_step(self._store, step) for step in wanted})
            self._metrics.count("vagen_learner_archived_total", count, fate="written")
        except OSError as error:
            count = sum(len(manifest.entries) for step in wanted if (manifest := self._store.wait_sealed(step, 0.0)))
            self._metrics.count("vagen_learner_archived_total", count, fate="lost")
            logger.warning(
                "%s takes no more (%s): %d trajectories of steps %d-%d are NOT archived, training goes on",
                self._writer.folder,
                error,
                count,
                steps[0],
                steps[-1],
            )
        self._store.done(steps)
        self._metrics.count("vagen_learner_archive_seconds_total", time.perf_counter() - started)


def archived_step(store: Store, step: int) -> Iterator[ArchivedTrajectory]:
    """The batch of a claimed step as archive records, in the order of its manifest; nothing for a step that is done."""
    manifest = store.wait_sealed(step, 0.0)
    entries = () if manifest is None else manifest.entries
    for start in range(0, len(entries), _CHUNK):
        chunk = entries[start : start + _CHUNK]
        trajectories = [decode_trajectory(payload) for payload in store.read(chunk)]
        for offset, (entry, trajectory) in enumerate(zip(chunk, trajectories, strict=True)):
            yield ArchivedTrajectory(
                trajectory=trajectory,
                step=step,
                position=start + offset,
                oldest_step=entry.oldest_step,
                staleness=entry.staleness,
                version_steps=store.version_steps(trajectory.versions),
                weight=entry.weight,
            )
