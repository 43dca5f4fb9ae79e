"""transformers' Qwen models, run by a lean forward pass over their own parameters with a slot KV cache.

Owns the parameters, the KV cache, and the two forward passes: `prefill` of whole prompts and `decode` of one token
for every running slot. The formulas are those of transformers' modules; what is left out is their Python overhead,
which dominates a small model: projections that read the same input are one matrix product, because their parameters
are laid out as views of one tensor. Knows nothing of requests, sampling or weight updates.

Legend: n prompts, L padded length, R running slots (0..R-1), T cached tokens, H hidden width, V vocabulary,
D head width, P patches, M image tokens.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import (
    Glm4vForConditionalGeneration,
    Glm46VForConditionalGeneration,
    InternVLForConditionalGeneration,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2ForCausalLM,
    Qwen3ForCausalLM,
    Qwen3VLForConditionalGeneration,
    Qwen3VLMoeForConditionalGeneration,
)
from transformers.utils.logging import disable_progress_bar

from vagen.actor.local_engine.config import EngineConfig
from vagen.common.errors import ConfigError
from vagen.common.model_types import require_unquantised, why_unsupported
from vagen.common.towers import AnyImageSpec, image_spec, vision_tower
from vagen.common.trajectory import VisionTokens
from vagen.common.vision import Grid, mrope_axes
from vagen.common.vocabulary import read_model_json, vision_tokens

__all__ = ["EngineModel"]

logger = logging.getLogger(__name__)

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_KINDS: dict[str, Any] = {
    "glm4v": Glm4vForConditionalGeneration,
    "glm46v": Glm46VForConditionalGeneration,
    "internvl": InternVLForConditionalGeneration,
    "qwen2": Qwen2ForCausalLM,
    "qwen2_5_vl": Qwen2_5_VLForConditionalGeneration,
    "qwen3": Qwen3ForCausalLM,
    "qwen3_vl": Qwen3VLForConditionalGeneration,
    "qwen3_vl_moe": Qwen3VLMoeForConditionalGeneration,
}
"""transformers' class of each `model_type`."""


@dataclass(frozen=True)
class _Layer:
    """Parameters of one decoder layer; `qkv`, `qk_norm` and `gate_up` are tensors that transformers' parameters view.

    Qwen2 and GLM have biases, Qwen3 norms of queries and keys ([2, D]: the query's, the key's), GLM norms of what
    attention and MLP add. A mixture of experts stays the module that it is in transformers.
    """

    norm1: Tensor
    norm2: Tensor
    qkv: Tensor
    qkv_bias: Tensor | None
    qk_norm: Tensor | None
    out: Tensor
    gate_up: Tensor | None
    down: Tensor | None
    experts: nn.Module | None
    post_norm1: Tensor | None
    post_norm2: Tensor | None


