"""Float8 in blocks against transformers' own quantiser, and against the bound of the format."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from transformers.integrations.finegrained_fp8 import Fp8Dequantize, Fp8Quantize

from vagen.common.block_fp8 import dequantise, is_quantised, quantise, scale_shape


def theirs(weight):
    """transformers' (quantised, scales), for whole blocks."""
    config = SimpleNamespace(weight_block_size=(128, 128), scale_fmt="float")
    made = Fp8Quantize(SimpleNamespace(quantization_config=config)).convert({"a.weight": weight})
    return made["a.weight"], made["a.weight_scale_inv"]


def bits(tensor):
    return tensor.contiguous().view(torch.uint8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(128, 128), (256, 384)])
def test_whole_blocks_are_transformers_to_the_bit(shape, dtype):
    weight = torch.randn(shape) * torch.logspace(-6, 3, shape[1])
    weight[:128, :128] = 0
    weight = weight.to(dtype)
    quantised, scale = quantise(weight)
    their_quantised, their_scale = theirs(weight)
    assert torch.equal(bits(quantised), bits(their_quantised)) and torch.equal(scale, their_scale)
    expected = Fp8Dequantize(None)._dequantize_one(their_quantised, their_scale, dtype)
    assert torch.equal(dequantise(quantised, scale, dtype), expected)


@pytest.mark.parametrize("shape", [(1, 1), (130, 200), (64, 300), (129, 128)])
def test_cut_blocks_are_whole_ones_with_zeros(shape):
    weight = torch.randn(shape)
    whole = torch.zeros([128 * count for count in scale_shape(shape)])
    whole[: shape[0], : shape[1]] = weight
    quantised, scale = quantise(weight)
    their_quantised, their_scale = theirs(whole)
    assert quantised.shape == weight.shape and torch.equal(scale, their_scale)
    assert torch.equal(bits(quantised), bits(their_quantised[: shape[0], : shape[1]]))


def test_what_comes_back_is_within_the_bound_of_the_format():
    weight = torch.randn(300, 500) * torch.logspace(-4, 2, 500)
    quantised, scale = quantise(weight)
    error = (dequantise(quantised, scale, torch.float32) - weight).abs()
    # Three bits behind the point; below 2**-6 of a block's scale, steps of 2**-9.
    step = scale.repeat_interleave(128, 0).repeat_interleave(128, 1)[:300, :500]
    assert (error <= torch.maximum(weight.abs() * 2**-4, step * 2**-10) * 1.001).all()
    assert error.max() > 0


@pytest.mark.parametrize(
    ("name", "shape", "goes"),
    [
        ("model.layers.0.self_attn.q_proj.weight", (4, 4), True),
        ("model.layers.11.mlp.experts.3.down_proj.weight", (4, 4), True),
        ("model.layers.0.self_attn.q_proj.bias", (4,), False),
        ("model.layers.0.input_layernorm.weight", (4,), False),
        ("model.embed_tokens.weight", (4, 4), False),
        ("lm_head.weight", (4, 4), False),
        ("visual.blocks.0.mlp.down_proj.weight", (4, 4), False),
    ],
)
def test_matrices_of_the_decoders_layers_go_in_float8(name, shape, goes):
    assert is_quantised(name, shape) is goes
