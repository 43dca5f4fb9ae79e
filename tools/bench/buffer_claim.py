"""What one claim costs Redis, whatever waits and however large it is."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import numpy as np
import xxhash
from ulid import ULID

from vagen.buffer.config import BufferConfig
from vagen.buffer.connection import make_client
from vagen.buffer.learner_store import LearnerStore
from vagen.buffer.requests import Put
from vagen.buffer.store import IngestStore
from vagen.common.trajectory import Trajectory
from vagen.common.wire import Envelope
from vagen.tools.bench.buffer_pool import RUN, make_trajectory
from vagen.tools.bench.buffer_sides import Setting, memory_valkey

_FILL = 256
_CLAIMED = 512
_STEPS = 1 << 30


class _Filled:
    """A store with `count` trajectories of `num_bytes` opaque bytes each, ready to be claimed.

    They are committed as the ingest commits them; only the payload, which no script looks at, is not a trajectory's.
    """

    def __init__(self, redis_url: str, count: int, num_bytes: int) -> None:
        self._client: Any = make_client(redis_url)
        self._learner = LearnerStore.connect(redis_url, RUN)
        self._learner.register("bench", step=0, batch_size=_CLAIMED, max_staleness=_STEPS)
        self._learner.record_version(self._learner.next_version(), "bench", 0, "")
        store = IngestStore(redis_url, RUN, BufferConfig(capacity_bytes=1 << 40))
        like = make_trajectory(np.random.default_rng(0), tokens=16, images=0, image_bytes=0)
        payload = memoryview(os.urandom(num_bytes))
        now = time.time()
        for start in range(0, count, _FILL):
            numbers = range(start, min(start + _FILL, count))
            puts = [_put(like, number, payload) for number in numbers]
            outcomes = store.commit(puts, now).outcomes
            assert all(outcome.verdict == "stored" for outcome in outcomes), outcomes[0]
        store.close()
        self._step = 0

    def claim_ms(self) -> float:
        """Milliseconds of server time of the next claim."""
        self._client.config_resetstat()
        manifest = self._learner.claim(self._step, _CLAIMED, 0.0)
        assert manifest is not None and len(manifest.entries) == _CLAIMED
        self._step += 1
        calls = self._client.info("commandstats")
        # A server that did not know the script yet is given its text.
        return sum(calls[name]["usec"] for name in ("cmdstat_evalsha", "cmdstat_eval") if name in calls) / 1e3

    def close(self) -> None:
        """Drop the connections."""
        self._learner.close()
        self._client.close()


def _put(like: Trajectory, number: int, payload: memoryview) -> Put:
    name = ULID()
    trajectory = msgspec.structs.replace(
        like, trajectory_id=str(name), group_id=str(ULID()), actor_seq=number + 1, task_index=number
    )
    envelope = Envelope(
        trajectory_id=name.bytes,
        actor_seq=number + 1,
        oldest_version=trajectory.oldest_version,
        num_bytes=len(payload),
        checksum=xxhash.xxh3_64_intdigest(payload),
    )
    return Put(b"", trajectory, payload, envelope)


@contextmanager
def _filled(setting: Setting, count: int, num_bytes: int) -> Iterator[_Filled]:
    """On a Valkey of its own, in memory."""
    with memory_valkey(setting) as server:
        store = _Filled(server.url, count, num_bytes)
        try:
            store.claim_ms()  # the first one loads the script
            yield store
        finally:
            store.close()


def claims(setting: Setting, count: int, num_bytes: int, runs: int) -> list[float]:
    """Server milliseconds of `runs` claims of 512; at least `count` entries wait at each."""
    with _filled(setting, count + runs * _CLAIMED, num_bytes) as store:
        return [store.claim_ms() for _ in range(runs)]
