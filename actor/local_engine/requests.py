"""A generation request: the JSON that asks for it, the state the engine keeps of it, the JSON that answers it.

Field names are SGLang's. What SGLang accepts and this engine cannot do (truncated sampling, streaming) is refused
rather than ignored.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from vagen.actor.local_engine.cache import ByteBoundedCache
from vagen.common.errors import ObservationError
from vagen.common.towers import AnyImageSpec
from vagen.common.trajectory import VisionTokens, content_hash
from vagen.common.vision import Grid

__all__ = ["BadRequest", "GenerateBody", "ImageInput", "Request", "RequestFactory", "SamplingParams"]

_MAX_SEED = 1 << 63
_FORBIDDING = 1e9
_NOT_HERE = (
    "stream",
    "return_text_in_logprobs",
    "return_hidden_states",
    "return_bytes",
    "return_entropy",
    "background",
)


class BadRequest(Exception):
    """The request cannot be served as it is: HTTP 400 with this message."""


class SamplingParams(msgspec.Struct, forbid_unknown_fields=True):
    """SGLang's sampling parameters, as far as this engine has them."""

    max_new_tokens: int = 128
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    """Neither the model's end token nor `stop_token_ids` end the generation, as in SGLang."""
    sampling_seed: int | None = None
    logit_bias: dict[str, float] | None = None
    """Addends to logits by token id. Only vision tokens, which this engine never samples, and to forbid them."""
    skip_special_tokens: bool = True
    no_stop_trim: bool = False
    """Keeps the stop token in `text`; `output_ids` always contain it."""


class GenerateBody(msgspec.Struct, forbid_unknown_fields=True):
    """Body of `/generate`."""

    input_ids: list[int]
    rid: str | None = None
    image_data: list[str] | str | None = None
    """Base64 or data URLs, in the order of their placeholders."""
    sampling_params: SamplingParams = msgspec.field(default_factory=SamplingParams)
    return_logprob: bool = False
    logprob_start_len: int = -1
    stream: bool = False
    session_id: str | None = None
    extra_key: str | None = None
    cache_salt: str | None = None
    """Accepted for SGLang's prefix cache, of which this engine has none."""
    model: str | None = None
    """From here on: what SGLang's router writes into each request. There is one model here, and no logs of requests."""
    log_metrics: bool = True
    no_logs: bool = False
    return_text_in_logprobs: bool = False
    return_hidden_states: bool = False
    return_bytes: bool = False
    return_entropy: bool = False
    background: bool = False


@dataclass(frozen=True)
class ImageInput:
    """One image, ready for the vision tower: patches float32 [P, D_patch]."""

    digest: str
    patches: Tensor
    grid: Grid


