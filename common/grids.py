"""How many tokens a picture takes: sizes, patch grids and placeholders of Qwen-VL models, without torch.

Owns the arithmetic that actor, engine client and validation share. Pixels themselves are `vagen.common.vision`'s.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vagen.common.errors import ConfigError, ObservationError

MAX_ASPECT_RATIO = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageGeometry:
    """The numbers of a model's image processor that decide a picture's grid. Sizes in pixels."""

    patch_size: int = 14
    merge_size: int = 2
    temporal_patch_size: int = 2
    min_pixels: int = 56 * 56
    max_pixels: int = 28 * 28 * 1280

    def __post_init__(self) -> None:
        for name in ("patch_size", "merge_size", "temporal_patch_size", "min_pixels"):
            if getattr(self, name) < 1:
                raise ConfigError(f"image geometry: {name} must be >= 1, got {getattr(self, name)}")
        if self.max_pixels < self.min_pixels:
            raise ConfigError(f"image geometry: max_pixels {self.max_pixels} is below min_pixels {self.min_pixels}")

    @classmethod
    def load(cls, model_dir: str | Path) -> ImageGeometry:
        """Read `preprocessor_config.json` of a model folder. Raises `ConfigError` when it is missing or malformed."""
        path = Path(model_dir) / "preprocessor_config.json"
        if not path.is_file():
            raise ConfigError(f"{path}: no such file; a vision-language model folder needs it")
        try:
            raw: dict[str, Any] = json.loads(path.read_text())
        except ValueError as error:
            raise ConfigError(f"{path}: not valid json: {error}") from error
        size = raw.get("size") or {}
        found = {
            "patch_size": raw.get("patch_size"),
            "merge_size": raw.get("merge_size"),
            "temporal_patch_size": raw.get("temporal_patch_size"),
            "min_pixels": raw.get("min_pixels") or size.get("shortest_edge") or size.get("min_pixels"),
            "max_pixels": raw.get("max_pixels") or size.get("longest_edge") or size.get("max_pixels"),
        }
        for key, value in found.items():
            if value is not None and not isinstance(value, int):
                raise ConfigError(f"{path}: {key} must be an int, got {value!r}")
        return cls(**{key: value for key, value in found.items() if value is not None})

    def grid_thw(self, size: tuple[int, int]) -> tuple[int, int, int]:
        """Patches along time, height and width of a picture of `size` (width, height).

        Raises `ObservationError` above an aspect ratio of 200.
        """
        width, height = size
        new_height, new_width = smart_resize(
            height,
            width,
            factor=self.patch_size * self.merge_size,
            min_pixels=self.min_pixels,
            max_pixels=self.max_pixels,
        )
        # One frame is repeated to fill the temporal patch, so time is always one patch.
        return 1, new_height // self.patch_size, new_width // self.patch_size

    def num_tokens(self, grid: tuple[int, int, int]) -> int:
        """Placeholders that a picture of this grid takes in a row."""
        return math.prod(grid) // self.merge_size**2


def smart_resize(height: int, width: int, *, factor: int, min_pixels: int, max_pixels: int) -> tuple[int, int]:
    """Nearest (height, width) whose sides are multiples of `factor` and whose area is within the bounds.

    The formula of transformers' `qwen2_vl.smart_resize`. Raises `ObservationError` above an aspect ratio of 200.
    """
    if max(height, width) > MAX_ASPECT_RATIO * min(height, width):
        raise ObservationError(f"image of {width}x{height} px: aspect ratio above {MAX_ASPECT_RATIO}")
    new_height, new_width = round(height / factor) * factor, round(width / factor) * factor
    if new_height * new_width > max_pixels:
        scale = math.sqrt(height * width / max_pixels)
        new_height = max(factor, math.floor(height / scale / factor) * factor)
        new_width = max(factor, math.floor(width / scale / factor) * factor)
    elif new_height * new_width < min_pixels:
        scale = math.sqrt(min_pixels / (height * width))
        new_height = math.ceil(height * scale / factor) * factor
        new_width = math.ceil(width * scale / factor) * factor
    return new_height, new_width
