"""common/vision.py against transformers: image processor, vision tower, M-RoPE positions."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import Qwen2_5_VLConfig
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VisionTransformerPretrainedModel
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from vagen.common.errors import ConfigError, ObservationError
from vagen.common.vision import BatchedVisionTower, Grid, ImageSpec, mrope_positions, preprocess_image

IMAGE = 500


def _picture(height: int, width: int, mode: str = "RGB") -> Image.Image:
    channels = {"RGB": 3, "RGBA": 4, "L": 1}[mode]
    pixels = np.random.default_rng(height * width).integers(0, 256, (height, width, channels), dtype=np.uint8)
    return Image.fromarray(pixels.squeeze(), mode=mode) if mode == "L" else Image.fromarray(pixels)


@pytest.mark.parametrize("size", [(56, 56), (28, 28), (100, 37), (500, 333), (13, 200)])
@pytest.mark.parametrize("mode", ["RGB", "RGBA", "L"])
def test_patches_equal_transformers(size: tuple[int, int], mode: str) -> None:
    picture = _picture(*size, mode)
    spec = ImageSpec(min_pixels=28 * 28, max_pixels=200 * 200)
    reference = Qwen2VLImageProcessorPil(min_pixels=28 * 28, max_pixels=200 * 200)(
        images=[picture], return_tensors="pt"
    )
    encoded = io.BytesIO()
    picture.save(encoded, "PNG")
    for image in (picture, encoded.getvalue()):
        patches, grid = preprocess_image(image, spec)
        assert list(grid) == reference["image_grid_thw"][0].tolist()
        assert torch.equal(patches, reference["pixel_values"])
    assert len(patches) == spec.num_tokens(grid) * 4


def test_spec_reads_what_transformers_writes(tmp_path: Path) -> None:
    options: dict[str, Any] = {"patch_size": 16, "image_mean": [0.5] * 3, "image_std": [0.4, 0.5, 0.6]}
    Qwen2VLImageProcessorPil(min_pixels=1024, max_pixels=65536, **options).save_pretrained(tmp_path)
    spec = ImageSpec.load(tmp_path)
    assert spec == ImageSpec(
        patch_size=16, min_pixels=1024, max_pixels=65536, mean=(0.5, 0.5, 0.5), std=(0.4, 0.5, 0.6)
    )
    spec.save(tmp_path)
    assert ImageSpec.load(tmp_path) == spec
    again = Qwen2VLImageProcessorPil.from_pretrained(tmp_path)(images=[_picture(90, 70)], return_tensors="pt")
    assert torch.equal(preprocess_image(_picture(90, 70), spec)[0], again["pixel_values"])


def test_bad_images_and_specs_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ObservationError, match="aspect ratio"):
        preprocess_image(_picture(1, 300), ImageSpec())
    with pytest.raises(ObservationError, match="does not decode"):
        preprocess_image(b"not a picture", ImageSpec())
    with pytest.raises(ConfigError, match=r"preprocessor_config\.json"):
        ImageSpec.load(tmp_path)
    (tmp_path / "preprocessor_config.json").write_text('{"do_normalize": false}')
    with pytest.raises(ConfigError, match="do_normalize"):
        ImageSpec.load(tmp_path)
    with pytest.raises(ConfigError, match="max_pixels"):
        ImageSpec(min_pixels=10, max_pixels=9)


def _vision_module(full_attention: list[int]) -> Any:
    torch.manual_seed(1)
    config = Qwen2_5_VLConfig(
        vision_config={
            "depth": 3,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_heads": 2,
            "patch_size": 14,
            "window_size": 56,
            "out_hidden_size": 40,
            "fullatt_block_indexes": full_attention,
        }
    )
    module = Qwen2_5_VisionTransformerPretrainedModel._from_config(config.vision_config)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    return module


@pytest.mark.parametrize("full_attention", [[0, 1, 2], [1], []])
@pytest.mark.parametrize(
    "grids",
    [[(1, 4, 4)] * 5, [(1, 4, 4), (1, 8, 12), (2, 6, 4), (1, 4, 4), (1, 6, 10), (1, 2, 2)]],
    ids=["one grid", "many grids"],
)
def test_tower_equals_transformers(full_attention: list[int], grids: list[Grid]) -> None:
    module = _vision_module(full_attention)
    patches = torch.randn(sum(int(np.prod(grid)) for grid in grids), 1176)
    reference = module(patches, torch.tensor(grids)).pooler_output
    features = BatchedVisionTower(module)(patches, grids)
    torch.testing.assert_close(features, reference, rtol=1e-5, atol=2e-6)
    weight = torch.randn_like(reference)
    expected = torch.autograd.grad((reference * weight).sum(), module.parameters())
    gradients = torch.autograd.grad((features * weight).sum(), module.parameters())
    for got, want in zip(gradients, expected, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5 * float(want.abs().max()))


def test_windows_matter_and_misfits_are_refused() -> None:
    patches, grids = torch.randn(96, 1176), [(1, 8, 12)]
    windowed, full = _vision_module([]), _vision_module([0, 1, 2])
    full.load_state_dict(windowed.state_dict())
    difference = BatchedVisionTower(windowed)(patches, grids) - BatchedVisionTower(full)(patches, grids)
    assert difference.abs().max() > 1e-3
    with pytest.raises(ObservationError, match="96 patches"):
        BatchedVisionTower(full)(patches[:-1], grids)
    with pytest.raises(ConfigError, match="Linear"):
        BatchedVisionTower(torch.nn.Linear(1, 1))


def test_mrope_positions_equal_transformers(save_vl: Any) -> None:
    model, _ = save_vl()
    rng = np.random.default_rng(5)
    for _ in range(40):
        ids: list[int] = []
        grids: list[Grid] = []
        for _ in range(int(rng.integers(0, 5))):
            ids += [int(x) for x in rng.integers(0, 490, rng.integers(1, 9))]
            grid = (1, 2 * int(rng.integers(1, 6)), 2 * int(rng.integers(1, 6)))
            ids += [IMAGE] * (grid[1] * grid[2] // 4)
            grids.append(grid)
        ids += [int(x) for x in rng.integers(0, 490, rng.integers(1, 9))]
        row = torch.tensor([ids])
        expected, _ = model.model.get_rope_index(
            row, (row == IMAGE).int(), image_grid_thw=torch.tensor(grids) if grids else None
        )
        positions = mrope_positions(np.array(ids), grids, image_token_id=IMAGE)
        assert positions.dtype == np.int64
        assert np.array_equal(positions, expected[:, 0].numpy())


def test_mrope_positions_of_adjacent_images_and_misfits() -> None:
    positions = mrope_positions(np.array([1, 9, 9, 9, 9, 9, 2]), [(1, 2, 2), (1, 4, 4)], image_token_id=9)
    assert positions.tolist() == [[0, 1, 2, 2, 2, 2, 4], [0, 1, 2, 2, 3, 3, 4], [0, 1, 2, 3, 2, 3, 4]]
    with pytest.raises(ObservationError, match="2 image placeholders"):
        mrope_positions(np.array([1, 9, 9]), [(1, 4, 4)], image_token_id=9)
    with pytest.raises(ObservationError, match="in a row"):
        mrope_positions(np.array([9, 9, 1, 9, 9]), [(1, 4, 4)], image_token_id=9)
