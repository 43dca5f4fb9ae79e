"""How many episodes may start: the pacing rule, pure, and the state it is applied to, read from Redis.

    credits = min(C_max - running, min(max_staleness + 1, steps left) * B - (ready + claimed_not_trained + running))

Everything the rule looks at is in Redis, so that a restart of the ingest or of Redis neither forgets a running
episode nor grants a second time. One ingest serves a run, so nobody grants between the reading and the granting.
"""

from __future__ import annotations

from typing import Any

import msgspec

from vagen.buffer.keys import Key, Keys


class Pacing(msgspec.Struct, frozen=True, kw_only=True):
    """What the rule depends on; counts of trajectories and of running episodes."""

    max_running: int
    """C_max."""
    batch_size: int | None
    """B, the trajectories of a learner step; none while no learner has registered."""
    max_staleness: int
    """In learner steps."""
    ready: int
    """Stored and not claimed, those that await their group among them."""
    untrained: int
    """Claimed, and not used by an optimizer step yet."""
    running: int
    """Leases."""
    engines: int
    """Engines that may take traffic."""
    steps_left: int | None = None
    """Learner steps until the run's last; none for a run without end."""


def start_credits(pacing: Pacing) -> tuple[int, str]:
    """Episodes that may start now, and the reason when there are none."""
    p = pacing
    if p.batch_size is None:
        return 0, "no learner has registered"
    if p.engines == 0:
        return 0, "no engine is admitted"
    by_running = p.max_running - p.running
    window = p.max_staleness + 1
    ahead, bound = p.ready + p.untrained + p.running, window * p.batch_size
    if by_running <= 0:
        return 0, f"{p.running} episodes run of at most {p.max_running}"
    if p.steps_left is not None and p.steps_left < window:
        bound = p.steps_left * p.batch_size
        if ahead >= bound:
            return 0, f"{ahead} trajectories are ahead of the learner, its last steps take {bound}"
    if ahead >= bound:
        return 0, f"{ahead} trajectories are ahead of the learner, at most {bound} keep max_staleness"
    return min(by_running, bound - ahead), ""


def queue_pacing(pipe: Any, keys: Keys) -> None:
    """Add the reads of `parse_pacing` to a pipeline."""
    pipe.hmget(keys[Key.LEARNER], "batch_size", "max_staleness", "step", "total_steps")
    pipe.hmget(keys[Key.STAT], "ready", "awaiting")
    pipe.hvals(keys[Key.UNTRAINED])
    pipe.zcard(keys[Key.TASK_LEASES])
    pipe.hlen(keys[Key.ADMITTED])
    pipe.hmget(keys[Key.SETTINGS], "max_staleness", "max_running")


def parse_pacing(replies: list[Any], max_running: int) -> Pacing:
    """The state behind the replies to `queue_pacing`; `max_running` is the recipe's."""
    (batch_size, max_staleness, step, total_steps), ready, untrained, running, engines, live = replies
    return Pacing(
        max_running=int(live[1] or max_running),
        batch_size=None if batch_size is None else int(batch_size),
        max_staleness=int(live[0] or max_staleness or 0),
        ready=sum(int(count or 0) for count in ready),
        untrained=sum(int(count) for count in untrained),
        running=running,
        engines=engines,
        steps_left=int(total_steps) - int(step) if int(total_steps or 0) else None,
    )
