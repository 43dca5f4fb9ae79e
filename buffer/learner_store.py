"""The learner's side of the buffer: claim and fetch batches, free them, name versions, know the engines.

Everything is in Redis, so a learner may be killed at any time and claim the same steps again. Every call waits out
an outage of Redis and raises `BufferUnavailableError` once `timeout_s` have passed.
"""

from __future__ import annotations

import functools
import json
import time
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple, TypeVar

import msgspec
import redis

from vagen.buffer.accounting import Accounting, BufferStatus, read_accounting, read_status
from vagen.buffer.connection import first_contact, make_client, patiently, run_script
from vagen.buffer.keys import Key, Keys, Shard
from vagen.buffer.manifest import Manifest, ManifestEntry
from vagen.buffer.selection.config import Order, SelectionConfig
from vagen.buffer.selection.selector import Decision, Selector
from vagen.buffer.selection.units import Proposal, Unit, read_candidate
from vagen.buffer.settings import SettingState, news, note_problem, read_settings
from vagen.common.errors import InfrastructureError

__all__ = ["EngineLease", "LearnerStore", "Manifest", "ManifestEntry", "Order"]

_FETCH_CHUNK = 16
_MAX_BLOCK_S = 1.0
_SEALED_POLL_S = 0.02

T = TypeVar("T")


class EngineLease(NamedTuple):
    """An engine that actors announce."""

    url: str
    kind: str
    incarnation: str
    lease_s: float
    """Seconds until the announcement ends, by this machine's clock."""
    version: int
    """Of the weights with which it was admitted to traffic; -1 while it is not."""


