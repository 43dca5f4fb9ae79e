"""What models say of a batch, without gradient: the log-probabilities, entropies and values that a step starts from.

Legend: N policy tokens, S segments of this rank's batch.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from vagen.learner.batching import TrainingBatch
from vagen.learner.model.actor_critic import VisionLanguageActorCritic
from vagen.learner.model.pipeline import outputs_of
from vagen.learner.packing import microbatches

__all__ = ["Scores", "score"]


@dataclass(frozen=True, kw_only=True)
class Scores:
    """The model's view of a batch, without gradient: logprobs, entropy, values float32 [N]; bootstrap_values [S].

    reference_logprobs float32 [N] are those of the reference model, None without one.
    """

    logprobs: Tensor
    entropy: Tensor
    values: Tensor
    bootstrap_values: Tensor
    reference_logprobs: Tensor | None = None


@torch.no_grad()
def score(
    model: VisionLanguageActorCritic,
    batch: TrainingBatch,
    max_tokens: int,
    forbidden_token_ids: Tensor,
    reference: VisionLanguageActorCritic | None = None,
    critic: VisionLanguageActorCritic | None = None,
) -> Scores:
    """Log-probabilities, entropies and values of every policy token, and the values of the bootstrap prompts.

    Values are those of `critic`, of the model itself without one.
    """
    rows = microbatches(batch.rows, batch.images, max_tokens)
    sampling = {"temperature": batch.temperature, "forbidden_token_ids": forbidden_token_ids}
    tokens = [torch.empty(batch.num_policy_tokens) for _ in range(3)]
    for slots, out in outputs_of(model, rows, **sampling):
        for target, values in zip(tokens, (out.logprobs, out.entropy, out.values), strict=True):
            target[slots] = values
    if critic is not None:
        valued = microbatches(batch.valued_rows, batch.images, max_tokens)
        for slots, out in outputs_of(critic, valued, values_only=True):
            tokens[2][slots] = out.values
    bootstrap = torch.zeros(batch.num_segments)
    prompts = microbatches(batch.valued_bootstrap_rows, batch.images, max_tokens)
    for slots, out in outputs_of(critic or model, prompts, values_only=True):
        bootstrap[slots] = out.values
    held_to: Tensor | None = None
    if reference is not None:
        held_to = torch.empty(batch.num_policy_tokens)
        for slots, out in outputs_of(reference, rows, **sampling):
            held_to[slots] = out.logprobs
    return Scores(
        logprobs=tokens[0],
        entropy=tokens[1],
        values=tokens[2],
        bootstrap_values=bootstrap,
        reference_logprobs=held_to,
    )
