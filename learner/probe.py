"""The standing check that engine and learner compute the same: fixed prompts, sampled at a version and rescored from
it.

Owns the choice of prompts (those of the first rows ever trained on, kept in the checkpoint) and the comparison.
"""

from __future__ import annotations

import base64
from typing import Any

import msgspec
import numpy as np
import torch

from vagen.common.trajectory import ImageRef, Row, Trajectory, VisionTokens
from vagen.learner.batching import PreparedRow, RowPreparer
from vagen.learner.broadcast import ProbeAnswer, ProbePrompt
from vagen.learner.model.actor_critic import VisionLanguageActorCritic
from vagen.learner.model.pipeline import outputs_of
from vagen.learner.packing import microbatches

__all__ = ["Probe"]


class _Prompt(msgspec.Struct, frozen=True):
    """A prompt up to its first sampled token, image placeholders expanded."""

    token_ids: list[int]
    images: list[ImageRef]
    encoded: dict[str, str]
    """Image bytes in base64 by content hash."""


class Probe:
    """Fixed prompts of one model."""

    def __init__(self, prompts: list[_Prompt], temperature: float) -> None:
        self._prompts = prompts
        self.temperature = temperature
        """At which the run samples, and so the probe."""

    @classmethod
    def of(cls, trajectories: list[Trajectory], count: int) -> Probe:
        """The prompts of the first `count` rows."""
        rows = [(row, t) for t in trajectories for row in t.rows if row.policy_mask.any()]
        prompts = [_prompt_of(row, t.images) for row, t in rows[:count]]
        return cls(prompts, trajectories[0].sampling.temperature)

    def to_plain(self) -> dict[str, Any]:
        """For a checkpoint's record."""
        return {"temperature": self.temperature, "prompts": msgspec.to_builtins(self._prompts)}

    @classmethod
    def from_plain(cls, plain: dict[str, Any]) -> Probe:
        """From a checkpoint's record."""
        return cls(msgspec.convert(plain["prompts"], list[_Prompt]), plain["temperature"])

    def requests(self, vision: VisionTokens | None) -> list[ProbePrompt]:
        """As the engine takes them: one placeholder an image."""
        forbidden = vision.forbidden_token_ids if vision else ()
        return [
            ProbePrompt(
                token_ids=_collapsed(prompt),
                images=tuple(prompt.encoded[image.content_hash] for image in prompt.images),
                forbidden_token_ids=forbidden,
                temperature=self.temperature,
            )
            for prompt in self._prompts
        ]

    @torch.no_grad()
    def mismatch(
        self,
        model: VisionLanguageActorCritic,
        preparer: RowPreparer,
        answers: list[ProbeAnswer],
    ) -> float:
        """Mean absolute difference of the engine's log-probabilities and the model's, over all sampled tokens.

        Collective over the ranks of a copy of the model.
        """
        store = preparer.new_store()
        rows: list[PreparedRow] = []
        reported: list[float] = []
        first = 0
        for prompt, answer in zip(self._prompts, answers, strict=True):
            size = len(answer.token_ids)
            ids = np.array([*prompt.token_ids, *answer.token_ids], dtype=np.int32)
            mask = np.zeros(len(ids), dtype=np.uint8)
            mask[len(prompt.token_ids) :] = 1
            nothing = np.zeros(0)
            row = Row(
                token_ids=ids,
                policy_mask=mask,
                behaviour_logprobs=nothing,
                policy_versions=nothing,
                turn_index=nothing,
                images=tuple(prompt.images),
            )
            encoded = {name: base64.b64decode(text) for name, text in prompt.encoded.items()}
            rows.append(preparer.policy_row(row, np.arange(first, first + size), encoded, store))
            reported += answer.logprobs
            first += size
        scored = torch.empty(first)
        was_training = model.training
        model.eval()
        packs = microbatches(rows, store, max_tokens=1 << 14)
        forbidden = preparer.forbidden_token_ids
        for slots, out in outputs_of(model, packs, temperature=self.temperature, forbidden_token_ids=forbidden):
            scored[slots] = out.logprobs
        model.train(was_training)
        return float((scored - torch.tensor(reported)).abs().mean())


def _prompt_of(row: Row, encoded: dict[str, bytes]) -> _Prompt:
    end = int(np.flatnonzero(row.policy_mask)[0])
    images = [image for image in row.images if image.start < end]
    return _Prompt(
        token_ids=row.token_ids[:end].tolist(),
        images=images,
        encoded={i.content_hash: base64.b64encode(encoded[i.content_hash]).decode() for i in images},
    )


def _collapsed(prompt: _Prompt) -> tuple[int, ...]:
    ids = list(prompt.token_ids)
    for image in reversed(prompt.images):
        del ids[image.start + 1 : image.start + image.num_tokens]
    return tuple(ids)
