"""Priorities: how much a trajectory is worth drawing, computed once, where the ingest has it decoded.

A priority function takes a trajectory and returns a float; larger is drawn more often. It must be cheap, since the
ingest waits for it.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np

from vagen.buffer.selection.config import PriorityConfig
from vagen.common.config import import_object
from vagen.common.errors import ConfigError, TrajectoryError
from vagen.common.trajectory import Trajectory

PriorityFunction = Callable[[Trajectory], float]

_UNITS = 1_000_000
"""Weights are whole millionths, so that their sum in Redis is exact."""
_LARGEST = 1e6
_FAULTS = (ArithmeticError, LookupError, TypeError, ValueError)


def total_reward(trajectory: Trajectory) -> float:
    """Sum of all rewards; negative ones count as the smallest priority."""
    return trajectory.total_reward


def surprise(trajectory: Trajectory) -> float:
    """Mean negative behaviour logprob of the policy's tokens: what the policy was unsure of."""
    logprobs = np.concatenate([row.behaviour_logprobs[row.policy_mask != 0] for row in trajectory.rows])
    return -float(logprobs.mean(dtype=np.float64))


def num_turns(trajectory: Trajectory) -> float:
    """Turns of the episode."""
    return float(len(trajectory.turns))


def success(trajectory: Trajectory) -> float:
    """1 for a success, else 0."""
    return float(trajectory.success)


PRIORITIES: Mapping[str, PriorityFunction] = {
    "total_reward": total_reward,
    "surprise": surprise,
    "num_turns": num_turns,
    "success": success,
}


class Draw(NamedTuple):
    """What a trajectory enters the drawing with."""

    weight: int
    """In millionths; 0 without priorities."""
    exponential: float
    """Of mean 1."""


NO_DRAW = Draw(0, 0.0)


class Prioritizer:
    """Turns trajectories into draws."""

    def __init__(self, config: PriorityConfig) -> None:
        """Raises `ConfigError` for a function that is not there."""
        self._config = config
        self._function = None if config.function is None else get_priority(config.function)
        self._random = random.Random()

    def draw(self, trajectory: Trajectory) -> Draw:
        """A draw of weight `max(priority, epsilon) ** alpha`.

        Raises `TrajectoryError` for field `priority` where the function fails or its result is not finite.
        """
        if self._function is None:
            return NO_DRAW
        try:
            priority = float(self._function(trajectory))
        except _FAULTS as error:
            raise TrajectoryError("priority", f"{self._config.function} raised {error!r}") from error
        if not np.isfinite(priority):
            raise TrajectoryError("priority", f"{self._config.function} returned {priority}, expected a finite float")
        weight = min(max(priority, self._config.epsilon), _LARGEST) ** self._config.alpha
        return Draw(max(1, round(_UNITS * min(weight, _LARGEST))), self._random.expovariate(1.0))


NO_PRIORITIES = Prioritizer(PriorityConfig())
"""Draws of weight 0."""


def get_priority(name: str) -> PriorityFunction:
    """The priority function of that name or import path. Raises `ConfigError` where there is none."""
    path = "buffer.priority.function"
    if ":" in name:
        found = import_object(name, path)
        if not callable(found):
            raise ConfigError(f"$.{path}: expected a function from a trajectory to a float, {name!r} is none")
        return found  # type: ignore[no-any-return]
    if name not in PRIORITIES:
        raise ConfigError(
            f"$.{path}: expected one of {', '.join(sorted(PRIORITIES))}, or package.module:function, got {name!r}"
        )
    return PRIORITIES[name]
