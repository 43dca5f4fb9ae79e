"""What SGLang holds on each rank, put together by hand: its checksums match, and no change of a weight escapes."""

from __future__ import annotations

import hashlib

import pytest
import torch

from vagen.common.errors import BroadcastError
from vagen.learner.engine_checksums import can_compare, missing_names, require_equal

SGLANG = {"device": "cpu"}


@pytest.fixture
def weights():
    """4 query heads and 2 key/value heads of width 2, a vocabulary of 70, a fused vision projection."""
    shapes = {
        "model.embed_tokens.weight": (70, 8),
        "model.layers.0.self_attn.q_proj.weight": (8, 8),
        "model.layers.0.self_attn.k_proj.weight": (4, 8),
        "model.layers.0.self_attn.v_proj.weight": (4, 8),
        "model.layers.0.self_attn.o_proj.weight": (8, 8),
        "model.layers.0.mlp.gate_proj.weight": (12, 8),
        "model.layers.0.mlp.up_proj.weight": (12, 8),
        "model.norm.weight": (8,),
        "visual.blocks.0.attn.qkv.bias": (24,),
    }
    torch.manual_seed(0)
    return {name: torch.randn(shape) for name, shape in shapes.items()}


def held_by(weights, rank, size):
    """What one rank of SGLang holds, written out case by case."""

    def rows(name):
        part = weights[name]
        step = part.shape[0] // size
        return part[rank * step : (rank + 1) * step]

    attention, mlp = "model.layers.0.self_attn.", "model.layers.0.mlp."
    embedding = torch.cat([weights["model.embed_tokens.weight"], torch.zeros(58, 8)])
    vision = weights["visual.blocks.0.attn.qkv.bias"]
    step = 8 // size
    return {
        "model.embed_tokens.weight": embedding[rank * 128 // size : (rank + 1) * 128 // size],
        attention + "qkv_proj.weight": torch.cat([rows(attention + f"{part}_proj.weight") for part in "qkv"]),
        attention + "o_proj.weight": weights[attention + "o_proj.weight"][:, rank * step : (rank + 1) * step],
        mlp + "gate_up_proj.weight": torch.cat([rows(mlp + "gate_proj.weight"), rows(mlp + "up_proj.weight")]),
        "model.norm.weight": weights["model.norm.weight"],
        "visual.blocks.0.attn.qkv_proj.bias": torch.cat(
            [vision[8 * part + rank * step : 8 * part + (rank + 1) * step] for part in range(3)]
        ),
        "model.layers.0.self_attn.rotary_emb.axis_map": torch.zeros(3),
    }


def answer_of(weights, size):
    """Of `/weights_checker`."""
    return {
        "ranks": [
            {
                "parallelism_info": [{"tp_rank": rank, "tp_size": size}],
                "checksums": {
                    name: hashlib.sha256(tensor.contiguous().numpy().tobytes()).hexdigest()[:16]
                    for name, tensor in held_by(weights, rank, size).items()
                },
            }
            for rank in range(size)
        ]
    }


@pytest.mark.parametrize("size", [1, 2])
def test_equal_weights_pass_and_any_changed_one_is_named(weights, size):
    answer = answer_of(weights, size)
    require_equal(SGLANG, answer, list(weights.items()), {})
    for name in weights:
        changed = dict(weights)
        changed[name] = weights[name].clone()
        changed[name].view(-1)[-1] += 1
        with pytest.raises(BroadcastError, match="tensors differ") as raised:
            require_equal(SGLANG, answer, list(changed.items()), {})
        # Tensors that are fused in the engine cannot be told apart.
        assert str(raised.value).rpartition("first ")[2].split(".")[:-2] == name.split(".")[:-2]


def test_ranks_in_another_order_do_not_pass(weights):
    answer = answer_of(weights, 2)
    for place, rank in zip((1, 0), answer["ranks"], strict=True):
        rank["parallelism_info"][0]["tp_rank"] = place
    with pytest.raises(BroadcastError):
        require_equal(SGLANG, answer, list(weights.items()), {})


def test_more_ranks_than_key_value_heads_hold_the_same_ones(weights):
    name = "model.layers.0.self_attn.qkv_proj.weight"
    query, key, value = (weights[name.replace("qkv", part)] for part in "qkv")
    rank = {
        "parallelism_info": [{"tp_rank": 3, "tp_size": 4}],
        "checksums": {
            name: hashlib.sha256(torch.cat([query[6:8], key[2:4], value[2:4]]).numpy().tobytes()).hexdigest()[:16]
        },
    }
    published = {name.replace("qkv", part): weights[name.replace("qkv", part)] for part in "qkv"}
    require_equal(SGLANG, {"ranks": [rank]}, list(published.items()), {})


def test_names_without_a_counterpart(weights):
    answer = answer_of(weights, 1)
    assert missing_names(answer, list(weights)) == []
    assert missing_names(answer, [*weights, "model.other.weight", "lm_head.weight"]) == ["model.other.weight"]
    with pytest.raises(BroadcastError, match="first model.other.weight"):
        require_equal(SGLANG, answer, [*weights.items(), ("model.other.weight", torch.zeros(1))], {})


def test_what_can_be_compared():
    assert can_compare({"kind": "local", "device": "cuda:0"}) and can_compare(SGLANG)
    assert not can_compare({"device": "cuda"})
