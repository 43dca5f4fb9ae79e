"""Weights computed once per batch, outside the gradient: how a stale token counts, and what a token counts in the mean.

Ratios are proximal over behaviour policy unless said otherwise, in log space, clamped to +- 20.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from vagen.learner.advantages.scan import LOG_RATIO_BOUND
from vagen.learner.losses.config import LossConfig


@dataclass(frozen=True)
class BehaviourWeights:
    """Multipliers of the policy objective, one a token."""

    weights: Tensor
    """float32 `[N]`, 0 where rejected."""
    rejected: Tensor
    """bool `[N]`."""
    truncated: Tensor
    """bool `[N]`: the ratio was larger than the cap."""


WeightFunction = Callable[[Tensor, Tensor, LossConfig], BehaviourWeights]


def behaviour_weights(
    log_ratio: Tensor, sequence_ids: Tensor, config: LossConfig, gather: Callable[[Tensor], Tensor] | None = None
) -> BehaviourWeights:
    """Weights of the method `config.behaviour_weight`, detached.

    `log_ratio` is float32 `[N]`; `sequence_ids` int64 `[N]` has equal numbers on consecutive tokens of one sequence.
    `gather` makes float64 `[M]` of all data-parallel ranks of one's own `[N]` (all must call); without it this rank is
    all there is.
    """
    log_ratio = clamped(log_ratio.detach())
    if config.behaviour_weight == "m2po":
        return _m2po(log_ratio, config, gather)
    return _METHODS[config.behaviour_weight](log_ratio, sequence_ids, config)


def loss_weights(
    turn_ids: Tensor,
    sequence_ids: Tensor,
    weighting: Literal["token", "turn", "sequence"],
    count: int | None = None,
) -> Tensor:
    """What each token counts in every mean of the losses, float32 `[N]`, summing to 1 over the global batch.

    A unit (token, turn or sequence: consecutive equal ids) counts `1 / count`, shared equally by its tokens; `count` is
    the number of units of the global batch, this tensor's own by default. Units may be spread over micro-batches, and
    tokens that are rejected later still count, so that dropping them does not inflate the rest.
    """
    if weighting == "token":
        return torch.full(turn_ids.shape, 1.0 / (turn_ids.numel() if count is None else count), device=turn_ids.device)
    unit, sizes = _units(turn_ids if weighting == "turn" else sequence_ids)
    return 1.0 / (sizes[unit].float() * (sizes.numel() if count is None else count))


def sequence_mean(terms: Tensor, sequence_ids: Tensor) -> Tensor:
    """Mean of `terms` `[N]` over each sequence, given back to each of its tokens `[N]`."""
    unit, sizes = _units(sequence_ids)
    return (terms.new_zeros(sizes.numel()).index_add(0, unit, terms) / sizes)[unit]


def clamped(log_ratio: Tensor) -> Tensor:
    """Log-ratios within the bound at which their exponential is still usable."""
    return log_ratio.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)


def _none(log_ratio: Tensor, sequence_ids: Tensor, config: LossConfig) -> BehaviourWeights:
    """Every token counts 1."""
    nothing = torch.zeros_like(log_ratio, dtype=torch.bool)
    return BehaviourWeights(torch.ones_like(log_ratio), nothing, nothing)


def _token_tis(log_ratio: Tensor, sequence_ids: Tensor, config: LossConfig) -> BehaviourWeights:
    """Truncated importance sampling: `min(w, cap)` of the sampled token."""
    bound = math.log(config.weight_cap)
    return BehaviourWeights(
        log_ratio.clamp(max=bound).exp(), torch.zeros_like(log_ratio, dtype=torch.bool), log_ratio > bound
    )


def _sequence_tis(log_ratio: Tensor, sequence_ids: Tensor, config: LossConfig) -> BehaviourWeights:
    """`min(product of w over the sequence, cap)`, the same for each of its tokens."""
    unit, sizes = _units(sequence_ids)
    totals = log_ratio.new_zeros(sizes.numel()).index_add(0, unit, log_ratio)
    return _token_tis(clamped(totals)[unit], sequence_ids, config)


def _token_reject(log_ratio: Tensor, sequence_ids: Tensor, config: LossConfig) -> BehaviourWeights:
    """1 where the ratio lies within `kept_ratios`, else 0."""
    return _keep(torch.ones_like(log_ratio), _within(log_ratio, config.kept_ratios))


def _icepop(log_ratio: Tensor, sequence_ids: Tensor, config: LossConfig) -> BehaviourWeights:
    """The ratio itself where it lies within `kept_ratios`, else 0 (IcePop, arXiv 2510.18855)."""
    return _keep(log_ratio.exp(), _within(log_ratio, config.kept_ratios))


def _m2po(log_ratio: Tensor, config: LossConfig, gather: Callable[[Tensor], Tensor] | None) -> BehaviourWeights:
    """Drop the largest squared log-ratios until the mean of the rest is below the threshold (arXiv 2510.01161).

    The set is all tokens of all ranks, so that it is a property of the batch and not of a micro-batch. Of equal ones
    all are dropped or none.
    """
    squared = log_ratio.double().square()
    ascending = (squared if gather is None else gather(squared)).sort().values
    means = ascending.cumsum(0) / torch.arange(1, ascending.numel() + 1, device=ascending.device)
    dropped = ascending[means >= config.m2po_threshold]
    kept = squared < dropped[0] if dropped.numel() else torch.ones_like(squared, dtype=torch.bool)
    return _keep(torch.ones_like(log_ratio), kept)


_METHODS: dict[str, WeightFunction] = {
    "none": _none,
    "token_tis": _token_tis,
    "sequence_tis": _sequence_tis,
    "token_reject": _token_reject,
    "icepop": _icepop,
}


def _keep(weights: Tensor, kept: Tensor) -> BehaviourWeights:
    return BehaviourWeights(weights.masked_fill(~kept, 0.0), ~kept, torch.zeros_like(kept))


def _within(log_ratio: Tensor, bounds: tuple[float, float]) -> Tensor:
    ratio = log_ratio.exp()
    return (ratio >= bounds[0]) & (ratio <= bounds[1])


def _units(ids: Tensor) -> tuple[Tensor, Tensor]:
    """Index of the run of equal ids that each token belongs to, and the length of every run."""
    _, unit, sizes = torch.unique_consecutive(ids, return_inverse=True, return_counts=True)
    return unit, sizes
