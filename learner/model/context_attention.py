"""Core attention with context parallelism: a rank's queries against the keys and values of all ranks.

Owns where the chunks of rows (see `context_shard.py`) lie among gathered keys and which of them a query sees. Chunks of
similar length are one call of torch's attention, as in `attention.py`; a query in chunk c of its row sees the chunks
before, and its own up to itself. Transformer Engine has its own way to do this, and never comes here.

Legend: C ranks, L tokens of a rank, R rows of all padded chunks, K keys of all padded chunks, h query heads, g
key/value heads, d head width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer.enums import AttnMaskType
from torch import Tensor

from vagen.learner.model.attention import (
    SegmentedSDPAttention,
    SegmentedSeqParams,
    length_buckets,
    pad_rows,
    rotate,
    rotation,
)
from vagen.learner.model.context_shard import ContextShard, chunk_owner

__all__ = ["ContextPlan", "ContextSDPAttention", "ContextSeqParams", "attend"]


@dataclass(frozen=True)
class ChunkBucket:
    """`num_chunks` chunks padded to `num_queries` tokens, each with `num_keys` keys.

    `mask` bool [num_chunks or 1, 1, num_queries, num_keys] is true where a query sees a key; None: key j is seen by
    query i >= j, and there are as many.
    """

    num_chunks: int
    num_queries: int
    num_keys: int
    mask: Tensor | None


@dataclass(frozen=True)
class ContextPlan:
    """Layout of a rank's chunks as padded batches.

    `gather` int64 [R] is the local token of each row of all buckets, one after another, `scatter` int64 [L] the row of
    each token; `keys` int64 [K] the place of each key among those of all ranks. Padding repeats a chunk's first token
    and a row's first key, which no real query sees.
    """

    buckets: tuple[ChunkBucket, ...]
    gather: Tensor
    scatter: Tensor
    keys: Tensor

    @classmethod
    def build(cls, lengths: Sequence[int], size: int, rank: int, device: torch.device) -> ContextPlan:
        """Plan of rank `rank` of `size` for rows of `lengths`, each a multiple of 2 * `size`."""
        widths = torch.tensor(lengths) // (2 * size)
        num_local = 2 * int(widths.sum())
        first = 2 * (widths.cumsum(0) - widths)
        scatter = torch.empty(num_local, dtype=torch.long)
        buckets: list[ChunkBucket] = []
        gather: list[Tensor] = []
        keys: list[Tensor] = []
        num_rows = 0

        def local(chunks: Tensor, offsets: Tensor, members: Tensor) -> Tensor:
            return first[members, None] + torch.where(chunks >= size, widths[members, None], 0) + offsets

        for chunk in (rank, 2 * size - 1 - rank):
            for members in length_buckets(widths.tolist()):
                width = widths[members, None]
                longest = int(width.max())
                offsets = torch.arange(longest)[None]
                real = offsets < width
                queries = local(torch.tensor(chunk), torch.where(real, offsets, 0), members)
                scatter[queries[real]] = num_rows + real.flatten().nonzero()[:, 0]
                gather.append(queries.flatten())
                num_rows += queries.numel()
                seen = torch.arange((chunk + 1) * longest)[None]
                of_row = torch.where(seen < (chunk + 1) * width, seen, 0)
                holder = chunk_owner(of_row // width, size)
                keys.append((holder * num_local + local(of_row // width, of_row % width, members)).flatten())
                mask = None
                if chunk:
                    ends = chunk * width if bool((width < longest).any()) else chunk * width[:1]
                    mask = (seen[:, None, None] <= (ends + offsets)[:, None, :, None]).to(device)
                buckets.append(ChunkBucket(len(members), longest, seen.size(1), mask))
        return cls(tuple(buckets), torch.cat(gather).to(device), scatter.to(device), torch.cat(keys).to(device))


@dataclass
class ContextSeqParams(SegmentedSeqParams):
    """What all layers share about a rank's part of a pack: as `SegmentedSeqParams`, of its own L tokens."""

    context: ContextPlan | None = None

    @classmethod
    def of_shard(
        cls,
        shard: ContextShard,
        cu_seqlens: Tensor,
        angles: Tensor,
        dtype: torch.dtype,
        image_rows: Tensor | None = None,
    ) -> ContextSeqParams:
        """cu_seqlens int32 [S + 1] of the pack; angles float32 [L, 1, 1, d] and image_rows of the rank's tokens."""
        plan = ContextPlan.build(cu_seqlens.diff().tolist(), shard.size, shard.rank, cu_seqlens.device)
        cos, sin = rotation(angles, dtype)
        return cls(context=plan, cos=cos, sin=sin, rows=shard.rows, image_rows=image_rows)


class ContextSDPAttention(SegmentedSDPAttention):
    """Causal attention within each row of a pack that lies on several ranks."""

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
        """query [L, 1, h, d], key and value [L, 1, g, d] -> [L, 1, h * d]. Collective over the ranks of the rows."""
        assert attention_mask is None and attention_bias is None
        assert isinstance(packed_seq_params, ContextSeqParams) and packed_seq_params.context is not None
        cos, sin = packed_seq_params.cos, packed_seq_params.sin
        keys = torch.cat([rotate(key, cos, sin), value], 2).squeeze(1)
        # Backward the sum over ranks of what each makes of this one's keys.
        keys = gather_from_sequence_parallel_region(keys, group=parallel_state.get_context_parallel_group())
        return attend(rotate(query, cos, sin).squeeze(1), keys, packed_seq_params.context, self._scale)[:, None]


def attend(query: Tensor, keys: Tensor, plan: ContextPlan, scale: float | None = None) -> Tensor:
    """query [L, h, d] of a rank; keys [C * L, 2 * g, d], and values behind them, of all ranks -> [L, h * d]."""
    queries = pad_rows(query, plan.gather, plan.scatter).split([x.num_chunks * x.num_queries for x in plan.buckets])
    seen = keys.index_select(0, plan.keys).split([x.num_chunks * x.num_keys for x in plan.buckets])
    outputs = []
    for bucket, q, k in zip(plan.buckets, queries, seen, strict=True):
        q = q.unflatten(0, (bucket.num_chunks, bucket.num_queries)).transpose(1, 2)
        k, v = k.unflatten(0, (bucket.num_chunks, bucket.num_keys)).transpose(1, 2).chunk(2, 1)
        out = F.scaled_dot_product_attention(
            *(q, k, v), bucket.mask, is_causal=bucket.mask is None, scale=scale, enable_gqa=q.size(1) != k.size(1)
        )
        outputs.append(out.transpose(1, 2).reshape(bucket.num_chunks * bucket.num_queries, -1))
    return torch.cat(outputs).index_select(0, plan.scatter)
