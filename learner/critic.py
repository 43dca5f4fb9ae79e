"""Where a step's values come from, which gradient goes where, and how fast the critic learns.

Owns the critic's side of an optimizer step: a head on the policy's trunk, or a model of its own, and the steps at the
start of a run that train it alone. Does not own losses or targets.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

from torch import Tensor

from vagen.common.errors import ConfigError
from vagen.learner.config import LearnerConfig
from vagen.learner.model.actor_critic import VisionLanguageActorCritic
from vagen.learner.model.batch import TokenOutputs
from vagen.learner.model.optimizer import StepStats, Trainer
from vagen.learner.model.pipeline import outputs_of
from vagen.learner.packing import RowMicrobatches

__all__ = ["CriticUpdate", "Rates"]

LossOf: TypeAlias = Callable[[Tensor, TokenOutputs], Tensor]
"""Loss of the tokens at the slots of a pack, from the model's outputs for it."""


@dataclass(frozen=True, kw_only=True)
class Rates:
    """Learning rates of one optimizer step; `policy` is None where the critic is trained alone."""

    policy: float | None
    critic: float


class CriticUpdate:
    """Optimizer steps of policy and critic. All methods are collective over all ranks, as those of `Trainer`."""

    def __init__(self, config: LearnerConfig, policy: Trainer, separate: Trainer | None) -> None:
        """`separate` trains a critic's own model. Raises `ConfigError` where it is not as `config` says, and for
        a policy's trainer without a rate for the value head where that needs one.
        """
        trunk = config.critic.trunk
        if (trunk == "separate") != (separate is not None):
            found = "none" if separate is None else "one"
            raise ConfigError(f"$.learner.critic.trunk: {trunk} does not go with {found} of a separate critic's model")
        if config.critic.is_apart and separate is None and not policy.has_critic_rate:
            raise ConfigError("$.learner.critic: expected a trainer with a learning rate for the value head, got none")
        self._config = config.critic
        self._policy = policy
        self.separate = separate

    @property
    def model(self) -> VisionLanguageActorCritic:
        """Whose values count."""
        return self._policy.model if self.separate is None else self.separate.model

    def is_alone(self, step: int) -> bool:
        """Whether learner step `step` trains the critic and nothing else."""
        return step < self._config.warmup_steps

    def accumulate(
        self,
        packs: RowMicrobatches,
        valued_packs: RowMicrobatches,
        policy_loss: LossOf,
        critic_loss: LossOf,
        add_total: Callable[[Tensor], None],
        *,
        alone: bool,
        **options: Any,
    ) -> None:
        """The gradient of all packs in place of any other; `valued_packs` are the same rows as a separate critic reads
        them.

        Both losses are computed of every pack, also where the critic learns `alone`, and add up to what `add_total` is
        given. `options` are those of the policy's forward pass.
        """

        def joint(taken: Tensor, out: TokenOutputs) -> Tensor:
            policy, critic = policy_loss(taken, out), critic_loss(taken, out)
            loss = policy + critic
            add_total(loss.detach())
            return critic if alone else loss

        def counted(loss_of: LossOf, taken: Tensor, out: TokenOutputs) -> Tensor:
            loss = loss_of(taken, out)
            add_total(loss.detach())
            return loss

        self._policy.zero_grad()
        if self.separate is None:
            detached = alone or self._config.trunk == "detached"
            self._policy.accumulate(packs, joint, detach_value=detached, **options)
            return
        self.separate.zero_grad()
        self.separate.accumulate(valued_packs, partial(counted, critic_loss), values_only=True)
        if alone:
            for taken, out in outputs_of(self._policy.model, packs, **options):
                counted(policy_loss, taken, out)
        else:
            self._policy.accumulate(packs, partial(counted, policy_loss), **options)

    def step(self, rates: Rates) -> StepStats:
        """Apply what was accumulated. The norm is the policy's, or the critic's where it is trained alone; `skipped`
        where either was not finite, and then neither has changed.
        """
        if self.separate is None:
            return self._policy.step(rates.policy or 0.0, critic_lr=rates.critic)
        trained = [(self.separate, rates.critic)]
        if rates.policy is not None:
            trained.insert(0, (self._policy, rates.policy))
        norms = [trainer.grad_norm() for trainer, _ in trained]
        if not all(map(math.isfinite, norms)):
            return StepStats(norms[0], skipped=True)
        for (trainer, rate), norm in zip(trained, norms, strict=True):
            trainer.apply(norm, rate)
        return StepStats(norms[0], skipped=False)
