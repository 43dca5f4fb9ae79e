"""The words around a lake: system prompt and text grid."""

from __future__ import annotations

from vagen.envs.frozen_lake.config import FrozenLakeConfig
from vagen.envs.frozen_lake.level import ACTION_NAMES, Level
from vagen.envs.parsing import ANSWER, FORMATS

_SECTION_HINTS = {
    "think": "what you see and what to do next",
    "observation": "where you, the goal and the holes are",
    "perception": "where you, the goal and the holes are",
    "reasoning": "what to do next and why",
    "prediction": "where you, the goal and the holes will be",
}
_SECTION_EXAMPLES = {
    "think": "The goal is two cells to my right and the ice between is free.",
    "observation": "The goal is two cells to my right. There is a hole below me.",
    "perception": "The goal is two cells to my right. There is a hole below me.",
    "reasoning": "The ice to my right is free, so I go right.",
    "prediction": "The goal will be closer to my right.",
}

_GRID_LEGEND = (
    "You see a grid of letters: P you, S start, G goal, F frozen ice, H hole; X is you in a hole, * is you at the goal."
)
_IMAGE_LEGEND = "You see it from above: the small figure is you, the red flag is the goal, dark blue squares are holes."


def system_prompt(config: FrozenLakeConfig) -> str:
    """The rules, the actions and the response format with an example; empty for `none`."""
    if config.system_prompt == "none":
        return ""
    shape = FORMATS[config.response_format]
    separator, count = config.action_separator, config.max_actions_per_turn
    answer_hint = "one action" if count == 1 else f"one to {count} actions separated by {separator!r}"
    example_actions = separator.join(["Right"] * min(count, 2))
    slippery = (
        "The ice is slippery: you often slide sideways instead of where you want to go."
        if config.is_slippery
        else "The ice is not slippery: you always move where you want to go."
    )
    return "\n".join(
        (
            f"You walk on a frozen lake of {config.size}x{config.size} cells. Reach the goal and avoid the holes.",
            _IMAGE_LEGEND if config.observation == "image" else _GRID_LEGEND,
            f"{slippery} Walking against the edge leaves you in place.",
            f"Actions: {', '.join(ACTION_NAMES)}. You have {config.max_turns} turns.",
            f"Answer in exactly this format: {shape.render({**_SECTION_HINTS, ANSWER: answer_hint})}",
            f"Example: {shape.render({**_SECTION_EXAMPLES, ANSWER: example_actions})}",
        )
    )


def text_grid(level: Level, player: int) -> str:
    """The lake in letters, one row a line, with the player's cell as `P`, `X` in a hole and `*` at the goal."""
    tiles = list(level.tiles)
    tiles[player] = {"H": "X", "G": "*"}.get(tiles[player], "P")
    size = level.size
    return "\n".join("".join(tiles[row : row + size]) for row in range(0, size * size, size))
