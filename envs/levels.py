"""Levels and their split into training and validation, by content.

Small levels recur under different seeds, so the split is a property of the level itself: seeds are only labels.
Python's `hash` is never used; it differs between processes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, TypeVar

import xxhash

from vagen.common.errors import ConfigError

Split = Literal["train", "validation"]
LevelT = TypeVar("LevelT")

VALIDATION_MODULUS = 10


def stable_hash(content: str) -> int:
    """XXH3 of the UTF-8 bytes, in [0, 2**64); the same in every process, machine and release."""
    return xxhash.xxh3_64_intdigest(content.encode())


def split_of(content: str) -> Split:
    """The side on which a level lies: one in ten is for validation."""
    return "validation" if stable_hash(content) % VALIDATION_MODULUS == 0 else "train"


def next_seed(seed: int) -> int:
    """The seed that is tried when `seed` gave an unusable level, in [0, 2**64)."""
    return stable_hash(f"next-seed:{seed}")


def select_level(
    seed: int,
    split: Split,
    generate: Callable[[int], LevelT],
    content: Callable[[LevelT], str],
    max_attempts: int = 2000,
) -> LevelT:
    """The first level of `split` on the chain of seeds that starts at `seed`.

    `generate` is a pure function of its seed. `content` names the level; equal names are equal levels. At one level
    in ten, 2000 attempts fail with probability 1e-91 unless the settings leave only a handful of levels.

    Raises `ConfigError` for a negative seed, and when no attempt falls into the split.
    """
    if seed < 0:
        raise ConfigError(f"seed: expected int >= 0, got {seed}")
    attempt = seed
    for _ in range(max_attempts):
        level = generate(attempt)
        if split_of(content(level)) == split:
            return level
        attempt = next_seed(attempt)
    raise ConfigError(f"no {split} level in {max_attempts} attempts from seed {seed}: too few levels are possible")
