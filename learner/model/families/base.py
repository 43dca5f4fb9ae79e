"""What a model family states: how its transformers config and weights correspond to megatron's GPTModel.

Owns the vocabulary of that statement (rules and layouts) and the decoder that all Qwen-like families share. Does not
move tensors (see `weights.py`) and does not build modules (see `gpt.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from torch import Tensor, nn

from vagen.common.errors import ConfigError

__all__ = [
    "Layout",
    "ModelFamily",
    "WeightRule",
    "decoder_rules",
    "gated_mlp_rules",
    "refuse_unsupported",
    "rotary_base",
]


class Layout(Enum):
    """How the HF tensors of a rule lie in the megatron tensor."""

    COPY = "copy"
    QKV = "qkv"
    """q, k, v rows interleaved by key/value group: the group's query heads, its key head, its value head."""
    GATE_UP = "gate_up"
    """gate rows, then up rows; each half is sharded by itself."""
    FUSED_GATE_UP = "fused_gate_up"
    """The same where HF has both in one tensor."""
    PAIRED_QKV = "paired_qkv"
    """As QKV, where HF rotates neighbouring channels of a query or key head and megatron those half a head apart: the
    even ones of the channels that rotate come into the first half, the odd ones into the second, the others behind."""


@dataclass(frozen=True)
class WeightRule:
    """One megatron tensor, the HF tensors that make it up, and the dimension split over tensor-parallel ranks.

    `expert` is the place along dimension 0 of an HF tensor that stacks all experts; the rules of one such tensor follow
    each other in order.
    """

    megatron: str
    hf: tuple[str, ...]
    layout: Layout = Layout.COPY
    tp_dim: int | None = None
    expert: int | None = None
    rotary_dim: int | None = None
    """Of PAIRED_QKV: the leading channels of a head that rotate."""


@dataclass(frozen=True, kw_only=True)
class ModelFamily:
    """One `model_type`.

    `text_prefix` and `vision_prefix` are HF's names of the decoder and of the vision module in a state dict;
    `disk_prefixes` maps them to the names on the hub where those differ. `transformer_options` gives the
    `TransformerConfig` fields that are peculiar to the family, from the HF text config. `mrope_section` gives the
    M-RoPE split of half a head (a text model gets one too, as three equal axes are plain RoPE), and `interleaved_mrope`
    how the axes lie in it (see `vagen.common.vision.mrope_axes`); `rotary_dim` counts the channels of a head that
    rotate, where not all do. With `post_norms` what attention and MLP add is normalised first. `vision` makes the
    vision module, from the top-level config, and `projector` names its parts that project features into the decoder;
    `num_deepstack` counts, from the top-level config, the decoder layers that add features of its inner blocks. `rules`
    lists the decoder's tensors layer by layer, from (HF text config, tied head). `from_disk` makes an HF tensor of one
    on disk, from (HF text config, HF name, tensor), where files on the hub hold another layout.
    """

    model_type: str
    text_prefix: str
    vision_prefix: str | None = None
    vision: Callable[[Any], nn.Module] | None = None
    projector: tuple[str, ...] = ("merger", "deepstack_merger_list")
    disk_prefixes: Mapping[str, str] = field(default_factory=dict)
    text_config: Callable[[Any], Any]
    transformer_options: Callable[[Any], dict[str, Any]]
    mrope_section: Callable[[Any], list[int]]
    interleaved_mrope: bool = False
    rotary_dim: Callable[[Any], int | None] = lambda text_config: None
    post_norms: bool = False
    num_deepstack: Callable[[Any], int] = lambda config: 0
    rules: Callable[[Any, bool], list[WeightRule]]
    from_disk: Callable[[Any, str, Tensor], Tensor] = lambda text_config, name, tensor: tensor

    def engine_name(self, name: str) -> str:
        """Engine name of an HF state-dict name: `visual.*`, `model.*` or `lm_head.weight`, as SGLang's."""
        if name.startswith(self.text_prefix):
            return "model." + name.removeprefix(self.text_prefix)
        vision = self.vision_name(name)
        return name if vision is None else "visual." + vision

    def vision_name(self, name: str) -> str | None:
        """Name within the vision module of an HF state-dict name; None for what belongs to the decoder."""
        if self.vision_prefix is None or name.startswith(self.text_prefix) or not name.startswith(self.vision_prefix):
            return None
        return name.removeprefix(self.vision_prefix)

    def disk_name(self, name: str) -> str:
        """Hub name of an HF state-dict name."""
        for prefix, shorter in self.disk_prefixes.items():
            if name.startswith(prefix):
                return shorter + name.removeprefix(prefix)
        return name

    def hf_name(self, name: str) -> str:
        """HF state-dict name of a name on disk, which may be either of the two."""
        if any(name.startswith(prefix) for prefix in self.disk_prefixes):
            return name
        for prefix, shorter in self.disk_prefixes.items():
            if name.startswith(shorter):
                return prefix + name.removeprefix(shorter)
        return name


