"""Which image processor and which vision tower a model has: one place for local engine and learner."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers.models.internvl.modeling_internvl import InternVLModel

from vagen.common.deepstack import DeepstackVisionTower
from vagen.common.glm import GlmImageSpec, GlmVisionTower
from vagen.common.grids import ImageKind, image_kind
from vagen.common.tiles import TiledVision, TiledVisionTower, TileSpec
from vagen.common.vision import BatchedVisionTower, ImageSpec, VisionTower

__all__ = ["AnyImageSpec", "image_spec", "vision_tower"]

AnyImageSpec = ImageSpec | TileSpec
_SPECS: dict[ImageKind, type[AnyImageSpec]] = {"qwen": ImageSpec, "glm": GlmImageSpec, "tiles": TileSpec}
_TOWERS = (BatchedVisionTower, DeepstackVisionTower, GlmVisionTower)


def image_spec(model_dir: str | Path) -> AnyImageSpec:
    """The image processor of a model directory. Raises ConfigError for one that is missing or unknown."""
    return _SPECS[image_kind(model_dir)].load(model_dir)


def vision_tower(visual: Any) -> VisionTower:
    """The tower around a vision module. Raises ConfigError for one of an unknown family."""
    if isinstance(visual, TiledVision | InternVLModel):
        return TiledVisionTower(visual)
    kind = next((kind for kind in _TOWERS if isinstance(visual, kind.module_types)), BatchedVisionTower)
    return kind(visual)
