"""Qwen3-VL's pictures against transformers: patches, features of the tower, the order of position axes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import Qwen2VLImageProcessorPil

from vagen.common.errors import ConfigError
from vagen.common.towers import vision_tower
from vagen.common.vision import Grid, ImageSpec, mrope_axes, preprocess_image

PREPROCESSOR = {
    "size": {"longest_edge": 16777216, "shortest_edge": 65536},
    "patch_size": 16,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
    "processor_class": "Qwen3VLProcessor",
    "image_processor_type": "Qwen2VLImageProcessorFast",
}
"""What the published Qwen3-VL models have."""


@pytest.mark.parametrize("size", [(300, 200), (64, 64), (257, 511)])
def test_patches_are_those_of_transformers(tmp_path: Path, size: tuple[int, int]) -> None:
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(PREPROCESSOR))
    pixels = np.random.default_rng(1).integers(0, 256, (*size, 3), dtype=np.uint8)
    picture = Image.fromarray(pixels)
    reference = Qwen2VLImageProcessorPil.from_pretrained(tmp_path)(images=[picture], return_tensors="pt")
    patches, grid = preprocess_image(picture, ImageSpec.load(tmp_path))
    assert list(grid) == reference["image_grid_thw"][0].tolist()
    assert torch.equal(patches, reference["pixel_values"])


@pytest.mark.parametrize(
    "grids",
    [[(1, 4, 4)] * 3, [(1, 4, 4), (1, 8, 12), (2, 6, 4), (1, 4, 4), (1, 14, 2)]],
    ids=["one grid", "many grids"],
)
def test_tower_equals_transformers(save_qwen3_vl: Any, grids: list[Grid]) -> None:
    module = save_qwen3_vl()[0].model.visual
    patches = torch.randn(sum(int(np.prod(grid)) for grid in grids), 1176)
    output = module(patches, torch.tensor(grids))
    reference = torch.cat([output.pooler_output, *output.deepstack_features], -1)
    features = vision_tower(module)(patches, grids)
    torch.testing.assert_close(features, reference, rtol=1e-5, atol=5e-6)
    weight = torch.randn_like(reference)
    expected = torch.autograd.grad((reference * weight).sum(), module.parameters())
    gradients = torch.autograd.grad((features * weight).sum(), module.parameters())
    for got, want in zip(gradients, expected, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=2e-5 * float(want.abs().max()))


def test_another_module_is_no_tower() -> None:
    with pytest.raises(ConfigError, match="vision tower must be .*Linear"):
        vision_tower(torch.nn.Linear(1, 1))


def test_axes_lie_apart_or_interleaved() -> None:
    assert mrope_axes([2, 3, 3], interleaved=False).tolist() == [0, 0, 1, 1, 1, 2, 2, 2]
    assert mrope_axes([4, 2, 2], interleaved=True).tolist() == [0, 1, 2, 0, 1, 2, 0, 0]
