"""GLM-4.1V and GLM-4.6V: pictures against transformers' processors, and what the parity tests notice."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers.models.glm4v.image_processing_pil_glm4v import Glm4vImageProcessorPil
from transformers.models.glm46v.image_processing_pil_glm46v import Glm46VImageProcessorPil

from vagen.common.errors import ConfigError, ObservationError
from vagen.common.glm import GlmImageSpec
from vagen.common.grids import image_geometry
from vagen.common.towers import image_spec
from vagen.common.vocabulary import vision_tokens
from vagen.learner.model.actor_critic import VisionLanguageActorCritic
from vagen.learner.model.batch import PackedBatch
from vagen.learner.model.gpt import ModelOptions
from vagen.learner.model.lora import AdapterOptions

Pack = Callable[..., PackedBatch]


@pytest.mark.parametrize("processor_class", [Glm4vImageProcessorPil, Glm46VImageProcessorPil])
def test_patches_equal_transformers(tmp_path: Path, processor_class: Any) -> None:
    """Sizes below a placeholder, between the bounds, and above them, which count both frames of a patch."""
    processor = processor_class(size={"shortest_edge": 6272, "longest_edge": 40_000})
    processor.save_pretrained(tmp_path)
    spec, geometry = image_spec(tmp_path), image_geometry(tmp_path)
    assert isinstance(spec, GlmImageSpec)
    for width, height in ((56, 56), (20, 70), (9, 300), (28, 29), (150, 100), (500, 333), (57, 111)):
        pixels = np.random.default_rng(width).integers(0, 256, (height, width, 3), dtype=np.uint8)
        picture = Image.fromarray(pixels)
        reference = processor(images=[picture], return_tensors="pt")
        encoded = io.BytesIO()
        picture.save(encoded, "PNG")
        patches, grid = spec.preprocess(encoded.getvalue())
        assert list(grid) == reference["image_grid_thw"][0].tolist(), (width, height)
        assert torch.equal(patches, reference["pixel_values"])
        assert geometry.grid_thw((width, height)) == grid
    with pytest.raises(ObservationError, match="aspect ratio"):
        geometry.grid_thw((30, 30 * 201))


def test_the_policy_never_samples_what_stands_around_a_picture(save_glm4v: Any) -> None:
    _, directory = save_glm4v()
    found = vision_tokens(directory)
    assert found is not None and found.image_token_id == 500
    # Image, video, and start and end of either (of a video by transformers' default).
    assert set(found.forbidden_token_ids) == {500, 501, 502, 503, 151341, 151342}


def test_norms_halves_and_channels_matter(save_glm4v: Any, vl_rows: Any, pack: Pack) -> None:
    hf, directory = save_glm4v()
    model, batch = VisionLanguageActorCritic.load_hf(directory), pack(vl_rows)
    layer: Any = model.language_model.decoder.layers[0]
    attention, mlp = layer.self_attention, layer.mlp
    gate, up = mlp.linear_fc1.weight.chunk(2)
    # Queries and keys as HF has them, their neighbouring channels not brought apart.
    prefix = "model.language_model.layers.0.self_attn."
    parts = [hf.state_dict()[f"{prefix}{x}_proj.weight"].reshape(2, -1, 32, 128) for x in "qkv"]
    unturned = torch.cat(parts, 1).reshape(-1, 128)
    visual: Any = model.visual
    with torch.no_grad():
        right = model(batch).logprobs
        for tensor, wrong in (
            (attention.linear_proj.post_norm.weight, torch.ones(128)),
            (mlp.linear_fc2.post_norm.weight, attention.linear_proj.post_norm.weight),
            (mlp.linear_fc1.weight, torch.cat((up, gate))),
            (attention.linear_qkv.weight, unturned),
            (visual.embeddings.position_embedding.weight, visual.embeddings.position_embedding.weight.roll(1, 0)),
            (visual.downsample.weight, visual.downsample.weight.transpose(2, 3)),
        ):
            kept = tensor.clone()
            tensor.copy_(wrong.clone())
            assert (model(batch).logprobs - right).abs().max() > 1e-4
            tensor.copy_(kept)
        assert torch.equal(model(batch).logprobs, right)


def test_a_mixture_of_experts_is_refused(save_glm4v: Any) -> None:
    _, directory = save_glm4v(newer=True)
    config = json.loads((directory / "config.json").read_text())
    config["text_config"]["model_type"] = "glm4v_moe_text"
    (directory / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match="text_config.model_type must be 'glm4v_text', got 'glm4v_moe_text'"):
        VisionLanguageActorCritic.load_hf(directory)


def test_adapters_are_refused(save_glm4v: Any) -> None:
    _, directory = save_glm4v()
    with pytest.raises(ConfigError, match="lora: not available for model_type 'glm4v'"):
        VisionLanguageActorCritic.load_hf(directory, ModelOptions(adapter=AdapterOptions(rank=2, alpha=4.0)))