def gated_mlp_rules(hf: str, megatron: str) -> list[WeightRule]:
    """Rules of a gated MLP without bias, from the prefixes of its layer."""
    gate_up = (f"{hf}mlp.gate_proj.weight", f"{hf}mlp.up_proj.weight")
    return [
        WeightRule(f"{megatron}mlp.linear_fc1.weight", gate_up, Layout.GATE_UP, tp_dim=0),
        WeightRule(f"{megatron}mlp.linear_fc2.weight", (f"{hf}mlp.down_proj.weight",), tp_dim=1),
    ]


def decoder_rules(
    text_config: Any,
    *,
    prefix: str,
    tied: bool,
    qkv_bias: bool = False,
    qk_norm: bool = False,
    mlp_rules: Callable[[str, str], list[WeightRule]] = gated_mlp_rules,
) -> list[WeightRule]:
    """Rules of a Llama-like decoder: RMSNorm, grouped-query attention, and by default a gated MLP without bias."""
    rules = [WeightRule("embedding.word_embeddings.weight", (f"{prefix}embed_tokens.weight",), tp_dim=0)]
    for i in range(text_config.num_hidden_layers):
        hf, megatron = f"{prefix}layers.{i}.", f"decoder.layers.{i}."
        attention = f"{megatron}self_attention."
        for kind in ("weight", "bias") if qkv_bias else ("weight",):
            names = (f"{hf}self_attn.q_proj.{kind}", f"{hf}self_attn.k_proj.{kind}", f"{hf}self_attn.v_proj.{kind}")
            rules.append(WeightRule(f"{attention}linear_qkv.{kind}", names, Layout.QKV, tp_dim=0))
        rules.append(WeightRule(f"{attention}linear_proj.weight", (f"{hf}self_attn.o_proj.weight",), tp_dim=1))
        if qk_norm:
            rules += [WeightRule(f"{attention}{x}_layernorm.weight", (f"{hf}self_attn.{x}_norm.weight",)) for x in "qk"]
        rules += mlp_rules(hf, megatron)
        rules += [
            WeightRule(f"{megatron}input_layernorm.weight", (f"{hf}input_layernorm.weight",)),
            WeightRule(f"{megatron}pre_mlp_layernorm.weight", (f"{hf}post_attention_layernorm.weight",)),
        ]
    rules.append(WeightRule("decoder.final_layernorm.weight", (f"{prefix}norm.weight",)))
    if not tied:
        rules.append(WeightRule("output_layer.weight", ("lm_head.weight",), tp_dim=0))
    return rules


def rotary_base(text_config: Any) -> float:
    """The rotary base. Raises ConfigError for scaled variants, which the learner does not implement."""
    parameters = text_config.rope_parameters
    if parameters.get("rope_type", "default") != "default":
        raise ConfigError(f"config.json: rope_type must be 'default', got {parameters['rope_type']!r}")
    return float(parameters["rope_theta"])


def refuse_unsupported(text_config: Any) -> None:
    """Raises ConfigError for settings that would silently train another model."""
    if text_config.hidden_act != "silu":
        raise ConfigError(f"config.json: hidden_act must be 'silu', got {text_config.hidden_act!r}")
    if text_config.attention_dropout:
        raise ConfigError(f"config.json: attention_dropout must be 0, got {text_config.attention_dropout}")
    if any(kind != "full_attention" for kind in getattr(text_config, "layer_types", None) or ()):
        raise ConfigError("config.json: sliding-window attention is not supported (use_sliding_window must be false)")
