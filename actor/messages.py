"""The conversation as harnesses keep it: messages to be rendered, and responses that are tokens already.

A sampled response is never text here: it stays the ids that the engine produced.
"""

from __future__ import annotations

import asyncio
import base64
from dataclasses import dataclass
from functools import cached_property

from PIL import Image

from vagen.common.trajectory import content_hash
from vagen.envs.base import IMAGE_PLACEHOLDER, Observation, encode_png

_INLINE_PIXELS = 1 << 16
"""Below it, handing a picture to a thread costs more than encoding it."""


@dataclass(frozen=True)
class Picture:
    """One image as the engine sees it. `size` is (width, height) in pixels."""

    encoded: bytes
    size: tuple[int, int]

    @cached_property
    def content_hash(self) -> str:
        """Key into `Trajectory.images`."""
        return content_hash(self.encoded)

    @cached_property
    def base64(self) -> str:
        """As it travels in a request."""
        return base64.b64encode(self.encoded).decode("ascii")


@dataclass(frozen=True, slots=True)
class Message:
    """A system or user message: text and pictures in order."""

    role: str
    parts: tuple[str | Picture, ...]

    @property
    def pictures(self) -> tuple[Picture, ...]:
        """In the order of their placeholders."""
        return tuple(part for part in self.parts if isinstance(part, Picture))


@dataclass(frozen=True, slots=True)
class Response:
    """What the policy sampled in an earlier turn."""

    token_ids: tuple[int, ...]


Conversation = tuple[Message | Response, ...]
"""Starts with messages; ends with the message that is to be answered."""


async def observation_message(observation: Observation) -> Message:
    """The user message of an observation, its pictures encoded (large ones off the event loop)."""
    parts: list[str | Picture] = []
    texts = observation.text.split(IMAGE_PLACEHOLDER)
    for text, image in zip(texts, (*observation.images, None), strict=True):
        if text:
            parts.append(text)
        if image is not None:
            parts.append(await _encode(image))
    return Message(role="user", parts=tuple(parts))


async def _encode(image: Image.Image) -> Picture:
    if image.width * image.height <= _INLINE_PIXELS:
        return Picture(encode_png(image), image.size)
    return Picture(await asyncio.to_thread(encode_png, image), image.size)
