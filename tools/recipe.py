"""A whole recipe, validated at once, before any process starts.

Owns the list of sections and the checks between them; each section's own bounds are its class's. A single process
validates only what it uses and cannot see, for example, that the buffer is too small for the learner.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from vagen.actor.config import ActorConfig, EnvSection, HarnessConfig
from vagen.actor.harness import make_harness
from vagen.actor.local_engine.config import EngineConfig
from vagen.buffer.config import BufferConfig
from vagen.buffer.selection.filters import make_filters
from vagen.buffer.selection.priority import get_priority
from vagen.common.config import RunConfig, require, section
from vagen.envs.registry import known_environments, parse_environment_config
from vagen.learner.advantages.registry import get_estimator
from vagen.learner.config import LearnerConfig, ModelConfig, SFTConfig
from vagen.tools.config import DemoConfig

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """All sections of a recipe."""

    run: RunConfig
    model: ModelConfig
    env: EnvSection
    harness: HarnessConfig
    actor: ActorConfig
    engine: EngineConfig
    buffer: BufferConfig
    learner: LearnerConfig
    sft: SFTConfig
    demo: DemoConfig


def validate_recipe(raw: Mapping[str, Any]) -> Recipe:
    """All sections, defaults where the recipe is silent, and what must hold between them.

    Raises `ConfigError` for the first thing that is wrong, naming path, value and bound.
    """
    env = section(raw, "env", EnvSection)
    require(env.name in known_environments(), "env.name", env.name, f"one of {', '.join(known_environments())}")
    parse_environment_config(env.name, env.config)
    recipe = Recipe(
        run=section(raw, "run", RunConfig),
        model=section(raw, "model", ModelConfig),
        env=env,
        harness=section(raw, "harness", HarnessConfig),
        actor=section(raw, "actor", ActorConfig),
        engine=section(raw, "engine", EngineConfig),
        buffer=section(raw, "buffer", BufferConfig),
        learner=section(raw, "learner", LearnerConfig),
        sft=section(raw, "sft", SFTConfig),
        demo=section(raw, "demo", DemoConfig),
    )
    _check_engine(recipe)
    _check_pacing(recipe)
    _check_estimator(recipe)
    _check_critic(recipe)
    _check_reward_placement(recipe)
    _check_selection(recipe)
    return recipe


def _check_engine(recipe: Recipe) -> None:
    """Every request that the actor may send must be one that the engine takes."""
    actor, engine, model = recipe.actor, recipe.engine, recipe.model
    require(
        actor.max_context <= engine.max_context,
        "actor.max_context",
        actor.max_context,
        f"int <= engine.max_context ({engine.max_context})",
    )
    require(
        actor.max_new_tokens <= engine.max_new_tokens_limit,
        "actor.max_new_tokens",
        actor.max_new_tokens,
        f"int <= engine.max_new_tokens_limit ({engine.max_new_tokens_limit})",
    )
    require(
        engine.max_context <= model.max_position_embeddings,
        "engine.max_context",
        engine.max_context,
        f"int <= model.max_position_embeddings ({model.max_position_embeddings})",
    )


def _check_pacing(recipe: Recipe) -> None:
    """The buffer must hold all that the learner may have claimed and not freed, or both wait for ever."""
    learner, buffer = recipe.learner, recipe.buffer
    require(
        buffer.capacity_bytes >= learner.required_capacity_bytes,
        "buffer.capacity_bytes",
        buffer.capacity_bytes,
        f"int >= {learner.required_capacity_bytes} = (checkpoint_every + prefetch + 2) * batch_size * "
        "expected_trajectory_bytes of $.learner",
    )
    require(
        learner.max_staleness >= learner.publish_every - 1,
        "learner.max_staleness",
        learner.max_staleness,
        f"int >= {learner.publish_every - 1} = learner.publish_every - 1, the age of the data of the last such step",
    )
    require(
        learner.batch_size % recipe.actor.group_size == 0,
        "learner.batch_size",
        learner.batch_size,
        f"a multiple of actor.group_size ({recipe.actor.group_size}), since groups are never split",
    )


def _check_selection(recipe: Recipe) -> None:
    """What the learner draws by must be there, and what compares the episodes of a group must have groups."""
    selection, priority = recipe.learner.selection, recipe.buffer.priority
    if priority.function is not None:
        get_priority(priority.function)
    require(
        selection.order != "priority" or priority.function is not None,
        "buffer.priority.function",
        priority.function,
        "a priority function for learner.selection.order priority, which draws by it",
    )
    make_filters(selection.filters, recipe.actor.group_size)
    estimator = get_estimator(recipe.learner.advantage.name)
    require(
        not estimator.needs_groups or selection.replay.share == 0,
        "learner.selection.replay.share",
        selection.replay.share,
        f"0 for the estimator {estimator.name}: a trajectory is replayed without its group",
    )


def _check_estimator(recipe: Recipe) -> None:
    estimator = get_estimator(recipe.learner.advantage.name)
    require(
        not (estimator.row_local and make_harness(recipe.harness).splits_episode_across_rows),
        "learner.advantage.name",
        estimator.name,
        f"an estimator that joins the rows of an episode, which harness {recipe.harness.name} splits",
    )
    require(
        not estimator.needs_groups or recipe.actor.group_size >= 2,
        "actor.group_size",
        recipe.actor.group_size,
        f"int >= 2 for the estimator {estimator.name}, which compares the episodes of a group",
    )
    require(
        not estimator.needs_critic or recipe.learner.loss.value_weight > 0,
        "learner.loss.value_weight",
        recipe.learner.loss.value_weight,
        f"float > 0 for the estimator {estimator.name}, which needs a critic",
    )


def _check_critic(recipe: Recipe) -> None:
    """Steps that train the critic alone must leave some for the policy, and be of use to the estimator."""
    learner, warmup_steps = recipe.learner, recipe.learner.critic.warmup_steps
    require(
        warmup_steps < learner.total_steps,
        "learner.critic.warmup_steps",
        warmup_steps,
        f"int < learner.total_steps ({learner.total_steps})",
    )
    estimator = get_estimator(learner.advantage.name)
    require(
        estimator.needs_critic or (learner.critic.trunk, warmup_steps) in (("shared", 0), ("detached", 0)),
        "learner.critic",
        f"trunk {learner.critic.trunk}, warmup_steps {warmup_steps}",
        f"no separate critic and no warmup_steps for the estimator {estimator.name}, which uses no values",
    )


def _check_reward_placement(recipe: Recipe) -> None:
    """A turn's reward must lie where the estimator reads it: between end anchors that is the turn's last token."""
    advantage = recipe.learner.advantage
    if recipe.actor.reward_placement == "turn_end" or advantage.turn_anchor != "end":
        return
    require(
        advantage.name != "turn_wise_gae",
        "actor.reward_placement",
        recipe.actor.reward_placement,
        "turn_end for the estimator turn_wise_gae, which ignores other rewards (or learner.advantage.turn_anchor "
        "start)",
    )
    if advantage.name == "bi_level_gae":
        logger.warning(
            "actor.reward_placement section_end with learner.advantage.name bi_level_gae: a reward paid before a "
            "turn's last token gives no credit to earlier turns"
        )
