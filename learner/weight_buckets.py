"""What one publish brings to engines: tensors in buckets, the checksums of the whole, and the sending of a bucket."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from vagen.common import block_fp8
from vagen.common.weight_transfer import (
    LowRankUpdate,
    broadcast,
    dtype_name,
    flatten_bucket,
    joined_bytes,
    tensor_checksum,
)
from vagen.learner.engine_links import Link
from vagen.learner.engine_quantisation import takes_block_fp8
from vagen.learner.frozen_weights import FrozenWeights, converted

__all__ = ["Buckets", "Content", "Deliveries", "Delivery"]

_DTYPES = {
    "float32": torch.float32,
    "float": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "half": torch.float16,
}
"""As engines name them. Where one says `auto`, it converts what it gets."""


class Deliveries:
    """What one publish brings to engines: the same weights to all, in the form of each, and to each what it lacks."""

    def __init__(
        self,
        version: str,
        tensors: Sequence[tuple[str, Tensor]],
        frozen: FrozenWeights,
        bucket_bytes: int,
        num_consumers: int,
        threads: ThreadPoolExecutor,
        *,
        quantise: bool = False,
    ) -> None:
        self.threads = threads
        self.frozen = frozen
        self._quantise = quantise
        self._version = version
        self._tensors = tensors
        self._bucket_bytes = bucket_bytes
        self._num_consumers = num_consumers
        self.content = Content(lambda: frozen.whole(tensors), frozen, threads)
        """Everything, as it is here."""
        self._contents: dict[tuple[torch.dtype | None, bool], Content] = {(None, False): self.content}
        self._made: dict[tuple[Content, frozenset[str], bool], asyncio.Future[Delivery]] = {}
        # While engines are asked what they are and to pause.
        self._begin(self.content, frozenset(), bool(frozen.updates))

    @property
    def sent_bytes(self) -> int:
        """That have left this process, each as often as it did."""
        return sum(delivery.sent_bytes for delivery in self._finished())

    def dtype_of(self, info: Mapping[str, Any]) -> torch.dtype | None:
        """What weights are converted to for an engine of this `/server_info`; None where they are sent as they are."""
        dtype = _DTYPES.get(str(info.get("dtype")))
        factors = self.frozen.factors
        plain = [*self.frozen.tensors, *((name, tensor) for name, tensor in self._tensors if name not in factors)]
        is_same = all(tensor.dtype == dtype for _, tensor in plain if tensor.is_floating_point())
        return None if is_same else dtype

    def is_quantised(self, info: Mapping[str, Any]) -> bool:
        """Whether weights go in blocks of float8 to an engine of this `/server_info`."""
        return self._quantise and takes_block_fp8(info)

    def form_of(self, info: Mapping[str, Any]) -> str:
        """What distinguishes what an engine of this `/server_info` gets; empty for weights as they are here."""
        return self._content_of(info).form

    async def of(self, info: Mapping[str, Any], missing: frozenset[str], *, adds: bool) -> Delivery:
        """What an engine of this `/server_info` gets that lacks the frozen tensors `missing`.

        With `adds` it adds low-rank updates itself, and gets factors; that one takes weights as they are here.
        """
        key = (self._content_of(info), missing, adds)
        if key not in self._made:
            self._begin(*key)
        return await asyncio.shield(self._made[key])

    async def whole(self, info: Mapping[str, Any]) -> Delivery:
        """Everything, for an engine of this `/server_info`, whatever it has."""
        return await self.of(info, self.frozen.names, adds=False)

    def leave(self, delivery: Delivery | None, buckets_done: int) -> None:
        """A consumer that had so many buckets of one of these needs no more of any."""
        self._num_consumers -= 1
        for each in self._finished():
            each.buckets.skip_from(buckets_done if each is delivery else 0)

    def _finished(self) -> list[Delivery]:
        return [future.result() for future in self._made.values() if future.done() and not future.exception()]

    def _content_of(self, info: Mapping[str, Any]) -> Content:
        form = (self.dtype_of(info), self.is_quantised(info))
        if form not in self._contents:
            self._contents[form] = ConvertedContent(self.content, self.frozen, self.threads, *form)
        return self._contents[form]

    def _begin(self, content: Content, missing: frozenset[str], adds: bool) -> None:
        making = self.threads.submit(self._make, content, missing, adds, self._num_consumers)
        self._made[content, missing, adds] = asyncio.wrap_future(making)

    def _make(self, content: Content, missing: frozenset[str], adds: bool, num_consumers: int) -> Delivery:
        frozen = self.frozen
        if adds:
            tensors = [*frozen.select(missing), *self._tensors]
        else:
            kept = frozen.names - frozen.updated - missing
            tensors = [(name, tensor) for name, tensor in content.tensors() if name not in kept]
        buckets = Buckets(tensors, self._bucket_bytes, num_consumers)
        self.threads.submit(buckets.prepare, 0)
        return Delivery(self._version, buckets, content, frozen.updates if adds else (), self.threads)


class Content:
    """All that an engine has after a publish."""

    form = ""
    """What the published tensors were converted to; empty where they are as they were."""

    def __init__(
        self, make: Callable[[], Sequence[tuple[str, Tensor]]], frozen: FrozenWeights, threads: ThreadPoolExecutor
    ) -> None:
        self._make = make
        self._frozen = frozen
        self._threads = threads
        self._lock = threading.Lock()
        self._tensors: Sequence[tuple[str, Tensor]] | None = None
        self._hashing: asyncio.Future[dict[str, str]] | None = None

    def tensors(self) -> Sequence[tuple[str, Tensor]]:
        """As they are sent, by engine name; the first call makes them. Blocks; any thread."""
        with self._lock:
            if self._tensors is None:
                self._tensors = self._make()
            return self._tensors

    def checksums(self) -> asyncio.Future[dict[str, str]]:
        """Of the tensors that an engine has in the end, by engine name. The first call begins to compute them.

        Nobody calls before an engine has received everything: hashing would take processor and memory from the
        transfer, while the engine's own hash, which is waited for as well, runs at the same time.
        """
        if self._hashing is None:
            self._hashing = asyncio.wrap_future(self._threads.submit(self._hash))
        return self._hashing

    def _hash(self) -> dict[str, str]:
        known = self._known()
        return {name: known[name] if name in known else tensor_checksum(tensor) for name, tensor in self._in_force()}

    def _known(self) -> Mapping[str, str]:
        """Checksums that are the same at each publish."""
        frozen = self._frozen
        kept = frozen.names - frozen.updated
        return {name: digest for name, digest in frozen.checksums().items() if name in kept} if kept else {}

    def _in_force(self) -> Iterable[tuple[str, Tensor]]:
        """The tensors as an engine has them, one at a time."""
        return self.tensors()


class ConvertedContent(Content):
    """The same in another dtype, or with matrices in blocks of float8."""

    def __init__(
        self,
        original: Content,
        frozen: FrozenWeights,
        threads: ThreadPoolExecutor,
        dtype: torch.dtype | None,
        is_quantised: bool,
    ) -> None:
        super().__init__(self._convert, frozen, threads)
        self.form = ("" if dtype is None else dtype_name(dtype)) + ("-fp8" if is_quantised else "")
        self._original = original
        self._dtype = dtype
        self._is_quantised = is_quantised
        self._dtypes: dict[str, torch.dtype] = {}
        """By name, what an engine makes of those that go in float8."""

    def _convert(self) -> list[tuple[str, Tensor]]:
        """Casting before the transfer halves what is sent to an engine in half precision."""
        tensors: list[tuple[str, Tensor]] = []
        for name, tensor in self._original.tensors():
            if self._is_quantised and block_fp8.is_quantised(name, tensor.shape):
                weight, scale = block_fp8.quantise(tensor)
                tensors += [(name, weight), (name + block_fp8.SCALE_SUFFIX, scale)]
                self._dtypes[name] = self._dtype or tensor.dtype
            else:
                tensors.append((name, converted(tensor, self._dtype)))
        return tensors

    def _known(self) -> Mapping[str, str]:
        return {}

    def _in_force(self) -> Iterator[tuple[str, Tensor]]:
        tensors = self.tensors()
        by_name = dict(tensors)
        for name, tensor in tensors:
            if name in self._dtypes:
                scale = by_name[name + block_fp8.SCALE_SUFFIX]
                yield name, block_fp8.dequantise(tensor, scale, self._dtypes[name])
            elif name.removesuffix(block_fp8.SCALE_SUFFIX) not in self._dtypes:
                yield name, tensor


class Delivery:
    """Tensors for all engines that lack the same, in one form each, and what engines have once they are there."""

    def __init__(
        self,
        version: str,
        buckets: Buckets,
        content: Content,
        updates: Sequence[LowRankUpdate],
        threads: ThreadPoolExecutor,
    ) -> None:
        self.version = version
        self.form = content.form
        """As that of the content."""
        self.buckets = buckets
        self.content = content
        self.updates = updates
        """That the engine is to add, whose factors are among the tensors."""
        self.threads = threads
        self.sent_bytes = 0
        self._lock = threading.Lock()

    def sending(self, link: Link, index: int) -> Callable[[], None]:
        """Broadcasts a bucket in a group; blocks."""

        def send() -> None:
            flat = self.buckets.get(index)
            self.threads.submit(self.buckets.prepare, index + 1)
            broadcast(link.group, flat if link.backend == "nccl" else flat.cpu())
            with self._lock:
                self.sent_bytes += flat.numel()

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
