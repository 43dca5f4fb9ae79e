"""Writes the state of a training checkpoint in megatron's torch_dist format, in threads of this process.

Owns the snapshot, after which training may go on, and the threads. Does not own what is in a checkpoint or its name.

megatron's own asynchronous save forks a process for each file, or keeps a pool of them. They outlive a learner that is
killed in mid-save, with its sockets and locks, and may write into a checkpoint of the learner that comes after it; and
a fork of a process with threads may never return.
"""

from __future__ import annotations

import concurrent.futures
import functools
import inspect
import queue
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.strategies import filesystem_async
from torch.distributed.checkpoint.api import CheckpointException

from vagen.common.files import flush_tree
from vagen.learner.model.cpu_compat import cuda_as_cpu

__all__ = ["StateWriter", "root_cause"]

_FAILURE = "Worker failure: "
"""What megatron writes before the cause."""
_Bucket = tuple[Any, str, tuple[list[Any], list[tuple[Any, torch.Tensor]]]]
"""Of megatron: file, its name in the metadata, and the objects and tensors to be written into it."""


class StateWriter:
    """The state of one checkpoint on its way to the disk. `state` may change once this is made."""

    def __init__(self, state: dict[str, Any], folder: Path, metadata: Mapping[str, Any]) -> None:
        """Copy this rank's part of a sharded state to host memory and start to write it. Collective over all ranks.

        `folder` exists and is empty. Raises OSError or RuntimeError where it cannot be written to already.
        """
        self.seconds = 0.0
        """That the writing took, once it has ended."""
        live = {tensor.untyped_storage().data_ptr() for tensor in _tensors(state)}
        filesystem_async._results_queue = queue.SimpleQueue()
        with cuda_as_cpu():
            self._request = dist_checkpointing.save(
                state, str(folder), content_metadata=dict(metadata), async_sharded_save=True
            )
            buckets = _snapshot(self._request, live)
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._writing: Future[None] = self._pool.submit(self._write, buckets, folder)

    @property
    def has_ended(self) -> bool:
        """Whether this rank's part is on the disk, or could not be written."""
        return self._writing.done()

    def wait(self) -> None:
        """Until `has_ended`."""
        concurrent.futures.wait([self._writing])
        self._pool.shutdown()

    def finish(self) -> None:
        """Wait for all ranks and write what lists their files. Collective over all ranks.

        Raises OSError or RuntimeError, on every rank, where one of them could not write.
        """
        self.wait()
        try:
            with cuda_as_cpu():
                for finalize in self._request.finalize_fns:
                    finalize()
        except CheckpointException as error:
            causes = {str(cause).removeprefix(_FAILURE) for cause, _ in error.failures.values()}
            raise OSError("; ".join(sorted(causes)) or "another rank could not write its part") from error
        self._writing.result()

    def _write(self, buckets: Sequence[_Bucket], folder: Path) -> None:
        started = time.perf_counter()
        try:
            if buckets:
                transforms, _ = self._request.async_fn.args
                self._request.async_fn_args[2].put(_write_buckets(transforms, buckets))
            if dist.get_rank() == 0:
                # What is flushed here does not hold up the loop when the checkpoint gets its name.
                flush_tree(folder.parent)
        finally:
            self.seconds = time.perf_counter() - started


def _tensors(state: dict[str, Any]) -> Iterator[torch.Tensor]:
    for shard in nested_values(state):
        data = getattr(shard, "data", None)
        if isinstance(data, torch.Tensor):
            yield data


def _snapshot(request: Any, live: set[int]) -> list[_Bucket]:
    """What this rank writes, of which nothing shares memory with `live` storages: megatron copies from a GPU, but on a
    CPU only what is part of a larger tensor."""
    if request.preload_fn is None:
        return []
    return [
        (file, name, (objects, [(item, _apart(tensor, live)) for item, tensor in tensors]))
        for file, name, (objects, tensors) in request.preload_fn()
    ]


def _apart(tensor: torch.Tensor, live: set[int]) -> torch.Tensor:
    return tensor.clone() if tensor.untyped_storage().data_ptr() in live else tensor


def _write_buckets(transforms: Any, buckets: Sequence[_Bucket]) -> dict[int, Any] | Exception:
    """As megatron's `write_preloaded_data_multiproc`, with one thread a file, each fsynced.

    Returns what was written of each, or an exception, which is the result of all: megatron raises it on every rank.
    """
    # Without its decorator, which turns the collection of garbage off for the whole process meanwhile.
    write = functools.partial(inspect.unwrap(filesystem_async.FileSystemWriterAsync.write_preloaded_data), transforms)
    outcomes: queue.SimpleQueue[tuple[int, Any]] = queue.SimpleQueue()
    open_buckets: queue.Queue[int] = queue.Queue()
    with ThreadPoolExecutor(len(buckets), thread_name_prefix="checkpoint-file") as pool:
        writes = []
        for index, bucket in enumerate(buckets):
            open_buckets.put(index)
            writes.append(pool.submit(write, index, bucket, outcomes, open_buckets, use_fsync=True))
        for ended in writes:
            ended.result()
    written = dict(outcomes.get() for _ in buckets)
    return next((root_cause(part) for part in written.values() if isinstance(part, Exception)), written)


def root_cause(error: Exception) -> Exception:
    """What the operating system said, where torch hides it behind an error of its own."""
    inner: BaseException | None = error
    while inner is not None:
        if isinstance(inner, OSError):
            return inner
        inner = inner.__cause__ or inner.__context__
    return error
