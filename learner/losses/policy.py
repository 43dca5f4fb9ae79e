"""The policy loss: a clipped objective against an anchor, weighted for stale data, with KL and entropy.

    loss = - sum_j m_j b_j L_j  +  behaviour_kl * KL  -  entropy_bonus * H

over the tokens `j` of a micro-batch: `m` the loss weights (which sum to 1 over the global batch), `b` the behaviour
weights, `L` the objective. Only `logprobs` and `entropy` carry gradients.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from vagen.common.errors import TrajectoryError
from vagen.learner.losses.config import LossConfig
from vagen.learner.losses.weights import BehaviourWeights, behaviour_weights, clamped, sequence_mean

_MAX_KL_EXPONENT = 10.0


@dataclass(frozen=True)
class PolicyLossInputs:
    """Policy tokens of one micro-batch, each tensor `[n]`."""

    logprobs: Tensor
    """float32, with gradient: under the current policy, at the sampling temperature."""
    behaviour_logprobs: Tensor
    """float32: under the policy that sampled."""
    advantages: Tensor
    """float32."""
    loss_weights: Tensor
    """float32: see `weights.loss_weights`."""
    sequence_ids: Tensor
    """int64: equal for consecutive tokens of a sequence. With `gspo` a sequence must lie in one micro-batch."""
    proximal_logprobs: Tensor | None = None
    """float32: under the learner's weights when it took the batch; not used by anchor `interpolated`."""
    weights: BehaviourWeights | None = None
    """Computed over the whole batch; without it over these tokens (the same, except for weights of a whole batch)."""
    staleness: Tensor | None = None
    """int64: learner version minus the token's; needed by anchor `interpolated`."""
    entropy: Tensor | None = None
    """float32, with gradient; needed where `entropy_bonus` is not 0."""


Objective = Callable[[Tensor, PolicyLossInputs, Tensor, LossConfig], tuple[Tensor, Tensor]]


