"""A Ray of this machine alone, which a `serve` role starts and the other roles join."""

from __future__ import annotations

import ray

from vagen.tools.bench.peers.exchange import Task, ready

_STORE_SHARE = 2
"""Object store over the bytes of all trajectories: nothing is spilled."""
_PAYLOAD_BYTES = 1 << 20


def start(task: Task) -> None:
    """Start Ray with room for all trajectories of the task."""
    ray.init(
        num_cpus=8,  # A number that Ray counts with, so that no actor waits for one.
        object_store_memory=_STORE_SHARE * max(task.count * _PAYLOAD_BYTES, 1 << 28),
        include_dashboard=False,
        log_to_driver=False,
        _node_ip_address="127.0.0.1",
        _temp_dir=task.folder,
    )


def serve_started() -> None:
    """Say where it is, and stop it when told to."""
    ready(ray.get_runtime_context().gcs_address)
    ray.shutdown()


def join(task: Task) -> None:
    """Join the one that serves."""
    ray.init(address=task.address, log_to_driver=False, _node_ip_address="127.0.0.1")
