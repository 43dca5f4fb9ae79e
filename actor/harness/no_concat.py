"""Each turn is [system, latest observation]: the policy remembers nothing, and every turn is a row of its own."""

from __future__ import annotations

from vagen.actor.harness.base import opening
from vagen.actor.messages import Conversation, Message, Response


class NoConcatHarness:
    """See the module."""

    name = "no_concat"
    splits_episode_across_rows = True

    def __init__(self) -> None:
        self._conversation: Conversation = ()
        self._opening: tuple[Message, ...] = ()

    def start(self, system_prompt: str, observation: Message) -> None:
        self._opening = opening(system_prompt)
        self._conversation = (*self._opening, observation)

    def prompt(self) -> Conversation:
        return self._conversation

    def add_turn(self, response: Response, observation: Message) -> None:
        self._conversation = (*self._opening, observation)
