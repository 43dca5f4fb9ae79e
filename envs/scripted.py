"""Scripted episodes for supervised warm starts.

A script plays an expert action with a small probability and a random one otherwise, and states as its thought where
the goal truly lies: a policy trained on it learns the format and to see, and leaves the acting to reinforcement
learning. Owns the script only; returns and tokens are the consumer's.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

from vagen.common.errors import ConfigError
from vagen.envs.base import EnvironmentCore, Observation
from vagen.envs.levels import stable_hash
from vagen.envs.parsing import ANSWER, ResponseFormat


class ScriptableCore(EnvironmentCore, Protocol):
    """A core that knows its own solution."""

    @property
    def action_names(self) -> tuple[str, ...]: ...

    @property
    def response_format(self) -> ResponseFormat: ...

    def expert_actions(self) -> tuple[str, ...]:
        """Every optimal action in the present state."""
        ...

    def goal_direction(self) -> str:
        """Where the goal truly lies, in words."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptedTurn:
    """What was seen, what was answered and what it earned, by component."""

    observation: Observation
    response: str
    reward: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptedEpisode:
    """All turns of one episode; unless `terminated` it was truncated."""

    seed: int
    turns: tuple[ScriptedTurn, ...]
    success: bool
    terminated: bool


def scripted_episodes(
    core: ScriptableCore, seeds: Iterable[int], *, script_seed: int, expert_probability: float = 0.1
) -> Iterator[ScriptedEpisode]:
    """Plays one episode a seed, one action a turn.

    An episode is a function of (core's configuration, seed, `script_seed`), whatever came before it.

    Raises `ConfigError` for a probability outside [0, 1].
    """
    if not 0.0 <= expert_probability <= 1.0:
        raise ConfigError(f"expert_probability: expected a number in [0, 1], got {expert_probability}")
    for seed in seeds:
        rng = random.Random(stable_hash(f"script:{script_seed}:{seed}"))
        yield _play(core, seed, rng, expert_probability)


def _play(core: ScriptableCore, seed: int, rng: random.Random, expert_probability: float) -> ScriptedEpisode:
    observation, _ = core.reset(seed)
    shape = core.response_format
    turns: list[ScriptedTurn] = []
    while True:
        is_expert = rng.random() < expert_probability
        action = rng.choice((core.expert_actions() if is_expert else ()) or core.action_names)
        thoughts = dict.fromkeys(shape.sections, core.goal_direction())
        response = shape.render({**thoughts, ANSWER: action})
        result = core.step(response)
        turns.append(ScriptedTurn(observation=observation, response=response, reward=result.reward))
        if result.done:
            return ScriptedEpisode(
                seed=seed, turns=tuple(turns), success=result.info.success, terminated=result.terminated
            )
        observation = result.observation
