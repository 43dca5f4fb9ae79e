"""The KL to a reference policy: a penalty of each token's reward, a term of the loss, or both.

Owns the two penalties. Does not own the reference model; its log-probabilities come at the sampling temperature, as
those of the policy.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from vagen.common.errors import TrajectoryError
from vagen.learner.losses.config import ReferenceConfig
from vagen.learner.losses.policy import behaviour_kl


def penalised_rewards(
    rewards: Tensor, proximal_logprobs: Tensor, reference_logprobs: Tensor, config: ReferenceConfig
) -> Tensor:
    """`r_j - kl_in_reward * (log pi_prox - log pi_ref)` at every policy token, float32 `[N]` as the arguments.

    The estimator is k1 whatever the configuration says: unbiased, as in RLHF (Ouyang et al. 2022, arXiv 2203.02155).
    """
    _check(rewards, proximal_logprobs, reference_logprobs)
    return rewards - config.kl_in_reward * (proximal_logprobs - reference_logprobs)


def reference_loss(
    logprobs: Tensor, reference_logprobs: Tensor, loss_weights: Tensor, config: ReferenceConfig
) -> tuple[Tensor, dict[str, Tensor]]:
    """`kl_in_loss` times the weighted mean of the estimator, and diagnostics; both add up over micro-batches.

    All float32 `[n]`, `logprobs` with gradient. The mean is over the sampled tokens as they are: stale ones are not
    weighted towards the current policy. Raises `TrajectoryError` for unequal shapes.
    """
    _check(logprobs, reference_logprobs, loss_weights)
    divergence = (loss_weights.detach() * _ESTIMATORS[config.estimator](logprobs, reference_logprobs.detach())).sum()
    loss = config.kl_in_loss * divergence
    return loss, {"reference_kl": divergence.detach(), "reference_loss": loss.detach()}


def _k1(logprobs: Tensor, reference_logprobs: Tensor) -> Tensor:
    return logprobs - reference_logprobs


def _k2(logprobs: Tensor, reference_logprobs: Tensor) -> Tensor:
    return 0.5 * (logprobs - reference_logprobs).square()


_ESTIMATORS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"k1": _k1, "k2": _k2, "k3": behaviour_kl}
"""Schulman 2020, "Approximating KL divergence"; k3 is `exp(x) - 1 - x` with `x` the reference over the policy."""


def _check(expected: Tensor, *tensors: Tensor) -> None:
    for tensor in tensors:
        if tensor.shape != expected.shape:
            raise TrajectoryError(
                "reference_logprobs", f"expected shape {list(expected.shape)} everywhere, got {list(tensor.shape)}"
            )