class LearnerStore:
    """One connection of one learner process; not for use by several threads at once."""

    def __init__(self, client: redis.Redis, keys: Keys, timeout_s: float) -> None:
        self._client = client
        self._keys = keys
        self._timeout_s = timeout_s
        self._settings: list[SettingState] = []

    @classmethod
    def connect(cls, redis_url: str, run_name: str, timeout_s: float = 60.0, shard: Shard = Shard()) -> LearnerStore:
        """Connect to the Redis of one shard of a run.

        Raises `ConfigError` for a bad URL or login, and `BufferUnavailableError` within seconds when nobody answers.
        """
        keys = Keys(run_name, shard)
        client = make_client(redis_url, socket_timeout_s=min(timeout_s, 30.0), keys=keys)
        first_contact(client, redis_url)
        return cls(client, keys, timeout_s)

    def close(self) -> None:
        """Drop the connection."""
        self._client.close()

    # -- pacing and versions ------------------------------------------------------------------------------------

    def register(
        self,
        incarnation: str,
        *,
        step: int,
        batch_size: int,
        max_staleness: int,
        publish_every: int = 1,
        total_steps: int = 0,
        required_capacity_bytes: int = 0,
        replay_max_bytes: int = 0,
        replay_max_staleness: int = 0,
        group_size: int = 0,
        selection: SelectionConfig = SelectionConfig(),
    ) -> None:
        """Say what the next step is and how far data may run ahead of it; admission grants nothing before.

        `total_steps` ends the granting with what the last step needs; 0 is a run without end. The buffer's capacity
        cannot be set live below `required_capacity_bytes`. Successes are kept for replay up to `replay_max_bytes`; 0
        keeps none and forgets those kept before. `group_size` is that of the actors, 0 where it is not known, and
        `selection` the recipe's; live values are checked against the one and shown beside the other.
        """
        pacing = (step, batch_size, max_staleness, publish_every, total_steps, required_capacity_bytes)
        told = [msgspec.json.encode(value).decode() for value in (selection.order, selection.filters)]
        self._script("register", incarnation, *pacing, replay_max_bytes, replay_max_staleness, group_size, *told)

    def next_version(self) -> int:
        """A policy version that nobody had before, from 1; versions never go back, some may stay unused."""
        return int(self._patiently("next_version", lambda: self._client.incr(self._keys[Key.VERSION])))

    def record_version(self, version: int, incarnation: str, step: int, checksum: str) -> None:
        """Map a version to the learner step of its weights; must precede the first token sampled with it."""
        info = json.dumps({"incarnation": incarnation, "step": step, "checksum": checksum})

        def call() -> None:
            pipe = self._client.pipeline(transaction=True)
            pipe.hset(self._keys[Key.VERSION_STEPS], str(version), step)
            pipe.hset(self._keys[Key.VERSION_INFO], str(version), info)
            pipe.execute()

        self._patiently("record_version", call)

    def version_steps(self, versions: Sequence[int]) -> dict[int, int]:
        """Learner steps of the versions that were recorded."""
        if not versions:
            return {}
        names = [str(version) for version in versions]
        steps: Any = self._patiently("version_steps", lambda: self._client.hmget(self._keys[Key.VERSION_STEPS], names))
        return {version: int(step) for version, step in zip(versions, steps, strict=True) if step is not None}

    # -- batches ------------------------------------------------------------------------------------------------

    def claim(self, step: int, num_trajectories: int, timeout_s: float, order: Order = "freshest") -> Manifest | None:
        """The sealed batch of a step without filters; see `Selector.claim`."""
        return Selector(self, SelectionConfig(order=order)).claim(step, num_trajectories, timeout_s)

    def propose(
        self, step: int, wanted: int, limit: int, order: str, seed: int, replayed: int
    ) -> Proposal | Manifest | None:
        """Candidates for a step in order, `limit` trajectories or a unit more; evicts what is too stale.

        Of the trajectories `wanted` up to `replayed` come from those kept for replay, drawn uniformly. Returns the
        manifest where the step is sealed, and None while too few are ready. `seed` is that of the order `uniform`.
        """
        reply = self._script("propose", step, wanted, limit, order, seed, replayed)
        if reply is None:
            return None
        if isinstance(reply, bytes):
            return msgspec.json.decode(reply, type=Manifest)
        num_units, total_weight, candidates, again = reply
        units = []
        for name, weight, described in zip(candidates[::3], candidates[1::3], candidates[2::3], strict=True):
            pairs = zip(described[::2], described[1::2], strict=True)
            members = tuple(read_candidate(trajectory_id, text, step) for trajectory_id, text in pairs)
            units.append(Unit(name=name.decode(), members=members, weight=float(weight)))
        kept = [read_candidate(name, text, step) for name, text in zip(again[::2], again[1::2], strict=True)]
        return Proposal(units, kept, num_units, float(total_weight))

    def decide(self, step: int, decision: Decision, manifest: Manifest | None) -> tuple[Manifest | None, list[str]]:
        """Seal the step's manifest, if given, and drop what was filtered, in one script.

        Returns the manifest of the step, which may be one that was sealed before, and the units that have changed since
        they were proposed; where there are any, nothing was done.
        """
        text = b"" if manifest is None else msgspec.json.encode(manifest)
        sealed, changed = self._script("seal", step, text, msgspec.json.encode(decision))
        return (msgspec.json.decode(sealed, type=Manifest) if sealed else None), [name.decode() for name in changed]

    def wait_ready(self, timeout_s: float) -> None:
        """Return when as many are ready as the last proposal lacked, or after `timeout_s`, a second at most."""
        block = min(timeout_s, _MAX_BLOCK_S)
        self._patiently("wait_ready", functools.partial(self._client.blpop, [self._keys[Key.WAKE]], block))

    def wait_sealed(self, step: int, timeout_s: float) -> Manifest | None:
        """The manifest that another rank seals, or None when it does not within `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        name = self._keys.of(Key.MANIFEST, step)
        while True:
            sealed: Any = self._patiently("wait_sealed", lambda: self._client.get(name))
            if sealed is not None:
                return msgspec.json.decode(sealed, type=Manifest)
            if time.monotonic() > deadline:
                return None
            time.sleep(_SEALED_POLL_S)

    def evict_stale(self, step: int) -> int:
        """Evict what is too stale for a step; returns how many trajectories are ready then."""
        proposal = self.propose(step, 0, 0, "freshest", 0, 0)
        return self.status().ready if isinstance(proposal, Proposal) else 0

    def read_plan(self, step: int) -> list[int] | None:
        """What each shard gives to a step, where that is decided."""
        name = self._keys[Key.PLANS]
        text: Any = self._patiently("read_plan", lambda: self._client.hget(name, str(step)))
        return None if text is None else msgspec.json.decode(text, type=list[int])

    def write_plan(self, step: int, shares: Sequence[int]) -> list[int]:
        """Decide what each shard gives to a step; returns the plan that counts, which is the first one written."""
        name, text = self._keys[Key.PLANS], msgspec.json.encode(shares)
        self._patiently("write_plan", lambda: self._client.hsetnx(name, str(step), text))
        return self.read_plan(step) or list(shares)

    def drop_plans(self, steps: Sequence[int]) -> None:
        """Forget the plans of steps that are done."""
        if steps:
            fields = [str(step) for step in steps]
            self._patiently("drop_plans", lambda: self._client.hdel(self._keys[Key.PLANS], *fields))

    def read(self, entries: Sequence[ManifestEntry]) -> list[bytes]:
        """Payloads of the entries of a claimed manifest, in order; as `fetch`."""
        return self.fetch([entry.trajectory_id for entry in entries])

    def fetch(self, ids: Sequence[str]) -> list[bytes]:
        """Payloads of claimed trajectories, replayed ones among them, in order, read in chunks.

        Raises `InfrastructureError` for one that is not stored (its step is done).
        """
        payloads: list[bytes] = []
        for start in range(0, len(ids), _FETCH_CHUNK):
            chunk = ids[start : start + _FETCH_CHUNK]
            found = self._payloads(Key.PAYLOAD, chunk)
            if missing := [index for index, payload in enumerate(found) if payload is None]:
                kept = self._payloads(Key.REPLAY_PAYLOAD, [chunk[index] for index in missing])
                found = [payload if payload is not None else kept.pop(0) for payload in found]
            for trajectory_id, payload in zip(chunk, found, strict=True):
                if payload is None:
                    raise InfrastructureError(f"trajectory {trajectory_id} has no payload: is its step done already?")
                payloads.append(payload)
        return payloads

    def _payloads(self, key: Key, ids: Sequence[str]) -> list[bytes | None]:
        names = [self._keys.of(key, trajectory_id) for trajectory_id in ids]
        found: Any = self._patiently("fetch", functools.partial(self._client.mget, names))
        return list(found)

    def mark_trained(self, step: int, step_s: float | None = None) -> None:
        """The optimizer has used the step's batch: for pacing only, `done` follows with the checkpoint.

        `step_s` is the learner's own time of a step in seconds, without what it waited for data.
        """

        def call() -> None:
            pipe = self._client.pipeline(transaction=True)
            pipe.hdel(self._keys[Key.UNTRAINED], str(step))
            pipe.hset(self._keys[Key.LEARNER], "step", step + 1)
            if step_s is not None:
                pipe.hset(self._keys[Key.PACE], "step_s", step_s)
            pipe.execute()

        self._patiently("mark_trained", call)

    def done(self, steps: Sequence[int], filtered: Collection[str] = ()) -> int:
        """A durable checkpoint holds these steps: free their payloads, or keep those of successes for replay, and count
        them as trained.

        `filtered` are ids that a filter kept out of the optimizer. Returns how many trajectories were freed; steps
        that are done already count nothing.
        """
        return sum(int(self._script("done", step, *filtered)) for step in steps)

    def rollback(self, step: int) -> list[int]:
        """The learner restarted from the checkpoint after `step`: later manifests will be trained again.

        They stay claimed and are claimed again identically. Returns their steps.
        """
        self._script("rollback", step)
        return [pending for pending in self.pending_manifests() if pending > step]

    def pending_manifests(self) -> list[int]:
        """Steps that are claimed and not done, in order."""
        steps: Any = self._patiently("pending_manifests", lambda: self._client.hkeys(self._keys[Key.CLAIMS]))
        return sorted(int(step) for step in steps)

    # -- engines ------------------------------------------------------------------------------------------------

    def engines(self) -> list[EngineLease]:
        """Engines that actors announce now, by url."""

        def call() -> Any:
            pipe = self._client.pipeline(transaction=True)
            pipe.hgetall(self._keys[Key.ENGINES])
            pipe.hgetall(self._keys[Key.ADMITTED])
            pipe.zrange(self._keys[Key.ENGINE_LEASES], 0, -1, withscores=True)
            return pipe.execute()

        announced, admitted, leases = self._patiently("engines", call)
        now = time.time()
        found = []
        for url, end in leases:
            info = json.loads(announced[url])
            version = int(json.loads(admitted[url])["version"]) if url in admitted else -1
            lease_s = max(0.0, float(end) - now)
            found.append(EngineLease(url.decode(), info["kind"], info["incarnation"], lease_s, version))
        return sorted(found)

    def admit_engine(self, url: str, incarnation: str, version: int) -> bool:
        """Let an engine take traffic: its weights' checksum matched at `version`.

        False when it is not announced under this incarnation any more.
        """
        return bool(self._script("admit", url, incarnation, version))

    def withdraw_engine(self, url: str, incarnation: str) -> bool:
        """Take an engine out of traffic; false when this incarnation was not admitted."""
        return bool(self._script("withdraw", url, incarnation))

    # -- state --------------------------------------------------------------------------------------------------

    def accounting(self) -> Accounting:
        """All terms of the accounting identity."""
        return self._patiently("accounting", lambda: read_accounting(self._client, self._keys))

    def status(self) -> BufferStatus:
        """What the buffer holds now."""
        return self._patiently("status", lambda: read_status(self._client, self._keys))

    def balance(self) -> None:
        """Nothing to do with one shard; see `ShardedStore.balance`."""

    def statuses(self) -> list[BufferStatus]:
        """`status` of each shard, here of one."""
        return [self.status()]

    def settings(self) -> list[SettingState]:
        """The live settings as they are in force now."""
        return self._patiently("settings", lambda: read_settings(self._client, self._keys))

    def changed_settings(self) -> dict[str, dict[str, Any]]:
        """Value and source of each live setting that has changed since the last call; at first of the live values."""
        before, self._settings = self._settings, self.settings()
        return news(before, self._settings)

    def note_problem(self, name: str, value: object, problem: str | None) -> None:
        """Tell those who look at the settings why a live value is not applied; None: what is set is applied."""
        self._patiently("note_problem", lambda: note_problem(self._client, self._keys, name, value, problem))

    def _script(self, name: str, *args: object) -> Any:
        return self._patiently(name, lambda: run_script(self._client, self._keys, name, *args))

    def _patiently(self, what: str, call: Callable[[], T]) -> T:
        return patiently(call, self._timeout_s, f"LearnerStore.{what}")