def policy_loss(inputs: PolicyLossInputs, config: LossConfig) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss (float32 scalar) and detached diagnostics; both add up over micro-batches and ranks.

    Raises `TrajectoryError` where an input that the configuration needs is missing or of another shape.
    """
    _check(inputs, config)
    anchor = _anchor(inputs, config)
    weights = inputs.weights
    if weights is None:
        stale = anchor if config.anchor == "interpolated" else inputs.proximal_logprobs
        log_ratio = torch.zeros_like(anchor) if stale is None else stale - inputs.behaviour_logprobs
        weights = behaviour_weights(log_ratio, inputs.sequence_ids, config)
    objective, is_clipped = _OBJECTIVES[config.objective](anchor, inputs, inputs.advantages.detach(), config)
    mean = inputs.loss_weights.detach()
    surrogate = -(mean * weights.weights.detach() * objective).sum()
    divergence = (mean * behaviour_kl(inputs.logprobs, inputs.behaviour_logprobs)).sum()
    loss = surrogate + config.behaviour_kl * divergence
    diagnostics = {
        "policy_surrogate": surrogate,
        "behaviour_kl": divergence,
        "clip_share": (mean * is_clipped).sum(),
        "behaviour_weight": (mean * weights.weights).sum(),
        "rejected_share": (mean * weights.rejected).sum(),
        "truncated_share": (mean * weights.truncated).sum(),
    }
    if inputs.entropy is not None:
        entropy = (mean * inputs.entropy).sum()
        if config.entropy_bonus:
            loss = loss - config.entropy_bonus * entropy
        diagnostics["entropy"] = entropy
    diagnostics["policy_loss"] = loss
    return loss, {name: tensor.detach() for name, tensor in diagnostics.items()}


def behaviour_kl(logprobs: Tensor, behaviour_logprobs: Tensor) -> Tensor:
    """`exp(x) - 1 - x` with `x = log mu - log pi` per sampled token, `[n]`: the k3 estimator (Schulman 2020).

    `x` is capped at 10, beyond which a token neither overflows nor pulls.
    """
    x = (behaviour_logprobs.detach() - logprobs).clamp(max=_MAX_KL_EXPONENT)
    return torch.expm1(x) - x


def interpolated_logprobs(logprobs: Tensor, behaviour_logprobs: Tensor, staleness: Tensor) -> Tensor:
    """Proximal logprobs without a forward pass, detached `[n]` (A-3PO, arXiv 2512.06547).

    `log mu + s / (s + 1) * (log pi - log mu)` for a token `s` versions old: during the update the current policy is up
    to `s + 1` versions from the behaviour policy, and the batch's start one version back from there.
    """
    share = staleness.to(logprobs.dtype) / (staleness + 1)
    return torch.lerp(behaviour_logprobs, logprobs.detach(), share)


def _ppo_clip(
    anchor: Tensor, inputs: PolicyLossInputs, advantages: Tensor, config: LossConfig
) -> tuple[Tensor, Tensor]:
    """`min(r A, clip(r) A)`, with separate bounds (DAPO, arXiv 2503.14476), at least `dual_clip * A` for negative `A`
    (Ye et al. 2020, arXiv 1912.09729)."""
    return _clipped(clamped(inputs.logprobs - anchor).exp(), advantages, config)


def _gspo(anchor: Tensor, inputs: PolicyLossInputs, advantages: Tensor, config: LossConfig) -> tuple[Tensor, Tensor]:
    """PPO's clipping of the sequence's geometric mean ratio, in the token form (GSPO-token, arXiv 2507.18071, eq. 13):

    `r_j = sg(s) * pi_j / sg(pi_j)`, with `s` the mean ratio: each token keeps its own advantage and gradient.
    """
    log_ratio = sequence_mean((inputs.logprobs - anchor).detach(), inputs.sequence_ids)
    token = inputs.logprobs - inputs.logprobs.detach()
    return _clipped((clamped(log_ratio) + token).exp(), advantages, config)


def _cispo(anchor: Tensor, inputs: PolicyLossInputs, advantages: Tensor, config: LossConfig) -> tuple[Tensor, Tensor]:
    """`sg(min(r, 1 + clip_high)) * A * log pi` (CISPO, arXiv 2506.13585): a clipped token keeps its gradient."""
    ratio = clamped(inputs.logprobs.detach() - anchor).exp()
    bound = 1.0 + config.clip_high
    return ratio.clamp(max=bound) * advantages * inputs.logprobs, ratio > bound


_OBJECTIVES: dict[str, Objective] = {"ppo_clip": _ppo_clip, "gspo": _gspo, "cispo": _cispo}


def _clipped(ratio: Tensor, advantages: Tensor, config: LossConfig) -> tuple[Tensor, Tensor]:
    low, high = 1.0 - config.clip_low, 1.0 + config.clip_high
    objective = torch.minimum(ratio * advantages, ratio.clamp(low, high) * advantages)
    is_clipped = ((ratio > high) & (advantages > 0)) | ((ratio < low) & (advantages < 0))
    if config.dual_clip is not None:
        floor = config.dual_clip * advantages
        is_clipped = is_clipped | ((advantages < 0) & (objective < floor))
        objective = torch.where(advantages < 0, torch.maximum(objective, floor), objective)
    return objective, is_clipped


def _anchor(inputs: PolicyLossInputs, config: LossConfig) -> Tensor:
    behaviour_logprobs = inputs.behaviour_logprobs.detach()
    if config.anchor == "behaviour":
        return behaviour_logprobs
    if config.anchor == "interpolated":
        assert inputs.staleness is not None
        return interpolated_logprobs(inputs.logprobs, behaviour_logprobs, inputs.staleness)
    assert inputs.proximal_logprobs is not None
    return inputs.proximal_logprobs.detach()


def _check(inputs: PolicyLossInputs, config: LossConfig) -> None:
    needed = {
        "behaviour_logprobs": True,
        "advantages": True,
        "loss_weights": True,
        "sequence_ids": True,
        "proximal_logprobs": config.anchor == "proximal"
        or (config.anchor == "behaviour" and config.behaviour_weight != "none" and inputs.weights is None),
        "staleness": config.anchor == "interpolated",
        "entropy": config.entropy_bonus != 0.0,
    }
    for name, is_needed in needed.items():
        tensor: Tensor | None = getattr(inputs, name)
        if tensor is None and is_needed:
            raise TrajectoryError(
                name,
                f"required by objective {config.objective}, anchor {config.anchor}, behaviour_weight "
                f"{config.behaviour_weight}, entropy_bonus {config.entropy_bonus}, got None",
            )
        if tensor is not None and tensor.shape != inputs.logprobs.shape:
            raise TrajectoryError(name, f"expected shape {list(inputs.logprobs.shape)}, got {list(tensor.shape)}")
