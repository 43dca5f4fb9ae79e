"""InternVL's pictures and vision tower: tiles of one size, InternViT, pixel shuffle, projector.

Owns what local engine and learner compute identically, as `vagen.common.vision` does for Qwen-VL models. Positions of
image tokens are those of text.

Legend: as `vagen.common.vision`; t tiles of one image, n tiles of all images, Q patches of a tile.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor, nn
from transformers.models.internvl.modeling_internvl import (
    InternVLModel,
    InternVLMultiModalProjector,
    InternVLVisionModel,
)

from vagen.common.errors import ConfigError, ObservationError
from vagen.common.grids import TileGeometry
from vagen.common.vision import Grid, decode_picture, normalised, read_pixel_settings

__all__ = ["TileSpec", "TiledVision", "TiledVisionTower"]


@dataclass(frozen=True, kw_only=True)
class TileSpec(TileGeometry):
    """How pictures become patches. `mean` and `std` are per RGB channel, of values in [0, 1]; ImageNet's by default."""

    mean: tuple[float, float, float] = (0.485, 0.456, 0.406)
    std: tuple[float, float, float] = (0.229, 0.224, 0.225)

    @classmethod
    def load(cls, model_dir: str | Path) -> TileSpec:
        """As `TileGeometry.load`. Raises ConfigError also where the processor has other steps."""
        return cls(**cls._settings(Path(model_dir)), **read_pixel_settings(model_dir))

    def preprocess(self, image: bytes | Image.Image) -> tuple[Tensor, Grid]:
        """Patches float32 [t * Q, 3 * patch_size^2], tile by tile and row by row, and grid of one image: the pixels are
        bit for bit those of transformers' PIL processor.

        Raises ObservationError where the bytes are no image.
        """
        picture = decode_picture(image)
        columns, rows = self.canvas(picture.size)
        side = self.tile_size
        whole = picture.resize((columns * side, rows * side), resample=Image.Resampling.BICUBIC)
        corners = [(column * side, row * side) for row in range(rows) for column in range(columns)]
        tiles = [whole.crop((x, y, x + side, y + side)) for x, y in corners]
        if len(tiles) > 1:
            tiles.append(picture.resize((side, side), resample=Image.Resampling.BICUBIC))
        values = np.stack([normalised(tile, self.mean, self.std) for tile in tiles])
        count, p = side // self.patch_size, self.patch_size
        patches = values.reshape(len(tiles), 3, count, p, count, p).transpose(0, 2, 4, 1, 3, 5)
        return torch.from_numpy(patches.reshape(-1, 3 * p**2)), (len(tiles), count, count)

    def positions(
        self, token_ids: NDArray[np.integer], grids: Sequence[Grid], image_token_id: int
    ) -> NDArray[np.int64]:
        """Positions int64 [3, T] of one row, all axes alike. Raises ObservationError where the placeholders are not as
        many as those of `grids`."""
        found, needed = int((np.asarray(token_ids) == image_token_id).sum()), sum(map(self.num_tokens, grids))
        if found != needed:
            raise ObservationError(f"row has {found} image placeholders, its {len(grids)} images need {needed}")
        return np.tile(np.arange(len(token_ids), dtype=np.int64), (3, 1))


class TiledVision(nn.Module):
    """transformers' InternViT and its projector, under the names that they have in `InternVLModel`."""

    def __init__(self, config: Any) -> None:
        """`config` is the top-level one."""
        super().__init__()
        self.config = config
        self.vision_tower = InternVLVisionModel._from_config(config.vision_config)
        self.multi_modal_projector = InternVLMultiModalProjector(config)


class TiledVisionTower:
    """Features of many tiles in one forward. `visual` is a `TiledVision` or transformers' whole `InternVLModel`."""

    def __init__(self, visual: TiledVision | InternVLModel) -> None:
        config = visual.config
        for name, only in (("vision_feature_layer", -1), ("vision_feature_select_strategy", "default")):
            if getattr(config, name) != only:
                raise ConfigError(f"config.json: {name} must be {only}, got {getattr(config, name)}")
        self._visual: Any = visual
        self._merge_size = round(1 / config.downsample_ratio)
        self.merge_unit = self._merge_size**2

    def __call__(self, patches: Tensor, grids: Sequence[Grid]) -> Tensor:
        """Features [M, H]. Raises ObservationError where the patches do not fit the grids."""
        needed = sum(map(math.prod, grids))
        if patches.dim() != 2 or len(patches) != needed:
            raise ObservationError(f"patches of shape {list(patches.shape)} for grids that need {needed} patches")
        tower, (_, height, width) = self._visual.vision_tower, grids[0]
        embeddings = tower.embeddings
        projection = embeddings.patch_embeddings.projection
        tiles = patches.to(projection.weight.dtype).unflatten(0, (-1, height * width))
        x = F.linear(tiles, projection.weight.flatten(1), projection.bias)
        x = torch.cat((embeddings.cls_token.expand(len(x), -1, -1), x), 1)
        if embeddings.position_embeddings is not None:
            x = x + embeddings.position_embeddings
        x = tower.layernorm(tower.encoder(x).last_hidden_state)[:, 1:]
        m = self._merge_size
        # Pixel shuffle: [n, rows, columns, m, m, width of the tower], a square's rows one after the other.
        squares = x.unflatten(1, (height // m, m, width // m, m)).permute(0, 1, 3, 2, 4, 5)
        return self._visual.multi_modal_projector(squares.flatten(3).flatten(0, 2))
