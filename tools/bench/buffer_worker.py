"""The processes of our own side of `vagen bench buffer`: the actor's spool and sender, and the learner's store."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

from vagen.actor.sender import Presence, Sender
from vagen.actor.spool import Spool
from vagen.buffer.learner_store import LearnerStore
from vagen.buffer.service import read_ready
from vagen.common.metrics import Metrics
from vagen.common.trajectory import Trajectory
from vagen.tools.bench.buffer_pool import RUN
from vagen.tools.bench.peers.exchange import Arrivals, Task, done, produced, ready, run_worker

_EPISODES = 32
"""Put at once by one producer, as by an actor of that concurrency."""
_WINDOW = 32
_BATCH = 64
"""Trajectories of a learner step."""
_TIMEOUT_S = 60.0


def produce(task: Task) -> None:
    """Journal, send, and wait until all is acknowledged; `address` is the folder of the spools."""
    asyncio.run(_produce(task))


async def _produce(task: Task) -> None:
    endpoint = read_ready(Path(task.folder)).endpoint
    spool = Spool(Path(task.address) / f"producer-{task.index}", RUN, 1 << 30)
    sender = Sender(endpoint, spool, Presence(), Metrics("vagen_actor", RUN), run_id=RUN, window=_WINDOW, heartbeat_s=1)
    sender.open()
    serving = asyncio.create_task(sender.run())
    await sender.wait_for_buffer(_TIMEOUT_S)
    trajectories = produced(task)
    await asyncio.to_thread(ready)

    turn = asyncio.Lock()

    async def episodes(source: Iterator[Trajectory]) -> None:
        for trajectory in source:
            # The rate that the buffer keeps up with: what comes faster waits in the spool, until that is full.
            async with turn:  # one looks at every change, the others wait for it
                while sender.in_window >= _WINDOW:
                    await sender.changed.wait(_TIMEOUT_S)
            await sender.put(trajectory)

    await asyncio.gather(*(episodes(trajectories) for _ in range(_EPISODES)))
    assert await sender.flush(_TIMEOUT_S), "the buffer did not acknowledge everything"
    await sender.close()
    serving.cancel()
    await spool.close()
    done()


def consume(task: Task) -> None:
    """Claim, fetch and decode as a learner does; each step is done before the next is claimed."""
    store = LearnerStore.connect(read_ready(Path(task.folder)).redis_url, RUN)
    arrivals = Arrivals(task.count)
    store.register("bench", step=0, batch_size=_BATCH, max_staleness=1 << 30)
    store.record_version(store.next_version(), "bench", 0, "")
    ready()
    step = 0
    while arrivals.missing:
        manifest = store.claim(step, min(_BATCH, arrivals.missing), _TIMEOUT_S)
        assert manifest is not None, f"nothing to claim for {_TIMEOUT_S:g} s"
        for payload in store.fetch(manifest.ids):
            arrivals.decode(payload)
        store.mark_trained(step)
        store.done((step,))
        step += 1
    arrivals.finish()


if __name__ == "__main__":
    run_worker({"produce": produce, "consume": consume})
