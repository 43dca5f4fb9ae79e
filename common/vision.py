"""Pictures as a Qwen-VL model sees them: pixels to patches, patches to features, positions of image tokens.

Owns what the local engine and the learner must compute identically: the image processor (equal to transformers'
`Qwen2VLImageProcessorPil`, without torchvision), one batched forward of transformers' vision module, and M-RoPE
positions. Does not own Qwen3-VL's vision module (`vagen.common.deepstack` does), parameters (they stay in the module
it wraps), placeholders in prompts, or devices.

Legend: N images, P patches of all images, D values of a patch (channels * temporal_patch_size * patch_size^2),
M merged features of all images (P / merge_size^2), H width of the language model, T tokens of a row.
"""

from __future__ import annotations

import io
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor, nn
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VisionTransformerPretrainedModel
from transformers.vision_utils import get_vision_position_ids, get_vision_window_index

from vagen.common.errors import ConfigError, ObservationError
from vagen.common.grids import ImageGeometry, read_processor

__all__ = [
    "BatchedVisionTower",
    "Grid",
    "GridPlan",
    "ImageSpec",
    "VisionTower",
    "decode_picture",
    "mrope_axes",
    "mrope_positions",
    "normalised",
    "preprocess_image",
    "read_pixel_settings",
]

Grid = tuple[int, int, int]
"""Patches of one image along (time, height, width), before merging."""

_BICUBIC = 3
_CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
_CLIP_STD = (0.26862954, 0.26130258, 0.27577711)


@dataclass(frozen=True, kw_only=True)
class ImageSpec(ImageGeometry):
    """How pictures become patches. `mean` and `std` are per RGB channel, of values in [0, 1]."""

    mean: tuple[float, float, float] = _CLIP_MEAN
    std: tuple[float, float, float] = _CLIP_STD

    @property
    def patch_dim(self) -> int:
        """D: values of one patch, all frames and channels."""
        return 3 * self.temporal_patch_size * self.patch_size**2

    @classmethod
    def load(cls, model_dir: str | Path) -> ImageSpec:
        """Read `preprocessor_config.json`. Raises ConfigError where it is missing or asks for another pipeline."""
        pixels = read_pixel_settings(model_dir)
        geometry = super().load(model_dir)
        return cls(**{field.name: getattr(geometry, field.name) for field in fields(ImageGeometry)}, **pixels)

    def preprocess(self, image: bytes | Image.Image) -> tuple[Tensor, Grid]:
        """See `preprocess_image`."""
        return preprocess_image(image, self)

    def positions(
        self, token_ids: NDArray[np.integer], grids: Sequence[Grid], image_token_id: int
    ) -> NDArray[np.int64]:
        """See `mrope_positions`."""
        return mrope_positions(token_ids, grids, image_token_id=image_token_id, merge_size=self.merge_size)

    def save(self, model_dir: str | Path) -> None:
        """Write `preprocessor_config.json` as transformers reads it."""
        content = {
            "image_processor_type": "Qwen2VLImageProcessor",
            "do_convert_rgb": True,
            "do_resize": True,
            "do_rescale": True,
            "do_normalize": True,
            "resample": _BICUBIC,
            "rescale_factor": 1 / 255,
            "image_mean": list(self.mean),
            "image_std": list(self.std),
            "patch_size": self.patch_size,
            "merge_size": self.merge_size,
            "temporal_patch_size": self.temporal_patch_size,
            "min_pixels": self.min_pixels,
            "max_pixels": self.max_pixels,
            "size": {"shortest_edge": self.min_pixels, "longest_edge": self.max_pixels},
        }
        (Path(model_dir) / "preprocessor_config.json").write_text(json.dumps(content, indent=2) + "\n")


def read_pixel_settings(model_dir: str | Path) -> dict[str, Any]:
    """`mean` and `std` where `preprocessor_config.json` states them. Raises ConfigError where it is missing or asks for
    other steps than resizing, rescaling and normalising.
    """
    path, raw = Path(model_dir) / "preprocessor_config.json", read_processor(model_dir)
    for key, only in (("do_resize", True), ("do_rescale", True), ("do_normalize", True), ("resample", _BICUBIC)):
        if raw.get(key, only) != only:
            raise ConfigError(f"{path}: {key} must be {only}, got {raw[key]}")
    if not math.isclose(raw.get("rescale_factor", 1 / 255), 1 / 255):
        raise ConfigError(f"{path}: rescale_factor must be 1/255, got {raw['rescale_factor']}")
    return {name: tuple(raw[f"image_{name}"]) for name in ("mean", "std") if raw.get(f"image_{name}") is not None}


