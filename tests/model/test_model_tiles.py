"""common/tiles.py against transformers: InternVL's image processor, and what of a model directory is refused."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil

from vagen.common.errors import ConfigError, ObservationError
from vagen.common.tiles import TiledVisionTower, TileSpec
from vagen.common.towers import image_spec, vision_tower
from vagen.learner.model.actor_critic import VisionLanguageActorCritic

SIZES = [(56, 56), (57, 13), (13, 57), (112, 112), (300, 100), (80, 240), (640, 480), (161, 100)]
"""(width, height), with shapes that two canvases suit equally."""


def _pixels(patches: torch.Tensor, tiles: int, side: int) -> torch.Tensor:
    """[t, 3, height, width] of patches in rows."""
    p = side // 4
    shaped = patches.reshape(tiles, 4, 4, 3, p, p).permute(0, 3, 1, 4, 2, 5)
    return shaped.reshape(tiles, 3, side, side)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(("low", "high"), [(1, 12), (2, 6), (1, 1)])
def test_tiles_equal_transformers(size: tuple[int, int], low: int, high: int) -> None:
    pixels = np.random.default_rng(sum(size)).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    picture = Image.fromarray(pixels)
    spec = TileSpec(patch_size=14, tile_size=56, min_tiles=low, max_tiles=high, mean=(0.4, 0.5, 0.6), std=(0.2, 0.3, 1))
    reference = GotOcr2ImageProcessorPil(
        size={"height": 56, "width": 56},
        crop_to_patches=True,
        min_patches=low,
        max_patches=high,
        image_mean=[0.4, 0.5, 0.6],
        image_std=[0.2, 0.3, 1],
    )(images=[picture], return_tensors="pt")
    patches, grid = spec.preprocess(picture)
    assert grid == (int(reference["num_patches"][0]), 4, 4) == spec.grid_thw(size)
    assert torch.equal(_pixels(patches, grid[0], 56), reference["pixel_values"])


def test_the_folder_of_a_model_says_how_pictures_are_cut(save_internvl: Any) -> None:
    _, directory = save_internvl()
    spec = image_spec(directory)
    assert isinstance(spec, TileSpec)
    assert (spec.tile_size, spec.patch_size, spec.merge_size, spec.max_tiles) == (56, 14, 2, 4)
    assert spec.num_tokens((5, 4, 4)) == 20
    file = directory / "preprocessor_config.json"
    written = json.loads(file.read_text())
    for change, message in (
        ({"size": {"height": 56, "width": 28}}, "size must be 56 x 56"),
        ({"max_patches": 0}, "1 <= min_patches <= max_patches"),
        ({"do_rescale": False}, "do_rescale must be True"),
        ({"image_processor_type": "ViTImageProcessor"}, "image_processor_type must be one of Qwen2VLImageProcessor"),
    ):
        file.write_text(json.dumps(written | change))
        with pytest.raises(ConfigError, match=message):
            image_spec(directory)


def test_placeholders_and_patches_that_do_not_fit_are_refused(save_internvl: Any) -> None:
    hf, _ = save_internvl()
    spec = TileSpec(tile_size=56)
    positions = spec.positions(np.array([1, 9, 9, 9, 9, 2]), [(1, 4, 4)], 9)
    np.testing.assert_array_equal(positions, [np.arange(6)] * 3)
    with pytest.raises(ObservationError, match="1 image placeholders, its 1 images need 4"):
        spec.positions(np.array([1, 9, 2]), [(1, 4, 4)], 9)
    tower = vision_tower(hf.model)
    assert isinstance(tower, TiledVisionTower)
    with pytest.raises(ObservationError, match="16 patches"):
        tower(torch.zeros(15, 588), [(1, 4, 4)])


@pytest.mark.parametrize(
    ("where", "change", "message"),
    [
        ("text_config", {"model_type": "llama"}, "text_config.model_type must be one of qwen2, qwen3, got 'llama'"),
        ("vision_config", {"attention_dropout": 0.1}, "vision_config.attention_dropout must be 0, got 0.1"),
        (None, {"vision_feature_layer": -2}, "vision_feature_layer must be -1, got -2"),
    ],
)
def test_another_internvl_is_refused(
    save_internvl: Any, where: str | None, change: dict[str, Any], message: str
) -> None:
    _, directory = save_internvl()
    config = json.loads((directory / "config.json").read_text())
    (config if where is None else config[where]).update(change)
    (directory / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=message):
        VisionLanguageActorCritic.load_hf(directory)
