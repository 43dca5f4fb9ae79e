"""A running engine against the learner's model: names, weights, pictures, log-probabilities, and an update.

Owns the prompt that both sides score. The model is loaded as the learner loads it, and scores as in the learner's own
probe.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from PIL import Image

from vagen.actor.messages import Message, Picture
from vagen.actor.rendering import ChatRenderer
from vagen.common.errors import BroadcastError, EngineError
from vagen.common.weight_transfer import tensor_checksum
from vagen.envs.base import encode_png
from vagen.learner.batching import RowPreparer
from vagen.learner.broadcast import Broadcaster, probe_engine
from vagen.learner.config import BroadcastConfig
from vagen.learner.engine_checksums import can_compare, missing_names, require_equal
from vagen.learner.engine_control import ProbeAnswer
from vagen.learner.model.actor_critic import VisionLanguageActorCritic
from vagen.learner.model.parallel import parallel_session
from vagen.learner.probe import Probe
from vagen.tools.doctor import Finding

__all__ = ["EngineComparison"]

_TEMPERATURE = 0.7
"""Not 1, so that log-probabilities that leave it out are seen."""
_PICTURE_SIDE = 56
_BOUNDS = {"float32": 1e-4}
_BOUND_OTHERWISE = 0.05
"""Of the mean difference of log-probabilities; engines in half precision differ by about a hundredth."""
_PERTURBATION = 0.1


class EngineComparison:
    """One engine and one model folder. Raises `ConfigError` for a folder that a learner could not train from."""

    def __init__(self, url: str, model_dir: Path, info: Mapping[str, Any], config: BroadcastConfig) -> None:
        renderer = ChatRenderer.load(model_dir)
        self._url = url
        self._preparer = RowPreparer.load(model_dir)
        self._model_dir = model_dir
        self._info = info
        self._config = config
        self._bound = _BOUNDS.get(str(info.get("dtype")), _BOUND_OTHERWISE)
        parts: tuple[str | Picture, ...] = ("look",) if renderer.vision is None else (_picture(), "look")
        prompt = renderer.render((Message("user", parts),))
        token_ids, images = renderer.expand(prompt.token_ids, prompt.pictures)
        self._length = len(token_ids)
        self._plain = {
            "token_ids": token_ids,
            "images": msgspec.to_builtins(images),
            "encoded": {picture.content_hash: picture.base64 for picture in prompt.pictures},
        }

    def examine(self, checksums: Mapping[str, Any], version: str, *, update: bool) -> Iterator[Finding]:
        """All findings; `checksums` is the engine's answer of `/weights_checker`."""
        with parallel_session():
            model = VisionLanguageActorCritic.load_hf(self._model_dir)
            tensors = model.engine_named_tensors()
            missing = missing_names(checksums, [name for name, _ in tensors])
            text = f"all {len(tensors)} of the learner's export are known to the engine"
            if missing:
                text = f"{len(missing)} of {len(tensors)} are unknown to the engine, first {missing[0]}"
            yield Finding(name="names", ok=not missing, text=text)
            weights = self._compare_weights(checksums, tensors)
            yield weights
            if weights.ok:
                yield from self._compare_logprobs(model, version)
            if update:
                yield self._try_update(model, version)
            else:
                text = "not tried: --update publishes twice and asks again"
                yield Finding(name=self._update_name, ok=True, text=text)

    def _compare_weights(self, checksums: Mapping[str, Any], tensors: Sequence[tuple[str, torch.Tensor]]) -> Finding:
        if not can_compare(self._info):
            return Finding(name="weights", ok=True, text="SGLang's checksums on a GPU cannot be compared")
        try:
            ours = {name: tensor_checksum(tensor) for name, tensor in tensors}
            require_equal(self._info, checksums, tensors, ours)
        except BroadcastError as error:
            return Finding(name="weights", ok=False, text=f"not those of {self._model_dir}: {error}")
        return Finding(name="weights", ok=True, text=f"those of {self._model_dir}, by checksum")

    def _compare_logprobs(self, model: VisionLanguageActorCritic, version: str) -> Iterator[Finding]:
        """With the picture where the model sees any, at a temperature that is not 1."""
        probe = self._probe(_TEMPERATURE)
        try:
            answers = probe_engine(self._url, probe.requests(self._preparer.vision), version, self._config)
        except EngineError as error:
            yield Finding(name="generation", ok=False, text=f"{error}; is it paused?")
            return
        seen = answers[0].num_prompt_tokens
        name, what = ("pictures", "a prompt with a picture") if self._preparer.vision else ("prompt", "a prompt")
        text = f"{what} has {seen} tokens at the engine and {self._length} at the learner"
        yield Finding(name=name, ok=seen == self._length, text=text)
        mismatch = self._mismatch(model, probe, answers)
        text = f"{mismatch:.1e} from the learner's on average, at temperature {_TEMPERATURE}"
        if mismatch > self._bound and self._mismatch(model, self._probe(1.0), answers) <= self._bound:
            text += ": they leave the temperature out; is SGLANG_RETURN_ORIGINAL_LOGPROB set?"
        elif mismatch > self._bound:
            text += f", expected at most {self._bound:g}"
        yield Finding(name="logprobs", ok=mismatch <= self._bound, text=text)

    def _try_update(self, model: VisionLanguageActorCritic, version: str) -> Finding:
        """Change the vision tower (a text model whole), ask again, and bring the weights of the folder back."""
        number = int(version) if version.isdecimal() else 0
        original = model.engine_named_tensors()
        broadcaster = Broadcaster(self._config)
        try:
            failures = []
            try:
                mismatch = self._mismatch_after_update(model, broadcaster, version, number + 1)
            except EngineError as error:
                failures.append(str(error))
            restored = broadcaster.publish(original, number + 2, [self._url])
        finally:
            broadcaster.close()
        failures += restored.failed.values()
        if failures:
            return Finding(name="update", ok=False, text=failures[0])
        sees = self._preparer.vision is not None
        if mismatch > self._bound:
            text = f"stale: {mismatch:.1e} from the learner's after an update"
            text += "; start it with SGLANG_VLM_CACHE_SIZE_MB=0" if sees else ""
            return Finding(name=self._update_name, ok=False, text=text)
        what = "an update reaches a picture seen before" if sees else "an update reaches the model"
        text = f"{what} ({mismatch:.1e}); paused {restored.stall_s:.2f} s, left at version {number + 2}"
        return Finding(name=self._update_name, ok=True, text=text)

    def _mismatch_after_update(
        self, model: VisionLanguageActorCritic, broadcaster: Broadcaster, version: str, new: int
    ) -> float:
        """Of a prompt that the engine saw before the weights were changed. Raises EngineError."""
        changed = model.language_model if model.visual is None else model.visual
        probe = self._probe(1.0)
        probe_engine(self._url, probe.requests(self._preparer.vision), version, self._config)
        with torch.no_grad():
            for parameter in changed.parameters():
                parameter.add_(_PERTURBATION * torch.randn_like(parameter))
        broadcaster.publish(model.engine_named_tensors(), new, [self._url], require_one=True)
        answers = probe_engine(self._url, probe.requests(self._preparer.vision), new, self._config)
        return self._mismatch(model, probe, answers)

    @property
    def _update_name(self) -> str:
        """What an update shows: whether features of old pictures are kept, or only that it arrives."""
        return "update" if self._preparer.vision is None else "vision cache"

    def _probe(self, temperature: float) -> Probe:
        return Probe.from_plain({"temperature": temperature, "prompts": [self._plain]})

    def _mismatch(self, model: VisionLanguageActorCritic, probe: Probe, answers: list[ProbeAnswer]) -> float:
        return probe.mismatch(model, self._preparer, answers)


def _picture() -> Picture:
    pixels = np.random.default_rng(0).integers(0, 256, (_PICTURE_SIDE, _PICTURE_SIDE, 3), dtype=np.uint8)
    return Picture(encode_png(Image.fromarray(pixels)), (_PICTURE_SIDE, _PICTURE_SIDE))
