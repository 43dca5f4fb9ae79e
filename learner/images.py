"""The images of a batch: each preprocessed once, and encoded once per step where the vision module does not change."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch

from vagen.common.errors import ObservationError
from vagen.common.towers import AnyImageSpec
from vagen.common.vision import Grid
from vagen.learner.model.batch import ImageBatch

__all__ = ["ImageStore"]


class ImageStore:
    """Images of a batch, preprocessed once each by content hash; a text model, whose `spec` is None, has none."""

    def __init__(self, spec: AnyImageSpec | None) -> None:
        self._spec = spec
        self._images: dict[str, tuple[torch.Tensor, Grid]] = {}
        self._features: dict[str, torch.Tensor] = {}

    def add(self, name: str, encoded: bytes) -> Grid:
        """Preprocess an image unless it is known; returns its grid. Raises `ObservationError` for bytes that are
        none, and for a text model.
        """
        if self._spec is None:
            raise ObservationError("an image for a model without vision")
        if name not in self._images:
            self._images[name] = self._spec.preprocess(encoded)
        return self._images[name][1]

    def batch(self, names: Sequence[str]) -> ImageBatch | None:
        """The images that stand at consecutive placeholder runs, each encoded once; None for none."""
        if not names:
            return None
        distinct = list(dict.fromkeys(names))
        place = {name: index for index, name in enumerate(distinct)}
        images = self._as_batch(distinct)
        return replace(images, index=torch.tensor([place[name] for name in names]))

    @torch.no_grad()
    def encode(self, encoder: Callable[[ImageBatch], torch.Tensor], merge_unit: int, max_tokens: int) -> None:
        """Compute the features of every image once, for a vision module that does not change: from here on batches
        have these in place of patches. `encoder` makes [tokens of all images, width] of at most `max_tokens` tokens
        at a time (of one image where it has more), `merge_unit` patches each.
        """
        names = [name for name in self._images if name not in self._features]
        sizes = [math.prod(self._images[name][1]) // merge_unit for name in names]
        while names:
            count = max(1, int(np.searchsorted(np.cumsum(sizes), max_tokens, side="right")))
            features = encoder(self._as_batch(names[:count])).split(sizes[:count])
            self._features |= dict(zip(names[:count], features, strict=True))
            names, sizes = names[count:], sizes[count:]

    def _as_batch(self, names: Sequence[str]) -> ImageBatch:
        """Distinct images, one placeholder run each."""
        grids = torch.tensor([self._images[name][1] for name in names])
        if all(name in self._features for name in names):
            features = torch.cat([self._features[name] for name in names])
            return ImageBatch(patches=self._images[names[0]][0][:0], grids=grids, features=features)
        return ImageBatch(patches=torch.cat([self._images[name][0] for name in names]), grids=grids)
