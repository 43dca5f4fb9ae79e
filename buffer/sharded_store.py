"""The learner's side of a buffer of several shards, in the terms of one: a global batch made of a part of each.

      plan    how many trajectories each shard gives to a step, by what is ready there; the first plan written counts
      claim   every shard seals its part, each in one script; the parts in shard order are the batch
      done    every shard frees its part, then the plan goes

A crash between two of these leaves a plan and some sealed parts: the next claim of the step reads the same plan, gets
the sealed parts as they are, and seals the others. The plan and the counter of versions live in the first shard, all
else in every one, so that an ingest decides on a trajectory without looking elsewhere.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from typing import Any, TypeAlias

from msgspec import structs

from vagen.buffer.accounting import Accounting, BufferStatus, add_accountings, add_statuses
from vagen.buffer.keys import Shard
from vagen.buffer.learner_store import EngineLease, LearnerStore
from vagen.buffer.manifest import Manifest, ManifestEntry
from vagen.buffer.selection.config import SelectionConfig
from vagen.buffer.selection.live import LiveSelector
from vagen.buffer.selection.selector import Selector
from vagen.buffer.settings import SettingState, combine_settings, news
from vagen.buffer.sharding import divide, divide_ready, split_urls

__all__ = ["ShardedSelector", "ShardedStore", "Store", "connect_store", "make_selector"]

Store: TypeAlias = "LearnerStore | ShardedStore"
"""A buffer as the learner sees it, whatever its number of shards."""

_POLL_S = 0.05
_REBALANCE_S = 2.0
_LIVE_S = 15.0
"""An actor that has been silent for longer gives its shard no weight."""


class ShardedStore:
    """One connection to each shard; not for use by several threads at once."""

    def __init__(self, shards: Sequence[LearnerStore], group_size: int) -> None:
        """`group_size` is that of the actors: no share of a batch splits a group."""
        self.shards = tuple(shards)
        self._home = self.shards[0]
        self._group_size = group_size
        self._incarnation = ""
        self._pacing: dict[str, Any] = {}
        self._settings: list[SettingState] = []
        self._balanced_at = 0.0

    def close(self) -> None:
        """Drop the connections."""
        for shard in self.shards:
            shard.close()

    # -- pacing and versions ------------------------------------------------------------------------------------

    def register(self, incarnation: str, **pacing: Any) -> None:
        """As `LearnerStore.register`; each shard paces its share of the batch."""
        self._incarnation, self._pacing = incarnation, pacing
        self._rebalance()

    def next_version(self) -> int:
        """As `LearnerStore.next_version`."""
        return self._home.next_version()

    def record_version(self, version: int, incarnation: str, step: int, checksum: str) -> None:
        """As `LearnerStore.record_version`, in every shard."""
        for shard in self.shards:
            shard.record_version(version, incarnation, step, checksum)

    def version_steps(self, versions: Sequence[int]) -> dict[int, int]:
        """As `LearnerStore.version_steps`."""
        return self._home.version_steps(versions)

    # -- batches ------------------------------------------------------------------------------------------------

    def plan(self, step: int, num_trajectories: int) -> list[int] | None:
        """What each shard gives to a step: as planned before, else by what is ready; None while that is too little."""
        planned = self._home.read_plan(step)
        if planned is not None:
            return planned
        ready = [shard.evict_stale(step) for shard in self.shards]
        shares = divide_ready(num_trajectories, ready, self._group_size)
        return None if shares is None else self._home.write_plan(step, shares)

    def wait_sealed(self, step: int, timeout_s: float) -> Manifest | None:
        """As `LearnerStore.wait_sealed`: the batch, once every shard has sealed its part."""
        deadline = time.monotonic() + timeout_s
        while (shares := self._home.read_plan(step)) is None:
            if time.monotonic() > deadline:
                return None
            time.sleep(_POLL_S)
        parts = []
        for index, share in enumerate(shares):
            if share:
                part = self.shards[index].wait_sealed(step, max(0.0, deadline - time.monotonic()))
                if part is None:
                    return None
                parts.append((index, part))
        return merge(parts)

    def read(self, entries: Sequence[ManifestEntry]) -> list[bytes]:
        """As `LearnerStore.read`; each from its shard, in the order of `entries`."""
        payloads: dict[str, bytes] = {}
        for index, shard in enumerate(self.shards):
            ids = [entry.trajectory_id for entry in entries if entry.shard == index]
            payloads |= zip(ids, shard.fetch(ids), strict=True)
        return [payloads[entry.trajectory_id] for entry in entries]

    def mark_trained(self, step: int, step_s: float | None = None) -> None:
        """As `LearnerStore.mark_trained`."""
        for shard in self.shards:
            shard.mark_trained(step, step_s)
        self._pacing["step"] = step + 1
        self._rebalance()

    def done(self, steps: Sequence[int]) -> int:
        """As `LearnerStore.done`."""
        freed = sum(shard.done(steps) for shard in self.shards)
        self._home.drop_plans(steps)
        return freed

    def rollback(self, step: int) -> list[int]:
        """As `LearnerStore.rollback`."""
        return sorted({pending for shard in self.shards for pending in shard.rollback(step)})

    def pending_manifests(self) -> list[int]:
        """Steps of which some shard has a part that is claimed and not done."""
        return sorted({pending for shard in self.shards for pending in shard.pending_manifests()})

    # -- engines ------------------------------------------------------------------------------------------------

    def engines(self) -> list[EngineLease]:
        """As `LearnerStore.engines`: those of all shards, once each, with the longest lease and the least version."""
        found: dict[tuple[str, str, str], EngineLease] = {}
        for lease in (lease for shard in self.shards for lease in shard.engines()):
            known = found.setdefault(lease[:3], lease)
            lease_s, version = max(known.lease_s, lease.lease_s), min(known.version, lease.version)
            found[lease[:3]] = lease._replace(lease_s=lease_s, version=version)
        return sorted(found.values())

    def admit_engine(self, url: str, incarnation: str, version: int) -> bool:
        """As `LearnerStore.admit_engine`, in the shards where it is announced."""
        return any([shard.admit_engine(url, incarnation, version) for shard in self.shards])

    def withdraw_engine(self, url: str, incarnation: str) -> bool:
        """As `LearnerStore.withdraw_engine`."""
        return any([shard.withdraw_engine(url, incarnation) for shard in self.shards])

    # -- state --------------------------------------------------------------------------------------------------

    def accounting(self) -> Accounting:
        """All terms of the accounting identity, over all shards."""
        return add_accountings([shard.accounting() for shard in self.shards])

    def status(self) -> BufferStatus:
        """What the buffer holds now, over all shards."""
        return add_statuses(self.statuses())

    def statuses(self) -> list[BufferStatus]:
        """What each shard holds now."""
        return [shard.status() for shard in self.shards]

    def settings(self) -> list[SettingState]:
        """As `LearnerStore.settings`, those of the first shard, marked where another has something else."""
        return combine_settings([shard.settings() for shard in self.shards])

    def changed_settings(self) -> dict[str, dict[str, Any]]:
        """As `LearnerStore.changed_settings`; a change that is not in every shard is told with each shard's value."""
        before, self._settings = self._settings, self.settings()
        return news(before, self._settings)

    def note_problem(self, name: str, value: object, problem: str | None) -> None:
        """As `LearnerStore.note_problem`, in every shard."""
        for shard in self.shards:
            shard.note_problem(name, value, problem)

    def balance(self) -> None:
        """Pace the shards anew when it is time: none may wait for a part that nobody makes any more."""
        if self._pacing and time.monotonic() - self._balanced_at > _REBALANCE_S:
            self._rebalance()

    def _rebalance(self) -> None:
        live = [any(a.age_s < _LIVE_S and not a.closing for a in shard.accounting().actors) for shard in self.shards]
        weights = [int(is_live) for is_live in live] if any(live) else [1] * len(live)
        shares = divide(self._pacing["batch_size"], weights, self._group_size)
        for shard, share in zip(self.shards, shares, strict=True):
            pacing: dict[str, Any] = {**self._pacing, "batch_size": share}
            shard.register(self._incarnation, **pacing)
        self._balanced_at = time.monotonic()


