"""The settings of FrozenLake; imports no simulator."""

from __future__ import annotations

import math
from typing import Annotated, Literal

import msgspec

from vagen.common.config import Section, require
from vagen.envs.base import IMAGE_PLACEHOLDER
from vagen.envs.levels import Split
from vagen.envs.parsing import FORMATS


class FrozenLakeConfig(Section, frozen=True, kw_only=True):
    """One lake is `size` x `size` cells, drawn at `cell_pixels` a cell.

    `hole_probability` is that of a cell which is neither start nor goal. `max_turns` truncates. `success_reward` is
    paid at the goal (component `task`); `format_reward` for a turn of correct format and valid action,
    `invalid_penalty` for a turn without a valid action (component `format`). `system_prompt` `full` states the rules.
    """

    size: Annotated[int, msgspec.Meta(ge=2, le=16)] = 4
    hole_probability: Annotated[float, msgspec.Meta(ge=0.0, le=0.9)] = 0.2
    is_slippery: bool = False
    split: Split = "train"

    observation: Literal["image", "text"] = "image"
    cell_pixels: Annotated[int, msgspec.Meta(ge=4, le=128)] = 14
    instruction: str = "Move to the goal."
    system_prompt: Literal["none", "full"] = "full"

    response_format: str = "free_think"
    strict_format: bool = True
    action_separator: Annotated[str, msgspec.Meta(min_length=1)] = ","
    max_actions_per_turn: Annotated[int, msgspec.Meta(ge=1)] = 1
    max_turns: Annotated[int, msgspec.Meta(ge=1)] = 8

    success_reward: float = 1.0
    format_reward: Annotated[float, msgspec.Meta(ge=0.0)] = 0.02
    invalid_penalty: Annotated[float, msgspec.Meta(le=0.0)] = -0.5

    def __post_init__(self) -> None:
        _require(
            self.response_format in FORMATS, "response_format", self.response_format, f"one of {', '.join(FORMATS)}"
        )
        _require(
            IMAGE_PLACEHOLDER not in self.instruction,
            "instruction",
            self.instruction,
            f"text without {IMAGE_PLACEHOLDER}",
        )
        for name in ("success_reward", "format_reward", "invalid_penalty"):
            value = getattr(self, name)
            _require(math.isfinite(value), name, value, "a finite number")


def _require(holds: bool, name: str, value: object, bound: str) -> None:
    require(holds, f"env.config.{name}", value, bound)
