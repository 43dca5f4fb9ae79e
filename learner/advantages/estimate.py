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
    is_whitened = config.whiten and not estimator.needs_groups
    if is_whitened and config.whiten_per == "task":
        if inputs.task_ids is None:
            raise TrajectoryError("task_ids", "expected the task of every segment to whiten per task, got None")
        if reduce is not None and inputs.num_tasks is None:
            raise TrajectoryError("num_tasks", "expected the run's number of tasks when ranks are reduced, got None")
    reduce = reduce or _this_rank_only
    with torch.no_grad():
        outputs = estimator(inputs, config, reduce)
        if is_whitened:
            over = outputs.value_mask if estimator.whiten_over == "targets" else None
            if config.whiten_per == "batch" or inputs.task_ids is None:
                advantages = whiten(outputs.advantages, reduce, over)
            else:
                tasks = inputs.task_ids[inputs.segment_ids]
                num_tasks = inputs.num_tasks or int(inputs.task_ids.max()) + 1
                advantages = whiten_per_task(outputs.advantages, tasks, num_tasks, reduce, over)
            outputs = replace(outputs, advantages=advantages)
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


def whiten_per_task(
    advantages: Tensor, tasks: Tensor, num_tasks: int, reduce: Reduce, over: Tensor | None = None
) -> Tensor:
    """`whiten` with the moments of each task's own tokens; `tasks` int64 `[N]` in 0..num_tasks-1.

    A task without variance (one token, or equal advantages) gets exactly 0. A rank that has nothing of a task takes
    part in the sums all the same.
    """
    exact = advantages.double()
    counted = torch.ones_like(exact) if over is None else over.double()

    def sums(terms: Tensor) -> Tensor:
        return exact.new_zeros(num_tasks).index_add_(0, tasks, terms * counted)

    count, total = reduce(torch.stack([sums(torch.ones_like(exact)), sums(exact)])).unbind()
    deviation = exact - (total / count.clamp(min=1.0))[tasks]
    variance = reduce(sums(deviation.square())) / (count - 1.0).clamp(min=1.0)
    scale = torch.where(variance > 0.0, torch.rsqrt(variance + 1e-8), 0.0)
    return (deviation * scale[tasks]).float()


def _this_rank_only(local: Tensor) -> Tensor:
    return local
