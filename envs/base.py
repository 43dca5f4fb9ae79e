"""The environment contract: what the actor sends to an environment and what it gets back.

Owns the types of that exchange and the PNG encoding of pictures. Knows nothing of tokens, engines, prompts of the
harness or how an environment is run (see `vagen.envs.threaded`).
"""

from __future__ import annotations

import io
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from PIL import Image

from vagen.common.errors import ObservationError

IMAGE_PLACEHOLDER = "<image>"


@dataclass(frozen=True, slots=True)
class Observation:
    """Text with ordered pictures; the i-th `<image>` of the text stands for `images[i]`.

    Pictures may be shared between observations: treat them as immutable. `state` is what the environment says of its
    state beyond that, for a privileged critic; the policy never sees it.

    Raises `ObservationError` when the number of placeholders is not the number of pictures.
    """

    text: str
    images: tuple[Image.Image, ...] = ()
    state: str = ""

    def __post_init__(self) -> None:
        num_placeholders = self.text.count(IMAGE_PLACEHOLDER)
        if num_placeholders != len(self.images):
            raise ObservationError(
                f"observation has {num_placeholders} {IMAGE_PLACEHOLDER} placeholders and {len(self.images)} images"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Info:
    """Success so far, and numbers for the metrics (never read by training)."""

    success: bool = False
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedResponse:
    """What the environment understood of one response.

    `format_ok`: the whole response has the demanded shape. `action_valid`: it lists at least one action and, up to
    the maximum per turn, no unknown one. `actions`: what was executed, in order, in the environment's own spelling;
    with an unknown action in the list these are the ones before it. `sections`: tag -> text for judges, empty when
    the format is wrong.
    """

    format_ok: bool
    action_valid: bool
    actions: tuple[str, ...]
    sections: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """The outcome of one turn.

    `reward` holds named components (`task`, `format`, ...), kept apart up to the buffer. An episode ends in one way:
    `terminated` by the environment's own rules, or `truncated` by a limit of ours.

    Raises `ObservationError` for a reward that is not finite or for both ends at once.
    """

    observation: Observation
    reward: Mapping[str, float]
    terminated: bool
    truncated: bool
    info: Info
    parsed: ParsedResponse

    def __post_init__(self) -> None:
        if self.terminated and self.truncated:
            raise ObservationError("step result is both terminated and truncated")
        for name, value in self.reward.items():
            if not math.isfinite(value):
                raise ObservationError(f"reward component {name!r} is {value}, expected a finite number")

    @property
    def done(self) -> bool:
        return self.terminated or self.truncated


@runtime_checkable
class Environment(Protocol):
    """One environment as the actor sees it: one episode at a time, started by `reset`, calls never overlapping.

    Every method may raise `EnvironmentFailure` (the simulator raised, timed out or died): the episode is then counted
    as an infrastructure failure and never as reward 0, and the environment is only good for `close`.
    """

    async def reset(self, seed: int) -> tuple[Observation, Info]:
        """Starts an episode; equal seeds give equal episodes in every process."""
        ...

    async def step(self, response: str) -> StepResult:
        """Plays one turn.

        `response` is the decoded text without the model's end-of-turn token, which the caller strips: the format is
        matched against the whole of it.
        """
        ...

    def system_prompt(self) -> str:
        """The text of the system message; empty when there is none."""
        ...

    async def close(self) -> None:
        """Frees what the environment holds; may be called more than once."""
        ...


@runtime_checkable
class EnvironmentCore(Protocol):
    """The same contract for a synchronous, CPU-bound simulator; `ThreadedEnvironment` makes it an `Environment`."""

    def reset(self, seed: int) -> tuple[Observation, Info]: ...

    def step(self, response: str) -> StepResult: ...

    def system_prompt(self) -> str: ...

    def close(self) -> None: ...


def encode_png(image: Image.Image) -> bytes:
    """Encodes pixels as an RGB PNG; equal pixels give equal bytes, so that content hashes agree."""
    pixels = image if image.mode == "RGB" else image.convert("RGB")
    # A picture without `info`: profiles, text and resolution that travelled with a file would change the bytes.
    bare = Image.frombytes("RGB", pixels.size, pixels.tobytes())
    buffer = io.BytesIO()
    bare.save(buffer, "PNG", compress_level=1)
    return buffer.getvalue()
