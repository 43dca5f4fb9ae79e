"""How many episodes may be on their way where the learner takes the freshest: as many as it will take, when it will.

With the order `freshest` whatever stays behind at a claim is passed over by the next ones too and gets too old. So
data is not made as far ahead as `max_staleness` allows, but for the batch that is asked for next:

    ready + running <= D (x + l) + slack        x  learner steps since it asked for its last batch, at most 1
                                                l  learner steps that an episode takes
                                                D  trajectories that a step uses up, those that filters drop among them

What is claimed when the learner asks is to be ready at x = 1, and has begun l before; the rate is D a step, so
episodes are always on their way when weights arrive. By Little's law D l of them run. `slack` is ready a little early.

While the learner waits for the batch that it asked for, that batch is due besides (x + 1), and what is ready has
passed the filters for the most part: one of it is worth D / B episodes. x goes on then without end, so that a wait,
whatever its cause, opens up all that `max_staleness` allows. Before times are known, x + l is 1.

Pure but for the two functions that read the state from Redis; the other rules are `vagen.buffer.admission`'s.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

import msgspec

from vagen.buffer.keys import Key, Keys

__all__ = ["Tempo", "parse_tempo", "queue_tempo", "startable"]

_SLACK_SHARE = 1 / 16
"""Of a batch. What stays behind of it gets too old once in `max_staleness` steps."""


class Tempo(msgspec.Struct, frozen=True, kw_only=True):
    """How fast the learner takes what is ready, and how long an episode takes."""

    since_asked_s: float = 0.0
    """Seconds since the learner asked for the batch that it asked for last."""
    is_waiting: bool = True
    """That batch is not sealed yet."""
    step_s: float | None = None
    """The learner's own time of a step; none before its second."""
    episode_s: float | None = None
    """From the grant to the last of the episode, on average; none before the first."""
    fresh_share: float = 1.0
    """Of the last batch; the rest was replayed."""
    filtered: int = 0
    """Trajectories that filters dropped for the last batch, or of late for the next one where that is more."""
    group_size: int = 1

    @property
    def steps_due(self) -> float:
        """x + l of the module, and one more while the learner waits."""
        if not self.step_s or self.episode_s is None:
            return 2.0 if self.is_waiting else 1.0
        x = self.since_asked_s / self.step_s
        return (1.0 + x if self.is_waiting else min(1.0, x)) + self.episode_s / self.step_s


def startable(tempo: Tempo, batch_size: int, ready: int, running: int) -> int:
    """Episodes that may start now by this rule alone; `ready` without those that await their group.

    Never so few that a batch cannot become complete: all of it and a group more may be on its way while one is waited
    for.
    """
    t = tempo
    taken = batch_size if t.is_waiting else batch_size * t.fresh_share
    used = taken + t.filtered
    slack = max(t.group_size, math.ceil(_SLACK_SHARE * batch_size))
    worth = used / taken if t.is_waiting and taken else 1.0
    due = used * t.steps_due + slack
    return max(0, math.floor(min(due, 2.0**53) - worth * ready) - running)


def queue_tempo(pipe: Any, keys: Keys) -> None:
    """Add the reads of `parse_tempo` to a pipeline."""
    pipe.hgetall(keys[Key.PACE])
    pipe.hmget(keys[Key.LEARNER], "order", "group_size")
    pipe.hget(keys[Key.SETTINGS], "order")
    pipe.hget(keys[Key.STAT], "filtered")
    pipe.time()


def parse_tempo(replies: Sequence[Any]) -> Tempo | None:
    """The state behind the replies to `queue_tempo`; none where another order than `freshest` is in force."""
    pace, (order, group_size), live_order, filtered, (seconds, micros) = replies
    if json.loads(live_order or order or b"null") != "freshest":
        return None
    now = seconds + micros / 1e6

    def number(name: bytes) -> float | None:
        return float(pace[name]) if name in pace else None

    asked_at = number(b"asked_at")
    since_last = int(filtered or 0) - int(number(b"filtered_before") or 0)
    fresh_share = number(b"fresh_share")
    return Tempo(
        since_asked_s=0.0 if asked_at is None else max(0.0, now - asked_at),
        is_waiting=number(b"waiting") != 0,
        step_s=number(b"step_s"),
        episode_s=number(b"episode_s"),
        fresh_share=1.0 if fresh_share is None else fresh_share,
        filtered=max(0, since_last, int(number(b"filtered_last") or 0)),
        group_size=int(group_size or 1),
    )
