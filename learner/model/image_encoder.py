"""Images on their way into the decoder: encoded by the vision module, placed at the placeholders of a pack.

Owns neither the vision module's weights, which are a part of the model, nor their preprocessing.
"""

from __future__ import annotations

import torch
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from vagen.common.errors import TrajectoryError
from vagen.common.towers import vision_tower
from vagen.learner.model.batch import ImageBatch, PackedBatch
from vagen.learner.model.context_images import encode_in_parts
from vagen.learner.model.context_shard import ContextShard

__all__ = ["ImageEncoder"]


class ImageEncoder:
    """Runs a vision module. `width` is that of a token's features: hidden_size times 1 + K, where the first K decoder
    layers each add features of an inner block."""

    def __init__(self, visual: nn.Module, *, image_token_id: int, width: int, config: TransformerConfig) -> None:
        self._visual = visual
        self._tower = vision_tower(visual)
        self._image_token_id, self._width, self._config = image_token_id, width, config

    @property
    def is_frozen(self) -> bool:
        """Whether the features of an image never change."""
        return not any(x.requires_grad for x in self._visual.parameters())

    @property
    def merge_unit(self) -> int:
        """Patches of one image token."""
        return self._tower.merge_unit

    def encode(self, images: ImageBatch) -> Tensor:
        """Features of the distinct images, one after another: [tokens, width].

        Collective over the ranks that share rows.
        """
        grids = [(int(t), int(h), int(w)) for t, h, w in images.grids.tolist()]
        if self._config.context_parallel_size == 1:
            return self._tower(images.patches, grids)
        return encode_in_parts(
            *(self._tower, images.patches, grids),
            merge_unit=self.merge_unit,
            nothing=images.patches.new_empty(0, self._width, dtype=self._config.params_dtype),
            is_trained=not self.is_frozen,
        )

    def place(
        self, embeddings: Tensor, batch: PackedBatch, shard: ContextShard | None
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """`embeddings` [T, 1, hidden_size] with image features at the placeholders; the placeholders int64 [M]; and the
        features [K, M, hidden_size] that the first K layers add there, where the family has any. With `shard` of its
        tokens.

        Raises TrajectoryError where placeholders and images differ in number.
        """
        where = (batch.token_ids == self._image_token_id).nonzero()[:, 0]
        if batch.images is None:
            if len(where):
                raise TrajectoryError("images", f"{len(where)} image placeholders without images")
            return embeddings, None, None
        features = self._of_runs(batch.images)
        if len(features) != len(where):
            raise TrajectoryError("images", f"{len(where)} image placeholders, but images of {len(features)} tokens")
        if shard is not None:
            where = shard.places[where]
            features, where = features[where >= 0], where[where >= 0]
        first, *inner = features.to(embeddings.dtype).split(embeddings.size(-1), -1)
        embeddings = embeddings.index_copy(0, where, first[:, None])
        return embeddings, where, torch.stack(inner) if inner else None

    def _of_runs(self, images: ImageBatch) -> Tensor:
        """Features of each placeholder run in order, [tokens, width]; each image is encoded once."""
        features = self.encode(images) if images.features is None else images.features
        if images.index is None:
            return features
        sizes = images.grids.prod(-1) // self.merge_unit
        starts = sizes.cumsum(0) - sizes
        used = images.index
        if len(used) and (int(used.min()) < 0 or int(used.max()) >= len(sizes)):
            raise TrajectoryError("images.index", f"expected values in [0, {len(sizes)})")
        ends = sizes[used].cumsum(0)
        shift = (starts[used] - (ends - sizes[used])).repeat_interleave(sizes[used])
        rows = torch.arange(len(shift)) + shift
        return features.index_select(0, rows.to(features.device))
