"""How many episodes may start: the pacing rule, pure, and the state it is applied to, read from Redis.

    credits = min(C_max - running, min(max_staleness + 1, steps left) * B - (stored + claimed_not_trained + running))

With the order `freshest`, which leaves the older behind, no more than will be taken: `vagen.buffer.tempo`. Nor does an
actor start episodes whose engines all have late weights: when trained on, they would be too old.

Everything the rules look at is in Redis, so that a restart of the ingest or of Redis neither forgets a running
episode nor grants a second time. One ingest serves a run, so nobody grants between the reading and the granting.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from vagen.buffer.keys import Key, Keys
from vagen.buffer.tempo import Tempo, parse_tempo, queue_tempo, startable
from vagen.common.wire import EngineStatus


class Pacing(msgspec.Struct, frozen=True, kw_only=True):
    """What the rule depends on; counts of trajectories and of running episodes."""

    max_running: int
    """C_max."""
    batch_size: int | None
    """B, the trajectories of a learner step; none while no learner has registered."""
    max_staleness: int
    """In learner steps."""
    ready: int
    """Stored and claimable."""
    awaiting: int = 0
    """Stored, and waiting for the rest of their group."""
    untrained: int
    """Claimed, and not used by an optimizer step yet."""
    running: int
    """Leases."""
    engines: int
    """Engines that may take traffic."""
    steps_left: int | None = None
    """Learner steps until the run's last; none for a run without end."""
    tempo: Tempo | None = None
    """Of the order `freshest`; none for the others, which take what has been made before."""


def start_credits(pacing: Pacing) -> tuple[int, str]:
    """Episodes that may start now, and the reason when there are none."""
    p = pacing
    if p.batch_size is None:
        return 0, "no learner has registered"
    if p.engines == 0:
        return 0, "no engine is admitted"
    by_running = p.max_running - p.running
    window = p.max_staleness + 1
    ahead, bound = p.ready + p.awaiting + p.untrained + p.running, window * p.batch_size
    if by_running <= 0:
        return 0, f"{p.running} episodes run of at most {p.max_running}"
    if p.steps_left is not None and p.steps_left < window:
        bound = p.steps_left * p.batch_size
        if ahead >= bound:
            return 0, f"{ahead} trajectories are ahead of the learner, its last steps take {bound}"
    if ahead >= bound:
        return 0, f"{ahead} trajectories are ahead of the learner, at most {bound} keep max_staleness"
    credits = min(by_running, bound - ahead)
    if p.tempo is None:
        return credits, ""
    soon = startable(p.tempo, p.batch_size, p.ready, p.running)
    if soon == 0:
        return 0, f"{p.ready} trajectories are ready and {p.running} episodes run, enough for the learner's pace"
    return min(credits, soon), ""


ENGINE_REPLIES = 3
"""Replies to `queue_engines`."""


def oldest_step(step: int, max_staleness: int, publish_every: int) -> int:
    """Learner step of the oldest weights that an episode may start with while the learner is at `step`.

    `max_staleness - 1` steps back, so that there is a step left in which to play it; but always what the learner
    published last, or it would wait for data that nobody may make.
    """
    return step - max(max_staleness - 1, publish_every - 1)


def engine_statuses(admitted: Mapping[bytes, bytes], oldest: int | None) -> list[EngineStatus]:
    """The hash `Key.ADMITTED`; weights older than step `oldest` are late. Ones whose step nobody knows never are."""
    found = []
    for url, text in sorted(admitted.items()):
        info = json.loads(text)
        step = info.get("step")
        is_late = oldest is not None and step is not None and step < oldest
        found.append(
            EngineStatus(
                url=url.decode(), incarnation=info["incarnation"], policy_version=info["version"], is_late=is_late
            )
        )
    return found


def engine_obstacle(engines: Sequence[EngineStatus], asked: Sequence[str]) -> str:
    """Why no episode may start on the engines that an actor asks for; empty when it may on one, or asks for none."""
    found = [engine for engine in engines if engine.url in asked]
    if not asked or any(not engine.is_late for engine in found):
        return ""
    if not found:
        return f"not admitted: {', '.join(asked)}"
    newest = max(engine.policy_version for engine in found)
    return f"weights of version {newest} are late, and no engine of the actor has newer ones"


def queue_pacing(pipe: Any, keys: Keys) -> None:
    """Add the reads of `parse_pacing` to a pipeline."""
    pipe.hmget(keys[Key.LEARNER], "batch_size", "max_staleness", "step", "total_steps")
    pipe.hmget(keys[Key.STAT], "ready", "awaiting")
    pipe.hvals(keys[Key.UNTRAINED])
    pipe.zcard(keys[Key.TASK_LEASES])
    pipe.hlen(keys[Key.ADMITTED])
    pipe.hmget(keys[Key.SETTINGS], "max_staleness", "max_running")
    queue_tempo(pipe, keys)


def parse_pacing(replies: list[Any], max_running: int) -> Pacing:
    """The state behind the replies to `queue_pacing`; `max_running` is the recipe's."""
    (batch_size, max_staleness, step, total_steps), stored, untrained, running, engines, live, *tempo = replies
    ready, awaiting = (int(count or 0) for count in stored)
    return Pacing(
        max_running=int(live[1] or max_running),
        batch_size=None if batch_size is None else int(batch_size),
        max_staleness=int(live[0] or max_staleness or 0),
        ready=ready,
        awaiting=awaiting,
        untrained=sum(int(count) for count in untrained),
        running=running,
        engines=engines,
        steps_left=int(total_steps) - int(step) if int(total_steps or 0) else None,
        tempo=parse_tempo(tempo),
    )


def queue_engines(pipe: Any, keys: Keys) -> None:
    """Add the reads of `parse_engines` to a pipeline."""
    pipe.hmget(keys[Key.LEARNER], "step", "max_staleness", "publish_every")
    pipe.hget(keys[Key.SETTINGS], "max_staleness")
    pipe.hgetall(keys[Key.ADMITTED])


def parse_engines(replies: Sequence[Any]) -> list[EngineStatus]:
    """The engines that may take traffic, behind the replies to `queue_engines`."""
    (step, max_staleness, publish_every), live, admitted = replies
    if step is None or max_staleness is None:
        return engine_statuses(admitted, None)
    return engine_statuses(admitted, oldest_step(int(step), int(live or max_staleness), int(publish_every or 1)))
