"""The accounting identity and the live state of a run, read from Redis in one snapshot.

    produced = trained + filtered + stale + refused + evicted + pending + in_flight

`produced` and `in_flight` are what the actors say in their heartbeats; every other term is decided in Redis, once
per trajectory id. The two sides are of different ages while actors run, and equal when they have drained.
"""

from __future__ import annotations

import json
import math
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

import msgspec
import redis
from msgspec import structs

from vagen.buffer import admission
from vagen.buffer.connection import first_contact, make_client
from vagen.buffer.keys import Key, Keys, Shard
from vagen.buffer.sharding import split_urls

REASONS = ("trained", "filtered", "stale", "refused", "evicted", "ready", "awaiting_group", "claimed", "in_flight")
"""Terms of the right-hand side; the three before the last are together `pending`."""


class ActorAccount(msgspec.Struct, frozen=True, kw_only=True):
    """One actor's side of the accounting, as of its last heartbeat."""

    actor_id: str
    journalled: int
    in_flight: int
    age_s: float
    """Seconds since that heartbeat."""
    closing: bool
    """The actor said goodbye; nothing changes until it starts again."""


class Accounting(msgspec.Struct, frozen=True, kw_only=True):
    """All terms of the identity, in trajectories, and what is counted apart from it."""

    produced: int
    trained: int
    filtered: int
    stale: int
    refused: int
    evicted: int
    ready: int
    awaiting_group: int
    claimed: int
    in_flight: int
    actors: tuple[ActorAccount, ...]
    refused_by_field: dict[str, int]
    filtered_by_reason: dict[str, int]
    """By the filter that dropped them, `partial_group`, or `learner`."""
    replayed: int
    """Times that a trained trajectory was trained on again."""
    duplicates: int
    """Resends of decided trajectories."""
    malformed: int
    """Messages that could not be attributed to a trajectory."""
    failed_episodes: int
    """Ended as infrastructure failures, reported by the actor."""
    tasks_abandoned: int
    """Given up after `buffer.max_attempts`."""
    episodes_abandoned: int
    """Cut episodes whose rest never came."""

    @property
    def pending(self) -> int:
        """Stored and not decided yet."""
        return self.ready + self.awaiting_group + self.claimed

    @property
    def accounted(self) -> int:
        """The right-hand side of the identity."""
        return sum(getattr(self, reason) for reason in REASONS)

    @property
    def identity_holds(self) -> bool:
        """Whether both sides are equal."""
        return self.produced == self.accounted

    @property
    def actors_age_s(self) -> float:
        """Age of the oldest heartbeat of an actor that has not said goodbye; 0 without one."""
        return max((actor.age_s for actor in self.actors if not actor.closing), default=0.0)


class BufferStatus(msgspec.Struct, frozen=True, kw_only=True):
    """Live state, for screens and for the learner's decisions."""

    ready: int
    awaiting_group: int
    claimed: int
    untrained: int
    """Those of `claimed` that no optimizer step has used."""
    running: int
    """Task leases."""
    num_bytes: int
    claimed_bytes: int
    room_bytes: int
    """Promised to incomplete groups."""
    replay_bytes: int
    """Kept for replay, apart from the others."""
    capacity_bytes: int
    """In force now; 0 while no ingest has served this run."""
    is_full: bool
    """The ingest holds back what does not fit."""
    priority_function: str | None
    """Name of what the ingest ranks trajectories by; none without priorities."""
    learner_step: int
    """-1 until a learner has registered."""
    policy_version: int
    """Newest version that an engine serves; -1 until one does."""
    engines: int
    """Admitted to take traffic."""
    actors: int
    tasks_granted: int


