"""Loading, exporting and saving weights: exact round trips, names, and refusals."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer

from vagen.common.errors import CheckpointError, ConfigError
from vagen.common.towers import image_spec
from vagen.common.vision import ImageSpec
from vagen.learner.config import ModelConfig
from vagen.learner.model.actor_critic import VisionLanguageActorCritic
from vagen.learner.model.tiny import save_tiny_model

FAMILIES = ["qwen2", "vl", "qwen3", "qwen3_vl", "qwen3_vl_moe", "glm4v", "internvl"]
"""Fixtures `save_*` of tiny models."""


def _assert_equal(state: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert set(state) == set(expected)
    for name, tensor in expected.items():
        assert torch.equal(state[name], tensor), name


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
def test_round_trip_is_exact(request: pytest.FixtureRequest, family: str, tied: bool) -> None:
    hf, directory = request.getfixturevalue(f"save_{family}")(tied=tied)
    _assert_equal(VisionLanguageActorCritic.load_hf(directory).export_hf_state(), hf.state_dict())


def test_both_name_styles_and_sharded_files_load(save_vl: Any) -> None:
    hf, directory = save_vl()
    state = {name: tensor.contiguous() for name, tensor in hf.state_dict().items()}
    save_file(state, directory / "model.safetensors")
    _assert_equal(VisionLanguageActorCritic.load_hf(directory).export_hf_state(), hf.state_dict())
    (directory / "model.safetensors").unlink()
    names = sorted(state)
    files = {"a.safetensors": names[:20], "b.safetensors": names[20:]}
    for file, part in files.items():
        save_file({name: state[name] for name in part}, directory / file)
    weight_map = {name: file for file, part in files.items() for name in part}
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    _assert_equal(VisionLanguageActorCritic.load_hf(directory).export_hf_state(), hf.state_dict())


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
def test_engine_names(request: pytest.FixtureRequest, family: str, tied: bool) -> None:
    hf, directory = request.getfixturevalue(f"save_{family}")(tied=tied)
    model = VisionLanguageActorCritic.load_hf(directory)
    named = model.engine_named_tensors()
    # What SGLang lists for this model: transformers' parameters under the hub's names, a tied head not repeated.
    # (SGLang has none for InternVL's in transformers' format: the local engine's.)
    expected = {
        re.sub(r"^model\.(vision_tower|multi_modal_projector)\.", r"visual.\1.", name)
        .replace("model.language_model.", "model.")
        .replace("model.visual.", "visual."): p
        for name, p in hf.named_parameters()
    }
    names = [name for name, _ in named]
    assert sorted(names) == sorted(expected)
    assert names == sorted(names, key=lambda name: ("visual", "model", "lm_head").index(name.split(".")[0]))
    assert names == [name for name, _ in model.engine_named_tensors()]
    for name, tensor in named:
        assert torch.equal(tensor, expected[name]) and tensor.is_contiguous()
    assert ("lm_head.weight" in dict(named)) is not tied
    assert "lm_head.weight" in dict(model.engine_named_tensors(include_tied_head=True))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert all(tensor.any() for _, tensor in named), "an exported tensor shares memory with the model"


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("family", ["vl", "qwen3_vl", "qwen3_vl_moe", "glm4v", "internvl"])
def test_saved_directory_is_complete(request: pytest.FixtureRequest, tmp_path: Path, family: str, tied: bool) -> None:
    hf, directory = request.getfixturevalue(f"save_{family}")(tied=tied)
    model = VisionLanguageActorCritic.load_hf(directory)
    assert not model.value_head.weight.any()
    torch.nn.init.normal_(model.value_head.weight)
    model.save_hf(tmp_path / "saved")
    _assert_equal(type(hf).from_pretrained(tmp_path / "saved").state_dict(), hf.state_dict())
    again = VisionLanguageActorCritic.load_hf(tmp_path / "saved")
    _assert_equal(again.export_hf_state(), hf.state_dict())
    assert torch.equal(again.value_head.weight, model.value_head.weight)
    assert image_spec(tmp_path / "saved") == image_spec(directory)
    assert (tmp_path / "saved" / "chat_template.jinja").read_text() == "{{ messages }}"
    with pytest.raises(CheckpointError, match="already exists"):
        model.save_hf(tmp_path / "saved")


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_text_model_saves_what_transformers_loads(request: pytest.FixtureRequest, tmp_path: Path, family: str) -> None:
    hf, directory = request.getfixturevalue(f"save_{family}")(tied=True)
    VisionLanguageActorCritic.load_hf(directory).save_hf(tmp_path / "saved")
    _assert_equal(type(hf).from_pretrained(tmp_path / "saved").state_dict(), hf.state_dict())


def test_weights_that_do_not_fit_are_refused(save_vl: Any) -> None:
    _, directory = save_vl()
    state = load_file(directory / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    save_file({k: v for k, v in state.items() if k != name}, directory / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"layers\.1\.mlp\.up_proj"):
        VisionLanguageActorCritic.load_hf(directory)
    save_file(state | {"model.norm.weight": torch.ones(3)}, directory / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"norm\.weight: \[3\]"):
        VisionLanguageActorCritic.load_hf(directory)
    save_file(state | {"visual.merger.ln_q.weight": torch.ones(3)}, directory / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"merger\.ln_q"):
        VisionLanguageActorCritic.load_hf(directory)
    (directory / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"model\.safetensors: no such file"):
        VisionLanguageActorCritic.load_hf(directory)


def test_unsupported_models_are_refused(save_qwen2: Any, tmp_path: Path) -> None:
    _, directory = save_qwen2()
    config = json.loads((directory / "config.json").read_text())
    for change, message in (
        ({"model_type": "no_such_model"}, "no_such_model.*supported: glm46v, glm4v, internvl, "),
        ({"model_type": "qwen3_5"}, "'qwen3_5' is not supported: most of its layers are gated delta nets"),
        ({"model_type": "qwen3_moe"}, "'qwen3_moe' is not supported: of mixtures of experts only Qwen3-VL-MoE's"),
        ({"model_type": "gpt2"}, "gpt2.*supported: .*internvl, qwen2, qwen2_5_vl, qwen3, qwen3_vl, qwen3_vl_moe"),
        (
            {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 1, "layer_types": None},
            "sliding-window",
        ),
        ({"attention_dropout": 0.1}, "attention_dropout must be 0, got 0.1"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"rope_parameters": {"rope_type": "linear", "rope_theta": 1e6, "factor": 2.0}}, "rope_type"),
    ):
        (directory / "config.json").write_text(json.dumps(config | change))
        with pytest.raises(ConfigError, match=message):
            VisionLanguageActorCritic.load_hf(directory)
    with pytest.raises(ConfigError, match=r"config\.json: no such file"):
        VisionLanguageActorCritic.load_hf(tmp_path / "nothing")


@pytest.mark.parametrize("family", ["qwen3", "qwen3_vl"])
def test_a_qwen3_with_settings_that_would_train_another_model_is_refused(
    request: pytest.FixtureRequest, family: str
) -> None:
    _, directory = request.getfixturevalue(f"save_{family}")()
    config = json.loads((directory / "config.json").read_text())
    text = config.get("text_config", config)
    text["attention_bias"] = True
    (directory / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match="attention_bias must be false"):
        VisionLanguageActorCritic.load_hf(directory)
    if "vision_config" in config:
        text["attention_bias"] = False
        config["vision_config"]["deepstack_visual_indexes"] = [0, 1, 2]
        (directory / "config.json").write_text(json.dumps(config))
        with pytest.raises(ConfigError, match="3 deepstack_visual_indexes for 3 decoder layers"):
            VisionLanguageActorCritic.load_hf(directory)


def _tokenizer(special: list[str]) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        ["Move to the goal."],
        trainers.BpeTrainer(vocab_size=261, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False),
    )
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in special])
    return tokenizer


SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>"]


def test_tiny_model(tmp_path: Path) -> None:
    tokenizer = _tokenizer([*SPECIAL, "<|video_pad|>"])
    directory = save_tiny_model(ModelConfig(vocab_multiple=384), tokenizer, tmp_path / "tiny")
    model = VisionLanguageActorCritic.load_hf(directory)
    assert sum(p.numel() for p in model.parameters()) == pytest.approx(0.70e6, rel=0.01)
    assert model.hf_config.image_token_id == tokenizer.token_to_id("<|image_pad|>")
    assert model.hf_config.text_config.vocab_size == 384
    assert model.hf_config.text_config.rope_parameters["mrope_section"] == [4, 6, 6]
    loaded = AutoTokenizer.from_pretrained(directory)
    assert loaded("goal")["input_ids"] == tokenizer.encode("goal").ids
    assert loaded.eos_token == "<|im_end|>"
    assert ImageSpec.load(directory).max_pixels == 28 * 28 * 64
    save_tiny_model(ModelConfig(vocab_multiple=384), tokenizer, tmp_path / "same")
    _assert_equal(load_file(tmp_path / "same/model.safetensors"), load_file(directory / "model.safetensors"))
    save_tiny_model(ModelConfig(vocab_multiple=384), tokenizer, tmp_path / "other", seed=1)
    other = load_file(tmp_path / "other/model.safetensors")
    assert not torch.equal(other["model.embed_tokens.weight"], model.export_hf_state()["lm_head.weight"])
    with pytest.raises(ConfigError, match="video_pad"):
        save_tiny_model(ModelConfig(), _tokenizer(SPECIAL), tmp_path / "bad")
    with pytest.raises(ConfigError, match="num_kv_heads"):
        ModelConfig(num_heads=4, num_kv_heads=3)
