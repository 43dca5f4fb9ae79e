"""Supervised warm start: the learner's model, packing and optimizer on rows whose tokens a script wrote.

Owns the loop over optimizer steps. Does not own where rows come from: the same masks as in reinforcement learning say
which tokens are imitated.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from vagen.common.errors import ConfigError
from vagen.learner.batching import PreparedRow
from vagen.learner.config import OptimizerConfig, SFTConfig
from vagen.learner.images import ImageStore
from vagen.learner.model.actor_critic import VisionLanguageActorCritic
from vagen.learner.model.batch import TokenOutputs
from vagen.learner.model.optimizer import AdamOptions, Trainer
from vagen.learner.packing import microbatches

__all__ = ["SFTData", "SFTProgress", "adam_options", "train_sft"]


@dataclass(frozen=True, kw_only=True)
class SFTData:
    """Rows to imitate. `returns` float32 [N] are the critic's targets of all their policy tokens, by slot."""

    rows: Sequence[PreparedRow]
    images: ImageStore
    returns: torch.Tensor


@dataclass(frozen=True, kw_only=True)
class SFTProgress:
    """One optimizer step: mean negative log-likelihood in nats per token, mean squared value error."""

    step: int
    loss: float
    value_loss: float
    seconds: float


def adam_options(config: OptimizerConfig) -> AdamOptions:
    """The optimizer's options from a recipe's section."""
    return AdamOptions(
        betas=(config.beta1, config.beta2),
        eps=config.eps,
        weight_decay=config.weight_decay,
        clip_grad=config.clip_grad,
    )


def train_sft(
    model: VisionLanguageActorCritic,
    data: SFTData,
    config: SFTConfig,
    *,
    seed: int,
    forbidden_token_ids: torch.Tensor,
    on_step: Callable[[SFTProgress], None],
) -> None:
    """Train in place; deterministic for (weights, data, seed). Rows are drawn with replacement.

    Raises `ConfigError` when there are fewer rows than a batch takes.
    """
    if len(data.rows) < config.batch_rows:
        raise ConfigError(f"$.sft.batch_rows: expected at most the {len(data.rows)} rows, got {config.batch_rows}")
    trainer = Trainer(model, adam_options(config.optimizer))
    rng = np.random.default_rng(seed)
    model.train()
    for step in range(config.steps):
        started = time.perf_counter()
        rows = [data.rows[index] for index in rng.integers(0, len(data.rows), config.batch_rows)]
        trainer.zero_grad()
        loss, value_loss = _accumulate(trainer, rows, data, config, forbidden_token_ids)
        trainer.step(config.optimizer.lr_at(step / config.steps, step))
        on_step(SFTProgress(step=step, loss=loss, value_loss=value_loss, seconds=time.perf_counter() - started))


def _accumulate(
    trainer: Trainer, rows: Sequence[PreparedRow], data: SFTData, config: SFTConfig, forbidden_token_ids: torch.Tensor
) -> tuple[float, float]:
    """Add the gradient of one step's rows; returns the losses of `SFTProgress`."""
    count = sum(len(row.slots) for row in rows)
    loss = value_loss = 0.0

    def loss_of(slots: torch.Tensor, out: TokenOutputs) -> torch.Tensor:
        nonlocal loss, value_loss
        imitation = -out.logprobs.sum() / count
        critic = F.mse_loss(out.values, data.returns[slots], reduction="sum") / count
        loss += float(imitation.detach())
        value_loss += float(critic.detach())
        return imitation + config.value_weight * critic

    packs = microbatches(rows, data.images, config.max_tokens_per_microbatch)
    trainer.accumulate(packs, loss_of, forbidden_token_ids=forbidden_token_ids)
    return loss, value_loss
