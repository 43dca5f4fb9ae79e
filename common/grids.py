"""How many tokens a picture takes: sizes, patch grids and placeholders of each kind of image processor, without torch.

Owns the arithmetic that actor, engine client and validation share. Pixels themselves are `vagen.common.vision`'s and
`vagen.common.tiles`'.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from vagen.common.errors import ConfigError, ObservationError
from vagen.common.vocabulary import merge_size, read_model_json

MAX_ASPECT_RATIO = 200
_FILE = "preprocessor_config.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class PatchGeometry:
    """A picture is cut into patches of `patch_size` pixels a side, `merge_size`^2 of which become a placeholder."""

    patch_size: int = 14
    merge_size: int = 2

    def num_tokens(self, grid: tuple[int, int, int]) -> int:
        """Placeholders that a picture of this grid takes in a row."""
        return math.prod(grid) // self.merge_size**2


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageGeometry(PatchGeometry):
    """Qwen's: a picture keeps its shape, and its size within bounds. Sizes in pixels."""

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
        path, raw = Path(model_dir) / _FILE, read_processor(model_dir)
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
        new_height, new_width = self.resized(height, width)
        # One frame is repeated to fill the temporal patch, so time is always one patch.
        return 1, new_height // self.patch_size, new_width // self.patch_size

    def resized(self, height: int, width: int) -> tuple[int, int]:
        """(height, width) that a picture is brought to. Raises `ObservationError` above an aspect ratio of 200."""
        factor = self.patch_size * self.merge_size
        return smart_resize(height, width, factor=factor, min_pixels=self.min_pixels, max_pixels=self.max_pixels)


