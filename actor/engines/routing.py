"""Which engine takes a request. Pure.

New episodes, and turns that must move, go to the least pressed engine with room; before pressure counts
    1. not the one that failed this very response last,
    2. not late (see `Member.is_late`), then the newest version.
A turn of an episode goes to the engine that has its prefix, its home, unless that is gone, has no room, failed this
response, or is pressed more than `OVERLOAD` times as hard as the least pressed one plus `SLACK`.
"""

from __future__ import annotations

import random
from collections.abc import Iterable

from vagen.actor.engines.member import Member

__all__ = ["OVERLOAD", "SLACK", "choose"]

OVERLOAD, SLACK = 2.0, 0.25


def choose(members: Iterable[Member], home: Member | None, avoid: Member | None) -> Member | None:
    """The engine for one request of an episode whose prefix `home` has; None while no usable engine has room."""
    candidates = [member for member in members if member.is_usable and member.has_room]
    if not candidates:
        return None
    # Chance decides among equals: actors that start together must not all begin with the same engine.
    best = min(candidates, key=lambda m: (m is avoid, m.is_late, -m.version, m.pressure, random.random()))
    if home in candidates and home is not avoid and (best.is_late or not home.is_late):
        if home.pressure <= OVERLOAD * best.pressure + SLACK:
            return home
    return best
