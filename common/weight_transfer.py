"""What the learner and an engine must agree on to move weights: process groups, buckets, checksums, low-rank updates.

Owns the wire side only: how the two-ended groups are built, how tensors lie in a flattened bucket, what the checksum
of a tensor is, and how a weight and its low-rank update become one tensor. Knows nothing of HTTP, of versions, or of
which weights a model has. Imports torch inside its functions only, as all of `vagen.common` must import without it.

Groups are built as SGLang's `init_custom_process_group` builds them: the trainer is rank 0, and the name of the group
prefixes the keys of the store twice, once by hand and once inside torch's helper.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import msgspec
import xxhash

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup
    from torch.distributed.distributed_c10d import Store

__all__ = [
    "LowRankUpdate",
    "add_low_rank",
    "broadcast",
    "combined_checksum",
    "connect_store",
    "dtype_name",
    "flatten_bucket",
    "join_group",
    "joined_bytes",
    "leave_group",
    "split_bucket",
    "tensor_checksum",
]

_RAISING_WAITS = "TORCH_NCCL_BLOCKING_WAIT"
_environment = threading.Lock()


class LowRankUpdate(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`weight + scale * b @ a` of the base weights of one layer, whose tensors are named here."""

    weights: tuple[str, ...]
    """[rows, inputs] each, by engine name: they share `a`, and the rows of `b` are theirs in this order."""
    a: str
    """[rank, inputs]."""
    b: str
    """[rows of all, rank]."""
    scale: float


def add_low_rank(
    base: Sequence[torch.Tensor], a: torch.Tensor, b: torch.Tensor, scale: float
) -> Iterator[torch.Tensor]:
    """The weights [rows, inputs] of a layer with their update added in float32, one after the other, in their dtype.

    Both sides of a transfer call this on the same shapes, so that what they get has the same checksum: factors are
    copied first, since a matrix product may depend on where they lie.
    """
    import torch

    factor = a.detach().to(torch.float32, copy=True)
    for weight, rows in zip(base, b.detach().split([weight.shape[0] for weight in base]), strict=True):
        update = rows.to(torch.float32, copy=True) @ factor
        yield update.mul_(scale).add_(weight.detach()).to(weight.dtype)


def connect_store(host: str, port: int, timeout_s: float) -> Store:
    """A connection of its own to the trainer's store: a wait on one blocks no other. Raises RuntimeError."""
    from torch._C._distributed_c10d import TCPStore

    return TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=timeout_s))


def join_group(store: Store, name: str, *, rank: int, world_size: int, backend: str, timeout_s: float) -> ProcessGroup:
    """Join the group `name`, which blocks until all members have.

    `timeout_s` bounds this call and each collective after it. With NCCL nobody is waited for here: members meet in the
    first collective, and that meeting has no bound. Raises RuntimeError when a member does not come, ValueError when
    this process already has a group of that name.
    """
    from torch.distributed import distributed_c10d as c10d

    with _waits_that_raise():
        group, _ = c10d._new_process_group_helper(
            world_size,
            rank,
            [],
            c10d.Backend(backend),
            c10d.PrefixStore(name, store),
            group_name=c10d.GroupName(name),
            timeout=timedelta(seconds=timeout_s),
        )
    c10d._world.pg_group_ranks[group] = {member: member for member in range(world_size)}
    return group


@contextmanager
def _waits_that_raise() -> Iterator[None]:
    """Groups that are built meanwhile raise where a collective of NCCL's is not done in time, as gloo's do.

    Otherwise torch's watchdog ends the whole process. A group reads the setting when it is built, so that those of
    training keep theirs.
    """
    with _environment:
        before = os.environ.get(_RAISING_WAITS)
        os.environ[_RAISING_WAITS] = "1"
        try:
            yield
        finally:
            if before is None:
                del os.environ[_RAISING_WAITS]
            else:
                os.environ[_RAISING_WAITS] = before


def leave_group(group: ProcessGroup) -> None:
    """Close this member's side. A gloo collective in another thread still ends only at its own time-out."""
    import torch.distributed as dist

    group.abort()
    dist.destroy_process_group(group)


def broadcast(group: ProcessGroup, tensor: torch.Tensor) -> None:
    """Send `tensor` from rank 0, or receive into it, and wait until it is there. Raises RuntimeError."""
    import torch
    from torch.distributed import BroadcastOptions

    options = BroadcastOptions()
    options.rootRank = 0
    options.rootTensor = 0
    if not tensor.is_cuda:
        group.broadcast([tensor], options).wait()
        return
    # A thread begins on the first GPU, whichever the tensor is on.
    with torch.cuda.device(tensor.device):
        group.broadcast([tensor], options).wait()
        # The memory may be written anew as soon as this returns.
        torch.cuda.current_stream().synchronize()


def flatten_bucket(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """The raw bytes of all tensors, one after the other without gaps: uint8 [sum of bytes]."""
    import torch

    return torch.cat([tensor.detach().contiguous().view(-1).view(torch.uint8) for tensor in tensors])


def joined_bytes(tensors: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """What `flatten_bucket` would make, as a view: where the tensors lie without gaps in one piece of memory.

    uint8 [sum of bytes], or None.
    """
    import torch

    first = tensors[0]
    storage = first.untyped_storage()
    end = first.data_ptr()
    for tensor in tensors:
        is_next = tensor.data_ptr() == end and tensor.untyped_storage().data_ptr() == storage.data_ptr()
        if not is_next or not tensor.is_contiguous():
            return None
        end += tensor.nbytes
    start = first.data_ptr() - storage.data_ptr()
    flat = torch.empty(0, dtype=torch.uint8, device=first.device)
    return flat.set_(storage, start, (end - first.data_ptr(),))  # type: ignore[call-overload, no-any-return]


def split_bucket(
    flat: torch.Tensor, dtypes: Sequence[torch.dtype], shapes: Sequence[Sequence[int]]
) -> list[torch.Tensor]:
    """The tensors of a flattened bucket, copied out of it where their bytes are not aligned."""
    import torch

    tensors, start = [], 0
    for dtype, shape in zip(dtypes, shapes, strict=True):
        size = dtype.itemsize * int(torch.Size(shape).numel())
        part = flat[start : start + size]
        part = part if start % dtype.itemsize == 0 else part.clone()
        tensors.append(part.view(dtype).view(tuple(shape)))
        start += size
    return tensors


def dtype_name(dtype: torch.dtype) -> str:
    """`torch.float32` -> `float32`, as in the body of an update request."""
    return str(dtype).removeprefix("torch.")


def tensor_checksum(tensor: torch.Tensor) -> str:
    """xxh3-64 of the raw bytes, row-major, 16 hexadecimal digits."""
    import torch

    flat: Any = tensor.detach().contiguous().view(-1).view(torch.uint8).cpu().numpy()
    return xxhash.xxh3_64_hexdigest(flat)


def combined_checksum(checksums: Mapping[str, str]) -> str:
    """One checksum of many, by name: independent of the order in which they were computed."""
    digest = xxhash.xxh3_64()
    for name in sorted(checksums):
        digest.update(f"{name}:{checksums[name]}\n".encode())
    return digest.hexdigest()