@dataclass(eq=False, slots=True, kw_only=True)
class Request:
    """A request and what was generated for it so far. The engine's thread owns it until it is finished."""

    rid: str
    prompt: NDArray[np.int64]
    """Ids [T], images expanded."""
    positions: NDArray[np.int64]
    """M-RoPE positions [3, T]."""
    images: tuple[ImageInput, ...]
    num_image_tokens: int
    max_new_tokens: int
    temperature: float
    seed: int
    stop_token_ids: frozenset[int]
    return_logprob: bool
    skip_special_tokens: bool
    no_stop_trim: bool
    deadline: float
    """On the monotonic clock."""
    next_position: int = 0
    """Position of the first generated token."""
    output_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    spans: list[tuple[str, int]] = field(default_factory=list)
    """(version of the weights, index of the first token that they sampled), ascending."""
    num_retractions: int = 0
    finish_reason: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        self.next_position = int(self.positions.max()) + 1

    def tokens_and_positions(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Ids [T'] and positions [3, T'] of prompt and output so far, as a prefill needs them."""
        if not self.output_ids:
            return self.prompt, self.positions
        ids = np.concatenate((self.prompt, np.array(self.output_ids, dtype=np.int64)))
        after = np.arange(self.next_position, self.next_position + len(self.output_ids))
        return ids, np.concatenate((self.positions, np.broadcast_to(after, (3, len(after)))), 1)

    def add_token(self, token: int, logprob: float, version: str) -> None:
        """Append a sampled token, and set `finish_reason` when it is the last one."""
        if not self.spans or self.spans[-1][0] != version:
            self.spans.append((version, len(self.output_ids)))
        self.output_ids.append(token)
        self.logprobs.append(logprob)
        if token in self.stop_token_ids:
            self.finish_reason = {"type": "stop", "matched": token}
        elif len(self.output_ids) >= self.max_new_tokens:
            self.finish_reason = {"type": "length", "length": self.max_new_tokens}

    def answer(self, current_version: str, decode: Callable[[Sequence[int], bool], str] | None) -> dict[str, Any]:
        """Body of the answer; `decode` makes text of ids, skipping special tokens if its second argument says so."""
        ends = [start for _, start in self.spans[1:]] + [len(self.output_ids)]
        spans = [{"version": v, "start": s, "end": end} for (v, s), end in zip(self.spans, ends, strict=False)]
        meta: dict[str, Any] = {
            "id": self.rid,
            "prompt_tokens": len(self.prompt),
            "completion_tokens": len(self.output_ids),
            "finish_reason": self.finish_reason,
            "weight_version": self.spans[-1][0] if self.spans else current_version,
            "weight_versions": spans,
            "cached_tokens": 0,
            "image_tokens": self.num_image_tokens,
            "num_retractions": self.num_retractions,
        }
        if self.return_logprob:
            meta["output_token_logprobs"] = [(p, t, None) for p, t in zip(self.logprobs, self.output_ids, strict=True)]
        text = ""
        if decode is not None:
            stopped = self.finish_reason is not None and self.finish_reason["type"] == "stop"
            kept = self.output_ids[:-1] if stopped and not self.no_stop_trim else self.output_ids
            text = decode(kept, self.skip_special_tokens)
        return {"text": text, "output_ids": self.output_ids, "meta_info": meta}


class RequestFactory:
    """Checks a body against the model and makes a request of it: images decoded, placeholders expanded."""

    def __init__(
        self,
        *,
        vocab_size: int,
        max_context: int,
        max_new_tokens_limit: int,
        eos_token_ids: Sequence[int],
        vision_tokens: VisionTokens | None,
        video_token_id: int,
        image_spec: AnyImageSpec | None,
        image_cache_bytes: int,
        seed: int | None,
    ) -> None:
        self._vocab_size = vocab_size
        self._max_context = max_context
        self._max_new_tokens_limit = max_new_tokens_limit
        self._eos_token_ids = frozenset(eos_token_ids)
        self._vision_tokens = vision_tokens
        self._video_token_id = video_token_id
        self._image_spec = image_spec
        self._images = ByteBoundedCache[ImageInput](image_cache_bytes)
        self._seeds = np.random.default_rng(seed)

    def build(self, body: GenerateBody, rid: str, deadline: float) -> Request:
        """The request. Raises BadRequest."""
        params = body.sampling_params
        self._check_params(body, params)
        images = self._decode_images([body.image_data] if isinstance(body.image_data, str) else body.image_data or [])
        prompt, num_image_tokens = self._expand(body.input_ids, images)
        if len(prompt) + params.max_new_tokens > self._max_context:
            raise BadRequest(
                f"input_ids: {len(prompt)} tokens with images expanded and max_new_tokens {params.max_new_tokens} "
                f"exceed the context of {self._max_context}"
            )
        seed = params.sampling_seed
        stop = frozenset() if params.ignore_eos else self._eos_token_ids | frozenset(params.stop_token_ids or ())
        return Request(
            rid=rid,
            prompt=prompt,
            positions=self._positions(prompt, images),
            images=images,
            num_image_tokens=num_image_tokens,
            max_new_tokens=params.max_new_tokens,
            temperature=params.temperature,
            seed=int(self._seeds.integers(_MAX_SEED)) if seed is None else seed,
            stop_token_ids=stop,
            return_logprob=body.return_logprob,
            skip_special_tokens=params.skip_special_tokens,
            no_stop_trim=params.no_stop_trim,
            deadline=deadline,
        )

    def _check_params(self, body: GenerateBody, params: SamplingParams) -> None:
        for name in _NOT_HERE:
            _require(not getattr(body, name), name, getattr(body, name), "false")
        _require(body.logprob_start_len == -1, "logprob_start_len", body.logprob_start_len, "-1, output tokens only")
        _require(params.top_p == 1, "sampling_params.top_p", params.top_p, "1; truncated sampling biases the ratio")
        _require(params.top_k == -1, "sampling_params.top_k", params.top_k, "-1; truncated sampling biases the ratio")
        _require(0 <= params.temperature < 1e6, "sampling_params.temperature", params.temperature, "number in [0, 1e6)")
        _require(
            1 <= params.max_new_tokens <= self._max_new_tokens_limit,
            "sampling_params.max_new_tokens",
            params.max_new_tokens,
            f"int in [1, {self._max_new_tokens_limit}]",
        )
        seed = params.sampling_seed
        _require(seed is None or 0 <= seed < _MAX_SEED, "sampling_params.sampling_seed", seed, "int in [0, 2^63)")
        for token in params.stop_token_ids or ():
            self._require_token(token, "sampling_params.stop_token_ids")
        never = self._vision_tokens.forbidden_token_ids if self._vision_tokens is not None else ()
        for name, bias in (params.logit_bias or {}).items():
            is_redundant = name.isdecimal() and int(name) in never and bias <= -_FORBIDDING
            _require(is_redundant, f"sampling_params.logit_bias[{name}]", bias, f"-1e9 for one of the tokens {never}")
        _require(bool(body.input_ids), "input_ids", body.input_ids, "at least one token")
        _require(len(body.input_ids) < self._max_context, "input_ids", len(body.input_ids), f"< {self._max_context}")
        self._require_token(min(body.input_ids), "input_ids")
        self._require_token(max(body.input_ids), "input_ids")

    def _require_token(self, token: int, path: str) -> None:
        _require(0 <= token < self._vocab_size, path, token, f"ids in [0, {self._vocab_size})")

    def _decode_images(self, encoded: Sequence[str]) -> tuple[ImageInput, ...]:
        if encoded and self._image_spec is None:
            raise BadRequest(f"image_data: {len(encoded)} images for a model without a vision tower")
        return tuple(self._decode_image(index, text) for index, text in enumerate(encoded))

    def _decode_image(self, index: int, text: str) -> ImageInput:
        assert self._image_spec is not None
        try:
            file = base64.b64decode(text.partition(",")[2] if text.startswith("data:") else text, validate=True)
            digest = content_hash(file)
            image = self._images.get(digest)
            if image is None:
                patches, grid = self._image_spec.preprocess(file)
                image = ImageInput(digest, patches, grid)
                self._images.put(digest, image, patches.nbytes)
        except (binascii.Error, ObservationError) as error:
            raise BadRequest(f"image_data[{index}]: {error}") from error
        return image

    def _expand(self, ids: list[int], images: Sequence[ImageInput]) -> tuple[NDArray[np.int64], int]:
        """Replace the one placeholder of each image by as many as the image has tokens."""
        prompt = np.array(ids, dtype=np.int64)
        if self._vision_tokens is None:
            return prompt, 0
        if self._video_token_id in ids:
            raise BadRequest("input_ids: video placeholders are not supported")
        where = np.flatnonzero(prompt == self._vision_tokens.image_token_id)
        if len(where) != len(images):
            adjacent = " (one placeholder an image, do not expand them)" if (np.diff(where) == 1).any() else ""
            raise BadRequest(f"input_ids: {len(where)} image placeholders for {len(images)} images{adjacent}")
        assert self._image_spec is not None
        sizes = np.array([self._image_spec.num_tokens(image.grid) for image in images], dtype=np.int64)
        repeats = np.ones(len(prompt), dtype=np.int64)
        repeats[where] = sizes
        return prompt.repeat(repeats), int(sizes.sum())

    def _positions(self, prompt: NDArray[np.int64], images: Sequence[ImageInput]) -> NDArray[np.int64]:
        if not images:
            return np.broadcast_to(np.arange(len(prompt)), (3, len(prompt)))
        assert self._vision_tokens is not None and self._image_spec is not None
        return self._image_spec.positions(prompt, [image.grid for image in images], self._vision_tokens.image_token_id)


def _require(holds: bool, path: str, value: object, bound: str) -> None:
    if not holds:
        raise BadRequest(f"{path}: expected {bound}, got {value}")
