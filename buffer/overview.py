"""Everything of one shard that a person looks at, read from Redis in a few round trips."""

from __future__ import annotations

import json
import time
from typing import Any

import msgspec
import redis

from vagen.buffer.accounting import (
    Accounting,
    BufferStatus,
    ReadyStaleness,
    read_accounting,
    read_ready_staleness,
    read_status,
)
from vagen.buffer.keys import Key, Keys
from vagen.buffer.settings import SettingState, read_settings


class EngineView(msgspec.Struct, frozen=True, kw_only=True):
    """An engine that actors announce."""

    url: str
    kind: str
    lease_s: float
    """Seconds until the announcement ends, by this machine's clock."""
    policy_version: int | None
    """Of its weights; None while it takes no traffic."""


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
    pipe.hgetall(keys[Key.ADMITTED])
    pipe.zrange(keys[Key.ENGINE_LEASES], 0, -1, withscores=True)
    announced, admitted, leases = pipe.execute()
    now = time.time()
    return [
        EngineView(
            url=url.decode(),
            kind=json.loads(announced[url])["kind"],
            lease_s=max(0.0, float(end) - now),
            policy_version=json.loads(admitted[url])["version"] if url in admitted else None,
        )
        for url, end in sorted((url, end) for url, end in leases)
        if url in announced
    ]