@dataclass(frozen=True, slots=True, kw_only=True)
class GlmGeometry(ImageGeometry):
    """GLM's: as Qwen's, but the bounds count the pixels of all frames of a patch, and a picture narrower than a
    placeholder is enlarged first.
    """

    min_pixels: int = 112 * 112
    max_pixels: int = 28 * 28 * 15000

    def resized(self, height: int, width: int) -> tuple[int, int]:
        """(height, width) that a picture is brought to. Raises `ObservationError` above an aspect ratio of 200."""
        factor = self.patch_size * self.merge_size
        if height < factor or width < factor:
            scale = max(factor / height, factor / width)
            height, width = int(height * scale), int(width * scale)
        frames = self.temporal_patch_size
        return smart_resize(
            height, width, factor=factor, min_pixels=self.min_pixels, max_pixels=self.max_pixels, frames=frames
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TileGeometry(PatchGeometry):
    """InternVL's: the square tiles of the canvas that suits a picture's shape best, and where those are several the
    whole picture as one more. What a grid calls time counts tiles.
    """

    tile_size: int = 448
    min_tiles: int = 1
    max_tiles: int = 12

    @classmethod
    def load(cls, model_dir: str | Path) -> TileGeometry:
        """Read `preprocessor_config.json` and `config.json` of a model folder. Raises `ConfigError` for what is missing
        or malformed, and where the two contradict each other.
        """
        return cls(**cls._settings(Path(model_dir)))

    @classmethod
    def _settings(cls, folder: Path) -> dict[str, Any]:
        path, raw = folder / _FILE, read_processor(folder)
        config = read_model_json(folder / "config.json")
        vision = config.get("vision_config") or {}
        patch_size, image_size = _side(vision.get("patch_size", 14)), _side(vision.get("image_size", 448))
        size = raw.get("size") or {}
        if (size.get("height"), size.get("width")) != (image_size, image_size) or not image_size:
            raise ConfigError(f"{path}: size must be {image_size} x {image_size}, config.json's image_size, got {size}")
        if not patch_size or image_size % (patch_size * merge_size(config)):
            raise ConfigError(f"{folder / 'config.json'}: {image_size} px do not divide into patches of {patch_size}")
        found = {"min_tiles": raw.get("min_patches", 1), "max_tiles": raw.get("max_patches", 12)}
        if not (isinstance(found["min_tiles"], int) and isinstance(found["max_tiles"], int)):
            raise ConfigError(f"{path}: min_patches and max_patches must be ints, got {found}")
        if not 1 <= found["min_tiles"] <= found["max_tiles"]:
            raise ConfigError(f"{path}: expected 1 <= min_patches <= max_patches, got {found}")
        return {"patch_size": patch_size, "merge_size": merge_size(config), "tile_size": image_size, **found}

    def canvas(self, size: tuple[int, int]) -> tuple[int, int]:
        """Columns and rows of tiles of a picture of `size` (width, height): those of the nearest shape; of several that
        are as near the largest that the picture fills by more than half.
        """
        width, height = size
        shapes = [
            (columns, rows)
            for columns in range(1, self.max_tiles + 1)
            for rows in range(1, self.max_tiles // columns + 1)
            if columns * rows >= self.min_tiles
        ]
        best, nearest = (1, 1), math.inf
        for columns, rows in sorted(shapes, key=lambda shape: shape[0] * shape[1]):
            distance = abs(width / height - columns / rows)
            fills = width * height > 0.5 * self.tile_size**2 * columns * rows
            if distance < nearest or (distance == nearest and fills):
                best, nearest = (columns, rows), distance
        return best

    def grid_thw(self, size: tuple[int, int]) -> tuple[int, int, int]:
        """Tiles, and patches along height and width of each, of a picture of `size` (width, height)."""
        columns, rows = self.canvas(size)
        side, tiles = self.tile_size // self.patch_size, columns * rows
        return tiles + (tiles > 1), side, side


AnyGeometry = ImageGeometry | TileGeometry
ImageKind = Literal["qwen", "glm", "tiles"]
_KINDS: dict[str, ImageKind] = {
    "Qwen2VL": "qwen",
    "Qwen2_5_VL": "qwen",
    "Glm4v": "glm",
    "Glm46V": "glm",
    "GotOcr2": "tiles",
}


def image_kind(model_dir: str | Path) -> ImageKind:
    """Which image processor a model folder asks for; Qwen's where it says none. Raises `ConfigError` for others."""
    found = str(read_processor(model_dir).get("image_processor_type", "Qwen2VLImageProcessor"))
    kind = _KINDS.get(found.partition("ImageProcessor")[0])
    if kind is None:
        known = ", ".join(f"{name}ImageProcessor" for name in _KINDS)
        raise ConfigError(f"{Path(model_dir) / _FILE}: image_processor_type must be one of {known}, got {found}")
    return kind


def image_geometry(model_dir: str | Path) -> AnyGeometry:
    """The geometry of a model folder. Raises `ConfigError` for files that are missing or malformed."""
    kind = image_kind(model_dir)
    if kind == "tiles":
        return TileGeometry.load(model_dir)
    return GlmGeometry.load(model_dir) if kind == "glm" else ImageGeometry.load(model_dir)


def read_processor(model_dir: str | Path) -> dict[str, Any]:
    """`preprocessor_config.json` of a model folder. Raises `ConfigError` when it is missing or malformed."""
    path = Path(model_dir) / _FILE
    if not path.is_file():
        raise ConfigError(f"{path}: no such file; a vision-language model folder needs it")
    return read_model_json(path)


def _side(value: Any) -> int:
    """A square's side, which config.json may write twice; 0 for what is none."""
    values = value if isinstance(value, list) else [value]
    return values[0] if isinstance(values[0], int) and values == [values[0]] * len(values) else 0


def smart_resize(
    height: int, width: int, *, factor: int, min_pixels: int, max_pixels: int, frames: int = 1
) -> tuple[int, int]:
    """Nearest (height, width) whose sides are multiples of `factor` and whose area, of all frames, is within bounds.

    The formula of transformers' `qwen2_vl.smart_resize`, and of `glm4v.smart_resize` for pictures that a placeholder
    fits in. Raises `ObservationError` above an aspect ratio of 200.
    """
    if max(height, width) > MAX_ASPECT_RATIO * min(height, width):
        raise ObservationError(f"image of {width}x{height} px: aspect ratio above {MAX_ASPECT_RATIO}")
    new_height, new_width = round(height / factor) * factor, round(width / factor) * factor
    if frames * new_height * new_width > max_pixels:
        scale = math.sqrt(frames * height * width / max_pixels)
        new_height = max(factor, math.floor(height / scale / factor) * factor)
        new_width = max(factor, math.floor(width / scale / factor) * factor)
    elif frames * new_height * new_width < min_pixels:
        scale = math.sqrt(min_pixels / (frames * height * width))
        new_height = math.ceil(height * scale / factor) * factor
        new_width = math.ceil(width * scale / factor) * factor
    return new_height, new_width
