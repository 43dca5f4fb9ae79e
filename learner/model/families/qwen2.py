"""Qwen2 and Qwen2.5 text models (`Qwen2ForCausalLM`)."""

from __future__ import annotations

from typing import Any

from vagen.learner.model.families.base import ModelFamily, WeightRule, decoder_rules

__all__ = ["QWEN2", "qwen2_options", "text_mrope_section"]

_PREFIX = "model."


def qwen2_options(text_config: Any) -> dict[str, Any]:
    """Biases on q, k and v only; shared by Qwen2.5-VL's decoder."""
    del text_config
    return {"add_bias_linear": False, "add_qkv_bias": True}


def text_mrope_section(text_config: Any) -> list[int]:
    """Any split will do: the three axes of a text row are equal. One axis takes all."""
    head_dim = getattr(text_config, "head_dim", None) or text_config.hidden_size // text_config.num_attention_heads
    return [head_dim // 2, 0, 0]


def _rules(text_config: Any, tied: bool) -> list[WeightRule]:
    return decoder_rules(text_config, prefix=_PREFIX, tied=tied, qkv_bias=True)


QWEN2 = ModelFamily(
    model_type="qwen2",
    text_prefix=_PREFIX,
    text_config=lambda config: config,
    transformer_options=qwen2_options,
    mrope_section=text_mrope_section,
    rules=_rules,
)
