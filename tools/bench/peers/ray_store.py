"""Ray's object store: producers put arrays into shared memory and hand the references to an actor; the consumer gets
them without a copy.

In memory: an object dies with the producer that owns it. No dedupe, no validation.
"""

from __future__ import annotations

import itertools
import time
from typing import Any

import numpy as np
import ray

from vagen.tools.bench.peers.exchange import Arrivals, Task, done, encoded, produced, ready, run_worker
from vagen.tools.bench.peers.ray_cluster import join, serve_started, start

_NAME = "references"
_NAMESPACE = "vagen-bench"
_BATCH = 8
_TAKE = 64


class References:
    """First in, first out."""

    def __init__(self) -> None:
        self._held: list[Any] = []

    def put(self, references: list[Any]) -> None:
        """Hold them."""
        self._held += references

    def take(self) -> list[Any]:
        """The oldest."""
        taken, self._held = self._held[:_TAKE], self._held[_TAKE:]
        return taken


def serve(task: Task) -> None:
    """The actor that holds references."""
    start(task)
    options = ray.remote(References).options(num_cpus=0, name=_NAME, namespace=_NAMESPACE, lifetime="detached")
    actor = options.remote()
    ray.get(actor.take.remote())
    serve_started()


def produce(task: Task) -> None:
    """Put each trajectory, then hand over a batch of references."""
    join(task)
    actor = ray.get_actor(_NAME, namespace=_NAMESPACE)
    trajectories = produced(task)
    ready()
    while batch := [ray.put(np.frombuffer(encoded(t), np.uint8)) for t in itertools.islice(trajectories, _BATCH)]:
        ray.get(actor.put.remote(batch))
    done()


def consume(task: Task) -> None:
    """Take references and get what they name."""
    join(task)
    actor = ray.get_actor(_NAME, namespace=_NAMESPACE)
    arrivals = Arrivals(task.count)
    ready()
    while arrivals.missing:
        taken = ray.get(actor.take.remote())
        if not taken:
            time.sleep(0.001)
        for payload in ray.get(taken):
            arrivals.decode(memoryview(payload))
    arrivals.finish()


if __name__ == "__main__":
    run_worker({"serve": serve, "produce": produce, "consume": consume})
