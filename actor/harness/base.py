"""The contract of a harness."""

from __future__ import annotations

from typing import Protocol

from vagen.actor.messages import Conversation, Message, Response


class Harness(Protocol):
    """Keeps the messages of one episode; `start` begins the next."""

    @property
    def name(self) -> str:
        """As recorded in a trajectory."""
        ...

    @property
    def splits_episode_across_rows(self) -> bool:
        """Whether one episode may become several rows: estimators that look at one row alone are refused then."""
        ...

    def start(self, system_prompt: str, observation: Message) -> None:
        """Begin an episode; an empty system prompt is left out."""
        ...

    def prompt(self) -> Conversation:
        """What the policy is to answer now."""
        ...

    def add_turn(self, response: Response, observation: Message) -> None:
        """Take what the policy answered, and what the environment showed then."""
        ...


def opening(system_prompt: str) -> tuple[Message, ...]:
    """The messages before the first observation."""
    return (Message(role="system", parts=(system_prompt,)),) if system_prompt else ()
