"""The critic's loss. Owns the value mask: a token without a target never contributes."""

from __future__ import annotations

import torch
from torch import Tensor

from vagen.common.errors import TrajectoryError
from vagen.learner.losses.config import LossConfig
from vagen.learner.losses.two_hot import bin_centres, two_hot_loss


def value_loss(
    values: Tensor,
    old_values: Tensor,
    targets: Tensor,
    mask: Tensor,
    config: LossConfig,
    count: int | Tensor | None = None,
    logits: Tensor | None = None,
    weights: Tensor | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """`value_weight` times the mean loss of the tokens with a target, and diagnostics; both add up over micro-batches.

    `values` (with gradient), `old_values` (at the batch's start) and `targets` are float32 `[n]`, `mask` bool `[n]`.
    `mse` is `(v - t)^2 / 2`; `smooth_l1` the same within 1 of the target and linear beyond. `value_clip` takes the
    larger of the losses of `v` and of `v` kept within the bound of its old value (Schulman et al. 2017). `two_hot` is
    the cross-entropy of `logits` (float32 `[n, value_bins]`, with gradient, not needed otherwise): see `two_hot_loss`.
    `weights`, float32 `[n]`, multiply each token's share. `count` is the number of targets in the global batch, this
    tensor's own by default. Raises `TrajectoryError` for unequal shapes.
    """
    for name, tensor in (("old_values", old_values), ("targets", targets), ("mask", mask), ("weights", weights)):
        if tensor is not None and tensor.shape != values.shape:
            raise TrajectoryError(name, f"expected shape {list(values.shape)}, got {list(tensor.shape)}")
    targets = torch.where(mask, targets, values).detach()
    share = mask.to(values.dtype) / (mask.sum() if count is None else torch.as_tensor(count)).clamp(min=1)
    if weights is not None:
        share = share * weights
    if config.value_loss == "two_hot":
        return _categorical(logits, targets, share, config)
    losses = _error(values, targets, config)
    is_clipped = torch.zeros_like(mask)
    if config.value_clip is not None:
        old_values = torch.where(mask, old_values, values).detach()
        kept = old_values + (values - old_values).clamp(-config.value_clip, config.value_clip)
        clipped = _error(kept, targets, config)
        is_clipped = clipped > losses
        losses = torch.maximum(losses, clipped)
    mean = (share * losses).sum()
    loss = config.value_weight * mean
    return loss, {"value_loss": mean.detach(), "value_clip_share": (share * is_clipped).sum().detach()}


def _categorical(
    logits: Tensor | None, targets: Tensor, share: Tensor, config: LossConfig
) -> tuple[Tensor, dict[str, Tensor]]:
    expected = (targets.numel(), config.value_bins)
    if logits is None or logits.shape != expected:
        found = None if logits is None else list(logits.shape)
        raise TrajectoryError("value_logits", f"expected shape {list(expected)} with value_loss two_hot, got {found}")
    mean = (share * two_hot_loss(logits, targets, bin_centres(config.value_bins, config.value_range).to(logits))).sum()
    low, high = config.value_range
    is_clamped = (targets < low) | (targets > high)
    return config.value_weight * mean, {
        "value_loss": mean.detach(),
        "value_clip_share": torch.zeros_like(mean),
        "value_clamped_share": (share * is_clamped).sum().detach(),
    }


def _error(values: Tensor, targets: Tensor, config: LossConfig) -> Tensor:
    if config.value_loss == "mse":
        return 0.5 * (values - targets).square()
    return torch.nn.functional.smooth_l1_loss(values, targets, reduction="none")
