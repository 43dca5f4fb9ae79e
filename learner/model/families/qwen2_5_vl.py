"""Qwen2.5-VL (`Qwen2_5_VLForConditionalGeneration`): Qwen2.5's decoder with M-RoPE, and a vision tower."""

from __future__ import annotations

from typing import Any

from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VisionTransformerPretrainedModel

from vagen.learner.model.families.base import ModelFamily, WeightRule, decoder_rules
from vagen.learner.model.families.qwen2 import qwen2_options

__all__ = ["QWEN2_5_VL"]

_TEXT_PREFIX, _VISION_PREFIX = "model.language_model.", "model.visual."


def _rules(text_config: Any, tied: bool) -> list[WeightRule]:
    return decoder_rules(text_config, prefix=_TEXT_PREFIX, tied=tied, qkv_bias=True)


QWEN2_5_VL = ModelFamily(
    model_type="qwen2_5_vl",
    text_prefix=_TEXT_PREFIX,
    vision_prefix=_VISION_PREFIX,
    vision=lambda config: Qwen2_5_VisionTransformerPretrainedModel._from_config(config.vision_config),
    disk_prefixes={_TEXT_PREFIX: "model.", _VISION_PREFIX: "visual."},
    text_config=lambda config: config.text_config,
    transformer_options=qwen2_options,
    mrope_section=lambda text_config: list(text_config.rope_parameters["mrope_section"]),
    rules=_rules,
)
