"""Mixtures of experts: what the parity tests notice, the hub's layout of experts, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from megatron.core import parallel_state
from safetensors.torch import load_file, save_file
from torch import Tensor

from vagen.common.errors import ConfigError
from vagen.learner.model.actor_critic import VisionLanguageActorCritic
from vagen.learner.model.batch import PackedBatch

Pack = Callable[..., PackedBatch]


def test_what_experts_are_chosen_and_what_they_are_matters(save_qwen3_vl_moe: Any, vl_rows: Any, pack: Pack) -> None:
    _, directory = save_qwen3_vl_moe()
    model, batch = VisionLanguageActorCritic.load_hf(directory), pack(vl_rows)
    mlp: Any = model.language_model.decoder.layers[1].mlp
    first, second, *_ = mlp.experts.local_experts
    with torch.no_grad():
        right = model(batch).logprobs
        gate, up = first.linear_fc1.weight.chunk(2)
        for tensor, wrong in (
            (mlp.router.weight, mlp.router.weight.roll(1, 0)),
            (first.linear_fc1.weight, second.linear_fc1.weight),
            (first.linear_fc1.weight, torch.cat((up, gate))),
            (first.linear_fc2.weight, second.linear_fc2.weight),
        ):
            kept = tensor.clone()
            tensor.copy_(wrong.clone())
            assert (model(batch).logprobs - right).abs().max() > 1e-4
            tensor.copy_(kept)
        assert torch.equal(model(batch).logprobs, right)


def test_experts_are_read_as_the_hub_holds_them(save_qwen3_vl_moe: Any) -> None:
    """Transposed, which transformers turns when it reads and not when it writes."""
    hf, directory = save_qwen3_vl_moe()
    file = directory / "model.safetensors"
    state = load_file(file)
    turned = {k: v.transpose(1, 2).contiguous() if ".mlp.experts." in k else v for k, v in state.items()}
    save_file(turned, file)
    loaded = VisionLanguageActorCritic.load_hf(directory).export_hf_state()
    theirs = type(hf).from_pretrained(directory).state_dict()
    expected: dict[str, Tensor] = hf.state_dict()
    assert set(loaded) == set(expected)
    assert all(
        torch.equal(loaded[name], tensor) and torch.equal(theirs[name], tensor) for name, tensor in expected.items()
    )


@pytest.mark.parametrize("change", [{"mlp_only_layers": [1]}, {"decoder_sparse_step": 2}])
def test_layers_without_experts_are_refused(save_qwen3_vl_moe: Any, change: dict[str, Any]) -> None:
    _, directory = save_qwen3_vl_moe()
    config = json.loads((directory / "config.json").read_text())
    config["text_config"] |= change
    (directory / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=f"config.json: {next(iter(change))} must be"):
        VisionLanguageActorCritic.load_hf(directory)


def test_shards_that_see_the_same_tokens_are_refused(save_qwen3_vl_moe: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    _, directory = save_qwen3_vl_moe()
    monkeypatch.setattr(parallel_state, "get_tensor_model_parallel_world_size", lambda: 2)
    with pytest.raises(ConfigError, match="sequence_parallel: expected true for a mixture of experts"):
        VisionLanguageActorCritic.load_hf(directory)
