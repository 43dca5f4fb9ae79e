"""What actor and learner both read of an engine's `/server_info`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import xxhash

__all__ = ["INCOMPLETE_VERSION", "incarnation_of"]

INCOMPLETE_VERSION = "incomplete"
"""Version of an engine with which an update failed: no number, so that no actor takes a token of it."""

_DRAWN_AT_START = ("random_seed", "nccl_port", "port", "startup_time")
"""What differs from one start of SGLang to the next; it announces no incarnation of its own."""


def incarnation_of(info: Mapping[str, Any]) -> str:
    """What tells one start of an engine from the next."""
    announced = info.get("incarnation")
    if announced:
        return str(announced)
    return xxhash.xxh3_64_hexdigest("|".join(f"{key}={info.get(key)}" for key in _DRAWN_AT_START).encode())
