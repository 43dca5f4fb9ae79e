"""What one publish brings to engines: the tensors in buckets, their checksums, and the sending of a bucket."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from vagen.common import block_fp8
from vagen.common.weight_transfer import broadcast, dtype_name, flatten_bucket, joined_bytes, tensor_checksum
from vagen.learner.engine_links import Link
from vagen.learner.engine_quantisation import takes_block_fp8

__all__ = ["Buckets", "Deliveries", "Delivery"]

_DTYPES = {
    "float32": torch.float32,
    "float": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "half": torch.float16,
}
"""As engines name them. Where one says `auto`, it converts what it gets."""


class Deliveries:
    """What one publish brings to engines: the same tensors to all, in the dtype of each."""

    def __init__(
        self,
        version: str,
        tensors: Sequence[tuple[str, Tensor]],
        bucket_bytes: int,
        num_consumers: int,
        threads: ThreadPoolExecutor,
        *,
        quantise: bool = False,
    ) -> None:
        self.threads = threads
        self._quantise = quantise
        self._bucket_bytes = bucket_bytes
        self._num_consumers = num_consumers
        self.original = Delivery(version, Buckets(tensors, bucket_bytes, num_consumers), threads)
        """The tensors as they are."""
        self._converted: dict[tuple[torch.dtype | None, bool], asyncio.Future[Delivery]] = {}

    async def of(self, info: Mapping[str, Any]) -> Delivery:
        """What an engine of this `/server_info` gets."""
        dtype = _DTYPES.get(str(info.get("dtype")))
        is_quantised = self._quantise and takes_block_fp8(info)
        tensors = self.original.buckets.tensors
        is_same = dtype is None or all(tensor.dtype in (dtype, _kept(tensor)) for _, tensor in tensors)
        if is_same and not is_quantised:
            return self.original
        form = (None if is_same else dtype, is_quantised)
        if form not in self._converted:
            self._converted[form] = asyncio.wrap_future(self.threads.submit(self._convert, *form))
        return await asyncio.shield(self._converted[form])

    def leave(self, delivery: Delivery | None, buckets_done: int) -> None:
        """A consumer that had so many buckets of one of these needs no more of any."""
        converted = [future.result() for future in self._converted.values() if future.done() and not future.exception()]
        for each in (self.original, *converted):
            each.buckets.skip_from(buckets_done if each is delivery else 0)

    def _convert(self, dtype: torch.dtype | None, is_quantised: bool) -> Delivery:
        """Casting before the transfer halves what is sent to an engine in half precision."""
        tensors: list[tuple[str, Tensor]] = []
        dtypes: dict[str, torch.dtype] = {}
        for name, tensor in self.original.buckets.tensors:
            wanted = tensor.dtype if dtype is None or _kept(tensor) is not None else dtype
            if is_quantised and block_fp8.is_quantised(name, tensor.shape):
                weight, scale = block_fp8.quantise(tensor)
                tensors += [(name, weight), (name + block_fp8.SCALE_SUFFIX, scale)]
                dtypes[name] = wanted
            else:
                tensors.append((name, tensor.to(wanted)))
        buckets = Buckets(tensors, self._bucket_bytes, self._num_consumers)
        form = ("" if dtype is None else dtype_name(dtype)) + ("-fp8" if is_quantised else "")
        return Delivery(self.original.version, buckets, self.threads, form, dtypes)


def _kept(tensor: Tensor) -> torch.dtype | None:
    """The dtype of what is not converted."""
    return None if tensor.is_floating_point() else tensor.dtype


class Delivery:
    """Tensors in one dtype each, for all engines that take them so, and what is known of them."""

    def __init__(
        self,
        version: str,
        buckets: Buckets,
        threads: ThreadPoolExecutor,
        form: str = "",
        dtypes: Mapping[str, torch.dtype] | None = None,
    ) -> None:
        """`dtypes`: by name, what an engine makes of those that go in float8."""
        self.version = version
        self.form = form
        """What the published tensors were converted to; empty where they are as they were."""
        self.buckets = buckets
        self.threads = threads
        self._dtypes = dtypes or {}
        self._checksums: asyncio.Future[dict[str, str]] | None = None

    def checksums(self) -> asyncio.Future[dict[str, str]]:
        """Of the tensors that an engine has in the end, by engine name. The first call begins to compute them.

        Nobody calls before an engine has received everything: hashing would take processor and memory from the
        transfer, while the engine's own hash, which is waited for as well, runs at the same time.
        """
        if self._checksums is None:
            hashing = self.threads.submit(lambda: {name: tensor_checksum(tensor) for name, tensor in self._in_force()})
            self._checksums = asyncio.wrap_future(hashing)
        return self._checksums

    def _in_force(self) -> Iterator[tuple[str, Tensor]]:
        """The tensors as an engine has them, one at a time."""
        by_name = dict(self.buckets.tensors)
        for name, tensor in self.buckets.tensors:
            if name in self._dtypes:
                scale = by_name[name + block_fp8.SCALE_SUFFIX]
                yield name, block_fp8.dequantise(tensor, scale, self._dtypes[name])
            elif name.removesuffix(block_fp8.SCALE_SUFFIX) not in self._dtypes:
                yield name, tensor

    def sending(self, link: Link, index: int) -> Callable[[], None]:
        """Broadcasts a bucket in a group; blocks."""

        def send() -> None:
            flat = self.buckets.get(index)
            self.threads.submit(self.buckets.prepare, index + 1)
            broadcast(link.group, flat if link.backend == "nccl" else flat.cpu())

        return send


class Buckets:
    """The tensors in flattened buckets, made when the first engine wants one and freed after the last has had it.

    Tensors that lie one after the other in memory, as those of a snapshot, are a bucket already.
    """

    def __init__(self, tensors: Sequence[tuple[str, Tensor]], bucket_bytes: int, num_consumers: int) -> None:
        self.tensors = tensors
        self._members = _partition(tensors, bucket_bytes)
        self._announcements = [_announcement(members) for members in self._members]
        self._locks = [threading.Lock() for _ in self._members]
        self._flat: dict[int, Tensor] = {}
        self._left = [num_consumers] * len(self._members)

    def __len__(self) -> int:
        return len(self._members)

    @property
    def is_cuda(self) -> bool:
        """Whether the tensors are on a GPU."""
        return self._members[0][0][1].is_cuda

    def describe(self, index: int) -> Mapping[str, Any]:
        """Names, dtypes and shapes of a bucket, as an engine wants them announced."""
        return self._announcements[index]

    def members(self, index: int) -> Sequence[tuple[str, Tensor]]:
        """The tensors of a bucket."""
        return self._members[index]

    def get(self, index: int) -> Tensor:
        """uint8 [bytes of the bucket]; any thread."""
        with self._locks[index]:
            if index not in self._flat:
                members = [tensor for _, tensor in self._members[index]]
                joined = joined_bytes(members)
                self._flat[index] = flatten_bucket(members) if joined is None else joined
            return self._flat[index]

    def prepare(self, index: int) -> None:
        """Make a bucket, if there is one of that number, while the one before it is on the wire; any thread."""
        if index < len(self) and self._left[index] > 0:
            self.get(index)

    def release(self, index: int) -> None:
        """One engine needs this bucket no more."""
        with self._locks[index]:
            self._left[index] -= 1
            if self._left[index] <= 0:
                self._flat.pop(index, None)

    def skip_from(self, index: int) -> None:
        """One engine will not come for the buckets from `index` on."""
        for skipped in range(index, len(self)):
            self.release(skipped)


def _partition(tensors: Sequence[tuple[str, Tensor]], bucket_bytes: int) -> list[list[tuple[str, Tensor]]]:
    """Consecutive tensors of at most `bucket_bytes`; a larger one is a bucket of its own."""
    buckets: list[list[tuple[str, Tensor]]] = []
    room = 0
    for name, tensor in tensors:
        if not buckets or tensor.nbytes > room:
            buckets.append([])
            room = bucket_bytes
        buckets[-1].append((name, tensor))
        room -= tensor.nbytes
    return buckets


def _announcement(members: Sequence[tuple[str, Tensor]]) -> dict[str, Any]:
    return {
        "names": [name for name, _ in members],
        "dtypes": [dtype_name(tensor.dtype) for _, tensor in members],
        "shapes": [list(tensor.shape) for _, tensor in members],
    }
