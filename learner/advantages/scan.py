"""The one recursion behind every estimator: backward scans over chains of states, importance-corrected on request.

A chain is a sequence of states (tokens, or one token per turn) in which consecutive states are joined by the tokens
sampled between them; several chains lie one after another, `ends` (int64 positions) being the last states of each. All
arithmetic is float64: scans of thousands of float32 terms then agree with an exact reference to float32 precision.
Batches are millions of tokens, so intermediate results are overwritten rather than allocated anew.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from vagen.learner.advantages.batch import Anchor, Layout

LOG_RATIO_BOUND = 20.0
"""Log-ratios are clamped to +- this, per token and per span; the loss diagnostics count how often."""

_BLOCK = 64
_HUGE = 1e150
"""Bounds partial results, so that an uncapped trace that explodes never meets a segment end as inf * 0."""


@dataclass(frozen=True)
class Caps:
    """`rho(x) = min(rho_bar, x)` weighs a TD error, `c(x) = min(c_bar, x)` carries later ones back."""

    rho_bar: float
    c_bar: float


@dataclass(frozen=True)
class SpanRatios:
    """Log importance ratios of the tokens from each state up to the next one, float64 `[M]`.

    A state's step is made by its own token and then by the *following* ones. `log_following` leaves the own token out,
    because that token's ratio is in the policy loss.
    """

    log_all: Tensor
    log_following: Tensor | None = None
    """None where every step is made by one token."""
    has_following: Tensor | None = None
    """bool `[M]`. Without following tokens there is no ratio to cap and the factor is exactly 1."""


def reverse_affine_scan(offset: Tensor, coefficient: Tensor) -> Tensor:
    """`y[j] = offset[j] + coefficient[j] * y[j + 1]` with `y[n] = 0`, float64 `[n]`; a coefficient of 0 ends a segment.

    Blocks of 64 are scanned side by side, their heads recursively, and the carries added back (Blelloch 1990): linear
    work in O(log n) passes.
    """
    n = offset.numel()
    block = min(_BLOCK, n)
    num_blocks = -(-n // block)
    padding = (0, num_blocks * block - n)
    local, product = (
        _columns(torch.nn.functional.pad(terms, padding) if padding[1] else terms, block)
        for terms in (offset, coefficient)
    )
    for i in range(block - 2, -1, -1):
        local[i].addcmul_(product[i], local[i + 1]).clamp_(-_HUGE, _HUGE)
        product[i].mul_(product[i + 1]).clamp_(max=_HUGE)
    if num_blocks > 1:
        heads = reverse_affine_scan(local[0], product[0])
        local[:, :-1].addcmul_(product[:, :-1], heads[1:])
    return local.t().reshape(-1)[:n]


def _columns(terms: Tensor, block: int) -> Tensor:
    """Consecutive blocks as the columns of a new matrix, so that position `i` of all blocks is one contiguous row."""
    return terms.view(-1, block).t().clone(memory_format=torch.contiguous_format)


def shift_back(terms: Tensor, ends: Tensor, fill: Tensor | None = None) -> Tensor:
    """`terms[j + 1]` at `j`, float64, a new tensor; at `ends` the numbers `fill` (as many), 0 by default."""
    shifted = torch.empty_like(terms, dtype=torch.float64)
    shifted[:-1] = terms[1:]
    if fill is None:
        return shifted.index_fill_(0, ends, 0.0)
    return shifted.index_copy_(0, ends, fill.double())


def log_ratios(proximal_logprobs: Tensor, behaviour_logprobs: Tensor) -> Tensor:
    """Clamped log importance ratio of each token, float64 `[N]`."""
    return proximal_logprobs.double().sub_(behaviour_logprobs).clamp_(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)


def span_ratios(log_ratio: Tensor, layout: Layout, anchor: Anchor, geometric: bool) -> SpanRatios:
    """Ratios of the steps from each turn's anchor token to the next one's, or to the end of the segment.

    `log_ratio` is float64 `[N]`. The ratio of a span is the product over its tokens, or their geometric mean. After an
    end anchor follow the tokens of the next turn up to its anchor, after a start anchor the rest of its own turn.
    """
    own = log_ratio[layout.anchors(anchor)]
    following, count = layout.sum_over_turns(log_ratio) - own, (layout.ends - layout.starts).double()
    if anchor == "end":
        following, count = (shift_back(terms, layout.last_turns) for terms in (following, count))
    log_all = following + own
    if geometric:
        following, log_all = following / count.clamp(min=1.0), log_all / (count + 1.0)
    bounds = (-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    return SpanRatios(log_all.clamp(*bounds), following.clamp(*bounds), count > 0)


def truncated_ratios(log_ratio: Tensor, caps: Caps) -> tuple[Tensor, Tensor]:
    """`rho` and `c` of a bounded log-ratio."""
    ratio = log_ratio.exp()
    rho = ratio.clamp(max=caps.rho_bar)
    return rho, ratio.clamp_(max=caps.c_bar)


def corrected_scan(
    td_error: Tensor,
    trace: float,
    ends: Tensor,
    ratios: SpanRatios | None,
    caps: Caps,
    pinned: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Policy advantage `A` and value correction `X` of every state, float64 `[M]` each.

        A = rho(U) * d + trace * c(U) * X'       U: ratio of the following tokens
        X = rho(W) * d + trace * c(W) * X'       W: ratio of all tokens of the step

    with `X'` the correction of the next state (0 at `ends`), `d` the TD error and `trace` discount times lambda:
    V-trace in its lambda form (Espeholt et al. 2018, arXiv 1802.01561, remark 2). Without ratios it is GAE (Schulman et
    al. 2016) and `A == X`. `pinned` gives `A` and `X` at `ends` from outside.
    """
    if ratios is None:
        offset, coefficient = td_error.clone(), torch.full_like(td_error, trace)
    else:
        rho, c = truncated_ratios(ratios.log_all, caps)
        offset, coefficient = rho.mul_(td_error), c.mul_(trace)
    if pinned is not None:
        offset.index_copy_(0, ends, pinned[1])
    correction = reverse_affine_scan(offset, coefficient.index_fill_(0, ends, 0.0))
    if ratios is None:
        return correction, correction
    advantage = _policy_advantage(td_error, shift_back(correction, ends).mul_(trace), ratios, caps)
    if pinned is not None:
        advantage.index_copy_(0, ends, pinned[0])
    return advantage, correction


def _policy_advantage(td_error: Tensor, later: Tensor, ratios: SpanRatios, caps: Caps) -> Tensor:
    if ratios.log_following is None or ratios.has_following is None:
        return later.add_(td_error)
    rho, c = truncated_ratios(ratios.log_following, caps)
    return torch.where(ratios.has_following, rho * td_error + c * later, td_error + later)
