"""One learner step's arithmetic: score the batch, estimate advantages, run the PPO epochs.

Owns the order of minibatches and the scaling that makes microbatches, minibatches and data-parallel ranks add up: which
rows make an optimizer step, and what the step's statistics say, does not depend on how many ranks share the batch. Does
not own where batches come from or where weights go.

Legend: N policy tokens.
"""

from __future__ import annotations

import time
from collections import defaultdict
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from vagen.common.errors import ConfigError
from vagen.learner.advantages.batch import AdvantageOutputs
from vagen.learner.advantages.estimate import estimate_advantages
from vagen.learner.batching import TrainingBatch
from vagen.learner.config import LearnerConfig
from vagen.learner.critic import CriticUpdate, Rates
from vagen.learner.losses.diagnostics import RatioDiagnostics, explained_variance, ratio_diagnostics
from vagen.learner.losses.gain import step_gain
from vagen.learner.losses.policy import policy_loss
from vagen.learner.losses.reference import reference_loss
from vagen.learner.losses.value import value_loss
from vagen.learner.losses.weights import behaviour_weights
from vagen.learner.model.actor_critic import VisionLanguageActorCritic
from vagen.learner.model.batch import TokenOutputs
from vagen.learner.model.collectives import (
    add_losses,
    gather_objects_over_data_parallel,
    gather_over_data_parallel,
)
from vagen.learner.model.optimizer import Trainer
from vagen.learner.packing import microbatches
from vagen.learner.scoring import Scores, score
from vagen.learner.token_data import Reduce, TokenData, advantage_inputs, row_numbers

__all__ = ["PolicyUpdate", "UpdateStats"]

_NO_SLOTS = np.zeros(0, dtype=np.int64)


@dataclass(frozen=True, kw_only=True)
class UpdateStats:
    """What one step did. `losses` are means over its optimizer steps."""

    losses: dict[str, float]
    grad_norm: float
    lr: float
    critic_lr: float | None
    """None where it is `lr`."""
    num_updates: int
    skipped_updates: int
    ratio: RatioDiagnostics
    explained_variance: float
    entropy: float
    seconds: dict[str, float] = field(default_factory=dict)