def connect_store(
    redis_url: str, run_name: str, *, num_shards: int = 1, group_size: int = 1, timeout_s: float = 60.0
) -> Store:
    """Connect to all shards of a run; `redis_url` as `split_urls` takes it. Raises what `LearnerStore.connect` does."""
    shards = [
        LearnerStore.connect(url, run_name, timeout_s, Shard(index, num_shards))
        for index, url in enumerate(split_urls(redis_url, num_shards))
    ]
    return shards[0] if num_shards == 1 else ShardedStore(shards, group_size)


def make_selector(store: Store, config: SelectionConfig, seed: int | None = None) -> LiveSelector:
    """What claims batches from a store by the settings in force, for the one rank that decides."""
    chooser = ShardedSelector if isinstance(store, ShardedStore) else Selector
    return LiveSelector(chooser(store, config, seed=seed), store, config)  # type: ignore[arg-type]


class ShardedSelector:
    """Claims global batches for the one rank that decides; orders and filters apply within each shard."""

    def __init__(self, store: ShardedStore, config: SelectionConfig, *, seed: int | None = None) -> None:
        """As `Selector`."""
        self._store = store
        self._selectors = [Selector(shard, config, seed=seed) for shard in store.shards]

    def use(self, config: SelectionConfig) -> None:
        """As `Selector.use`, in every shard; parts that are sealed stay as they are."""
        for selector in self._selectors:
            selector.use(config)

    def claim(self, step: int, num_trajectories: int, timeout_s: float) -> Manifest | None:
        """As `Selector.claim`. Once a plan is written, each shard waits for its own part."""
        deadline = time.monotonic() + timeout_s
        while (shares := self._store.plan(step, num_trajectories)) is None:
            if time.monotonic() > deadline:
                return None
            time.sleep(_POLL_S)
        parts = []
        for index, share in enumerate(shares):
            if share:
                part = self._selectors[index].claim(step, share, max(0.0, deadline - time.monotonic()))
                if part is None:
                    return None
                parts.append((index, part))
        return merge(parts)


