"""TransferQueue: producers put batches of tensors into its storage units, the consumer asks its controller for what is
ready and gets that.

In memory: nothing survives a storage unit without a checkpoint. No dedupe, no validation.
"""

from __future__ import annotations

import itertools
import time

import numpy as np
import torch
import transfer_queue
from tensordict import TensorDict

from vagen.tools.bench.peers.exchange import Arrivals, Task, done, padded, produced, ready, run_worker, stripped
from vagen.tools.bench.peers.ray_cluster import join, serve_started, start

_PARTITION = "trajectories"
_FIELD = "payload"
_BATCH = 8
_TAKE = 32
_CONFIG = {
    "controller": {"polling_mode": True},
    "backend": {"SimpleStorage": {"num_data_storage_units": 1}},
}
"""One storage unit, since this machine is one node; a consumer that finds too little is told so at once."""


def serve(task: Task) -> None:
    """Controller and storage unit."""
    from omegaconf import OmegaConf

    start(task)
    transfer_queue.init(OmegaConf.create(_CONFIG))
    serve_started()


def produce(task: Task) -> None:
    """Put batches of one field, padded to equal lengths."""
    join(task)
    transfer_queue.init()
    trajectories = produced(task)
    torch.set_num_threads(1)
    ready()
    while batch := list(itertools.islice(trajectories, _BATCH)):
        stacked = torch.from_numpy(np.stack([padded(trajectory) for trajectory in batch]))
        transfer_queue.kv_batch_put(
            keys=[trajectory.trajectory_id for trajectory in batch],
            partition_id=_PARTITION,
            fields=TensorDict({_FIELD: stacked}, batch_size=[len(batch)]),
        )
    done()


def consume(task: Task) -> None:
    """Take what is ready, and clear it as done."""
    join(task)
    transfer_queue.init()
    client = transfer_queue.get_client()
    torch.set_num_threads(1)
    arrivals = Arrivals(task.count)
    ready()
    while arrivals.missing:
        meta = client.get_meta(
            data_fields=[_FIELD],
            batch_size=min(_TAKE, arrivals.missing),
            partition_id=_PARTITION,
            task_name="learner",
        )
        if not meta.size:
            time.sleep(0.001)
            continue
        for tensor in client.get_data(meta)[_FIELD]:
            arrivals.decode(stripped(tensor.contiguous().numpy()))
        client.clear_samples(meta)
    arrivals.finish()


if __name__ == "__main__":
    run_worker({"serve": serve, "produce": produce, "consume": consume})
