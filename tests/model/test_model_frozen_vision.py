"""Parts of the vision module that are kept as loaded, and features that are known already, in every family."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from vagen.learner.model.actor_critic import VisionLanguageActorCritic
from vagen.learner.model.gpt import ModelOptions

FAMILIES = ["vl", "qwen3_vl", "qwen3_vl_moe", "internvl"]


@pytest.mark.parametrize("family", FAMILIES)
def test_tower_and_projector_are_all_of_the_vision_module(request: Any, family: str) -> None:
    _, directory = request.getfixturevalue(f"save_{family}")()
    learning = {}
    for frozen in ("tower", "projector"):
        visual = VisionLanguageActorCritic.load_hf(directory, ModelOptions(freeze_vision=frozen)).visual
        assert visual is not None
        learning[frozen] = {name for name, x in visual.named_parameters() if x.requires_grad}
        everything = {name for name, _ in visual.named_parameters()}
    assert learning["tower"] and learning["projector"]
    assert learning["tower"] == everything - learning["projector"]
    assert all("merger" in name or "projector" in name for name in learning["tower"])
    assert not any("merger" in name or "projector" in name for name in learning["projector"])


@pytest.mark.parametrize("family", ["vl", "qwen3_vl"])
def test_known_features_stand_for_patches_to_the_bit(request: Any, vl_rows: Any, pack: Any, family: str) -> None:
    _, directory = request.getfixturevalue(f"save_{family}")()
    model, batch = VisionLanguageActorCritic.load_hf(directory), pack(vl_rows)
    images = replace(batch.images, index=torch.tensor([0, 1, 2, 3]))
    with torch.no_grad():
        expected = model(replace(batch, images=images)).logprobs
        known = replace(images, features=model.image_encoder.encode(images), patches=images.patches[:0])
        assert torch.equal(model(replace(batch, images=known)).logprobs, expected)
        others = replace(known, features=known.features + 1)
        assert not torch.equal(model(replace(batch, images=others)).logprobs, expected)