class PolicyUpdate:
    """Turns batches into optimizer steps."""

    def __init__(
        self,
        model: VisionLanguageActorCritic,
        trainer: Trainer,
        config: LearnerConfig,
        *,
        seed: int,
        forbidden_token_ids: Tensor,
        reduce: Reduce | None = None,
        reference: VisionLanguageActorCritic | None = None,
        critic: Trainer | None = None,
    ) -> None:
        """`reduce` sums a tensor over the data-parallel ranks; None where this rank is alone.

        `reference` is a frozen model, required where `config.reference` is used, `critic` the trainer of a separate
        critic, required where `config.critic` has one: see `models.load_trained`. Raises `ConfigError` where one is
        missing, or the model's critic is not of the kind that `config.loss` trains.
        """
        if config.reference.is_used and reference is None:
            raise ConfigError("$.learner.reference: expected a reference model with a positive coefficient, got none")
        if (config.loss.value_loss == "two_hot") != (model.options.value_bins is not None):
            raise ConfigError(
                f"$.learner.loss.value_loss: expected a model with a critic for {config.loss.value_loss}, got one of "
                f"{model.options.num_value_outputs} outputs"
            )
        self._model = model
        self.critic = CriticUpdate(config, trainer, critic)
        self._config = config
        self._seed = seed
        self._forbidden = forbidden_token_ids
        self._reduce = reduce
        self._reference = reference if config.reference.is_used else None
        self.num_updates = 0
        """Optimizer steps of the policy in the run so far; part of a checkpoint."""
        self.num_critic_updates = 0
        """The same of the critic: more where it was trained alone."""

    def run(self, batch: TrainingBatch, step: int, version: int) -> UpdateStats:
        """Train on a batch as learner step `step`; deterministic for (weights, batch, seed, step).

        `version` is the policy version that the present weights were published as, -1 if they never were; tokens that
        it sampled show the numerical mismatch of engine and learner apart from staleness.
        """
        config = self._config
        started = time.perf_counter()
        self._refresh_reference(step)
        encoder = self._model.image_encoder
        if encoder is not None and encoder.is_frozen:
            batch.images.encode(encoder.encode, encoder.merge_unit, config.max_tokens_per_microbatch)
        scores = self.score(batch)
        scored = time.perf_counter()
        data = self.estimate(batch, scores)
        gain = step_gain(scores.logprobs - batch.behaviour_logprobs, batch.staleness, config.loss, self._reduce)
        estimated = time.perf_counter()
        alone = self.critic.is_alone(step)
        totals: dict[str, float] = defaultdict(float)
        grad_norm, lr, skipped, updates = 0.0, 0.0, 0, 0
        numbers = _RowNumbers.of(batch, self._reduce)
        for epoch in range(config.ppo_epochs):
            for members in self._minibatches(numbers, step, epoch):
                rates = self._rates(step, gain, alone=alone)
                norm, was_skipped = self._minibatch(batch, members, data, rates, totals)
                lr = rates.policy or 0.0
                grad_norm += norm
                skipped += was_skipped
                updates += 1
                self.num_updates += not alone
                self.num_critic_updates += 1
        finished = time.perf_counter()
        view = _GlobalView.of(batch, scores, data.outputs, version)
        return UpdateStats(
            losses={name: value / updates for name, value in add_losses(totals).items()},
            grad_norm=grad_norm / updates,
            lr=lr,
            critic_lr=rates.critic if config.critic.is_apart else None,
            num_updates=updates,
            skipped_updates=skipped,
            ratio=ratio_diagnostics(
                view.logprobs, view.behaviour_logprobs, view.is_behind.long(), config.loss.weight_cap
            ),
            explained_variance=float(explained_variance(view.values, view.value_targets, view.value_mask)),
            entropy=float(view.entropy.mean()),
            seconds={"score": scored - started, "advantages": estimated - scored, "update": finished - estimated},
        )

    def estimate(self, batch: TrainingBatch, scores: Scores) -> TokenData:
        """Advantages, critic targets and behaviour weights of a batch: what its optimizer steps share."""
        config, tasks = self._config, None
        if config.advantage.whiten_per == "task":
            present = {trajectory.task for trajectory in batch.trajectories}
            tasks = sorted(set().union(*gather_objects_over_data_parallel(present)))
        inputs = advantage_inputs(batch, scores, config.reference, tasks)
        outputs = estimate_advantages(inputs, config.advantage, self._reduce)
        sequence_ids, log_ratio = row_numbers(batch), scores.logprobs - batch.behaviour_logprobs
        weights = behaviour_weights(log_ratio, sequence_ids, config.loss, gather_over_data_parallel)
        return TokenData(batch, scores, outputs, weights, sequence_ids)

    def score(self, batch: TrainingBatch) -> Scores:
        """What the present models say of a batch."""
        critic = None if self.critic.separate is None else self.critic.separate.model
        models = [self._model] if critic is None else [self._model, critic]
        for model in models:
            model.eval()
        scores = score(
            *(self._model, batch, self._config.max_tokens_per_microbatch, self._forbidden), self._reference, critic
        )
        for model in models:
            model.train()
        return scores

    def accumulate(
        self,
        batch: TrainingBatch,
        members: np.ndarray,
        data: TokenData,
        totals: dict[str, float],
        *,
        critic_alone: bool = False,
    ) -> None:
        """The gradient of one minibatch in place of any other, and its losses added to `totals`.

        `members` are numbers of rows: means are over their tokens, advantages and weights those of the whole batch.
        With `critic_alone` only the critic gets a gradient.
        """
        config = self._config
        rows = [batch.rows[index] for index in members]
        slots = torch.from_numpy(np.sort(np.concatenate([_NO_SLOTS, *(row.slots for row in rows)])))
        data.weigh(slots, config.loss.weighting, self._reduce)
        targets = int(self._total(data.outputs.value_mask[slots].sum()))

        def counted(found: tuple[Tensor, dict[str, Tensor]]) -> Tensor:
            for name, value in found[1].items():
                totals[name] += float(value)
            return found[0]

        def add_total(loss: Tensor) -> None:
            totals["total_loss"] += float(loss)

        self.critic.accumulate(
            microbatches(rows, batch.images, config.max_tokens_per_microbatch),
            microbatches(
                [batch.valued_rows[index] for index in members], batch.images, config.max_tokens_per_microbatch
            ),
            lambda taken, out: counted(self._policy_losses(data, taken, out)),
            lambda taken, out: counted(self._critic_losses(data, taken, out, targets)),
            add_total,
            alone=critic_alone,
            temperature=batch.temperature,
            forbidden_token_ids=self._forbidden,
        )

    def _rates(self, step: int, gain: float, *, alone: bool) -> Rates:
        """Learning rates of the next optimizer step; only the policy's is scaled by how stale the batch is."""
        config = self._config
        progress, schedule = step / config.total_steps, config.schedule
        policy = gain * config.optimizer.lr_at(progress, self.num_updates, schedule)
        if not config.critic.is_apart:
            return Rates(policy=policy, critic=policy)
        critic = config.critic.optimizer(config.optimizer).lr_at(progress, self.num_critic_updates, schedule)
        return Rates(policy=None if alone else policy, critic=critic)

    def _refresh_reference(self, step: int) -> None:
        every = self._config.reference.refresh_every
        if self._reference is not None and every and step and step % every == 0:
            self._reference.copy_policy(self._model)

    def beside_policy(self) -> dict[str, Trainer | VisionLanguageActorCritic]:
        """What a checkpoint holds beside the policy: by name, a critic of its own and a reference that moves."""
        found: dict[str, Trainer | VisionLanguageActorCritic] = {}
        if self.critic.separate is not None:
            found["critic"] = self.critic.separate
        if self._reference is not None and self._config.reference.refresh_every:
            found["reference"] = self._reference
        return found

    def _minibatches(self, numbers: _RowNumbers, step: int, epoch: int) -> list[np.ndarray]:
        """This rank's rows of each optimizer step. Those of all ranks are the global batch's: shuffled, of nearly equal
        number."""
        count = max(1, round(numbers.total / self._config.minibatch_rows))
        shuffled = np.random.default_rng((self._seed, step, epoch)).permutation(numbers.total)
        local = np.full(numbers.total, -1)
        local[numbers.own] = np.arange(len(numbers.own))
        return [rows[rows >= 0] for rows in np.array_split(local[shuffled], count)]

    def _minibatch(
        self, batch: TrainingBatch, members: np.ndarray, data: TokenData, rates: Rates, totals: dict[str, float]
    ) -> tuple[float, bool]:
        """One optimizer step; adds its losses to `totals` and returns (gradient norm, whether it was skipped)."""
        self.accumulate(batch, members, data, totals, critic_alone=rates.policy is None)
        stats = self.critic.step(rates)
        return (0.0 if stats.skipped else stats.grad_norm), stats.skipped

    def _policy_losses(self, data: TokenData, taken: Tensor, out: TokenOutputs) -> tuple[Tensor, dict[str, Tensor]]:
        """Policy loss of the tokens at slots `taken`, scalar, and diagnostics."""
        inputs = data.inputs(taken, out.logprobs, out.entropy)
        loss, losses = policy_loss(inputs, self._config.loss)
        if data.scores.reference_logprobs is None:
            return loss, losses
        penalty, penalty_losses = reference_loss(
            out.logprobs, data.scores.reference_logprobs[taken], inputs.loss_weights, self._config.reference
        )
        return loss + penalty, losses | penalty_losses

    def _critic_losses(
        self, data: TokenData, taken: Tensor, out: TokenOutputs, num_targets: int
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Critic loss of the tokens at slots `taken`, scalar, and diagnostics; `num_targets` is the minibatch's."""
        return value_loss(
            out.values,
            data.scores.values[taken],
            data.outputs.value_targets[taken],
            data.outputs.value_mask[taken],
            self._config.loss,
            count=num_targets,
            logits=out.value_logits,
            weights=data.trajectory_weights(taken),
        )

    def _total(self, value: Tensor) -> float:
        value = value.double()
        return float(value if self._reduce is None else self._reduce(value))


@dataclass(frozen=True)
class _RowNumbers:
    """Which rows of the global batch, counted trajectory after trajectory, this rank has."""

    own: np.ndarray
    """int64, of each row in order."""
    total: int

    @classmethod
    def of(cls, batch: TrainingBatch, reduce: Reduce | None) -> _RowNumbers:
        """Collective over the data-parallel ranks where there are several."""
        if reduce is None:
            return cls(np.arange(len(batch.rows)), len(batch.rows))
        segments = [int(batch.segment_ids[int(row.slots[0])]) for row in batch.rows]
        mine = torch.zeros(batch.num_global_segments, dtype=torch.float64)
        mine[batch.positions] = torch.bincount(
            torch.tensor(segments, dtype=torch.int64), minlength=batch.num_segments
        ).double()
        counts = reduce(mine).long()
        first = (counts.cumsum(0) - counts)[batch.positions]
        own = [int(first[segment]) + n for segment in range(batch.num_segments) for n in range(segments.count(segment))]
        return cls(np.array(own, dtype=np.int64), int(counts.sum()))


@dataclass(frozen=True)
class _GlobalView:
    """What a step's statistics are of: the tokens of all data-parallel ranks, each tensor [N of the global batch]."""

    logprobs: Tensor
    behaviour_logprobs: Tensor
    entropy: Tensor
    values: Tensor
    value_targets: Tensor
    value_mask: Tensor
    is_behind: Tensor

    @classmethod
    def of(cls, batch: TrainingBatch, scores: Scores, outputs: AdvantageOutputs, version: int) -> _GlobalView:
        """Collective over the data-parallel ranks. Tokens that `version` did not sample are `is_behind`."""
        parts = (scores.logprobs, batch.behaviour_logprobs, scores.entropy, scores.values, outputs.value_targets)
        masks = (outputs.value_mask, batch.versions != version)
        return cls(*(gather_over_data_parallel(part) for part in (*parts, *masks)))
