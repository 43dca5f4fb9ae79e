"""Random walks against a small model: whatever the order and the filters, nothing is lost, split or too stale."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from vagen.buffer.connection import make_client
from vagen.buffer.keys import Key, Keys
from vagen.buffer.selection.config import PriorityConfig, ReplayConfig

BATCH = 5
MAX_STALENESS = 2
OPERATIONS = 90
FILTERS = {"none": [], "absolute": ["all_same"], "ranked": ["reward_variance", ("starpo_s", {"share": 0.5})]}


class Walk:
    """One run of random operations; `check` holds Redis against what is known to have been stored."""

    def __init__(self, bench, seed: int, order: str, filters: list, *, partial: str, share: float) -> None:
        replay = ReplayConfig(share=share, max_staleness=4)
        priority = PriorityConfig(function="total_reward" if order == "priority" else None)
        self.bench = bench(partial_groups=partial, priority=priority, group_timeout_s=100)
        self.bench.store.announce()
        kept = {"replay_max_bytes": 20_000, "replay_max_staleness": 4} if share else {}
        self.bench.learn(batch_size=BATCH, max_staleness=MAX_STALENESS, **kept)
        self.selector = self.bench.selector(filters, order=order, replay=replay)
        self.random = random.Random(seed)
        self.redis, self.keys = make_client(self.bench.valkey.url), Keys("run")
        self.redis.config_set("appendfsync", "no")
        self.filters, self.share, self.partial = filters, share, partial
        self.versions = {1: 0}
        self.step = self.next_done = 0
        self.born: dict[str, int] = {}
        self.group: dict[str, str] = {}
        self.success: dict[str, bool] = {}
        self.size: dict[str, int] = {}
        self.manifests = {}
        self.trained_once: set[str] = set()
        self.counted: Counter[str] = Counter()

    def run(self) -> None:
        operations = {
            self.put: 8,
            self.publish: 1,
            self.claim: 3,
            self.claim_again: 1,
            self.finish: 2,
            self.time_out: 1,
        }
        for _ in range(OPERATIONS):
            (operation,) = self.random.choices(list(operations), list(operations.values()))
            operation()
            self.check()

    def put(self) -> None:
        size = self.random.choice([1, 1, 2, 3])
        group = f"g{len(self.born)}"
        for _ in range(size if self.random.random() < 0.8 else 1):
            version = self.random.choice(list(self.versions)[-MAX_STALENESS - 2 :])
            success = self.random.random() < 0.5
            before = self.bench.learner.accounting().stale
            put = self.bench.put(version=version, group_id=group, group_size=size, success=success, num_bytes=3000)
            (outcome,) = self.bench.commit(put)
            if outcome.verdict == "stale":
                assert self.bench.learner.accounting().stale == before + 1
                self.counted["late"] += 1
                continue
            self.born[put.trajectory_id] = self.versions[version]
            self.group[put.trajectory_id], self.success[put.trajectory_id] = group, success
            self.size[group] = size

    def publish(self) -> None:
        self.versions[self.bench.publish(self.step)] = self.step

    def ready(self) -> dict[str, set[str]]:
        """Members of the ready units."""
        units = {}
        for name in (unit.decode() for unit in self.redis.zrange(self.keys[Key.READY], 0, -1)):
            fields = (
                [f.decode() for f in self.redis.hkeys(self.keys.of(Key.GROUP, name[2:]))]
                if name[:2] == "g:"
                else [name]
            )
            units[name] = {field for field in fields if len(field) == 26}
        return units

    def claim(self) -> None:
        before, accounting = self.ready(), self.bench.learner.accounting()
        manifest = self.selector.claim(self.step, BATCH, 0)
        after, now = self.ready(), self.bench.learner.accounting()
        floor = self.step - MAX_STALENESS
        stale = {one for members in before.values() for one in members if self.born[one] < floor}
        assert now.stale - accounting.stale == len(stale)
        taken = set() if manifest is None else {e.trajectory_id for e in manifest.entries if not e.replayed}
        left = {one for members in after.values() for one in members}
        gone = {one for members in before.values() for one in members} - stale - taken - left
        assert now.filtered - accounting.filtered == len(gone)
        assert not gone or self.filters or self.partial == "drop"
        assert not stale & (taken | left)
        for members in before.values():
            assert not members & taken or not members & left, "a unit is taken whole or not at all"
            if members & taken and ["all_same"] == self.filters:
                assert len({self.success[one] for one in members & taken}) == 2
        if manifest is None:
            assert len(left) < BATCH
            return
        assert BATCH <= len(manifest.entries) < BATCH + 3
        assert taken <= {one for members in before.values() for one in members} and not taken & self.trained_once
        for entry in manifest.entries:
            assert entry.oldest_step == self.born[entry.trajectory_id]
            assert entry.staleness == max(0, self.step - entry.oldest_step)
            assert entry.staleness <= (4 if entry.replayed else MAX_STALENESS)
            assert 0 < entry.weight <= 1
        again = [entry.trajectory_id for entry in manifest.entries if entry.replayed]
        assert len(again) <= self.share * BATCH and set(again) <= self.trained_once
        assert all(self.success[one] for one in again) and len(set(again)) == len(again)
        payloads = self.bench.learner.fetch(manifest.ids)
        assert list(map(len, payloads)) == [entry.num_bytes for entry in manifest.entries]
        self.manifests[self.step] = manifest
        self.step += 1
        self.publish()

    def claim_again(self) -> None:
        for step, manifest in self.manifests.items():
            assert self.selector.claim(step, BATCH, 0) == manifest
            assert self.bench.learner.wait_sealed(step, 0) == manifest
        assert self.bench.learner.pending_manifests() == sorted(self.manifests)

    def finish(self) -> None:
        if self.next_done in self.manifests:
            manifest = self.manifests.pop(self.next_done)
            fresh = {entry.trajectory_id for entry in manifest.entries if not entry.replayed}
            assert self.bench.learner.done([self.next_done]) == len(fresh)
            self.trained_once |= fresh
            self.counted["replayed"] += manifest.num_replayed
            self.next_done += 1

    def time_out(self) -> None:
        self.bench.tick(after_s=101)

    def check(self) -> None:
        accounting, status = self.bench.learner.accounting(), self.bench.learner.status()
        assert accounting.accounted == len(self.born) + self.counted["late"]
        assert accounting.trained == len(self.trained_once)
        assert accounting.replayed == self.counted["replayed"]
        assert accounting.filtered == sum(accounting.filtered_by_reason.values())
        ready = self.ready()
        assert accounting.ready == sum(map(len, ready.values())) and all(ready.values())
        claimed = sum(not e.replayed for manifest in self.manifests.values() for e in manifest.entries)
        assert accounting.claimed == claimed
        assert self.bench.bytes_in_redis() == status.num_bytes
        assert self.bench.bytes_in_redis(Key.REPLAY_PAYLOAD) == status.replay_bytes <= 20_000
        picks = set(self.redis.zrange(self.keys[Key.PICKS], 0, -1))
        assert picks == (
            set(self.redis.zrange(self.keys[Key.READY], 0, -1)) if self.selector._config.order == "priority" else set()
        )
        weights = sum(map(int, self.redis.hvals(self.keys[Key.WEIGHTS])))
        assert weights == int(self.redis.hget(self.keys[Key.STAT], "weight") or 0)
        if self.partial == "drop":
            for name, members in ready.items():
                assert name[:2] != "g:" or len(members) == self.size[self.group[next(iter(members))]]


@pytest.mark.parametrize(("partial", "share"), [("train", 0.0), ("drop", 0.4)])
@pytest.mark.parametrize("filters", FILTERS)
@pytest.mark.parametrize("order", ["freshest", "oldest", "uniform", "priority"])
def test_every_order_and_filter_keeps_the_promises(bench, order, filters, partial, share):
    Walk(bench, 2, order, FILTERS[filters], partial=partial, share=share).run()


def test_the_walks_reach_what_they_are_about(bench):
    """Whatever a walk never meets it does not test."""
    walk = Walk(bench, 1, "uniform", FILTERS["absolute"], partial="drop", share=0.4)
    walk.run()
    accounting = walk.bench.learner.accounting()
    assert min(accounting.trained, accounting.stale, accounting.replayed) > 0
    assert set(accounting.filtered_by_reason) == {"all_same", "partial_group"}
