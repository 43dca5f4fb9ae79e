"""Core attention and layer for megatron-core's local spec: torch SDPA over packed segments, on CPU or GPU.

Owns how packed rows become batches (segments of similar length are padded into one causal call per length bucket
instead of one call per segment), the rotation of queries and keys by given angles, and the last layer's restriction to
the rows that are read. Does not own projections, nor the angles. Transformer Engine has its own kernels and never comes
here, and neither do rows that lie on several ranks (`context_attention.py`).

Legend: T tokens of the pack, S segments, N rows that are read, h query heads, g key/value heads, d head width.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor

from vagen.learner.model.deepstack import add_deepstack

__all__ = [
    "SegmentPlan",
    "SegmentedLayer",
    "SegmentedSDPAttention",
    "SegmentedSeqParams",
    "length_buckets",
    "pad_rows",
    "rotate",
    "rotation",
]

_MAX_PADDING = 16
"""Segments share a bucket while the shortest is at most this many tokens, or an eighth, below the longest."""


@dataclass(frozen=True)
class SegmentPlan:
    """Layout of packed segments as padded batches.

    `shapes` are (segments, padded length) of each bucket, in the order in which the buckets lie in the padded buffer of
    R = sum(segments * length) rows. `gather` int64 [R] is the token of each padded row (a padding row repeats its
    segment's first token: it comes after all real ones, so causality hides it), `scatter` int64 [T] the padded row of
    each token. Both are None where all segments are equally long and the pack is its own padded buffer.
    """

    shapes: tuple[tuple[int, int], ...]
    gather: Tensor | None
    scatter: Tensor | None

    @classmethod
    def build(cls, lengths: Sequence[int], device: torch.device) -> SegmentPlan:
        """Plan for segments of `lengths` (each >= 1) that lie one after another."""
        assert lengths and min(lengths) >= 1, f"segment lengths must be >= 1, got {list(lengths)}"
        if min(lengths) == max(lengths):
            return cls(((len(lengths), lengths[0]),), None, None)
        sizes = torch.tensor(lengths)
        starts = sizes.cumsum(0) - sizes
        shapes: list[tuple[int, int]] = []
        gather: list[Tensor] = []
        scatter = torch.empty(int(sizes.sum()), dtype=torch.long)
        rows = 0
        for members in length_buckets(lengths):
            longest = int(sizes[members[0]])
            offsets = torch.arange(longest)[None]
            real = offsets < sizes[members, None]
            tokens = torch.where(real, starts[members, None] + offsets, starts[members, None]).flatten()
            scatter[tokens[real.flatten()]] = rows + real.flatten().nonzero()[:, 0]
            gather.append(tokens)
            shapes.append((len(members), longest))
            rows += len(tokens)
        return cls(tuple(shapes), torch.cat(gather).to(device), scatter.to(device))


def length_buckets(lengths: Sequence[int]) -> Iterator[Tensor]:
    """The numbers of the segments of each bucket, int64, longest first."""
    order = torch.tensor(lengths).argsort(descending=True, stable=True).tolist()
    first = 0
    while first < len(order):
        longest = lengths[order[first]]
        shortest = longest - max(_MAX_PADDING, longest // 8)
        last = first
        while last < len(order) and lengths[order[last]] >= shortest:
            last += 1
        yield torch.tensor(order[first:last])
        first = last


@dataclass
class SegmentedSeqParams(PackedSeqParams):
    """What all layers share about one pack.

    `cos` and `sin` [T, 1, 1, d / 2] are the rotation of each token (megatron's own application loops over segments in
    Python); `rows` int64 [N] are the tokens whose final hidden state is read; `image_rows` int64 [M] are the image
    placeholders where features of inner vision blocks are added (see `deepstack.py`).
    """

    plan: SegmentPlan | None = None
    cos: Tensor | None = None
    sin: Tensor | None = None
    rows: Tensor | None = None
    image_rows: Tensor | None = None

    @classmethod
    def build(
        cls,
        cu_seqlens: Tensor,
        angles: Tensor,
        rows: Tensor,
        dtype: torch.dtype,
        image_rows: Tensor | None = None,
    ) -> SegmentedSeqParams:
        """cu_seqlens int32 [S + 1]; angles float32 [T, 1, 1, d], megatron's rotary embedding; `dtype` of queries."""
        plan = SegmentPlan.build(cu_seqlens.diff().tolist(), cu_seqlens.device)
        cos, sin = rotation(angles, dtype)
        return cls(plan=plan, cos=cos, sin=sin, rows=rows, image_rows=image_rows)


class SegmentedLayer(TransformerLayer):
    """A layer whose last instance runs its MLP only on the rows that are read: what the final hidden states of prompt
    tokens would be is used by nothing."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """As `TransformerLayer.forward`; the last layer returns [N, 1, hidden_size]."""
        hidden_states, _ = self._forward_attention(*args, **kwargs)
        params = kwargs["packed_seq_params"]
        # With sequence parallelism a rank has a part of the tokens here, and their number must divide by the ranks.
        if self.layer_number == self.config.num_layers and not self.config.sequence_parallel:
            hidden_states = hidden_states.index_select(0, params.rows)
        return add_deepstack(self._forward_mlp(hidden_states), kwargs.get("context"), params, self.layer_number)


class SegmentedSDPAttention(MegatronModule):
    """Causal attention within each segment of a pack. Signature of megatron's `DotProductAttention`."""

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        **_: Any,
    ) -> None:
        super().__init__(config=config)
        assert not (config.attention_dropout if attention_dropout is None else attention_dropout)
        assert attention_type == "self" and attn_mask_type == AttnMaskType.causal
        self._scale = softmax_scale

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> Tensor:
        """query [T, 1, h, d], key and value [T, 1, g, d] -> [T, 1, h * d]. Masks other than the pack's are refused."""
        assert attention_mask is None and attention_bias is None
        assert isinstance(packed_seq_params, SegmentedSeqParams) and packed_seq_params.plan is not None
        plan, cos, sin = packed_seq_params.plan, packed_seq_params.cos, packed_seq_params.sin
        query, key = (rotate(x, cos, sin) for x in (query, key))
        inputs = [x.squeeze(1) for x in (query, key, value)]
        if plan.gather is None or plan.scatter is None:
            return self._batched(inputs, plan.shapes[0]).unsqueeze(1)
        inputs = [pad_rows(x, plan.gather, plan.scatter) for x in inputs]
        parts = [x.split([n * length for n, length in plan.shapes]) for x in inputs]
        outputs = [self._batched(bucket, shape) for *bucket, shape in zip(*parts, plan.shapes, strict=True)]
        return torch.cat(outputs).index_select(0, plan.scatter).unsqueeze(1)

    def _batched(self, inputs: Sequence[Tensor], shape: tuple[int, int]) -> Tensor:
        """query, key, value [n * length, heads, d] -> [n * length, h * d]."""
        query, key, value = (x.unflatten(0, shape).transpose(1, 2) for x in inputs)
        out = F.scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=self._scale, enable_gqa=query.size(1) != key.size(1)
        )
        return out.transpose(1, 2).reshape(shape[0] * shape[1], -1)


