"""Rows, turns and rewards of one episode, derived from what was sent to the engine and what it sampled.

A prompt that continues everything a row holds extends that row; any other prompt opens a new one. So each distinct
context is a row of its own, whatever the harness does, and each sampled token is a policy token exactly once. Owns at
which token a reward is paid; how much is the environment's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from vagen.actor.client import Generation
from vagen.actor.config import RewardPlacement
from vagen.actor.messages import Picture
from vagen.actor.rendering import ChatRenderer, Prompt
from vagen.common.trajectory import BootstrapPrompt, ImageRef, RewardEntry, Row, Turn
from vagen.envs.base import ParsedResponse
from vagen.envs.parsing import judged_section_end


@dataclass(slots=True)
class _OpenRow:
    """A row that grows. `seen` is collapsed, as the engine knows it; the lists below it are expanded."""

    seen: list[int] = field(default_factory=list)
    pictures: list[Picture] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    mask: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    turn_index: list[int] = field(default_factory=list)
    images: list[ImageRef] = field(default_factory=list)

    def is_continued_by(self, prompt: Prompt) -> bool:
        return (
            prompt.token_ids[: len(self.seen)] == self.seen
            and list(prompt.pictures[: len(self.pictures)]) == self.pictures
        )

    def add_context(self, prompt: Prompt, renderer: ChatRenderer) -> None:
        pictures = prompt.pictures[len(self.pictures) :]
        expanded, refs = renderer.expand(prompt.token_ids[len(self.seen) :], pictures, offset=len(self.token_ids))
        count = len(expanded)
        self.seen = list(prompt.token_ids)
        self.pictures += pictures
        self.token_ids += expanded
        self.images += refs
        self.mask += [0] * count
        self.logprobs += [0.0] * count
        self.versions += [-1] * count
        self.turn_index += [-1] * count

    def add_response(self, generation: Generation, turn: int) -> tuple[int, int]:
        start, count = len(self.token_ids), len(generation.token_ids)
        self.seen += generation.token_ids
        self.token_ids += generation.token_ids
        self.mask += [1] * count
        self.logprobs += generation.logprobs
        self.versions += generation.versions
        self.turn_index += [turn] * count
        return start, start + count

    def close(self) -> Row:
        return Row(
            token_ids=np.asarray(self.token_ids, dtype=np.int32),
            policy_mask=np.asarray(self.mask, dtype=np.uint8),
            behaviour_logprobs=np.asarray(self.logprobs, dtype=np.float32),
            policy_versions=np.asarray(self.versions, dtype=np.int32),
            turn_index=np.asarray(self.turn_index, dtype=np.int16),
            images=tuple(self.images),
        )


class Recorder:
    """Records one episode, turn by turn: `add_response`, then `add_outcome`."""

    def __init__(self, renderer: ChatRenderer, reward_placement: RewardPlacement = "turn_end") -> None:
        self._renderer = renderer
        self._reward_placement = reward_placement
        self._rows: list[_OpenRow] = []
        self._turns: list[Turn] = []
        self._rewards: list[RewardEntry] = []
        self._span = (0, 0)
        self._state = ""
        self._generation: Generation | None = None

    def add_response(self, prompt: Prompt, generation: Generation, state: str = "") -> None:
        """Record what was sampled, from what, and what the environment said of its state then."""
        if not self._rows or not self._rows[-1].is_continued_by(prompt):
            self._rows.append(_OpenRow())
        row = self._rows[-1]
        row.add_context(prompt, self._renderer)
        self._span = row.add_response(generation, len(self._turns))
        self._generation = generation
        self._state = state

    def add_outcome(
        self, parsed: ParsedResponse, reward: Mapping[str, float], metrics: Mapping[str, float], env_s: float
    ) -> None:
        """Record what the environment made of the response.

        Each reward component is paid at the turn's last token or, with `section_end`, at the last token of the section
        that it judges.
        """
        generation, self._generation = self._generation, None
        assert generation is not None, "add_response() first"
        start, end = self._span
        row = len(self._rows) - 1
        self._turns.append(
            Turn(
                index=len(self._turns),
                row=row,
                start=start,
                end=end,
                format_ok=parsed.format_ok,
                action_valid=parsed.action_valid,
                actions=tuple(parsed.actions),
                finish_reason=generation.finish_reason,
                engine_s=generation.engine_s,
                env_s=env_s,
                metrics=dict(metrics),
                state=self._state,
            )
        )
        self._rewards += [
            RewardEntry(
                component=component,
                row=row,
                token=start + self._num_tokens_judged(component, generation, parsed) - 1,
                value=float(value),
            )
            for component, value in reward.items()
        ]

    def _num_tokens_judged(self, component: str, generation: Generation, parsed: ParsedResponse) -> int:
        """Leading tokens of the response that decide a reward component."""
        if self._reward_placement == "section_end":
            response = self._renderer.decode(generation.token_ids)
            end = judged_section_end(component, response, parsed.sections)
            if end is not None:
                return self._renderer.num_tokens_spelling(generation.token_ids, end)
        return len(generation.token_ids)

    def rows(self) -> tuple[Row, ...]:
        """All rows, as arrays."""
        return tuple(row.close() for row in self._rows)

    def turns(self) -> tuple[Turn, ...]:
        """All turns with an outcome."""
        return tuple(self._turns)

    def rewards(self) -> tuple[RewardEntry, ...]:
        """All reward entries."""
        return tuple(self._rewards)

    def bootstrap(self, prompt: Prompt, state: str = "") -> BootstrapPrompt:
        """The prompt that would have come next, in that state."""
        expanded, refs = self._renderer.expand(prompt.token_ids, prompt.pictures)
        return BootstrapPrompt(token_ids=np.asarray(expanded, dtype=np.int32), images=tuple(refs), state=state)

    def images(self, prompt: Prompt | None) -> dict[str, bytes]:
        """Encoded bytes of every image of the rows, and of the bootstrap `prompt` if there is one."""
        pictures = [picture for row in self._rows for picture in row.pictures]
        pictures += prompt.pictures if prompt is not None else ()
        return {picture.content_hash: picture.encoded for picture in pictures}
