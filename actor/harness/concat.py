"""System, observation, response, observation, response ... in one growing row.

With a window only the last turns stay in the context. Each context that differs is then a row of its own, so that
training sees exactly what was sampled from.
"""

from __future__ import annotations

from vagen.actor.harness.base import opening
from vagen.actor.messages import Conversation, Message, Response


class ConcatHarness:
    """See the module. `window` counts turns, the one being answered included; 0 keeps all."""

    name = "concat"

    def __init__(self, *, window: int = 0) -> None:
        self._window = window
        self._opening: tuple[Message, ...] = ()
        self._turns: list[tuple[Message, Response]] = []
        self._pending: Message | None = None

    @property
    def splits_episode_across_rows(self) -> bool:
        return self._window > 0

    def start(self, system_prompt: str, observation: Message) -> None:
        self._opening = opening(system_prompt)
        self._turns = []
        self._pending = observation

    def prompt(self) -> Conversation:
        assert self._pending is not None, "start() first"
        first = max(0, len(self._turns) + 1 - self._window) if self._window else 0
        kept = (item for turn in self._turns[first:] for item in turn)
        return (*self._opening, *kept, self._pending)

    def add_turn(self, response: Response, observation: Message) -> None:
        assert self._pending is not None, "start() first"
        self._turns.append((self._pending, response))
        self._pending = observation
