"""What of the published weights never changes in a run, and what is known of it.

With adapters that is everything: they are low-rank updates of frozen weights. Without, it is what of the vision module
is not trained. It is sent to an engine once, where its checksums say that the engine does not have it; every publish
sends the rest: factors of updates, or the weights with updates added where an engine cannot add them.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor

from vagen.common.weight_transfer import LowRankUpdate, add_low_rank, tensor_checksum
from vagen.learner.snapshot import SnapshotBuffer

__all__ = ["FrozenWeights"]


class FrozenWeights:
    """Tensors by engine name that nobody changes, and the low-rank updates that each publish brings of some."""

    def __init__(self, tensors: Sequence[tuple[str, Tensor]] = (), updates: Sequence[LowRankUpdate] = ()) -> None:
        self.tensors = tensors
        self.updates = updates
        self.names = frozenset(name for name, _ in tensors)
        self.updated = frozenset(name for update in updates for name in update.weights)
        """Those of `names` that engines have with an update added."""
        self.factors = frozenset(name for update in updates for name in (update.a, update.b))
        self._merged = SnapshotBuffer()
        self._checksums: dict[torch.dtype | None, dict[str, str]] = {}
        self._lock = threading.Lock()

    def whole(self, sent: Sequence[tuple[str, Tensor]]) -> list[tuple[str, Tensor]]:
        """All that an engine has after the tensors of a publish, updates added. The next call writes over it.

        Takes the time to add them; one thread at a time.
        """
        if not self.names:
            return list(sent)
        by_name = dict(self.tensors)
        factors = {name: tensor for name, tensor in sent if name in self.factors}
        self._merged.take(
            (name, merged)
            for update in self.updates
            for name, merged in zip(
                update.weights,
                add_low_rank([by_name[n] for n in update.weights], factors[update.a], factors[update.b], update.scale),
                strict=True,
            )
        )
        return [
            *((name, tensor) for name, tensor in self.tensors if name not in self.updated),
            *((name, tensor) for name, tensor in sent if name not in factors),
            *self._merged.tensors,
        ]

    def changing(self, whole: Sequence[tuple[str, Tensor]]) -> list[tuple[str, Tensor]]:
        """Those of `whole` that change from one publish to the next."""
        return [(name, tensor) for name, tensor in whole if name not in self.names or name in self.updated]

    def select(self, names: Collection[str]) -> list[tuple[str, Tensor]]:
        """Some of the tensors, without updates."""
        return [(name, tensor) for name, tensor in self.tensors if name in names]

    def checksums(self, dtype: torch.dtype | None = None) -> Mapping[str, str]:
        """Of all tensors without updates, those with real numbers converted to `dtype`. Hashed once; any thread."""
        with self._lock:
            if dtype not in self._checksums:
                self._checksums[dtype] = {name: tensor_checksum(converted(x, dtype)) for name, x in self.tensors}
            return self._checksums[dtype]


def converted(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    """In `dtype`, where that is not None and the tensor has real numbers."""
    return tensor.to(dtype) if dtype is not None and tensor.is_floating_point() else tensor
