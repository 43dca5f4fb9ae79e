"""Entry point of credit assignment: check, estimate, whiten. Owns the statistics over the global batch."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from vagen.common.errors import TrajectoryError
from vagen.learner.advantages.batch import AdvantageInputs, AdvantageOutputs
from vagen.learner.advantages.config import AdvantageConfig
from vagen.learner.advantages.registry import get_estimator

if TYPE_CHECKING:
    from vagen.learner.advantages.registry import Reduce


def estimate_advantages(
    inputs: AdvantageInputs, config: AdvantageConfig, reduce: Reduce | None = None
) -> AdvantageOutputs:
    """Advantages and critic targets of one rank's segments, detached.

    `reduce` sums a float64 tensor over the data-parallel ranks (all must call); without it this rank is all there is.
    Raises `TrajectoryError` for inputs that contradict themselves and `ConfigError` for an unknown estimator.
    """
    estimator = get_estimator(config.name)
    if reduce is not None and estimator.needs_groups and inputs.num_groups is None:
        raise TrajectoryError("num_groups", "expected the global number of groups when ranks are reduced, got None")
    reduce = reduce or _this_rank_only
    with torch.no_grad():
        outputs = estimator(inputs, config, reduce)
        if config.whiten and not estimator.needs_groups:
            over = outputs.value_mask if estimator.whiten_over == "targets" else None
            outputs = replace(outputs, advantages=whiten(outputs.advantages, reduce, over))
    return outputs


def whiten(advantages: Tensor, reduce: Reduce, over: Tensor | None = None) -> Tensor:
    """`(A - mean) * rsqrt(var + 1e-8)` of float32 `[N]`, with the moments of all ranks and unbiased variance.

    `over` (bool `[N]`) restricts the tokens whose moments are taken. Two passes (mean, then squared deviations), so
    that equal advantages give exactly 0.
    """
    exact = advantages.double()
    counted = exact if over is None else exact[over]
    count, total = reduce(torch.stack([exact.new_tensor(float(counted.numel())), counted.sum()])).unbind()
    mean = total / count.clamp(min=1.0)
    variance = reduce((counted - mean).square().sum()) / (count - 1.0).clamp(min=1.0)
    return ((exact - mean) * torch.rsqrt(variance + 1e-8)).float()


def _this_rank_only(local: Tensor) -> Tensor:
    return local