class EngineModel:
    """A model in memory, its KV cache, and its forward passes. One thread uses it."""

    def __init__(self, model_dir: Path, config: EngineConfig) -> None:
        """Load `model_dir`. Raises ConfigError where it holds no model of a supported family."""
        self.device = torch.device(config.device)
        self.dtype = _DTYPES[config.dtype]
        self.hf = _load(model_dir, self.dtype).to(self.device).eval().requires_grad_(False)
        is_vl = hasattr(self.hf.model, "language_model")
        self._text: Any = self.hf.model.language_model if is_vl else self.hf.model
        text = self._text.config
        _check_supported(text)
        self.vocab_size = int(text.vocab_size)
        self.max_context = min(config.max_context, int(text.max_position_embeddings))
        self.is_tied = self.hf.lm_head.weight is self._text.embed_tokens.weight
        self.eos_token_ids = _eos_token_ids(self.hf)
        self.vision_tokens: VisionTokens | None = None
        self.video_token_id = -1
        self.image_spec: AnyImageSpec | None = None
        if is_vl:
            self.vision_tokens = vision_tokens(model_dir)
            self.video_token_id = int(getattr(self.hf.config, "video_token_id", -1))
            self.image_spec = image_spec(model_dir)
            # InternVL has no module of its own around tower and projector.
            self._visual = vision_tower(getattr(self.hf.model, "visual", self.hf.model))
        self._num_heads = int(text.num_attention_heads)
        self._num_kv_heads = int(text.num_key_value_heads)
        self._head_dim = int(getattr(text, "head_dim", None) or text.hidden_size // self._num_heads)
        self._eps = float(text.rms_norm_eps)
        self._norm_of_head = torch.tensor([0] * self._num_heads + [1] * self._num_kv_heads, device=self.device)
        self._layers = [_fuse(layer) for layer in self._text.layers]
        self._make_rope_table()
        shape = (len(self._layers), 2, config.max_running, self.max_context, self._num_kv_heads, self._head_dim)
        self._cache = torch.zeros(shape, dtype=self.dtype, device=self.device)
        """Keys and values [layer, key or value, slot, token, head, D]."""
        self._arange = torch.arange(max(config.max_running, self.max_context), device=self.device)

    @property
    def num_parameters(self) -> int:
        """Of the model, a tied head counted once."""
        return sum(p.numel() for p in self.hf.parameters())

    def image_features(self, patches: Sequence[Tensor], grids: Sequence[Grid]) -> list[Tensor]:
        """Features [M_i, (1 + K) * H] of each image, from its patches float32 [P_i, D_patch].

        Of K inner vision blocks too where the family has DeepStack.
        """
        assert self.image_spec is not None
        features = self._visual(torch.cat(tuple(patches)).to(self.device), grids)
        return list(features.split([self.image_spec.num_tokens(grid) for grid in grids]))

    def prefill(
        self,
        first_slot: int,
        ids: NDArray[np.int64],
        positions: NDArray[np.int64],
        lengths: NDArray[np.int64],
        features: Sequence[Tensor],
    ) -> Tensor:
        """Fill slots `first_slot ..` with n prompts and return the logits [n, V] after each one's last token.

        `ids` [n, L] and `positions` [3, n, L] are padded on the right, which a causal mask makes harmless; `features`
        are those of all images in the order of their placeholders.
        """
        n, length = ids.shape
        flat_ids = torch.from_numpy(ids.reshape(-1)).to(self.device)
        x = F.embedding(flat_ids, self._text.embed_tokens.weight)
        where, inner = self._place_images(x, ids, features)
        cos, sin = self._rotation(torch.from_numpy(positions.reshape(3, -1)).to(self.device))
        group = self._num_heads // self._num_kv_heads
        for index, layer in enumerate(self._layers):
            query_key, value = self._project(layer, x, cos, sin)
            query_key = query_key.view(n, length, -1, self._head_dim)
            key = query_key[:, :, self._num_heads :]
            value = value.view(n, length, self._num_kv_heads, self._head_dim)
            slots = self._cache[index, :, first_slot : first_slot + n, :length]
            slots[0], slots[1] = key, value
            attended = F.scaled_dot_product_attention(
                query_key[:, :, : self._num_heads].transpose(1, 2),
                key.repeat_interleave(group, 2).transpose(1, 2),
                value.repeat_interleave(group, 2).transpose(1, 2),
                is_causal=True,
            )
            x = self._finish_layer(layer, x, attended.transpose(1, 2).reshape(n * length, -1))
            if index < len(inner):
                x.index_add_(0, where, inner[index])
        last = torch.from_numpy(np.arange(n) * length + lengths - 1).to(self.device)
        return self._head(x[last])

    def decode(self, ids: NDArray[np.int64], positions: NDArray[np.int64], lengths: NDArray[np.int64]) -> Tensor:
        """Append token `ids[r]` to slot r, for the slots 0..R-1, and return the logits [R, V] after it.

        `positions` [R] is the M-RoPE position, equal on all three axes; `lengths` [R] counts the tokens cached so far.
        """
        running, longest = len(ids), int(lengths.max()) + 1
        x = F.embedding(torch.from_numpy(ids).to(self.device), self._text.embed_tokens.weight)
        where = torch.from_numpy(positions).to(self.device)
        cos, sin = self._cos[where, None], self._sin[where, None]
        cached = torch.from_numpy(lengths).to(self.device)
        visible = (self._arange[:longest] <= cached[:, None])[:, None, None]
        entry = self._arange[:running] * self.max_context + cached
        heads = (running, self._num_kv_heads, -1, self._head_dim)
        for index, layer in enumerate(self._layers):
            query_key, value = self._project(layer, x, cos, sin)
            keys, values = self._cache[index]
            keys.view(-1, self._num_kv_heads, self._head_dim).index_copy_(0, entry, query_key[:, self._num_heads :])
            values.view(-1, self._num_kv_heads, self._head_dim).index_copy_(0, entry, value)
            # The query heads that share a key head stand in the place of query positions: nothing is repeated.
            attended = F.scaled_dot_product_attention(
                query_key[:, : self._num_heads].view(heads),
                keys[:running, :longest].transpose(1, 2),
                values[:running, :longest].transpose(1, 2),
                attn_mask=visible,
            )
            x = self._finish_layer(layer, x, attended.reshape(running, -1))
        return self._head(x)

    def move_slot(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` tokens of one slot over those of another."""
        self._cache[:, :, target, :length] = self._cache[:, :, source, :length]

    def _place_images(
        self, x: Tensor, ids: NDArray[np.int64], features: Sequence[Tensor]
    ) -> tuple[Tensor, Sequence[Tensor]]:
        """Write features over the embeddings of placeholders; returns where, and what the first layers add there."""
        if not features:
            return self._arange[:0], ()
        assert self.vision_tokens is not None
        where = torch.from_numpy(np.flatnonzero(ids == self.vision_tokens.image_token_id)).to(self.device)
        first, *inner = torch.cat(tuple(features)).split(x.shape[-1], -1)
        x.index_copy_(0, where, first)
        return where, inner

    def _project(self, layer: _Layer, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Rotated queries and keys [N, heads + kv_heads, D], values [N, kv_heads, D] of N tokens [N, H]."""
        normed = F.rms_norm(x, (x.shape[-1],), layer.norm1, self._eps)
        qkv = F.linear(normed, layer.qkv, layer.qkv_bias).view(x.shape[0], -1, self._head_dim)
        query_key = qkv[:, : self._num_heads + self._num_kv_heads]
        if layer.qk_norm is not None:
            query_key = F.rms_norm(query_key, (self._head_dim,), eps=self._eps) * layer.qk_norm[self._norm_of_head]
        if self._rotates_pairs:
            partner = query_key.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
        else:
            partner = query_key.roll(self._head_dim // 2, -1)
        rotated = torch.addcmul(query_key * cos, partner, sin)
        return rotated, qkv[:, self._num_heads + self._num_kv_heads :]

    def _finish_layer(self, layer: _Layer, x: Tensor, attended: Tensor) -> Tensor:
        x = x + self._post_norm(F.linear(attended, layer.out), layer.post_norm1)
        normed = F.rms_norm(x, (x.shape[-1],), layer.norm2, self._eps)
        if layer.gate_up is None or layer.down is None:
            assert layer.experts is not None
            return x + layer.experts(normed[None])[0]
        gate, up = F.linear(normed, layer.gate_up).chunk(2, -1)
        return x + self._post_norm(F.linear(F.silu(gate) * up, layer.down), layer.post_norm2)

    def _post_norm(self, x: Tensor, weight: Tensor | None) -> Tensor:
        return x if weight is None else F.rms_norm(x, (x.shape[-1],), weight, self._eps)

    def _head(self, x: Tensor) -> Tensor:
        normed = F.rms_norm(x, (x.shape[-1],), self._text.norm.weight, self._eps)
        return F.linear(normed, self.hf.lm_head.weight).float()

    def _make_rope_table(self) -> None:
        """Tables [max_context, D]; the sign of `rotate_half` is in the sine, so that it becomes a roll by D / 2, or for
        GLM an exchange of neighbours. Channels that do not rotate have angle 0."""
        frequencies = self._text.rotary_emb.inv_freq.float()
        angles = torch.arange(self.max_context, device=self.device).float()[:, None] * frequencies
        cos, sin = angles.cos(), angles.sin()
        self._rotates_pairs = isinstance(self.hf, Glm4vForConditionalGeneration | Glm46VForConditionalGeneration)
        still = self._head_dim - 2 * len(frequencies)
        if self._rotates_pairs:
            self._cos = F.pad(cos.repeat_interleave(2, -1), (0, still), value=1.0).to(self.dtype)
            self._sin = F.pad(torch.stack((-sin, sin), -1).flatten(-2), (0, still)).to(self.dtype)
        else:
            self._cos = torch.cat((cos, cos), -1).to(self.dtype)
            self._sin = torch.cat((-sin, sin), -1).to(self.dtype)
        sections = self._text.config.rope_parameters.get("mrope_section") or [len(frequencies)]
        # Qwen3-VL always interleaves, whatever `mrope_interleaved` says.
        interleaved = isinstance(self.hf, Qwen3VLForConditionalGeneration | Qwen3VLMoeForConditionalGeneration)
        axis = torch.from_numpy(mrope_axes(sections, interleaved=interleaved))
        axis = F.pad(axis.repeat_interleave(2), (0, still)) if self._rotates_pairs else torch.cat((axis, axis))
        self._axis = axis.to(self.device)
        """[D]: which of the three position axes turns this component."""
        self._component = torch.arange(self._head_dim, device=self.device)

    def _rotation(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin [N, 1, D] of positions [3, N]."""
        rows = positions[self._axis].T
        return self._cos[rows, self._component][:, None], self._sin[rows, self._component][:, None]


def _load(model_dir: Path, dtype: torch.dtype) -> Any:
    if not (model_dir / "config.json").is_file():
        raise ConfigError(f"{model_dir}: expected a model folder with a config.json")
    content = read_model_json(model_dir / "config.json")
    require_unquantised(content, model_dir / "config.json")
    model_type = content.get("model_type")
    if model_type not in _KINDS:
        raise ConfigError(
            f"{model_dir}: the local engine runs {', '.join(_KINDS)}, got model type {model_type}"
            f"{why_unsupported(str(model_type))}"
        )
    disable_progress_bar()
    model, report = _KINDS[model_type].from_pretrained(model_dir, dtype=dtype, output_loading_info=True)
    missing = sorted(report["missing_keys"])
    if missing:
        raise ConfigError(f"{model_dir}: the weights lack {len(missing)} parameters, first {missing[0]}")
    return model


def _check_supported(text: Any) -> None:
    rope = text.rope_parameters.get("rope_type", "default")
    if rope != "default":
        raise ConfigError(f"local engine: rope type must be default, got {rope}")
    if "sliding_attention" in (getattr(text, "layer_types", None) or ()):
        raise ConfigError("local engine: sliding-window attention is not supported; use SGLang")
    if getattr(text, "attention_bias", False):
        raise ConfigError("local engine: attention_bias is not supported; use SGLang")
    if text.hidden_act != "silu":
        raise ConfigError(f"local engine: hidden_act must be silu, got {text.hidden_act}")


def _eos_token_ids(hf: Any) -> tuple[int, ...]:
    for source in (hf.generation_config, hf.config.get_text_config()):
        raw = getattr(source, "eos_token_id", None)
        if raw is not None:
            return tuple(raw) if isinstance(raw, list) else (int(raw),)
    return ()


def _fuse(layer: Any) -> _Layer:
    attention, mlp = layer.self_attn, layer.mlp
    projections = [attention.q_proj, attention.k_proj, attention.v_proj]
    is_dense, gate_up = hasattr(mlp, "down_proj"), getattr(mlp, "gate_up_proj", None)
    if is_dense:
        gate_up = _share([mlp.gate_proj.weight, mlp.up_proj.weight]) if gate_up is None else gate_up.weight
    norms = [attention.q_norm.weight, attention.k_norm.weight] if hasattr(attention, "q_norm") else []
    return _Layer(
        norm1=layer.input_layernorm.weight,
        norm2=layer.post_attention_layernorm.weight,
        qkv=_share([p.weight for p in projections]),
        qkv_bias=None if attention.q_proj.bias is None else _share([p.bias for p in projections]),
        qk_norm=_share(norms).unflatten(0, (2, -1)) if norms else None,
        out=attention.o_proj.weight,
        gate_up=gate_up,
        down=mlp.down_proj.weight if is_dense else None,
        experts=None if is_dense else mlp,
        post_norm1=_weight(layer, "post_self_attn_layernorm"),
        post_norm2=_weight(layer, "post_mlp_layernorm"),
    )


def _weight(layer: Any, name: str) -> Tensor | None:
    norm = getattr(layer, name, None)
    return None if norm is None else norm.weight


def _share(parameters: Sequence[nn.Parameter]) -> Tensor:
    """One tensor of all rows; the parameters become views of it, so that writing to them writes to it."""
    fused = torch.cat([p.data for p in parameters])
    for parameter, rows in zip(parameters, fused.split([len(p) for p in parameters]), strict=True):
        parameter.data = rows
    return fused
