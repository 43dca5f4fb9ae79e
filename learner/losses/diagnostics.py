"""What the learner logs about a batch: how far the data is from the policy, and how good the critic is.

Owns numbers, not names: metric names are in `vagen.common.metrics`. Everything is detached and computed in float64.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from vagen.learner.advantages.scan import LOG_RATIO_BOUND
from vagen.learner.losses.weights import clamped


@dataclass(frozen=True)
class Mismatch:
    """Distance between proximal and behaviour policy over a set of tokens; all 0 for an empty set."""

    num_tokens: int
    mean_abs_log_ratio: float
    max_abs_log_ratio: float
    kl: float
    """Mean of `exp(x) - 1 - x`, `x` the log-ratio: estimates KL(behaviour, proximal) on the sampled tokens."""


@dataclass(frozen=True)
class RatioDiagnostics:
    """Importance ratios `w` (proximal over behaviour) of a batch of policy tokens."""

    mean: float
    max: float
    p99: float
    effective_sample_size: float
    """`(sum w)^2 / (n sum w^2)`, a share in (0, 1]."""
    capped_share: float
    """Share of tokens whose ratio is above the cap given."""
    clamped_share: float
    """Share of tokens whose log-ratio left +- 20, where it is clamped."""
    fresh: Mismatch
    """Tokens of staleness 0: the numerics of engine against learner."""
    stale: Mismatch
    """All others: the same, plus what staleness adds."""


def ratio_diagnostics(
    proximal_logprobs: Tensor, behaviour_logprobs: Tensor, staleness: Tensor, cap: float
) -> RatioDiagnostics:
    """Diagnostics of float32 logprobs `[N]` and int64 staleness `[N]`, `N >= 1`.

    Mean, percentile and sample size are of the tokens given: gather them over ranks for those of the global batch.
    """
    raw = (proximal_logprobs.double() - behaviour_logprobs.double()).detach()
    ratio = clamped(raw).exp()
    rank = max(0, -(-99 * ratio.numel() // 100) - 1)
    fresh = staleness == 0
    return RatioDiagnostics(
        mean=ratio.mean().item(),
        max=ratio.max().item(),
        p99=ratio.sort().values[rank].item(),
        effective_sample_size=effective_sample_size(raw).item(),
        capped_share=(ratio > cap).double().mean().item(),
        clamped_share=(raw.abs() > LOG_RATIO_BOUND).double().mean().item(),
        fresh=_mismatch(raw[fresh]),
        stale=_mismatch(raw[~fresh]),
    )


def effective_sample_size(log_ratio: Tensor) -> Tensor:
    """`(sum w)^2 / (n sum w^2)` of log-ratios `[N]`, float64 scalar in (0, 1]."""
    ratio = clamped(log_ratio.detach().double()).exp()
    return ratio.sum().square() / (ratio.numel() * ratio.square().sum())


def staleness_histogram(staleness: Tensor, num_bins: int) -> Tensor:
    """Tokens of staleness 0, 1, ... `num_bins - 1` and more, int64 `[num_bins]`; adds up over ranks."""
    return torch.bincount(staleness.clamp(0, num_bins - 1), minlength=num_bins)


def explained_variance(values: Tensor, targets: Tensor, mask: Tensor) -> Tensor:
    """`1 - var(target - value) / var(target)` over tokens with a target, float64 scalar; 0 if these do not vary."""
    target = targets[mask].detach().double()
    residual = target - values[mask].detach().double()
    if target.numel() < 2:
        return target.new_zeros(())
    variance = target.var()
    return torch.where(variance > 0, 1.0 - residual.var() / variance, 0.0)


def _mismatch(log_ratio: Tensor) -> Mismatch:
    if log_ratio.numel() == 0:
        return Mismatch(0, 0.0, 0.0, 0.0)
    x = clamped(log_ratio)
    return Mismatch(
        num_tokens=x.numel(),
        mean_abs_log_ratio=x.abs().mean().item(),
        max_abs_log_ratio=x.abs().max().item(),
        kl=(torch.expm1(x) - x).mean().item(),
    )
