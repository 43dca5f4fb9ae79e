"""Qwen3-VL-MoE (`Qwen3VLMoeForConditionalGeneration`): Qwen3-VL with a mixture of experts in every decoder layer.

Experts are chosen by the softmax of all, and weighted by that of the chosen. No load-balancing loss is added, as
transformers adds none unless asked to.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers.models.qwen3_vl_moe.modeling_qwen3_vl_moe import Qwen3VLMoeVisionModel

from vagen.common.errors import ConfigError
from vagen.learner.model.families.base import Layout, ModelFamily, WeightRule, decoder_rules
from vagen.learner.model.families.qwen3 import qwen3_options

__all__ = ["QWEN3_VL_MOE"]

_TEXT_PREFIX = "model.language_model."
_GATE_UP, _DOWN = "mlp.experts.gate_up_proj", "mlp.experts.down_proj"


def _options(text_config: Any) -> dict[str, Any]:
    """Raises ConfigError where some layers have no experts, which no published model has."""
    if text_config.mlp_only_layers:
        raise ConfigError(f"config.json: mlp_only_layers must be empty, got {text_config.mlp_only_layers}")
    if text_config.decoder_sparse_step != 1:
        raise ConfigError(f"config.json: decoder_sparse_step must be 1, got {text_config.decoder_sparse_step}")
    return qwen3_options(text_config) | {
        "num_moe_experts": text_config.num_experts,
        "moe_ffn_hidden_size": text_config.moe_intermediate_size,
        "moe_router_topk": text_config.num_experts_per_tok,
        "moe_router_load_balancing_type": "none",
    }


def _rules(text_config: Any, tied: bool) -> list[WeightRule]:
    def mlp_rules(hf: str, megatron: str) -> list[WeightRule]:
        experts = range(text_config.num_experts)
        local = f"{megatron}mlp.experts.local_experts."
        return [
            WeightRule(f"{megatron}mlp.router.weight", (f"{hf}mlp.gate.weight",)),
            *(
                WeightRule(f"{local}{e}.linear_fc1.weight", (hf + _GATE_UP,), Layout.FUSED_GATE_UP, tp_dim=0, expert=e)
                for e in experts
            ),
            *(WeightRule(f"{local}{e}.linear_fc2.weight", (hf + _DOWN,), tp_dim=1, expert=e) for e in experts),
        ]

    return decoder_rules(text_config, prefix=_TEXT_PREFIX, tied=tied, qk_norm=True, mlp_rules=mlp_rules)


def _from_disk(text_config: Any, name: str, tensor: Tensor) -> Tensor:
    """Files on the hub hold an expert's matrices transposed, those that transformers writes do not."""
    width, inner = text_config.hidden_size, text_config.moe_intermediate_size
    for suffix, shape in ((_GATE_UP, (2 * inner, width)), (_DOWN, (width, inner))):
        if name.endswith(suffix) and tensor.shape[1:] != shape and tensor.shape[:0:-1] == shape:
            return tensor.transpose(1, 2)
    return tensor


QWEN3_VL_MOE = ModelFamily(
    model_type="qwen3_vl_moe",
    text_prefix=_TEXT_PREFIX,
    vision_prefix="model.visual.",
    vision=lambda config: Qwen3VLMoeVisionModel._from_config(config.vision_config),
    text_config=lambda config: config.text_config,
    transformer_options=_options,
    mrope_section=lambda text_config: list(text_config.rope_parameters["mrope_section"]),
    interleaved_mrope=True,
    num_deepstack=lambda config: len(config.vision_config.deepstack_visual_indexes),
    rules=_rules,
    from_disk=_from_disk,
)