def merge(parts: Sequence[tuple[int, Manifest]]) -> Manifest:
    """The batch made of the parts of some shards, which are given by index; its weights are those of one global draw.

    A part of `d_s` of `d` units drawn from `N_s` of `N` gives unit `i` of weight `w_i` of its shard's `W_s` the
    probability `(d_s / d) (w_i / W_s)` of being what one draw of the batch brings, so it counts

        (N (d_s / d) (w_i / W_s)) ** -beta = (N d_s / (N_s d)) ** -beta * (N_s w_i / W_s) ** -beta,

    the second factor being what its shard gave it, over the largest of the batch. What was replayed, or was not drawn
    by priority, counts 1 before that division.
    """
    drawings = [part.drawing for _, part in parts if part.drawing is not None]
    num_units, num_drawn = sum(d.num_units for d in drawings), sum(d.num_drawn for d in drawings)
    entries, filtered = [], Counter[str]()
    for index, part in parts:
        drawing = part.drawing
        scale, share = 1.0, 1.0
        if drawing is not None:
            scale = drawing.largest
            share = (num_units * drawing.num_drawn / (drawing.num_units * num_drawn)) ** -drawing.beta
        for entry in part.entries:
            weight = entry.weight * scale * (1.0 if entry.replayed else share)
            entries.append(structs.replace(entry, shard=index, weight=weight))
        filtered.update(part.filtered)
    largest = max(entry.weight for entry in entries)
    return Manifest(
        step=parts[0][1].step,
        entries=tuple(structs.replace(entry, weight=entry.weight / largest) for entry in entries),
        sealed_at=max(part.sealed_at for _, part in parts),
        considered=sum(part.considered for _, part in parts),
        filtered=dict(filtered),
    )