def read_accounting(client: redis.Redis, keys: Keys) -> Accounting:
    """A snapshot of the identity."""
    pipe: Any = client.pipeline(transaction=True)
    pipe.hgetall(keys[Key.STAT])
    pipe.hgetall(keys[Key.ACTORS])
    pipe.hgetall(keys[Key.REFUSED_FIELDS])
    pipe.hgetall(keys[Key.FILTERED_REASONS])
    stat, heartbeats, fields, reasons = pipe.execute()
    now = time.time()
    actors = tuple(
        ActorAccount(
            actor_id=actor_id.decode(),
            journalled=beat["journalled"],
            in_flight=beat["in_flight"],
            age_s=max(0.0, now - beat["at"]),
            closing=beat["closing"],
        )
        for actor_id, beat in sorted((name, json.loads(text)) for name, text in heartbeats.items())
    )
    terms = ("trained", "filtered", "stale", "refused", "evicted", "ready", "claimed", "duplicates", "malformed")
    apart = ("failed_episodes", "tasks_abandoned", "episodes_abandoned", "replayed")
    counts = {name: int(stat.get(name.encode(), 0)) for name in (*terms, *apart)}
    return Accounting(
        produced=sum(actor.journalled for actor in actors),
        in_flight=sum(actor.in_flight for actor in actors),
        awaiting_group=int(stat.get(b"awaiting", 0)),
        actors=actors,
        refused_by_field={field.decode(): int(count) for field, count in sorted(fields.items())},
        filtered_by_reason={reason.decode(): int(count) for reason, count in sorted(reasons.items())},
        **counts,
    )


def read_status(client: redis.Redis, keys: Keys) -> BufferStatus:
    """A snapshot of the live state."""
    pipe: Any = client.pipeline(transaction=True)
    pipe.hgetall(keys[Key.STAT])
    pipe.hmget(keys[Key.LEARNER], "step", "published")
    pipe.hmget(keys[Key.CONFIG], "capacity_bytes", "priority_function")
    pipe.hget(keys[Key.SETTINGS], "capacity_bytes")
    pipe.hlen(keys[Key.ACTORS])
    pipe.get(keys[Key.TASK_NEXT])
    admission.queue_pacing(pipe, keys)
    stat, (step, published), (capacity, priority), live_capacity, actors, tasks, *replies = pipe.execute()
    pacing = admission.parse_pacing(replies, max_running=0)
    names = {"ready": b"ready", "awaiting_group": b"awaiting", "claimed": b"claimed", "num_bytes": b"bytes"}
    names |= {"claimed_bytes": b"claimed_bytes", "room_bytes": b"room", "replay_bytes": b"replay_bytes"}
    return BufferStatus(
        untrained=pacing.untrained,
        running=pacing.running,
        capacity_bytes=int(live_capacity or capacity or 0),
        priority_function=json.loads(priority or b"null"),
        learner_step=-1 if step is None else int(step),
        is_full=bool(int(stat.get(b"full", 0))),
        policy_version=-1 if published is None else int(published),
        engines=pacing.engines,
        actors=actors,
        tasks_granted=int(tasks or 0),
        **{name: int(stat.get(field, 0)) for name, field in names.items()},
    )


class ReadyStaleness(msgspec.Struct, frozen=True, kw_only=True):
    """How old what is ready would be for the step that the learner claims next."""

    units: dict[int, int]
    """Staleness in learner steps -> ready units (single trajectories and groups, by their oldest token); those beyond
    the largest step of the table are counted under it."""

    def statistics(self) -> dict[str, float]:
        """Mean and max; NaN while nothing is ready."""
        total = sum(self.units.values())
        mean = sum(staleness * count for staleness, count in self.units.items()) / total if total else math.nan
        return {"mean": mean, "max": max(self.units, default=math.nan)}


_STALENESS_BINS = 64


def read_ready_staleness(client: redis.Redis, keys: Keys) -> ReadyStaleness:
    """A histogram that costs the server a few microseconds, however much is ready."""
    pipe: Any = client.pipeline(transaction=True)
    pipe.hget(keys[Key.LEARNER], "step")
    pipe.zrange(keys[Key.READY], 0, 0, withscores=True)
    step, oldest = pipe.execute()
    if step is None or not oldest:
        return ReadyStaleness(units={})
    now = int(step)
    bins = min(_STALENESS_BINS, max(0, now - int(oldest[0][1])) + 1)
    pipe = client.pipeline(transaction=True)
    for staleness in range(bins):
        newest = "+inf" if staleness == 0 else now - staleness
        pipe.zcount(keys[Key.READY], "-inf" if staleness == bins - 1 else now - staleness, newest)
    return ReadyStaleness(units={age: count for age, count in enumerate(pipe.execute()) if count})


