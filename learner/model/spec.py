"""Which modules megatron's decoder is made of: Transformer Engine on GPUs that have it, megatron's own elsewhere.

Transformer Engine is decided for at run time and never imported on a host without CUDA, where its import can fail
and would take megatron-core with it.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig

from vagen.learner.model.attention import SegmentedLayer, SegmentedSDPAttention
from vagen.learner.model.deepstack import DeepstackLayer

__all__ = ["decoder_layer_spec", "uses_transformer_engine"]


def uses_transformer_engine() -> bool:
    """True where Transformer Engine and CUDA are both there."""
    if not torch.cuda.is_available():
        return False
    from megatron.core.extensions.transformer_engine import HAVE_TE

    return bool(HAVE_TE)


def decoder_layer_spec(config: TransformerConfig, *, transformer_engine: bool, deepstack: bool) -> ModuleSpec:
    """Layer spec for `config`; with `deepstack` the layers add features of inner vision blocks."""
    spec: Any
    if transformer_engine:
        spec = get_gpt_layer_with_transformer_engine_spec(
            num_experts=config.num_moe_experts, qk_layernorm=config.qk_layernorm
        )
        if deepstack:
            spec.module = DeepstackLayer
        return spec
    spec = get_gpt_layer_local_spec(
        num_experts=config.num_moe_experts, normalization=config.normalization, qk_layernorm=config.qk_layernorm
    )
    spec.module = SegmentedLayer
    spec.submodules.self_attention.submodules.core_attention = SegmentedSDPAttention
    return spec
