"""Which image processor and which vision tower a model has: one place for local engine and learner."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers.models.internvl.modeling_internvl import InternVLModel

from vagen.common.deepstack import DeepstackVisionTower
from vagen.common.grids import image_kind
from vagen.common.tiles import TiledVision, TiledVisionTower, TileSpec
from vagen.common.vision import BatchedVisionTower, ImageSpec, VisionTower

__all__ = ["AnyImageSpec", "image_spec", "vision_tower"]

AnyImageSpec = ImageSpec | TileSpec


def image_spec(model_dir: str | Path) -> AnyImageSpec:
    """The image processor of a model directory. Raises ConfigError for one that is missing or unknown."""
    return TileSpec.load(model_dir) if image_kind(model_dir) == "tiles" else ImageSpec.load(model_dir)


def vision_tower(visual: Any) -> VisionTower:
    """The tower around a vision module. Raises ConfigError for one of an unknown family."""
    if isinstance(visual, TiledVision | InternVLModel):
        return TiledVisionTower(visual)
    is_deep = isinstance(visual, DeepstackVisionTower.module_types)
    return DeepstackVisionTower(visual) if is_deep else BatchedVisionTower(visual)