def add_accountings(parts: Sequence[Accounting]) -> Accounting:
    """The accounting of several shards together.

    An actor that changed its shard is known to both: it has journalled what the larger number says, and its last
    heartbeat says what is in flight.
    """
    latest: dict[str, ActorAccount] = {}
    for actor in (actor for part in parts for actor in part.actors):
        known = latest.setdefault(actor.actor_id, actor)
        newer = min(known, actor, key=lambda account: account.age_s)
        latest[actor.actor_id] = structs.replace(newer, journalled=max(known.journalled, actor.journalled))
    actors = tuple(latest[name] for name in sorted(latest))
    counts: dict[str, Any] = {}
    for field in structs.fields(Accounting):
        values = [getattr(part, field.name) for part in parts]
        if field.type is int:
            counts[field.name] = sum(values)
        elif field.name != "actors":
            counts[field.name] = dict(sorted(sum(map(Counter, values), Counter()).items()))
    counts["produced"] = sum(actor.journalled for actor in actors)
    counts["in_flight"] = sum(actor.in_flight for actor in actors)
    return Accounting(actors=actors, **counts)


def add_statuses(parts: Sequence[BufferStatus]) -> BufferStatus:
    """The live state of several shards together: sums, and the step and version that all of them know."""
    first, sums = parts[0], {}
    for field in structs.fields(BufferStatus):
        values = [getattr(part, field.name) for part in parts]
        if field.name in ("learner_step", "policy_version"):
            sums[field.name] = min(values)
        elif field.type is bool:
            sums[field.name] = all(values)
        else:
            sums[field.name] = sum(values) if field.type is int else getattr(first, field.name)
    return BufferStatus(**sums)


def audit(redis_url: str, run_name: str, num_shards: int = 1) -> Accounting:
    """The accounting of a run by its Redis URL; of several shards as `split_urls` takes it.

    Raises `BufferUnavailableError` within seconds when nobody answers there.
    """
    parts = []
    for index, url in enumerate(split_urls(redis_url, num_shards)):
        keys = Keys(run_name, Shard(index, num_shards))
        client = make_client(url, keys=keys)
        try:
            first_contact(client, url)
            parts.append(read_accounting(client, keys))
        finally:
            client.close()
    return add_accountings(parts)


def format_accounting(accounting: Accounting) -> str:
    """A table for people: both sides, by reason and by actor, and how old they are."""
    a = accounting
    lines = [
        f"produced          {a.produced:>10}  journalled by {len(a.actors)} actors, up to {a.actors_age_s:.1f} s ago"
    ]
    lines += [f"  {reason:<16}{getattr(a, reason):>10}" for reason in REASONS]
    lines.append(f"accounted         {a.accounted:>10}  in Redis now, in_flight as the actors said")
    lines.append(f"the identity {'holds' if a.identity_holds else 'DOES NOT HOLD: ' + str(a.produced - a.accounted)}")
    lines += [f"refused, {field}: {count}" for field, count in a.refused_by_field.items()]
    lines += [f"filtered, {reason}: {count}" for reason, count in a.filtered_by_reason.items()]
    for actor in a.actors:
        state = "closed" if actor.closing else f"{actor.age_s:.1f} s ago"
        lines.append(f"actor {actor.actor_id}: journalled {actor.journalled}, in flight {actor.in_flight}, {state}")
    apart = ("replayed", "duplicates", "malformed", "failed_episodes", "tasks_abandoned", "episodes_abandoned")
    lines.append("apart: " + ", ".join(f"{name} {getattr(a, name)}" for name in apart))
    return "\n".join(lines)
