"""Everything of one shard that a person looks at, read from Redis in a few round trips."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

import msgspec
import redis
from msgspec import structs

from vagen.buffer import admission
from vagen.buffer.accounting import (
    Accounting,
    BufferStatus,
    ReadyStaleness,
    add_accountings,
    add_statuses,
    read_accounting,
    read_ready_staleness,
    read_status,
)
from vagen.buffer.keys import Key, Keys
from vagen.buffer.settings import SettingState, combine_settings, read_settings


class EngineView(msgspec.Struct, frozen=True, kw_only=True):
    """An engine that actors announce."""

    url: str
    kind: str
    lease_s: float
    """Seconds until the announcement ends, by this machine's clock."""
    policy_version: int | None
    """Of its weights; None while it takes no traffic."""
    is_late: bool = False
    """Its weights are so old that no new episode may be played on it."""


class Overview(msgspec.Struct, frozen=True, kw_only=True):
    """A shard at one moment; its parts are read one after the other, each a snapshot of its own."""

    at: float
    """Unix time in seconds."""
    accounting: Accounting
    status: BufferStatus
    staleness: ReadyStaleness
    settings: list[SettingState]
    engines: list[EngineView]
    stored: int
    """Trajectories stored since the run began."""


_RATES = ("stored", "trained", "filtered", "stale", "refused", "evicted")


def read_overview(client: redis.Redis, keys: Keys) -> Overview:
    """May raise one of `connection.TRANSIENT`."""
    return Overview(
        at=time.time(),
        accounting=read_accounting(client, keys),
        status=read_status(client, keys),
        staleness=read_ready_staleness(client, keys),
        settings=read_settings(client, keys),
        engines=_read_engines(client, keys),
        stored=int(client.hget(keys[Key.STAT], "stored") or 0),  # type: ignore[arg-type]
    )


def add_overviews(parts: Sequence[Overview]) -> Overview:
    """Several shards as one: sums, the settings marked where they differ, and each engine once with its longest lease.

    Of an engine that several shards announce the lowest version counts; it takes no traffic, or is late, where one says
    so.
    """
    units: Counter[int] = Counter()
    engines: dict[str, EngineView] = {}
    for part in parts:
        units.update(part.staleness.units)
        for engine in part.engines:
            known = engines.setdefault(engine.url, engine)
            versions = (known.policy_version, engine.policy_version)
            lowest = None if None in versions else min(v for v in versions if v is not None)
            longest = max(known.lease_s, engine.lease_s)
            late = known.is_late or engine.is_late
            engines[engine.url] = structs.replace(known, lease_s=longest, policy_version=lowest, is_late=late)
    return Overview(
        at=parts[-1].at,
        accounting=add_accountings([part.accounting for part in parts]),
        status=add_statuses([part.status for part in parts]),
        staleness=ReadyStaleness(units=dict(sorted(units.items()))),
        settings=combine_settings([part.settings for part in parts]),
        engines=[engines[url] for url in sorted(engines)],
        stored=sum(part.stored for part in parts),
    )


def rates(before: Overview | None, now: Overview) -> dict[str, float]:
    """Trajectories a second by what became of them, between two looks; empty without an earlier one."""
    if before is None or now.at <= before.at:
        return {}
    first, last = _counts(before), _counts(now)
    return {name: (last[name] - first[name]) / (now.at - before.at) for name in _RATES}


def _counts(overview: Overview) -> dict[str, int]:
    return {name: overview.stored if name == "stored" else getattr(overview.accounting, name) for name in _RATES}


def _read_engines(client: redis.Redis, keys: Keys) -> list[EngineView]:
    pipe: Any = client.pipeline(transaction=True)
    pipe.hgetall(keys[Key.ENGINES])
    pipe.zrange(keys[Key.ENGINE_LEASES], 0, -1, withscores=True)
    admission.queue_engines(pipe, keys)
    announced, leases, *replies = pipe.execute()
    admitted = {engine.url: engine for engine in admission.parse_engines(replies)}
    now = time.time()
    return [
        EngineView(
            url=url.decode(),
            kind=json.loads(announced[url])["kind"],
            lease_s=max(0.0, float(end) - now),
            policy_version=admitted[url.decode()].policy_version if url.decode() in admitted else None,
            is_late=url.decode() in admitted and admitted[url.decode()].is_late,
        )
        for url, end in sorted((url, end) for url, end in leases)
        if url in announced
    ]
