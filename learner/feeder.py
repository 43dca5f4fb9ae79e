"""Batches ahead of time: takes, reads and prepares the next one in a thread while the present one trains.

The first rank chooses and seals the manifest of a step, the others read it from the buffer, so no rank has to tell
another; each then reads its own part of it, a function of (manifest, number of ranks).
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass
from typing import Any

from vagen.buffer.learner_store import Manifest
from vagen.common.errors import VagenError
from vagen.learner.batching import RowPreparer, TrainingBatch, partition, prepare_batch
from vagen.learner.sources import BatchSource

__all__ = ["BatchFeeder", "Feed"]

logger = logging.getLogger(__name__)

_CLAIM_WAIT_S = 1.0


@dataclass(frozen=True, kw_only=True)
class Feed:
    """One step's data. `seconds`: claim (waiting for data included), fetch, prepare."""

    manifest: Manifest
    batch: TrainingBatch
    seconds: dict[str, float]
    version: int | None = None
    """Policy version of the weights before the step, where the source says it: see `BatchSource.version_before`."""
    notes: Mapping[str, Any] | None = None
    """What a replay says of the batch."""


class BatchFeeder:
    """One batch in preparation at a time."""

    def __init__(self, source: BatchSource, preparer: RowPreparer, *, dp_rank: int, dp_size: int) -> None:
        self._source = source
        self._preparer = preparer
        self._dp_rank = dp_rank
        self._dp_size = dp_size
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="feeder")
        self._closed = threading.Event()
        self._pending: tuple[int, Future[Feed]] | None = None

    def request(self, step: int) -> None:
        """Start preparing the batch of `step`, unless it is in preparation already."""
        if self._pending is None:
            self._pending = (step, self._pool.submit(self._prepare, step))
        assert self._pending[0] == step, f"step {self._pending[0]} is in preparation, not {step}"

    def wait(self, timeout_s: float) -> Feed | None:
        """The requested batch, or None when it is not ready in time. Raises what its preparation raised."""
        assert self._pending is not None, "request() first"
        try:
            feed = self._pending[1].result(timeout_s)
        except FutureTimeoutError:
            return None
        self._pending = None
        return feed

    def close(self) -> None:
        """Stop waiting for data; a manifest that was sealed stays claimed, and is claimed again by the next start."""
        self._closed.set()
        self._pool.shutdown(wait=True, cancel_futures=True)

    def _prepare(self, step: int) -> Feed:
        started = time.perf_counter()
        manifest = None
        while manifest is None:
            if self._closed.is_set():
                raise VagenError("the feeder was closed")
            manifest = self._source.take(step, timeout_s=_CLAIM_WAIT_S)
        claimed = time.perf_counter()
        mine = partition(manifest.sizes, self._dp_size)[self._dp_rank]
        entries = [manifest.entries[index] for index in mine]
        trajectories = self._source.read(entries)
        fetched = time.perf_counter()
        groups = {name: index for index, name in enumerate(dict.fromkeys(e.group_id for e in manifest.entries))}
        batch = prepare_batch(
            trajectories,
            [entry.staleness for entry in entries],
            groups,
            self._preparer,
            weights=None if manifest.has_equal_weights else [entry.weight for entry in entries],
            positions=mine,
            num_global_segments=len(manifest.entries),
        )
        seconds = {
            "claim": claimed - started,
            "fetch": fetched - claimed,
            "prepare": time.perf_counter() - fetched,
        }
        return Feed(
            manifest=manifest,
            batch=batch,
            seconds=seconds,
            version=self._source.version_before(manifest),
            notes=self._source.notes(manifest),
        )
