"""Log probability and entropy of chosen tokens from vocabulary-parallel logits, without gathering the logits.

Owns one autograd function. Three all-reduces of [N] tensors forward, none backward; with one tensor-parallel rank
there is no communication.

Legend: N scored tokens, V vocabulary, W = V / tensor-parallel size.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["logprobs_and_entropy"]

_FORBIDDEN_LOGIT = -1e30
"""Finite, so that probability 0 times its logarithm stays 0; its exponential is 0 as that of minus infinity."""


def logprobs_and_entropy(
    logits: Tensor,
    targets: Tensor,
    *,
    group: dist.ProcessGroup,
    temperature: float = 1.0,
    forbidden_token_ids: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """(logprobs, entropy) float32 [N] of softmax(logits / temperature) over the tokens that are not forbidden.

    logits [N, W]: this rank's slice of the vocabulary, any float dtype. targets int64 [N]: global ids, none forbidden.
    forbidden_token_ids int64: ids of probability 0, as an engine that sets their logits to minus infinity.
    """
    logprobs, entropy = _LogprobsAndEntropy.apply(logits, targets, group, temperature, forbidden_token_ids)
    return logprobs, entropy


class _LogprobsAndEntropy(torch.autograd.Function):
    """With l = log softmax: d l_t / dx = onehot_t - p and dH / dx = -p (l + H), H = -sum p l."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        targets: Tensor,
        group: dist.ProcessGroup,
        temperature: float,
        forbidden: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        first = dist.get_rank(group) * logits.size(-1)
        x = logits.float() / temperature
        if forbidden is not None:
            local = forbidden - first
            x[:, local[(local >= 0) & (local < x.size(-1))]] = _FORBIDDEN_LOGIT
        top = x.amax(-1)
        _all_reduce(top, dist.ReduceOp.MAX, group)
        x -= top[:, None]
        p = x.exp()
        total = p.sum(-1)
        _all_reduce(total, dist.ReduceOp.SUM, group)
        x -= total.log()[:, None]
        p /= total[:, None]
        mine = (targets >= first) & (targets < first + x.size(-1))
        column = torch.where(mine, targets - first, 0)
        sums = torch.stack([x.gather(-1, column[:, None])[:, 0] * mine, -(p * x).sum(-1)])
        _all_reduce(sums, dist.ReduceOp.SUM, group)
        logprobs, entropy = sums.unbind()
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, p, entropy, column, mine)
        ctx.temperature, ctx.dtype = temperature, logits.dtype
        return logprobs, entropy

    @staticmethod
    def backward(  # type: ignore[override]
        ctx: Any, d_logprobs: Tensor | None, d_entropy: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        log_p, p, entropy, column, mine = ctx.saved_tensors
        d_logprobs = torch.zeros_like(entropy) if d_logprobs is None else d_logprobs
        if d_entropy is None:
            # A loss without entropy, as the default is: five passes over [N, W] less, to the same bits.
            grad = p * -d_logprobs[:, None]
        else:
            factor = (log_p + entropy[:, None]).mul_(d_entropy[:, None]).add_(d_logprobs[:, None])
            grad = factor.mul_(p).neg_()
        grad.scatter_add_(-1, column[:, None], (d_logprobs * mine)[:, None])
        if ctx.temperature != 1.0:
            grad /= ctx.temperature
        return grad.to(ctx.dtype), None, None, None, None


def _all_reduce(tensor: Tensor, op: Any, group: dist.ProcessGroup) -> None:
    if dist.get_world_size(group) > 1:
        dist.all_reduce(tensor, op=op, group=group)
