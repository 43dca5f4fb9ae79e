"""InternVL3 and InternVL3.5 (`InternVLForConditionalGeneration`): InternViT over tiles, pixel shuffle, a projector
and a Qwen2 or Qwen3 decoder with the positions of text.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from vagen.common.errors import ConfigError
from vagen.common.tiles import TiledVision
from vagen.learner.model.families.base import ModelFamily, WeightRule, decoder_rules
from vagen.learner.model.families.qwen2 import qwen2_options, text_mrope_section
from vagen.learner.model.families.qwen3 import qwen3_options

__all__ = ["INTERNVL"]

_TEXT_PREFIX = "model.language_model."
_DECODERS = {"qwen2": qwen2_options, "qwen3": qwen3_options}


def _options(text_config: Any) -> dict[str, Any]:
    """Those of the decoder. Raises ConfigError for another one (GPT-OSS, mixtures of experts)."""
    if text_config.model_type not in _DECODERS:
        raise ConfigError(
            f"config.json: text_config.model_type must be one of {', '.join(_DECODERS)}, got {text_config.model_type!r}"
        )
    return _DECODERS[text_config.model_type](text_config)


def _vision(config: Any) -> nn.Module:
    """Raises ConfigError for dropout, which no published model has."""
    for name in ("attention_dropout", "hidden_dropout_prob", "projection_dropout"):
        if getattr(config.vision_config, name):
            raise ConfigError(f"config.json: vision_config.{name} must be 0, got {getattr(config.vision_config, name)}")
    return TiledVision(config)


def _rules(text_config: Any, tied: bool) -> list[WeightRule]:
    is_qwen2 = text_config.model_type == "qwen2"
    return decoder_rules(text_config, prefix=_TEXT_PREFIX, tied=tied, qkv_bias=is_qwen2, qk_norm=not is_qwen2)


INTERNVL = ModelFamily(
    model_type="internvl",
    text_prefix=_TEXT_PREFIX,
    vision_prefix="model.",
    vision=_vision,
    projector=("multi_modal_projector",),
    disk_prefixes={
        _TEXT_PREFIX: "language_model.model.",
        "lm_head.": "language_model.lm_head.",
        "model.vision_tower.": "vision_tower.",
        "model.multi_modal_projector.": "multi_modal_projector.",
    },
    text_config=lambda config: config.text_config,
    transformer_options=_options,
    mrope_section=text_mrope_section,
    rules=_rules,
)