def preprocess_image(image: bytes | Image.Image, spec: ImageSpec) -> tuple[Tensor, Grid]:
    """Patches float32 [P, D] and grid of one image, bit for bit those of transformers' PIL processor.

    `image` is an encoded file (PNG as the engine saw it) or a PIL image; transparency is composed onto white.
    Raises ObservationError where the bytes are no image or its shape is out of bounds.
    """
    picture = decode_picture(image)
    height, width = spec.resized(picture.height, picture.width)
    if (picture.height, picture.width) != (height, width):
        picture = picture.resize((width, height), resample=Image.Resampling.BICUBIC)
    rows, columns, p, m = height // spec.patch_size, width // spec.patch_size, spec.patch_size, spec.merge_size
    values = normalised(picture, spec.mean, spec.std)
    blocks = values.reshape(3, rows // m, m, p, columns // m, m, p).transpose(1, 4, 2, 5, 0, 3, 6)
    frames = np.broadcast_to(
        blocks[:, :, :, :, :, None], (*blocks.shape[:5], spec.temporal_patch_size, *blocks.shape[5:])
    )
    return torch.from_numpy(frames.reshape(rows * columns, spec.patch_dim)), (1, rows, columns)


def decode_picture(image: bytes | Image.Image) -> Image.Image:
    """RGB of an encoded file or a PIL image, transparency composed onto white. Raises ObservationError for no image."""
    try:
        return _to_rgb(Image.open(io.BytesIO(image)) if isinstance(image, bytes) else image)
    except OSError as error:
        raise ObservationError(f"image does not decode: {error}") from error


def normalised(picture: Image.Image, mean: tuple[float, ...], std: tuple[float, ...]) -> NDArray[np.float32]:
    """[3, height, width] float32 of an RGB picture, bit for bit as transformers rescales and normalises."""
    pixels, table = np.asarray(picture), _normalisation_table(mean, std)
    return np.stack([table[c][pixels[..., c]] for c in range(3)])


def _to_rgb(picture: Image.Image) -> Image.Image:
    if "A" in picture.getbands() or picture.info.get("transparency") is not None:
        picture = picture.convert("RGBA")
        picture = Image.alpha_composite(Image.new("RGBA", picture.size, (255, 255, 255, 255)), picture)
    return picture.convert("RGB")


@lru_cache(maxsize=8)
def _normalisation_table(mean: tuple[float, ...], std: tuple[float, ...]) -> NDArray[np.float32]:
    """[3, 256] float32: byte -> normalised value, rounded as transformers rounds (rescale in float64, then float32)."""
    scaled = (np.arange(256, dtype=np.float64) * (1 / 255)).astype(np.float32)
    return (scaled[None] - np.array(mean, np.float32)[:, None]) / np.array(std, np.float32)[:, None]


@lru_cache(maxsize=256)
def _image_positions(grid: Grid, merge_size: int) -> NDArray[np.int64]:
    """[3, t * h * w / merge_size^2]: (time, height, width) index of each image token, from 0."""
    t, h, w = grid[0], grid[1] // merge_size, grid[2] // merge_size
    return np.indices((t, h, w), dtype=np.int64).reshape(3, -1)


def mrope_positions(
    token_ids: NDArray[np.integer], grids: Sequence[Grid], *, image_token_id: int, merge_size: int = 2
) -> NDArray[np.int64]:
    """M-RoPE positions int64 [3, T] of one row whose image placeholders are expanded (transformers' `get_rope_index`).

    Text advances all three axes by one; an image occupies a block from the current position and advances it by its
    longer merged side. The position after the row is `positions.max() + 1`. Raises ObservationError where the
    placeholders are not those of `grids`, in order.
    """
    where = np.flatnonzero(np.asarray(token_ids) == image_token_id)
    sizes = [math.prod(grid) // merge_size**2 for grid in grids]
    if len(where) != sum(sizes):
        raise ObservationError(f"row has {len(where)} image placeholders, its {len(grids)} images need {sum(sizes)}")
    positions = np.empty((3, len(token_ids)), dtype=np.int64)
    done, current, seen = 0, 0, 0
    for grid, size in zip(grids, sizes, strict=True):
        start = int(where[seen])
        if int(where[seen + size - 1]) != start + size - 1:
            raise ObservationError(f"image placeholders at token {start} are not {size} in a row (grid {grid})")
        positions[:, done:start] = np.arange(current, current + start - done)
        current += start - done
        positions[:, start : start + size] = _image_positions(grid, merge_size) + current
        current += max(grid[1], grid[2]) // merge_size
        done, seen = start + size, seen + size
    positions[:, done:] = np.arange(current, current + len(token_ids) - done)
    return positions


def mrope_axes(sections: Sequence[int], *, interleaved: bool) -> NDArray[np.int64]:
    """[D / 2]: which of the axes time (0), height (1) and width (2) turns each component of half a head.

    `sections` counts the components of each axis. They lie one axis after the other (Qwen2.5-VL), or interleaved
    (Qwen3-VL): 0, 1, 2, 0, 1, 2 ... while height and width have components left, then time.
    """
    if not interleaved:
        return np.repeat(np.arange(len(sections), dtype=np.int64), sections)
    axes = np.zeros(sum(sections), np.int64)
    for axis in (1, 2):
        axes[axis : 3 * sections[axis] : 3] = axis
    return axes


@dataclass(frozen=True, kw_only=True)
class GridPlan:
    """What depends on the grid of an image alone; Q = its patches, in window order where the tower has windows.

    cos, sin float32 [Q, 1, head_dim]; order, reverse int64 [Q / merge_unit] or None without windows;
    windows int64 [W, longest window] (patch of each slot, padded with 0) with mask bool [W, 1, 1, longest window]
    (None where all windows are equally long) and slot int64 [Q] (the slot of each patch).
    """

    frames: int
    cos: Tensor
    sin: Tensor
    order: Tensor | None
    reverse: Tensor | None
    windows: Tensor | None
    mask: Tensor | None
    slot: Tensor | None


class VisionTower(Protocol):
    """Features [M, (1 + K) * H] of patches [P, D], both image after image in the order of `grids`.

    Around a vision module that its owner saves and moves. K as in `vagen.common.deepstack`; 0 elsewhere.
    """

    merge_unit: int
    """Patches of a feature."""

    def __call__(self, patches: Tensor, grids: Sequence[Grid]) -> Tensor: ...


class BatchedVisionTower:
    """Features of many images in one forward of transformers' Qwen2.5-VL vision module (`hf.model.visual`).

    transformers loops over the images (and windows) of a batch in Python; here images of one grid form one batch, so
    the attention of a block is one call. Same parameters, same formulas, forward and backward. Not a module itself:
    whoever owns the wrapped module saves and moves it.
    """

    module_types: tuple[type[nn.Module], ...] = (Qwen2_5_VisionTransformerPretrainedModel,)
    num_deepstack = 0
    """K: so many times H more features for each token."""

    def __init__(self, visual: Any) -> None:
        self._visual = visual
        if not isinstance(visual, self.module_types):
            raise ConfigError(f"vision tower must be a {self.module_types[0].__name__}, got {type(visual).__name__}")
        self._merge_size = int(self._visual.spatial_merge_size)
        self.merge_unit = self._merge_size**2
        self._full_attention = self._attention_kinds()
        self._plans: dict[tuple[Grid, torch.device], GridPlan] = {}

    def __call__(self, patches: Tensor, grids: Sequence[Grid]) -> Tensor:
        """Features [M, H] of patches [P, D], both image after image in the order of `grids`.

        Raises ObservationError where the patches do not fit the grids.
        """
        sizes = [math.prod(grid) for grid in grids]
        if patches.dim() != 2 or patches.shape[0] != sum(sizes):
            raise ObservationError(f"patches of shape {list(patches.shape)} for grids that need {sum(sizes)} patches")
        kinds = list(dict.fromkeys(grids))
        if len(kinds) == 1:
            return self._forward(patches.view(len(grids), sizes[0], -1), kinds[0]).flatten(0, 1)
        parts = patches.split(sizes)
        features: list[Tensor | None] = [None] * len(grids)
        for kind in kinds:
            members = [i for i, grid in enumerate(grids) if grid == kind]
            for i, image in zip(members, self._forward(torch.stack([parts[i] for i in members]), kind), strict=True):
                features[i] = image
        return torch.cat([image for image in features if image is not None])

    def _attention_kinds(self) -> list[bool]:
        """By block: whether a frame attends to all of itself, else in windows."""
        return [i in self._visual.fullatt_block_indexes for i in range(len(self._visual.blocks))]

    def _forward(self, patches: Tensor, grid: Grid) -> Tensor:
        """[n, Q, D] of one grid -> [n, Q / merge_unit, H]."""
        plan = self._plan(grid, patches.device)
        visual = self._visual
        weight = visual.patch_embed.proj.weight
        x = F.linear(patches.to(weight.dtype), weight.flatten(1))
        if plan.order is not None:
            x = x.unflatten(1, (-1, self.merge_unit))[:, plan.order].flatten(1, 2)
        for block, full in zip(visual.blocks, self._full_attention, strict=True):
            x = x + self._attention(block.attn, block.norm1(x), plan, full)
            x = x + block.mlp(block.norm2(x))
        merged = visual.merger.mlp(visual.merger.ln_q(x).unflatten(1, (-1, self.merge_unit)).flatten(2))
        return merged if plan.reverse is None else merged[:, plan.reverse]

    def _attention(self, module: Any, x: Tensor, plan: GridPlan, full: bool) -> Tensor:
        n, length, width = x.shape
        qkv = module.qkv(x).view(n, length, 3, module.num_heads, -1)
        rotated = _rotate(qkv[:, :, :2].float(), plan.cos, plan.sin).to(qkv.dtype)
        query, key, value = rotated[:, :, 0], rotated[:, :, 1], qkv[:, :, 2]
        if not full and plan.windows is not None:
            mask = None if plan.mask is None else plan.mask.repeat(n, 1, 1, 1)
            query, key, value = (t[:, plan.windows].flatten(0, 1).transpose(1, 2) for t in (query, key, value))
            out = F.scaled_dot_product_attention(query, key, value, attn_mask=mask).transpose(1, 2)
            assert plan.slot is not None
            return module.proj(out.reshape(n, -1, width)[:, plan.slot])
        # A frame attends to itself only.
        shape = (n * plan.frames, length // plan.frames, *query.shape[2:])
        query, key, value = (t.reshape(shape).transpose(1, 2) for t in (query, key, value))
        out = F.scaled_dot_product_attention(query, key, value).transpose(1, 2)
        return module.proj(out.reshape(n, length, width))

    def _plan(self, grid: Grid, device: torch.device) -> GridPlan:
        plan = self._plans.get((grid, device))
        if plan is None:
            plan = self._plans[grid, device] = self._make_plan(grid, device)
        return plan

    @torch.no_grad()
    def _make_plan(self, grid: Grid, device: torch.device) -> GridPlan:
        visual = self._visual
        thw = torch.tensor([grid])
        positions = get_vision_position_ids(thw, self._merge_size, kwargs={}).to(device)
        cos, sin = visual.rotary_pos_emb(torch.zeros(1, device=device), positions)
        order = reverse = windows = mask = slot = None
        if not all(self._full_attention):
            order, bounds = get_vision_window_index(
                thw, self._merge_size, visual.window_size, visual.patch_size, kwargs={}
            )
            lengths = bounds.diff().long()
            longest = int(lengths.max())
            valid = torch.arange(longest)[None] < lengths[:, None]
            windows = torch.where(valid, bounds[:-1, None].long() + torch.arange(longest)[None], 0).to(device)
            mask = None if bool(valid.all()) else valid[:, None, None].to(device)
            slot = valid.flatten().nonzero()[:, 0].to(device)
            order, reverse = order.to(device), order.argsort().to(device)
            cos, sin = (t.unflatten(0, (-1, self.merge_unit))[order].flatten(0, 1) for t in (cos, sin))
        # Two axes for (query or key, head).
        cos, sin = (t[:, None, None].float().contiguous() for t in (cos, sin))
        return GridPlan(
            frames=grid[0], cos=cos, sin=sin, order=order, reverse=reverse, windows=windows, mask=mask, slot=slot
        )


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin
