"""One game of FrozenLake, played turn by turn on Gymnasium's environment.

Owns the turn: parsing, several actions a turn, the turn limit and the rewards. Gymnasium owns what an action does and
what a state looks like.
"""

from __future__ import annotations

import gymnasium
import numpy as np
from numpy.typing import NDArray

from vagen.envs.base import IMAGE_PLACEHOLDER, Info, Observation, ParsedResponse, StepResult
from vagen.envs.frozen_lake.config import FrozenLakeConfig
from vagen.envs.frozen_lake.level import ACTION_NAMES, Level, generate_level
from vagen.envs.frozen_lake.prompts import system_prompt, text_grid
from vagen.envs.frozen_lake.rendering import lake_painter
from vagen.envs.levels import select_level
from vagen.envs.parsing import FORMATS, ResponseFormat, ResponseParser

_ACTION_NUMBERS = {name: number for number, name in enumerate(ACTION_NAMES)}


class FrozenLakeCore:
    """A synchronous `EnvironmentCore`; also tells a scripted policy what it may know.

    On slippery ice the seed also fixes the slips, so that equal seeds and equal actions give equal episodes.
    """

    action_names = ACTION_NAMES

    def __init__(self, config: FrozenLakeConfig) -> None:
        self._config = config
        self._parser = ResponseParser(
            self.response_format,
            ACTION_NAMES,
            separator=config.action_separator,
            max_actions=config.max_actions_per_turn,
            strict_format=config.strict_format,
        )
        self._painter = lake_painter(config.size, config.cell_pixels)
        self._lake: gymnasium.Env | None = None
        self._level: Level | None = None
        self._player = 0
        self._num_turns = 0
        self._num_actions = 0
        self._num_effective_actions = 0
        self._ended = False

    @property
    def response_format(self) -> ResponseFormat:
        return FORMATS[self._config.response_format]

    @property
    def level(self) -> Level:
        """The lake of the running episode."""
        assert self._level is not None, "reset comes first"
        return self._level

    def system_prompt(self) -> str:
        return system_prompt(self._config)

    def reset(self, seed: int) -> tuple[Observation, Info]:
        config = self._config
        self._level = select_level(
            seed,
            config.split,
            lambda attempt: generate_level(attempt, config.size, config.hole_probability),
            lambda level: level.content,
        )
        # Turns are limited here, in turns; Gymnasium's own limit counts actions.
        self._lake = gymnasium.make(
            "FrozenLake-v1",
            desc=list(self._level.rows),
            is_slippery=config.is_slippery,
            render_mode="rgb_array",
            max_episode_steps=-1,
            disable_env_checker=True,
        )
        self._player = int(self._lake.reset(seed=seed)[0])
        self._num_turns = self._num_actions = self._num_effective_actions = 0
        self._ended = False
        return self._observe(), self._info()

    def step(self, response: str) -> StepResult:
        assert self._lake is not None and not self._ended, "step needs a running episode"
        parsed = self._parser.parse(response)
        task_reward, executed, terminated = self._act(parsed.actions)
        self._num_turns += 1
        truncated = not terminated and self._num_turns >= self._config.max_turns
        self._ended = terminated or truncated
        return StepResult(
            observation=self._observe(),
            reward={"task": task_reward, "format": self._format_reward(parsed)},
            terminated=terminated,
            truncated=truncated,
            info=self._info(),
            parsed=ParsedResponse(
                format_ok=parsed.format_ok,
                action_valid=parsed.action_valid,
                actions=executed,
                sections=parsed.sections,
            ),
        )

    def close(self) -> None:
        # Gymnasium's close would quit pygame for every other episode of the process; there is nothing else to free.
        self._lake = None

    def expert_actions(self) -> tuple[str, ...]:
        """Every action on a shortest path (as if the ice did not slip); none when the episode is over."""
        return self.level.optimal_actions(self._player)

    def goal_direction(self) -> str:
        """Where the goal lies from the player: `down right`."""
        return self.level.goal_direction(self._player)

    def _act(self, actions: tuple[str, ...]) -> tuple[float, tuple[str, ...], bool]:
        """Plays actions until the lake ends the episode; returns task reward, actions played, terminated."""
        assert self._lake is not None
        for count, action in enumerate(actions, start=1):
            cell, reward, terminated, _, _ = self._lake.step(_ACTION_NUMBERS[action])
            self._num_actions += 1
            self._num_effective_actions += int(cell) != self._player
            self._player = int(cell)
            if terminated:
                return self._config.success_reward * float(reward), actions[:count], True
        return 0.0, actions, False

    def _format_reward(self, parsed: ParsedResponse) -> float:
        if not parsed.action_valid:
            return self._config.invalid_penalty
        return self._config.format_reward if parsed.format_ok else 0.0

    def _observe(self) -> Observation:
        instruction, grid = self._config.instruction, text_grid(self.level, self._player)
        if self._config.observation == "text":
            return Observation(f"{grid}\n{instruction}", state=grid)
        picture = self._painter.paint(self.level, self._player, self._render)
        return Observation(f"{IMAGE_PLACEHOLDER}{instruction}", (picture,), grid)

    def _render(self) -> NDArray[np.uint8]:
        assert self._lake is not None
        return np.asarray(self._lake.render(), dtype=np.uint8)

    def _info(self) -> Info:
        level = self.level
        return Info(
            success=self._player == level.goal,
            metrics={
                "num_turns": self._num_turns,
                "num_actions": self._num_actions,
                "num_effective_actions": self._num_effective_actions,
                "initial_distance": level.distances[level.start],
            },
        )
