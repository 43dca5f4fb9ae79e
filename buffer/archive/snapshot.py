"""What a live buffer holds at this moment, as archive records: ready, awaiting their group, claimed. Reads only."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import redis

from vagen.buffer.archive.record import ArchivedTrajectory
from vagen.buffer.keys import Key, Keys
from vagen.buffer.manifest import Manifest, ManifestEntry
from vagen.common.wire import decode_trajectory

__all__ = ["LiveBuffer", "read_live"]

_CHUNK = 16


class _Claim(NamedTuple):
    step: int
    position: int
    entry: ManifestEntry


class LiveBuffer:
    """One shard of a run's buffer, as of the moment at which this is made."""

    def __init__(self, client: redis.Redis, keys: Keys, earlier: Mapping[int, int] | None = None) -> None:
        """`earlier` says how many trajectories the shards before this one give to each claimed step.

        Raises one of `connection.TRANSIENT` when Redis is away.
        """
        self._client = client
        self._keys = keys
        self._earlier = earlier or {}
        self.num_gone = 0
        """Trajectories that were evicted or done before they could be read."""
        pipe: Any = client.pipeline(transaction=True)
        pipe.hgetall(keys[Key.LIVE])
        pipe.hkeys(keys[Key.CLAIMS])
        pipe.hgetall(keys[Key.VERSION_STEPS])
        live, steps, versions = pipe.execute()
        self._oldest_steps = {name.decode(): int(text.split(b":", 1)[0]) for name, text in live.items()}
        self._version_steps = {int(version): int(step) for version, step in versions.items()}
        self._claims = self._read_claims(sorted(int(step) for step in steps))

    @property
    def claimed(self) -> Counter[int]:
        """Trajectories of each claimed step."""
        return Counter(claim.step for claim in self._claims.values())

    def __len__(self) -> int:
        return len(self._oldest_steps)

    def records(self) -> Iterator[ArchivedTrajectory]:
        """Claimed ones first, by step and in manifest order, then the others by age."""
        order = sorted(self._oldest_steps, key=lambda name: (name not in self._claims, *self._place(name)))
        for start in range(0, len(order), _CHUNK):
            chunk = order[start : start + _CHUNK]
            payloads: Any = self._client.mget([self._keys.of(Key.PAYLOAD, name) for name in chunk])
            for name, payload in zip(chunk, payloads, strict=True):
                if payload is None:
                    self.num_gone += 1
                else:
                    yield self._record(name, payload)

    def _place(self, name: str) -> tuple[int, int]:
        claim = self._claims.get(name)
        return (self._oldest_steps[name], 0) if claim is None else (claim.step, claim.position)

    def _record(self, name: str, payload: bytes) -> ArchivedTrajectory:
        trajectory = decode_trajectory(payload)
        known = self._version_steps
        record = ArchivedTrajectory(
            trajectory=trajectory,
            oldest_step=self._oldest_steps[name],
            version_steps={version: known[version] for version in trajectory.versions if version in known},
        )
        claim = self._claims.get(name)
        if claim is None:
            return record
        return msgspec.structs.replace(
            record,
            step=claim.step,
            position=claim.position,
            staleness=claim.entry.staleness,
            weight=claim.entry.weight,
        )

    def _read_claims(self, steps: list[int]) -> dict[str, _Claim]:
        claims: dict[str, _Claim] = {}
        for step in steps:
            sealed: Any = self._client.get(self._keys.of(Key.MANIFEST, step))
            if sealed is None:
                continue
            for position, entry in enumerate(msgspec.json.decode(sealed, type=Manifest).entries):
                claims[entry.trajectory_id] = _Claim(step, self._earlier.get(step, 0) + position, entry)
        return claims


def read_live(shards: Sequence[tuple[redis.Redis, Keys]]) -> list[LiveBuffer]:
    """All shards of a run, in order; the positions in a claimed step count over them, as in its global batch."""
    earlier: Counter[int] = Counter()
    found = []
    for client, keys in shards:
        found.append(LiveBuffer(client, keys, dict(earlier)))
        earlier.update(found[-1].claimed)
    return found
