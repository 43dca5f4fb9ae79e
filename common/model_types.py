"""Model types that learner and local engine know and refuse, each with the reason that a person is told at load."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vagen.common.errors import ConfigError

__all__ = ["require_unquantised", "why_unsupported"]

_LINEAR = (
    "most of its layers are gated delta nets (linear attention), for which megatron-core needs flash-linear-attention, "
    "and whose state neither packed rows nor the local engine's cache of keys and values hold"
)
_EXPERTS = "of mixtures of experts only Qwen3-VL-MoE's is implemented"
_REASONS = {
    "qwen3_5": _LINEAR,
    "qwen3_5_text": _LINEAR,
    "qwen3_5_moe": _LINEAR,
    "qwen3_5_moe_text": _LINEAR,
    "qwen3_next": _LINEAR,
    "qwen2_moe": _EXPERTS,
    "qwen3_moe": _EXPERTS,
    "glm4v_moe": _EXPERTS,
    "internvl_chat": "it is InternVL in its original format; take the model's folder in transformers' (-hf)",
    "qwen2_vl": "its vision tower is another than Qwen2.5-VL's",
}


def why_unsupported(model_type: str) -> str:
    """`: reason` for a type that is known and refused, else an empty text."""
    reason = _REASONS.get(model_type)
    return "" if reason is None else f": {reason}"


def require_unquantised(config: Mapping[str, Any], path: Path) -> None:
    """Raise ConfigError for a model whose weights are numbers only together with scales; `config` is its config.json.

    Read without them they load as any others, and are wrong.
    """
    for place in ("", "text_config."):
        content = config if not place else config.get("text_config") or {}
        for key in ("quantization_config", "compression_config"):
            if content.get(key):
                method = content[key].get("quant_method", "?") if isinstance(content[key], Mapping) else "?"
                raise ConfigError(
                    f"{path}: {place}{key}: expected none, got quant_method {method}: the weights are quantised;"
                    " take the model's folder in bfloat16, or write one with transformers (dequantize=True)"
                )
