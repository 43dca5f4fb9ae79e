"""What one correction makes of a part of a batch, without a step: weights, gradient, critic.

A batch is scored once. For each correction, over the whole batch: advantages, critic targets and behaviour weights,
exactly as a learner step computes them. For each part of it then the gradient of the policy loss (objective, KL to the
behaviour policy, entropy, reference; not the critic's) with every other token masked out and the mean taken over the
part's own tokens, at the first optimizer step, before any weight has moved.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace

import msgspec
import numpy as np
import torch
from torch import Tensor

from vagen.learner.batching import TrainingBatch
from vagen.learner.config import CriticConfig, LearnerConfig
from vagen.learner.losses.config import LossConfig
from vagen.learner.losses.diagnostics import effective_sample_size
from vagen.learner.losses.policy import policy_loss
from vagen.learner.model.actor_critic import VisionLanguageActorCritic
from vagen.learner.model.optimizer import Trainer
from vagen.learner.models import Trained
from vagen.learner.scoring import Scores, score
from vagen.learner.token_data import TokenData
from vagen.learner.update import PolicyUpdate

__all__ = ["Bench", "Bucket", "Measured"]


class Bucket(msgspec.Struct, frozen=True, kw_only=True):
    """The data of one range of staleness; the same for every correction."""

    low: int
    high: int | None
    """Inclusive; None is without end."""
    staleness_mean: float
    trajectories: int
    tokens: int
    log_ratio: float
    """Mean absolute log importance ratio, model over behaviour policy."""
    ess: float
    """Effective sample size of the ratios, a share in (0, 1]."""

    @property
    def name(self) -> str:
        """`4-7`, `3` or `32+`."""
        if self.high is None:
            return f"{self.low}+"
        return str(self.low) if self.high == self.low else f"{self.low}-{self.high}"


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """One correction on one bucket."""

    weight_ess: float
    """Effective sample size of the factors with which tokens' advantages enter the policy gradient: behaviour weight
    times the anchored ratio, 0 where clipped or rejected. 0 when all are."""
    truncated_share: float
    rejected_share: float
    clipped_share: float
    grad_norm: float
    """Norm of the policy loss's gradient, its mean taken over this bucket's tokens; before clipping."""
    value_error: float | None
    """Root mean square of the critic's value minus this correction's return (the critic's target); None without any."""


@dataclass(frozen=True, kw_only=True)
class Bench:
    """One model and one batch, scored; lives inside a `parallel_session`."""

    model: VisionLanguageActorCritic
    reference: VisionLanguageActorCritic | None
    trainer: Trainer
    batch: TrainingBatch
    scores: Scores
    forbidden: Tensor
    seed: int

    @classmethod
    def of(cls, trained: Trained, batch: TrainingBatch, forbidden: Tensor, seed: int, max_tokens: int) -> Bench:
        """Scores the batch in microbatches of `max_tokens`; a critic of its own is not needed after that."""
        model = trained.policy.model.eval()
        critic = None if trained.critic is None else trained.critic.model.eval()
        scores = score(model, batch, max_tokens, forbidden, trained.reference, critic)
        return cls(
            model=model,
            reference=trained.reference,
            trainer=trained.policy,
            batch=batch,
            scores=scores,
            forbidden=forbidden,
            seed=seed,
        )

    def bucket(self, bounds: tuple[int, int | None], members: np.ndarray) -> Bucket:
        """What trajectories `members` (their numbers in the batch) have in common for all corrections."""
        slots = self._slots(members)
        log_ratio = (self.scores.logprobs - self.batch.behaviour_logprobs)[slots].double()
        return Bucket(
            low=bounds[0],
            high=bounds[1],
            staleness_mean=float(self.batch.staleness[torch.from_numpy(members)].double().mean()),
            trajectories=len(members),
            tokens=slots.numel(),
            log_ratio=float(log_ratio.abs().mean()),
            ess=float(effective_sample_size(log_ratio)),
        )

    def correction(self, config: LearnerConfig) -> Callable[[np.ndarray], Measured]:
        """Estimates over the whole batch; the function measures on trajectories given by their numbers in it."""
        # The critic's gradient would hide what a correction does to the policy's.
        policy_alone = msgspec.structs.replace(
            config, loss=msgspec.structs.replace(config.loss, value_weight=0.0), critic=CriticConfig()
        )
        update = PolicyUpdate(
            self.model,
            self.trainer,
            policy_alone,
            seed=self.seed,
            forbidden_token_ids=self.forbidden,
            reference=self.reference,
        )
        scores = self.scores if config.reference.is_used else replace(self.scores, reference_logprobs=None)
        data = update.estimate(self.batch, scores)

        def measure(members: np.ndarray) -> Measured:
            slots = self._slots(members)
            losses: dict[str, float] = defaultdict(float)
            # Also sets the loss weights of these tokens, which the gradient weights are relative to.
            update.accumulate(self.batch, self._rows(members), data, losses)
            return Measured(
                weight_ess=_share_of_weight(_gradient_weights(data, slots, config.loss)),
                truncated_share=losses["truncated_share"],
                rejected_share=losses["rejected_share"],
                clipped_share=losses["clip_share"],
                grad_norm=self.trainer.grad_norm(),
                value_error=_value_error(data, slots),
            )

        return measure

    def _slots(self, members: np.ndarray) -> Tensor:
        """Policy tokens of trajectories, ascending."""
        return torch.isin(self.batch.segment_ids, torch.from_numpy(members)).nonzero().squeeze(-1)

    def _rows(self, members: np.ndarray) -> np.ndarray:
        """Rows of trajectories."""
        segments = np.array([int(self.batch.segment_ids[int(row.slots[0])]) for row in self.batch.rows])
        return np.flatnonzero(np.isin(segments, members))


def _gradient_weights(data: TokenData, slots: Tensor, config: LossConfig) -> Tensor:
    """`|d loss / d logprob| / (loss weight * |advantage|)` of the objective alone, float64 `[n]`."""
    logprobs = data.scores.logprobs[slots].clone().requires_grad_(True)
    inputs = data.inputs(slots, logprobs, data.scores.entropy[slots])
    signs = torch.where(inputs.advantages < 0, -1.0, 1.0)
    objective = msgspec.structs.replace(config, behaviour_kl=0.0, entropy_bonus=0.0)
    loss, _ = policy_loss(replace(inputs, advantages=signs), objective)
    (gradient,) = torch.autograd.grad(loss, logprobs)
    return (gradient / inputs.loss_weights).abs().double()


def _share_of_weight(weights: Tensor) -> float:
    """`(sum w)^2 / (n sum w^2)`, 0 where all are 0."""
    squares = float(weights.square().sum())
    return 0.0 if squares == 0 else float(weights.sum().square()) / (weights.numel() * squares)


def _value_error(data: TokenData, slots: Tensor) -> float | None:
    slots = slots[data.outputs.value_mask[slots]]
    if not slots.numel():
        return None
    return math.sqrt(float((data.scores.values[slots] - data.outputs.value_targets[slots]).double().square().mean()))
