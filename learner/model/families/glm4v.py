"""GLM-4.1V and GLM-4.6V, dense (`Glm4vForConditionalGeneration`, `Glm46VForConditionalGeneration`): norms before and
behind attention and MLP, biases on q, k and v, M-RoPE over part of a head in neighbouring channels, and a vision tower.

Names on the hub are those of transformers' state dict.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from transformers.models.glm4v.modeling_glm4v import Glm4vVisionModel

from vagen.common.errors import ConfigError
from vagen.learner.model.families.base import Layout, ModelFamily, WeightRule, decoder_rules
from vagen.learner.model.families.qwen2 import qwen2_options

__all__ = ["GLM46V", "GLM4V"]

_TEXT_PREFIX = "model.language_model."


def _options(text_config: Any) -> dict[str, Any]:
    """Those of Qwen2's decoder. Raises ConfigError for a mixture of experts."""
    if text_config.model_type != "glm4v_text":
        raise ConfigError(f"config.json: text_config.model_type must be 'glm4v_text', got {text_config.model_type!r}")
    return qwen2_options(text_config)


def _rotary_dim(text_config: Any) -> int:
    head_dim = text_config.hidden_size // text_config.num_attention_heads
    return int(head_dim * text_config.rope_parameters.get("partial_rotary_factor", 1.0))


def _mlp_rules(hf: str, megatron: str) -> list[WeightRule]:
    return [
        WeightRule(
            f"{megatron}mlp.linear_fc1.weight", (f"{hf}mlp.gate_up_proj.weight",), Layout.FUSED_GATE_UP, tp_dim=0
        ),
        WeightRule(f"{megatron}mlp.linear_fc2.weight", (f"{hf}mlp.down_proj.weight",), tp_dim=1),
        WeightRule(f"{megatron}mlp.linear_fc2.post_norm.weight", (f"{hf}post_mlp_layernorm.weight",)),
        WeightRule(f"{megatron}self_attention.linear_proj.post_norm.weight", (f"{hf}post_self_attn_layernorm.weight",)),
    ]


def _rules(text_config: Any, tied: bool) -> list[WeightRule]:
    rules = decoder_rules(text_config, prefix=_TEXT_PREFIX, tied=tied, qkv_bias=True, mlp_rules=_mlp_rules)
    rotary_dim = _rotary_dim(text_config)
    return [
        replace(rule, layout=Layout.PAIRED_QKV, rotary_dim=rotary_dim) if rule.layout is Layout.QKV else rule
        for rule in rules
    ]


GLM4V = ModelFamily(
    model_type="glm4v",
    text_prefix=_TEXT_PREFIX,
    vision_prefix="model.visual.",
    vision=lambda config: Glm4vVisionModel._from_config(config.vision_config),
    text_config=lambda config: config.text_config,
    transformer_options=_options,
    mrope_section=lambda text_config: list(text_config.rope_parameters["mrope_section"]),
    rotary_dim=_rotary_dim,
    post_norms=True,
    rules=_rules,
)
GLM46V = replace(GLM4V, model_type="glm46v")
