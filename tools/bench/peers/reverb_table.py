"""dm-reverb: producers insert into a table that gives each item out once, first in, first out.

In memory: nothing survives the server without a checkpoint. An insert is acknowledged, a sample is not; no dedupe.
"""

from __future__ import annotations

import numpy as np
import reverb

from vagen.tools.bench.peers.exchange import Arrivals, Task, done, padded, produced, ready, run_worker, stripped

_TABLE = "trajectories"
_UNFLUSHED = 8


def serve(task: Task) -> None:
    """A server with one table."""
    table = reverb.Table(
        name=_TABLE,
        sampler=reverb.selectors.Fifo(),
        remover=reverb.selectors.Fifo(),
        max_size=task.count + 1,
        max_times_sampled=1,
        rate_limiter=reverb.rate_limiters.MinSize(1),
    )
    server = reverb.Server(tables=[table])
    ready(f"localhost:{server.port}")
    server.stop()


def produce(task: Task) -> None:
    """Insert each trajectory as an item of one step."""
    client = reverb.Client(task.address)
    trajectories = produced(task)
    ready()
    with client.trajectory_writer(num_keep_alive_refs=1) as writer:
        for number, trajectory in enumerate(trajectories):
            writer.append({"payload": padded(trajectory)})
            writer.create_item(_TABLE, 1.0, {"payload": writer.history["payload"][-1:]})
            if number % _UNFLUSHED == _UNFLUSHED - 1:
                writer.flush()
        writer.flush()
    done()


def consume(task: Task) -> None:
    """Sample until all have come."""
    client = reverb.Client(task.address)
    arrivals = Arrivals(task.count)
    ready()
    for sample in client.sample(_TABLE, num_samples=task.count, emit_timesteps=False):
        arrivals.decode(stripped(np.ascontiguousarray(sample.data[0])))
    arrivals.finish()


if __name__ == "__main__":
    run_worker({"serve": serve, "produce": produce, "consume": consume})
