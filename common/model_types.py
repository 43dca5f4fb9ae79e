"""Model types that learner and local engine know and refuse, each with the reason that a person is told at load."""

from __future__ import annotations

__all__ = ["why_unsupported"]

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
