"""Batches ahead of time: claims, fetches and prepares the next one in a thread while the present one trains.

Every rank claims the same step and gets the same sealed manifest, so no rank has to tell another; each then takes its
own part of it, a function of (manifest, number of ranks).
"""

from __future__ import annotations

import logging
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass

from vagen.buffer.learner_store import LearnerStore, Manifest, Order
from vagen.common.errors import VagenError
from vagen.common.wire import decode_trajectory
from vagen.learner.batching import RowPreparer, TrainingBatch, partition, prepare_batch

__all__ = ["BatchFeeder", "Feed"]

logger = logging.getLogger(__name__)

_CLAIM_WAIT_S = 1.0


@dataclass(frozen=True, kw_only=True)
class Feed:
    """One step's data. `seconds`: claim (waiting for data included), fetch, prepare."""

    manifest: Manifest
    batch: TrainingBatch
    seconds: dict[str, float]


class BatchFeeder:
    """One batch in preparation at a time."""

    def __init__(
        self, store: LearnerStore, preparer: RowPreparer, *, batch_size: int, order: Order, dp_rank: int, dp_size: int
    ) -> None:
        self._store = store
        self._preparer = preparer
        self._batch_size = batch_size
        self._order = order
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
            manifest = self._store.claim(step, self._batch_size, timeout_s=_CLAIM_WAIT_S, order=self._order)
        claimed = time.perf_counter()
        mine = partition([entry.num_bytes for entry in manifest.entries], self._dp_size)[self._dp_rank]
        entries = [manifest.entries[index] for index in mine]
        payloads = self._store.fetch([entry.trajectory_id for entry in entries])
        fetched = time.perf_counter()
        groups = {name: index for index, name in enumerate(dict.fromkeys(e.group_id for e in manifest.entries))}
        trajectories = [decode_trajectory(payload) for payload in payloads]
        batch = prepare_batch(trajectories, [entry.staleness for entry in entries], groups, self._preparer)
        seconds = {
            "claim": claimed - started,
            "fetch": fetched - claimed,
            "prepare": time.perf_counter() - fetched,
        }
        return Feed(manifest=manifest, batch=batch, seconds=seconds)
