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
from megatron.core.tensor_parallel.layers import RowParallelLinear
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from vagen.common.errors import ConfigError
from vagen.learner.model.attention import SegmentedLayer, SegmentedSDPAttention
from vagen.learner.model.context_attention import ContextSDPAttention
from vagen.learner.model.deepstack import DeepstackLayer

__all__ = [
    "PostNormLinear",
    "decoder_layer_spec",
    "decoder_spec",
    "require_transformer_engine",
    "uses_transformer_engine",
]


class PostNormLinear(RowParallelLinear):
    """A row-parallel linear layer whose sum over ranks is normalised."""

    def __init__(self, input_size: int, output_size: int, *, config: TransformerConfig, **more: Any) -> None:
        super().__init__(input_size, output_size, config=config, **more)
        self.post_norm = WrappedTorchNorm(config, output_size, eps=config.layernorm_epsilon)

    def forward(self, input_: Tensor) -> tuple[Tensor, Tensor | None]:
        """As `RowParallelLinear.forward`."""
        output, bias = super().forward(input_)
        return self.post_norm(output), bias


def uses_transformer_engine(*, post_norms: bool = False) -> bool:
    """True where Transformer Engine and CUDA are both there, and the decoder has no norms that it lacks."""
    if post_norms or not torch.cuda.is_available():
        return False
    from megatron.core.extensions.transformer_engine import HAVE_TE

    return bool(HAVE_TE)


def require_transformer_engine() -> None:
    """Raises ConfigError on a GPU without Transformer Engine."""
    if torch.cuda.is_available() and not uses_transformer_engine():
        raise ConfigError(
            "this process has a GPU, but Transformer Engine cannot be imported: install the extra `gpu`, or set "
            "$.learner.require_transformer_engine to false for torch's attention"
        )


def decoder_layer_spec(
    config: TransformerConfig, *, transformer_engine: bool, deepstack: bool, post_norms: bool = False
) -> ModuleSpec:
    """Layer spec for `config`; with `deepstack` the layers add features of inner vision blocks. `post_norms` normalise
    what attention and MLP add, which only megatron's own modules do here."""
    assert not (transformer_engine and post_norms)
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
    attention = ContextSDPAttention if config.context_parallel_size > 1 else SegmentedSDPAttention
    spec.submodules.self_attention.submodules.core_attention = attention
    if post_norms:
        spec.submodules.self_attention.submodules.linear_proj = PostNormLinear
        spec.submodules.mlp.submodules.linear_fc2 = PostNormLinear
    if config.sequence_parallel:
        spec.submodules.input_layernorm = spec.submodules.pre_mlp_layernorm = ShardedRMSNorm
        if config.qk_layernorm:
            heads = spec.submodules.self_attention.submodules
            heads.q_layernorm = heads.k_layernorm = ShardedRMSNorm
    return spec


def decoder_spec(config: TransformerConfig, layer: ModuleSpec, *, transformer_engine: bool) -> Any:
    """Spec of this stage's layers, and of the norm behind the last."""
    if transformer_engine or not config.sequence_parallel:
        return layer
    layers = [layer] * get_num_layers_to_build(config)
    return TransformerBlockSubmodules(layer_specs=layers, layer_norm=ShardedRMSNorm)


class ShardedRMSNorm(torch.nn.RMSNorm):
    """torch's norm for sequence parallelism, which megatron's wrapper of it refuses. Its weight says that each
    tensor-parallel rank sees a part of the tokens, so that megatron adds up its gradients."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__(hidden_size, eps=eps)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
