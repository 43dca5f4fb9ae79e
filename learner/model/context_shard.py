"""Context parallelism: every row of a pack lies on several ranks, each of which holds two parts of it.

Rows are padded to a multiple of 2 C tokens and cut into 2 C chunks of one length; rank r holds chunks r and
2 C - 1 - r of each, so that causal attention costs every rank the same. It is Transformer Engine's order too. What the
ranks say of scored tokens is gathered, so that losses see whole rows: each rank computes the same loss, whose gradient
goes back through what that rank computed itself, and the gradient buffer sums over ranks.

Legend: C ranks, T tokens of the padded pack, L = T / C tokens of a rank, N scored tokens, n those of a rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import lcm

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from vagen.learner.model.batch import PackedBatch, TokenOutputs

__all__ = ["ContextShard", "chunk_owner", "divided", "padded_for_context"]


def divided(batch: PackedBatch, config: TransformerConfig) -> tuple[PackedBatch, ContextShard | None]:
    """The batch, padded so that ranks can share it, and this rank's part of it; None where it holds all tokens."""
    size = config.context_parallel_size
    parts = config.tensor_model_parallel_size if config.sequence_parallel else 1
    if size == 1:
        return batch.padded(parts), None
    batch = padded_for_context(batch, size, parts)
    return batch, ContextShard.build(batch, size, parallel_state.get_context_parallel_rank())


def padded_for_context(batch: PackedBatch, size: int, parts: int = 1) -> PackedBatch:
    """The batch in rows that can be cut into chunks for `size` ranks, each of which can cut its own into `parts`."""
    return batch.with_row_multiple(2 * size).padded(size * lcm(2, parts))


def chunk_owner(chunks: Tensor, size: int) -> Tensor:
    """The rank that holds each chunk, int64."""
    return torch.minimum(chunks, 2 * size - 1 - chunks)


@dataclass(frozen=True, kw_only=True)
class ContextShard:
    """The part of a pack that rank `rank` of `size` holds: row after row, of each its two chunks.

    `tokens` int64 [L] are their places in the pack; `places` int64 [T] the inverse, -1 for tokens of other ranks. Of
    the scored tokens `scored` int64 [n] are this rank's, `rows` int64 [n] where it holds the token before each; where n
    is 0 its first token, since layers need a token to go on with. `order` int64 [N] is the place of each scored token
    among the ranks' answers, one after another, all `longest` long.
    """

    size: int
    rank: int
    tokens: Tensor
    places: Tensor
    scored: Tensor
    rows: Tensor
    order: Tensor
    longest: int

    @classmethod
    def build(cls, batch: PackedBatch, size: int, rank: int) -> ContextShard:
        """The part of rank `rank` of `size`, of rows whose lengths divide by 2 * `size`."""
        lengths = batch.cu_seqlens.diff().long()
        assert not bool((lengths % (2 * size)).any()), f"rows of {lengths.tolist()} tokens for {size} ranks"
        offsets = torch.arange(len(batch.token_ids), device=lengths.device)
        offsets -= batch.cu_seqlens[:-1].long().repeat_interleave(lengths)
        owners = chunk_owner(offsets // (lengths // (2 * size)).repeat_interleave(lengths), size)
        tokens = (owners == rank).nonzero()[:, 0]
        places = torch.full_like(owners, -1)
        places[tokens] = torch.arange(len(tokens), device=tokens.device)
        before = batch.score_positions - 1
        answers = [(owners[before] == other).nonzero()[:, 0] for other in range(size)]
        longest = max(map(len, answers))
        order = torch.empty_like(before)
        for other, scored in enumerate(answers):
            order[scored] = other * longest + torch.arange(len(scored), device=order.device)
        scored = answers[rank]
        return cls(
            size=size,
            rank=rank,
            tokens=tokens,
            places=places,
            scored=scored,
            rows=places[before[scored]] if len(scored) else scored.new_zeros(1),
            order=order,
            longest=longest,
        )

    def gathered(self, outputs: TokenOutputs, *, values_only: bool) -> TokenOutputs:
        """Outputs of all scored tokens, from each rank's of its own. Collective over the ranks of the rows."""
        content = outputs.packed(values_only=values_only).T
        content = F.pad(content, (0, 0, 0, self.longest - len(content)))
        # All ranks compute the same of it: each keeps the gradient of its own part.
        whole = gather_from_sequence_parallel_region(
            content, tensor_parallel_output_grad=False, group=parallel_state.get_context_parallel_group()
        )
        return TokenOutputs.unpacked(whole[self.order].T, values_only=values_only)
