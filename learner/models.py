"""Loads what a learner computes with: the policy, the model that it is held to, and a critic of its own."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from vagen.learner.config import LearnerConfig
from vagen.learner.model.actor_critic import VisionLanguageActorCritic
from vagen.learner.model.gpt import ModelOptions
from vagen.learner.model.lora import AdapterOptions
from vagen.learner.model.optimizer import Trainer
from vagen.learner.sft import adam_options

__all__ = ["Trained", "load_models", "load_trained", "trained_options"]


@dataclass(frozen=True, kw_only=True)
class Trained:
    """What `PolicyUpdate` needs: the policy's trainer, the frozen model it is held to, and a critic's own trainer."""

    policy: Trainer
    reference: VisionLanguageActorCritic | None
    critic: Trainer | None


def load_trained(model_dir: Path, config: LearnerConfig) -> Trained:
    """All models of a configuration with their optimizers. Errors are those of `load_models`."""
    model, reference = load_models(model_dir, config)
    critic, is_separate = None, config.critic.trunk == "separate"
    if is_separate:
        critic = Trainer(
            VisionLanguageActorCritic.load_hf(model_dir, trained_options(config)), adam_options(config.optimizer)
        )
    policy = Trainer(model, adam_options(config.optimizer), has_critic_rate=config.critic.is_apart and not is_separate)
    return Trained(policy=policy, reference=reference, critic=critic)


def load_models(
    model_dir: Path, config: LearnerConfig
) -> tuple[VisionLanguageActorCritic, VisionLanguageActorCritic | None]:
    """The model to be trained, and the frozen copy that it is held to where the configuration wants one.

    Errors are those of `VisionLanguageActorCritic.load_hf`.
    """
    model = VisionLanguageActorCritic.load_hf(model_dir, trained_options(config))
    if not config.reference.is_used:
        return model, None
    reference = VisionLanguageActorCritic.load_hf(
        model_dir, ModelOptions(bf16=config.bf16, sequence_parallel=config.sequence_parallel)
    )
    return model, reference.eval().requires_grad_(False)


def trained_options(config: LearnerConfig) -> ModelOptions:
    """How a model that is trained is held: its critic's kind, and what of it does not change."""
    loss, lora = config.loss, config.lora
    frozen: dict[str, bool | Literal["tower", "projector"]] = {
        "none": False,
        "tower": "tower",
        "projector": "projector",
        "all": True,
    }
    return ModelOptions(
        value_bins=loss.value_bins if loss.value_loss == "two_hot" else None,
        value_range=loss.value_range,
        adapter=AdapterOptions(rank=lora.rank, alpha=lora.alpha, targets=lora.targets) if lora.rank else None,
        freeze_vision=frozen[config.freeze_vision],
        bf16=config.bf16,
        recompute=config.recompute,
        sequence_parallel=config.sequence_parallel,
    )
