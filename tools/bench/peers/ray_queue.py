"""`ray.util.queue`: producers put arrays into an actor that holds them in memory, the consumer gets them from it.

In memory: nothing survives the actor. No acknowledgement beyond the call's, no dedupe, no validation.
"""

from __future__ import annotations

import itertools
import time

import numpy as np
import ray
from ray.util.queue import Queue

from vagen.tools.bench.peers.exchange import Arrivals, Task, done, encoded, produced, ready, run_worker
from vagen.tools.bench.peers.ray_cluster import join, serve_started, start

_NAME = "queue"
_NAMESPACE = "vagen-bench"
_BATCH = 8


def serve(task: Task) -> None:
    """The queue's actor."""
    start(task)
    queue = Queue(actor_options={"num_cpus": 0, "name": _NAME, "namespace": _NAMESPACE, "lifetime": "detached"})
    assert queue.empty()
    serve_started()


def produce(task: Task) -> None:
    """Put batches; each call is answered."""
    join(task)
    actor = ray.get_actor(_NAME, namespace=_NAMESPACE)
    trajectories = produced(task)
    ready()
    while batch := [np.frombuffer(encoded(t), np.uint8) for t in itertools.islice(trajectories, _BATCH)]:
        ray.get(actor.put_nowait_batch.remote(batch))
    done()


def consume(task: Task) -> None:
    """Get whatever is there."""
    join(task)
    actor = ray.get_actor(_NAME, namespace=_NAMESPACE)
    arrivals = Arrivals(task.count)
    ready()
    while arrivals.missing:
        found = min(_BATCH, ray.get(actor.qsize.remote()))
        if not found:
            time.sleep(0.001)
            continue
        for payload in ray.get(actor.get_nowait_batch.remote(found)):
            arrivals.decode(memoryview(payload))
    arrivals.finish()


if __name__ == "__main__":
    run_worker({"serve": serve, "produce": produce, "consume": consume})
