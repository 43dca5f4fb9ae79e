"""Per-token data of a batch, as the losses of its microbatches take it.

Legend: N policy tokens of this rank's batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from vagen.learner.advantages.batch import AdvantageInputs, AdvantageOutputs
from vagen.learner.batching import TrainingBatch
from vagen.learner.losses.config import ReferenceConfig
from vagen.learner.losses.policy import PolicyLossInputs
from vagen.learner.losses.reference import penalised_rewards
from vagen.learner.losses.weights import BehaviourWeights, loss_weights
from vagen.learner.scoring import Scores

__all__ = ["Reduce", "TokenData", "advantage_inputs", "row_numbers"]

Reduce = Callable[[Tensor], Tensor]
"""Sums a tensor over the data-parallel ranks."""


class TokenData:
    """Per-token data of a batch, to be gathered for each microbatch; made by `PolicyUpdate.estimate`."""

    def __init__(
        self,
        batch: TrainingBatch,
        scores: Scores,
        outputs: AdvantageOutputs,
        weights: BehaviourWeights,
        sequence_ids: Tensor,
    ) -> None:
        self.scores = scores
        self.outputs = outputs
        self.weights = weights
        self._batch = batch
        self._sequence_ids = sequence_ids
        self._staleness = batch.staleness[batch.segment_ids]
        self._loss_weights = torch.zeros(batch.num_policy_tokens)

    def weigh(self, slots: Tensor, weighting: str, reduce: Reduce | None) -> None:
        """Set the loss weights of a minibatch's tokens (ascending slots): shares that sum to 1 over all ranks, times
        the weights of their trajectories.
        """
        turns, sequences = self._batch.turn_ids[slots], self._sequence_ids[slots]
        units = {"token": slots, "turn": turns, "sequence": sequences}[weighting]
        count = torch.tensor(float(torch.unique_consecutive(units).numel()), dtype=torch.float64)
        total = int(count if reduce is None else reduce(count))
        self._loss_weights[slots] = loss_weights(turns, sequences, weighting, total)  # type: ignore[arg-type]
        weights = self.trajectory_weights(slots)
        if weights is not None:
            self._loss_weights[slots] *= weights

    def trajectory_weights(self, taken: Tensor) -> Tensor | None:
        """What the trajectories of the tokens at slots `taken` count, float32 [n]; None where all count 1."""
        return None if self._batch.weights is None else self._batch.weights[self._batch.segment_ids[taken]]

    def inputs(self, taken: Tensor, logprobs: Tensor, entropy: Tensor) -> PolicyLossInputs:
        """Loss inputs of the tokens at slots `taken`."""
        weights = BehaviourWeights(
            self.weights.weights[taken], self.weights.rejected[taken], self.weights.truncated[taken]
        )
        return PolicyLossInputs(
            logprobs=logprobs,
            behaviour_logprobs=self._batch.behaviour_logprobs[taken],
            advantages=self.outputs.advantages[taken],
            loss_weights=self._loss_weights[taken],
            sequence_ids=self._sequence_ids[taken],
            proximal_logprobs=self.scores.logprobs[taken],
            weights=weights,
            staleness=self._staleness[taken],
            entropy=entropy,
        )


def row_numbers(batch: TrainingBatch) -> Tensor:
    """The row of each policy token, int64 [N]."""
    ids = torch.empty(batch.num_policy_tokens, dtype=torch.int64)
    for index, row in enumerate(batch.rows):
        ids[torch.from_numpy(row.slots)] = index
    return ids


def advantage_inputs(
    batch: TrainingBatch, scores: Scores, reference: ReferenceConfig, tasks: Sequence[str] | None = None
) -> AdvantageInputs:
    """What estimators read; rewards are less the penalty where `reference` asks for one.

    `tasks` are those of the global batch, by default of this one.
    """
    rewards = batch.rewards
    if scores.reference_logprobs is not None:
        rewards = penalised_rewards(rewards, scores.logprobs, scores.reference_logprobs, reference)
    names = [trajectory.task for trajectory in batch.trajectories]
    numbers = {name: number for number, name in enumerate(sorted(set(names)) if tasks is None else tasks)}
    return AdvantageInputs(
        rewards=rewards,
        values=scores.values,
        behaviour_logprobs=batch.behaviour_logprobs,
        proximal_logprobs=scores.logprobs,
        turn_ids=batch.turn_ids,
        segment_ids=batch.segment_ids,
        bootstrap_values=scores.bootstrap_values,
        group_ids=batch.group_ids,
        num_groups=batch.num_groups,
        task_ids=torch.tensor([numbers[name] for name in names]),
        num_tasks=len(numbers),
    )
