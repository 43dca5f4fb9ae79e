"""The local engine's model, called in this process: prompts in, sampled responses out, nothing runs beside it.

Owns the order in which prompts take slots, which makes a response bit for bit repeatable, and the copy of the learner's
weights. The forward passes and the sampling are those of `vagen.actor.local_engine`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vagen.actor.client import Generation
from vagen.actor.local_engine.config import EngineConfig
from vagen.actor.local_engine.model import EngineModel
from vagen.actor.local_engine.sampling import Sampler
from vagen.actor.local_engine.weights import engine_name
from vagen.actor.rendering import ChatRenderer, Prompt
from vagen.common.errors import ConfigError
from vagen.common.trajectory import SamplingParams
from vagen.common.vision import Grid

__all__ = ["StudySampler"]


@dataclass(slots=True)
class _Slot:
    """What was generated in one slot so far; `index` is the prompt's place in the answer."""

    index: int
    token_ids: list[int]
    logprobs: list[float]


class StudySampler:
    """Samples responses under the weights loaded last."""

    def __init__(
        self, model_dir: Path, renderer: ChatRenderer, config: EngineConfig, forbidden_token_ids: Sequence[int]
    ) -> None:
        """Raises `ConfigError` for a model without vision."""
        self._renderer = renderer
        self._config = config
        self._model = EngineModel(model_dir, config)
        if self._model.vision_tokens is None or self._model.image_spec is None:
            raise ConfigError(f"{model_dir}: the study needs a vision-language model")
        self._image_token_id = self._model.vision_tokens.image_token_id
        self._image_spec = self._model.image_spec
        self._sampler = Sampler(self._model.vocab_size, forbidden_token_ids, self._model.device)
        self._stop = frozenset(renderer.stop_token_ids) | frozenset(self._model.eos_token_ids)
        self._parameters = {engine_name(name): parameter for name, parameter in self._model.hf.named_parameters()}
        self._patches: dict[str, tuple[Tensor, Grid]] = {}
        self.version = -1
        """Of the weights in force, recorded with every token."""

    def load(self, tensors: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Copy the learner's weights, given under the engine's names. Raises `ConfigError` unless they are all."""
        given = dict(tensors)
        if given.keys() != self._parameters.keys():
            raise ConfigError(f"weights: expected the engine's parameters, differ in {given.keys() ^ self._parameters}")
        with torch.no_grad():
            for name, parameter in self._parameters.items():
                parameter.copy_(given[name])
        self.version = version

    @torch.inference_mode()
    def generate(self, prompts: Sequence[Prompt], seeds: Sequence[int], sampling: SamplingParams) -> list[Generation]:
        """One response a prompt, in order. `seeds` (below 2^63) decide the draws, one a prompt."""
        answers: list[Generation] = []
        for first in range(0, len(prompts), self._config.max_running):
            chunk = slice(first, first + self._config.max_running)
            answers += _Chunk(self, prompts[chunk], np.array(seeds[chunk], np.uint64), sampling).run()
        self._patches.clear()
        return answers

    def lay_out(
        self, prompts: Sequence[Prompt]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64], list[Tensor]]:
        """Ids [n, L], positions [3, n, L], lengths [n] and image features of prompts, padded on the right."""
        rows = [self._expand(prompt) for prompt in prompts]
        lengths = np.array([len(ids) for ids, _ in rows])
        ids = np.zeros((len(rows), int(lengths.max())), np.int64)
        positions = np.zeros((3, *ids.shape), np.int64)
        for index, (row_ids, row_positions) in enumerate(rows):
            ids[index, : lengths[index]] = row_ids
            positions[:, index, : lengths[index]] = row_positions
        images = [self._patches[picture.content_hash] for prompt in prompts for picture in prompt.pictures]
        features = self._model.image_features([i[0] for i in images], [i[1] for i in images]) if images else []
        return ids, positions, lengths, features

    def _expand(self, prompt: Prompt) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        expanded, _ = self._renderer.expand(prompt.token_ids, prompt.pictures)
        for picture in prompt.pictures:
            if picture.content_hash not in self._patches:
                self._patches[picture.content_hash] = self._image_spec.preprocess(picture.encoded)
        ids = np.array(expanded, np.int64)
        grids = [self._patches[picture.content_hash][1] for picture in prompt.pictures]
        return ids, self._image_spec.positions(ids, grids, self._image_token_id)


class _Chunk:
    """Prompts that run at once, one a slot; slots stay without gaps, so that finished ones cost nothing."""

    def __init__(
        self, owner: StudySampler, prompts: Sequence[Prompt], seeds: NDArray[np.uint64], sampling: SamplingParams
    ) -> None:
        self._owner = owner
        self._model = owner._model
        self._sampling = sampling
        self._seeds = seeds
        self._slots = [_Slot(index, [], []) for index in range(len(prompts))]
        self._answers: list[Generation | None] = [None] * len(prompts)
        ids, positions, self._lengths, features = owner.lay_out(prompts)
        self._positions = positions.max(axis=(0, 2)) + 1
        self._tokens = np.zeros(len(prompts), np.int64)
        self._append(self._model.prefill(0, ids, positions, self._lengths, features))

    def run(self) -> list[Generation]:
        while self._slots:
            running = len(self._slots)
            logits = self._model.decode(self._tokens[:running], self._positions[:running], self._lengths[:running])
            self._positions[:running] += 1
            self._lengths[:running] += 1
            self._append(logits)
        return [answer for answer in self._answers if answer is not None]

    def _append(self, logits: Tensor) -> None:
        """Sample a token for every slot and release those that it ends."""
        running = len(self._slots)
        counts = np.array([len(slot.token_ids) for slot in self._slots], np.int64)
        temperatures = np.full(running, self._sampling.temperature, np.float32)
        tokens, logprobs = self._owner._sampler(logits, temperatures, self._seeds[:running], counts)
        self._tokens[:running] = tokens
        for slot, token, logprob in zip(self._slots, tokens.tolist(), logprobs.tolist(), strict=True):
            slot.token_ids.append(token)
            slot.logprobs.append(logprob)
        for place in reversed(range(running)):
            slot = self._slots[place]
            is_stopped = slot.token_ids[-1] in self._owner._stop
            if is_stopped or len(slot.token_ids) == self._sampling.max_new_tokens:
                self._answers[slot.index] = Generation(
                    token_ids=slot.token_ids,
                    logprobs=slot.logprobs,
                    versions=[self._owner.version] * len(slot.token_ids),
                    finish_reason="stop" if is_stopped else "length",
                    engine_s=0.0,
                )
                self._release(place)

    def _release(self, place: int) -> None:
        """Free a slot; the last one moves into the gap."""
        last = len(self._slots) - 1
        moved = self._slots.pop()
        if place != last:
            self._model.move_slot(last, place, int(self._lengths[last]))
            for column in (self._tokens, self._positions, self._lengths, self._seeds):
                column[place] = column[last]
            self._slots[place] = moved
