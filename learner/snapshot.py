"""A copy of the weights at one moment: what is published stays as it was while training goes on.

Owns the memory of the copy, which is laid out as it is sent (see `vagen.common.weight_transfer.joined_bytes`) and used
again for the next one: filling fresh pages takes several times as long as filling pages that are there.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

__all__ = ["SnapshotBuffer"]


class SnapshotBuffer:
    """Room for one copy of named tensors, on their device. One thread at a time uses it."""

    def __init__(self) -> None:
        self._views: list[tuple[str, Tensor]] = []

    @property
    def tensors(self) -> Sequence[tuple[str, Tensor]]:
        """The copy, in the order in which it was taken; the next `take` writes over it."""
        return self._views

    @torch.no_grad()
    def take(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Copy `weights`, which are contiguous in the copy whatever they are here; iterates to the end.

        Names, dtypes, shapes and device that are not those of the copy before cost new memory.
        """
        views = iter(self._views)
        taken: list[tuple[str, Tensor]] = []
        pending = iter(weights)
        for name, tensor in pending:
            known, view = next(views, ("", tensor))
            if known != name or not _is_alike(view, tensor):
                # The layout needs all sizes: what is left is gathered before it is copied.
                self._views = _laid_out([*taken, (name, tensor), *pending])
                return
            view.copy_(tensor)
            taken.append((name, view))
        self._views = taken


def _is_alike(view: Tensor, tensor: Tensor) -> bool:
    return view.shape == tensor.shape and view.dtype == tensor.dtype and view.device == tensor.device


def _laid_out(tensors: Sequence[tuple[str, Tensor]]) -> list[tuple[str, Tensor]]:
    """Copies in one piece of memory, without gaps but where a dtype's alignment needs one."""
    starts, end = [], 0
    for _, tensor in tensors:
        end += -end % tensor.dtype.itemsize
        starts.append(end)
        end += tensor.nbytes
    flat = torch.empty(end, dtype=torch.uint8, device=tensors[0][1].device)
    views = []
    for (name, tensor), start in zip(tensors, starts, strict=True):
        view = flat[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        view.copy_(tensor)
        views.append((name, view))
    return views