def pad_rows(x: Tensor, gather: Tensor, scatter: Tensor) -> Tensor:
    """x [T, ...] as padded rows [R, ...], by a plan's `gather` and `scatter`."""
    padded: Tensor = _Pad.apply(x, gather, scatter)
    return padded


def rotation(angles: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosine and sine [T, 1, 1, d / 2] of megatron's rotary embedding float32 [T, 1, 1, d]."""
    half = angles[..., : angles.size(-1) // 2]
    return half.cos().to(dtype), half.sin().to(dtype)


def rotate(x: Tensor, cos: Tensor | None, sin: Tensor | None) -> Tensor:
    """Rotary embedding of x [T, 1, heads, d] by the angles of `rotation`."""
    rotated: Tensor = _Rotate.apply(x, cos, sin)
    return rotated


class _Pad(torch.autograd.Function):
    """`x[gather]`, whose gradient is `grad[scatter]`: padding rows never receive any, so nothing has to be summed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gather: Tensor, scatter: Tensor) -> Tensor:
        ctx.save_for_backward(scatter)
        return x.index_select(0, gather)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        (scatter,) = ctx.saved_tensors
        return grad.index_select(0, scatter), None, None


class _Rotate(torch.autograd.Function):
    """Rotary embedding of x [T, 1, heads, d], pairing channel i with i + d / 2; its gradient is the inverse rotation.

    One function of in-place passes: composed of autograd operations it costs three times the memory traffic.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _rotated(x, cos, sin)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        cos, sin = ctx.saved_tensors
        return _rotated(grad, cos, -sin), None, None


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    (first, second), (out_first, out_second) = x.chunk(2, -1), out.chunk(2, -1)
    torch.mul(first, cos, out=out_first)
    out_first.addcmul_(second, sin, value=-1)
    torch.mul(second, cos, out=out_second)
    out_second.addcmul_(first, sin)
    return out
