"""Another number of shards for a run that stands still: what has been decided moves, what is pending must not be there.

Owns the layout, a key outside all shards that says how many there are, so that no process serves or reads the parts of
another layout. What moves: counters of the accounting identity, actors, versions, the learner's place and the live
settings. Sequences of tasks go on behind the last group that was played.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import redis

from vagen.buffer.accounting import Accounting, add_accountings, read_accounting, read_status
from vagen.buffer.connection import first_contact, make_client
from vagen.buffer.keys import Key, Keys, Shard
from vagen.buffer.sharding import split_urls
from vagen.common.errors import ConfigError

__all__ = ["check_layout", "reshard"]

_FATES = ("trained", "filtered", "stale", "refused", "evicted", "replayed", "duplicates", "malformed")
_APART = ("failed_episodes", "tasks_abandoned", "episodes_abandoned")
_COPIED = (Key.LEARNER, Key.VERSION_STEPS, Key.VERSION_INFO, Key.SETTINGS, Key.SETTINGS_INFO)
"""Hashes that every shard has alike."""


class _Part(NamedTuple):
    client: redis.Redis
    keys: Keys


def check_layout(redis_url: str, run_name: str, num_shards: int) -> None:
    """Note the number of shards of a run that has none noted.

    Raises `ConfigError` when the run has another.
    """
    if (found := _note_layout(redis_url, run_name, num_shards)) != num_shards:
        raise ConfigError(
            f"$.buffer.shards: expected {found}, the shards that run {run_name!r} has in this Redis, got {num_shards}; "
            f"drain it, then `vagen buffer reshard --run {run_name} --from {found} --to {num_shards}`"
        )


def reshard(redis_url: str, run_name: str, old: int, new: int, group_size: int, *, evict: bool = False) -> Accounting:
    """Give a run `new` shards instead of `old`; returns its accounting, which stays what it was.

    `redis_url` as `split_urls` takes it, for the larger of both numbers. Actors, ingests and learner must have stopped
    in order. `evict` counts what is pending as evicted. May be repeated after a kill: the old shards go last. Raises
    `ConfigError` for what stands against it, and changes nothing then.
    """
    if old == new:
        raise ConfigError(f"--to: expected another number of shards than --from, got {new}")
    urls = split_urls(redis_url, max(old, new))
    before, after = _connect(urls, run_name, old), _connect(urls, run_name, new)
    if _note_layout(urls[0], run_name, old) != new:
        check_layout(urls[0], run_name, old)
        _move(before, after, group_size, evict)
        layout = Keys(run_name)
        make_client(urls[0], keys=layout).set(layout[Key.LAYOUT], new)
    for part in before:
        _clear(part)
    return add_accountings([read_accounting(*part) for part in after])


def _note_layout(redis_url: str, run_name: str, num_shards: int) -> int:
    """The number of shards that is noted, `num_shards` where none was."""
    keys = Keys(run_name)
    client = make_client(redis_url, keys=keys)
    try:
        client.set(keys[Key.LAYOUT], num_shards, nx=True)
        return int(client.get(keys[Key.LAYOUT]) or 0)
    finally:
        client.close()


def _move(before: Sequence[_Part], after: Sequence[_Part], group_size: int, evict: bool) -> None:
    accounting = add_accountings([read_accounting(*part) for part in before])
    _check_rest(before, accounting, evict)
    counts = {name: getattr(accounting, name) for name in (*_FATES, *_APART)}
    counts["evicted"] += accounting.pending
    counts["stored"] = sum(int(part.client.hget(part.keys[Key.STAT], "stored") or 0) for part in before)
    next_group = max(-(-_next_task(part) // group_size) for part in before) * len(before)
    for index, part in enumerate(after):
        _write(part, before, next_task=-(-(next_group - index) // len(after)) * group_size)
    _write_home(after[0], before, counts, accounting)


def _connect(urls: Sequence[str], run_name: str, num_shards: int) -> list[_Part]:
    parts = []
    for index in range(num_shards):
        keys = Keys(run_name, Shard(index, num_shards))
        parts.append(_Part(make_client(urls[index], keys=keys), keys))
        first_contact(parts[-1].client, urls[index])
    return parts


def _check_rest(parts: Sequence[_Part], accounting: Accounting, evict: bool) -> None:
    statuses = [read_status(*part) for part in parts]
    if running := sum(status.running for status in statuses):
        raise ConfigError(f"{running} episodes run; stop the actors with SIGTERM and let their leases end")
    if accounting.in_flight:
        raise ConfigError(f"{accounting.in_flight} trajectories are unacked; start their actors until they are stored")
    if undone := sum(status.claimed - status.untrained for status in statuses):
        raise ConfigError(f"{undone} trajectories are trained and in no checkpoint; stop the learner with SIGTERM")
    if accounting.pending and not evict:
        raise ConfigError(
            f"{accounting.pending} trajectories are pending; let the learner train them, or save them with `vagen "
            "buffer save` and pass --evict"
        )


def _next_task(part: _Part) -> int:
    return int(part.client.get(part.keys[Key.TASK_NEXT]) or 0)


def _write(part: _Part, before: Sequence[_Part], next_task: int) -> None:
    home = before[0]
    pipe: Any = part.client.pipeline(transaction=True)
    for key in _COPIED:
        pipe.unlink(part.keys[key])
        if content := home.client.hgetall(home.keys[key]):
            pipe.hset(part.keys[key], mapping=content)
    pipe.unlink(part.keys[Key.SETTINGS_LOG])
    if log := home.client.lrange(home.keys[Key.SETTINGS_LOG], 0, -1):
        pipe.rpush(part.keys[Key.SETTINGS_LOG], *log)
    pipe.set(part.keys[Key.TASK_NEXT], next_task)
    pipe.execute()


def _write_home(part: _Part, before: Sequence[_Part], counts: dict[str, int], accounting: Accounting) -> None:
    actors: dict[bytes, bytes] = {}
    for account in accounting.actors:
        name = account.actor_id.encode()
        beats = [beat for old in before if (beat := old.client.hget(old.keys[Key.ACTORS], name))]
        latest = max(map(json.loads, beats), key=lambda beat: float(beat["at"]))
        actors[name] = json.dumps(latest | {"journalled": account.journalled}).encode()
    fields: Counter[str] = Counter(accounting.refused_by_field)
    reasons: Counter[str] = Counter(accounting.filtered_by_reason)
    pipe: Any = part.client.pipeline(transaction=True)
    for key, content in (
        (Key.STAT, counts),
        (Key.ACTORS, actors),
        (Key.REFUSED_FIELDS, fields),
        (Key.FILTERED_REASONS, reasons),
    ):
        pipe.unlink(part.keys[key])
        if content:
            pipe.hset(part.keys[key], mapping=content)
    version = max(int(old.client.get(old.keys[Key.VERSION]) or 0) for old in before)
    pipe.set(part.keys[Key.VERSION], version)
    pipe.execute()


def _clear(part: _Part) -> None:
    """Free all keys of a shard. They are named one by one: to scan for them is to see those of other runs."""
    client, keys = part
    for key, owners in (
        (Key.PAYLOAD, client.hkeys(keys[Key.LIVE])),
        (Key.REPLAY_PAYLOAD, client.hkeys(keys[Key.REPLAY_LIVE])),
        (Key.MANIFEST, client.hkeys(keys[Key.CLAIMS])),
        (Key.SEQ_ABOVE, client.hkeys(keys[Key.ACTORS])),
        (Key.GROUP, _groups(part)),
    ):
        for owner in owners:
            client.unlink(keys.of(key, owner.decode()))
    client.unlink(*(keys[key] for key in Key if not key.value.endswith(":") and key is not Key.LAYOUT))


def _groups(part: _Part) -> list[bytes]:
    client, keys = part
    ready = [unit[2:] for unit in client.zrange(keys[Key.READY], 0, -1) if unit.startswith(b"g:")]
    return [*ready, *client.zrange(keys[Key.WAITING], 0, -1)]
