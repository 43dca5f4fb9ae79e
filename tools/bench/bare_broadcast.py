"""A gloo broadcast from this process to another one and nothing else: what publishing is measured against."""

from __future__ import annotations

import multiprocessing
import time
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING

from vagen.common.errors import VagenError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_HOST = "127.0.0.1"


class BareBroadcast:
    """Two members, as between the learner and an engine, and one tensor on each side that is there already."""

    def __init__(self, num_bytes: int, timeout_s: float) -> None:
        import torch
        from torch._C._distributed_c10d import TCPStore

        self._timeout_s = timeout_s
        self._store = TCPStore(_HOST, 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=timeout_s))
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        arguments = (theirs, self._store.port, num_bytes, timeout_s)
        self._process = context.Process(target=_receive, args=arguments, daemon=True)
        self._process.start()
        self._group = _join(self._store.port, 0, timeout_s)
        self._tensor = torch.ones(num_bytes, dtype=torch.uint8)

    def run(self) -> float:
        """Seconds until the other side has all bytes. Raises VagenError when it does not answer."""
        from vagen.common.weight_transfer import broadcast

        self._pipe.send(True)
        self._answer()
        start = time.monotonic()
        broadcast(self._group, self._tensor)
        return self._answer() - start

    def close(self) -> None:
        """Leave the group and end the other process."""
        from vagen.common.weight_transfer import leave_group

        self._pipe.send(False)
        self._process.join(self._timeout_s)
        if self._process.is_alive():
            self._process.kill()
        leave_group(self._group)

    def _answer(self) -> float:
        if not self._pipe.poll(self._timeout_s):
            raise VagenError(f"bench broadcast: the bare receiver does not answer within {self._timeout_s} s")
        return float(self._pipe.recv())


def _join(port: int, rank: int, timeout_s: float) -> ProcessGroup:
    from vagen.common.weight_transfer import connect_store, join_group

    store = connect_store(_HOST, port, timeout_s)
    return join_group(store, "bare", rank=rank, world_size=2, backend="gloo", timeout_s=timeout_s)


def _receive(pipe: Connection, port: int, num_bytes: int, timeout_s: float) -> None:
    """Of the other process: the time at which it is ready for a broadcast, and at which it has it.

    Clocks of one machine agree: `time.monotonic` is the system's.
    """
    import torch

    from vagen.common.weight_transfer import broadcast

    group = _join(port, 1, timeout_s)
    tensor = torch.zeros(num_bytes, dtype=torch.uint8)
    while pipe.recv():
        pipe.send(time.monotonic())
        broadcast(group, tensor)
        pipe.send(time.monotonic())
