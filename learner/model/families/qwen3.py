"""Qwen3 dense text models (`Qwen3ForCausalLM`): queries and keys are normalised by head, no projection has a bias."""

from __future__ import annotations

from typing import Any

from vagen.common.errors import ConfigError
from vagen.learner.model.families.base import ModelFamily, WeightRule, decoder_rules
from vagen.learner.model.families.qwen2 import text_mrope_section

__all__ = ["QWEN3", "qwen3_options"]

_PREFIX = "model."


def qwen3_options(text_config: Any) -> dict[str, Any]:
    """Shared by Qwen3-VL's decoder. Raises ConfigError for biases, which no published model has."""
    if text_config.attention_bias:
        raise ConfigError(f"config.json: attention_bias must be false, got {text_config.attention_bias}")
    return {"add_bias_linear": False, "add_qkv_bias": False, "qk_layernorm": True}


def _rules(text_config: Any, tied: bool) -> list[WeightRule]:
    return decoder_rules(text_config, prefix=_PREFIX, tied=tied, qk_norm=True)


QWEN3 = ModelFamily(
    model_type="qwen3",
    text_prefix=_PREFIX,
    text_config=lambda config: config,
    transformer_options=qwen3_options,
    mrope_section=text_mrope_section,
    rules=_rules,
)
