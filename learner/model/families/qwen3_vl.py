"""Qwen3-VL (`Qwen3VLForConditionalGeneration`): Qwen3's decoder with interleaved M-RoPE, a vision tower and DeepStack.

Names on the hub are those of transformers' state dict.
"""

from __future__ import annotations

from typing import Any

from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLVisionModel

from vagen.learner.model.families.base import ModelFamily, WeightRule, decoder_rules
from vagen.learner.model.families.qwen3 import qwen3_options

__all__ = ["QWEN3_VL"]

_TEXT_PREFIX = "model.language_model."


def _rules(text_config: Any, tied: bool) -> list[WeightRule]:
    return decoder_rules(text_config, prefix=_TEXT_PREFIX, tied=tied, qk_norm=True)


QWEN3_VL = ModelFamily(
    model_type="qwen3_vl",
    text_prefix=_TEXT_PREFIX,
    vision_prefix="model.visual.",
    vision=lambda config: Qwen3VLVisionModel._from_config(config.vision_config),
    text_config=lambda config: config.text_config,
    transformer_options=qwen3_options,
    mrope_section=lambda text_config: list(text_config.rope_parameters["mrope_section"]),
    interleaved_mrope=True,
    num_deepstack=lambda config: len(config.vision_config.deepstack_visual_indexes),
    rules=_rules,
)
