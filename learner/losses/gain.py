"""How large a step a batch deserves: the factor of the learning rate. Owns nothing of the loss itself."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from vagen.learner.losses.config import LossConfig
from vagen.learner.losses.weights import clamped

__all__ = ["sample_size_scale", "staleness_scale", "step_gain"]


def sample_size_scale(effective_sample_size: float, power: float) -> float:
    """Effective sample size, a share, to a power (VCPO, arXiv 2602.17616: 0.5 for Adam)."""
    return effective_sample_size**power


def staleness_scale(mean_staleness: float, free: float, power: float) -> float:
    """`(free / s) ** power` for data that are `s` learner steps old, 1 up to `free`.

    Training on delayed feedback is stable while gain times delay stays below a bound; staleness-aware step sizes (Zhang
    et al., arXiv 1511.05950) divide by the staleness, which is `power` 1.
    """
    return min(1.0, free / mean_staleness) ** power if mean_staleness > 0 else 1.0


def step_gain(
    log_ratio: Tensor, staleness: Tensor, config: LossConfig, reduce: Callable[[Tensor], Tensor] | None
) -> float:
    """The product of both scales for the global batch, the same on every rank.

    `log_ratio` `[N]` is that of proximal to behaviour policy over policy tokens, `staleness` int64 `[B]` that of
    trajectories, `reduce` sums a float64 tensor over data-parallel ranks.
    """
    ratio = clamped(log_ratio.detach().double()).exp()
    ages = staleness.double()
    totals = torch.stack(
        [
            ratio.sum(),
            ratio.square().sum(),
            ratio.new_tensor(float(ratio.numel())),
            ages.sum(),
            ages.new_tensor(float(ages.numel())),
        ]
    )
    weight, squares, num_tokens, age, num_trajectories = (totals if reduce is None else reduce(totals)).tolist()
    return sample_size_scale(weight**2 / (num_tokens * squares), config.ess_power) * staleness_scale(
        age / num_trajectories, config.staleness_free, config.staleness_power
    )
