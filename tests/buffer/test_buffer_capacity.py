"""What happens when the buffer is full: random walks against a model, on a real Valkey."""

from __future__ import annotations

import random

import pytest

from vagen.buffer.connection import make_client
from vagen.buffer.keys import Key, Keys
from vagen.buffer.settings import change_settings

CAPACITY = 1 << 17


class Model:
    """The buffer as a person would write it down: units in order of arrival, and who is evicted for whom."""

    def __init__(self, policy):
        self.policy, self.capacity = policy, CAPACITY
        self.held: dict[str, tuple[str, int, int]] = {}
        """Id -> unit, bytes, step."""
        self.ready: dict[str, int] = {}
        """Unit -> arrival of its first member."""
        self.waiting: dict[str, dict] = {}
        self.fates = dict.fromkeys(("trained", "stale", "evicted"), 0)
        self.claimed: dict[int, list[str]] = {}
        self.arrivals = 0

    def members(self, unit):
        return [i for i, (its, _, _) in self.held.items() if its == unit]

    def size(self, ids):
        return sum(self.held[i][1] for i in ids)

    @property
    def spoken_for(self):
        return self.size(self.held) + sum(group["room"] for group in self.waiting.values())

    def drop(self, ids, fate):
        for i in ids:
            del self.held[i]
            self.fates[fate] += 1

    def put(self, trajectory_id, size, step, group, group_size):
        unit = trajectory_id if group_size == 1 else f"g:{group}"
        waits = self.waiting.get(unit)
        wanted = size if unit in self.ready or group_size == 1 else size * group_size
        if waits is not None:
            wanted = max(0, size - waits["room"])
        victims = [] if self.policy == "block" else sorted(self.ready, key=self.order)
        victims = [victim for victim in victims if victim != unit]
        if wanted > self.capacity - self.spoken_for + sum(self.size(self.members(v)) for v in victims) and wanted:
            return "full"
        while wanted and wanted > self.capacity - self.spoken_for:
            victim = victims.pop(0)
            self.drop(self.members(victim), "evicted")
            del self.ready[victim]
        self.arrivals += 1
        self.held[trajectory_id] = (unit, size, step)
        if group_size == 1:
            self.ready[unit] = self.arrivals
        elif unit not in self.ready:
            waits = self.waiting.setdefault(
                unit, {"room": size * group_size, "left": group_size, "arrival": self.arrivals}
            )
            waits["room"] = max(0, waits["room"] - size)
            waits["left"] -= 1
            if waits["left"] == 0:
                self.release(unit)
        return "stored"

    def order(self, unit):
        return (min(self.held[i][2] for i in self.members(unit)), unit) if self.is_stalest else self.ready[unit]

    @property
    def is_stalest(self):
        return self.policy == "drop_stalest"

    def release(self, unit):
        self.ready[unit] = self.waiting.pop(unit)["arrival"]

    def claim(self, step, floor, ids):
        """Stale members go first; then the manifest, if any, must be whole units that were ready."""
        for unit in list(self.ready):
            stale = [i for i in self.members(unit) if self.held[i][2] < floor]
            self.drop(stale, "stale")
            if not self.members(unit):
                del self.ready[unit]
        units = {self.held[i][0] for i in ids}
        assert units <= set(self.ready)
        assert sorted(ids) == sorted(i for unit in units for i in self.members(unit)), "a unit was split"
        for unit in units:
            del self.ready[unit]
            for i in self.members(unit):
                self.held[i] = (f"claimed by {step}", *self.held[i][1:])
        if ids:
            self.claimed[step] = ids

    def done(self, step):
        self.drop(self.claimed.pop(step), "trained")


class Walk:
    """One random walk: each step is done to the buffer and to the model, then both are compared."""

    def __init__(self, bench, seed, policy):
        self.rng = random.Random(seed)
        self.bench = bench(capacity_bytes=CAPACITY, when_full=policy, group_timeout_s=10)
        self.bench.learn(max_staleness=3)
        self.client, self.keys = make_client(self.bench.valkey.url), Keys("run")
        self.model = Model(policy)
        self.step = self.published = 0
        self.max_staleness, self.oldest_offer = 3, 3
        self.offered = 0
        self.sent: list = []
        self.groups: list[tuple[str, int]] = []

    def next_put(self):
        size = self.rng.choice((2_000, 9_000, 9_000, 20_000))
        version = self.rng.randint(max(0, self.published - self.oldest_offer), self.published) + 1
        if self.rng.random() < 0.5:
            return self.bench.put(num_bytes=size, version=version)
        if not self.groups or self.rng.random() < 0.4:
            self.groups.append((f"group{self.offered}-{self.rng.random()}", self.rng.randint(2, 3)))
        group, size_of_group = self.rng.choice(self.groups[-3:])
        return self.bench.put(num_bytes=min(size, 9_000), version=version, group_id=group, group_size=size_of_group)

    def offer(self):
        puts = [self.next_put() for _ in range(self.rng.choice((1, 1, 4)))]
        fits = self.bench.store.fitting(puts)
        batch = [put for put, fit in zip(puts, fits, strict=True) if fit or len(puts) == 1]
        outcomes = self.bench.commit(*batch)
        verdicts = [outcome.verdict for outcome in outcomes]
        if len(puts) == 1 and verdicts != ["stale"]:
            assert fits == [verdicts != ["full"]], "both scripts agree"
        assert len(puts) == 1 or "full" not in verdicts, "what is admitted is never turned away"
        for put, verdict in zip(batch, verdicts, strict=True):
            trajectory = put.trajectory
            step = trajectory.oldest_version - 1
            assert (verdict == "stale") == (step < self.step - 1 - self.max_staleness), "by the last claim, exactly"
            if verdict == "stale":
                self.model.fates["stale"] += 1
            else:
                told = self.model.put(
                    put.trajectory_id, len(put.payload), step, trajectory.group_id, trajectory.group_size
                )
                assert told == verdict
            self.offered += verdict != "full"
            self.sent += [put] if verdict != "full" else []

    def claim(self):
        manifest = self.bench.learner.claim(self.step, self.rng.randint(1, 4), 0)
        self.model.claim(self.step, self.step - self.max_staleness, manifest.ids if manifest else [])
        if manifest:
            assert all(entry.staleness <= self.max_staleness for entry in manifest.entries)
            self.bench.learner.mark_trained(self.step)
            self.step += 1
            self.published = self.step
            self.bench.publish(self.step)

    def done(self):
        if self.model.claimed:
            step = self.rng.choice(list(self.model.claimed))
            self.bench.learner.done([step])
            self.model.done(step)

    def wait(self):
        self.bench.tick(after_s=11)
        for unit in list(self.model.waiting):
            self.model.release(unit)

    def change_policy(self):
        self.model.policy = self.rng.choice(("block", "drop_stalest", "drop_oldest"))
        change_settings(self.client, self.keys, {"when_full": self.model.policy}, "test")

    def change_staleness(self):
        self.max_staleness = self.rng.randint(0, 5)
        change_settings(self.client, self.keys, {"max_staleness": self.max_staleness}, "test")

    def resend(self):
        """Whatever became of it, it is not decided twice."""
        if self.sent:
            put = self.rng.choice(self.sent)
            assert [outcome.verdict for outcome in self.bench.commit(put)] == ["duplicate"]

    def compare(self):
        status, accounting = self.bench.learner.status(), self.bench.learner.accounting()
        live = {i.decode() for i in self.client.hkeys(self.keys[Key.LIVE])}
        assert live == set(self.model.held)
        payloads = {key.decode()[-26:] for key in self.client.scan_iter(self.keys.of(Key.PAYLOAD, "*"), count=1000)}
        assert payloads == live
        assert status.num_bytes + status.room_bytes == self.model.spoken_for <= CAPACITY
        assert {name: getattr(accounting, name) for name in self.model.fates} == self.model.fates
        assert accounting.pending + sum(self.model.fates.values()) == self.offered, "the identity"
        ready = {unit.decode() for unit in self.client.zrange(self.keys[Key.READY], 0, -1)}
        arrived = [unit.decode() for unit in self.client.zrange(self.keys[Key.ARRIVED], 0, -1)]
        assert ready == set(self.model.ready)
        assert arrived == sorted(self.model.ready, key=self.model.ready.__getitem__)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("policy", ["block", "drop_stalest", "drop_oldest"])
def test_random_walk_agrees_with_the_model(bench, seed, policy):
    walk = Walk(bench, seed, policy)
    for _ in range(120):
        act = walk.rng.choices((walk.offer, walk.claim, walk.done, walk.wait), (10, 2, 1.5, 0.5))[0]
        act()
        walk.compare()
    assert walk.model.arrivals > 20
    assert (walk.model.fates["evicted"] > 5) == (policy != "block")


def test_policy_may_change_on_the_way(bench):
    walk = Walk(bench, 5, "block")
    for _ in range(150):
        act = walk.rng.choices((walk.offer, walk.claim, walk.done, walk.change_policy), (10, 2, 1.5, 1))[0]
        act()
        walk.compare()


@pytest.mark.parametrize("seed", range(3))
def test_staleness_bound_may_move_on_the_way(bench, seed):
    walk = Walk(bench, 50 + seed, "drop_stalest")
    walk.oldest_offer = 6
    for _ in range(150):
        acts = (walk.offer, walk.claim, walk.done, walk.change_staleness, walk.resend)
        walk.rng.choices(acts, (10, 3, 2, 1.5, 3))[0]()
        walk.compare()
    assert walk.model.fates["stale"] > 5


@pytest.fixture
def full(bench):
    """A buffer of three units of 20 KB, in order of arrival of steps 2, 0, 1, and little room."""

    def make(when_full):
        made = bench(capacity_bytes=1 << 16, when_full=when_full)
        made.learn(max_staleness=5)
        for step in (1, 2):
            made.publish(step)
        made.ids = [made.store_one(version=version, num_bytes=20_000) for version in (3, 1, 2)]
        return made

    return make


def ready_ids(bench):
    client, keys = make_client(bench.valkey.url), Keys("run")
    return {unit.decode() for unit in client.zrange(keys[Key.READY], 0, -1)}


@pytest.mark.parametrize(("policy", "victim"), [("drop_stalest", 1), ("drop_oldest", 0)])
def test_newcomer_takes_the_place_of_the_stalest_or_the_oldest(full, policy, victim):
    bench = full(policy)
    put = bench.put(version=3, num_bytes=20_000)
    assert bench.store.fitting([put]) == [True]
    assert [outcome.verdict for outcome in bench.commit(put)] == ["stored"]
    assert ready_ids(bench) == set(bench.ids) - {bench.ids[victim]} | {put.trajectory_id}
    assert bench.learner.accounting().evicted == 1
    assert bench.commit(bench.put(trajectory_id=bench.ids[victim], version=3))[0].verdict == "duplicate"


@pytest.mark.parametrize("policy", ["drop_stalest", "drop_oldest"])
def test_claimed_and_waiting_ones_are_never_evicted(full, policy):
    bench = full(policy)
    bench.learner.claim(2, 3, 0)
    put = bench.put(version=3, num_bytes=20_000)
    assert bench.store.fitting([put]) == [False]
    assert bench.commit(put)[0].verdict == "full"
    bench.learner.done([2])
    bench.store_one(num_bytes=20_000, version=3, group_id="g", group_size=3)
    assert bench.store.fitting([put]) == [False], "a group that waits keeps its room"
    assert bench.commit(put)[0].verdict == "full"
    assert bench.learner.accounting().evicted == 0


def test_nothing_is_evicted_for_one_that_does_not_fit_anyway(full):
    bench = full("drop_oldest")
    bench.learner.claim(2, 2, 0)
    assert bench.commit(bench.put(num_bytes=20_000, group_id="g", group_size=3))[0].verdict == "full"
    assert bench.learner.accounting().evicted == 0


def test_what_surely_fits_is_never_found_too_much_by_the_commit(bench):
    bench = bench(capacity_bytes=200_000)
    bench.learn()
    assert not bench.store.surely_fit([bench.put(num_bytes=10)]), "before the first commit nothing is known"
    verdicts, sure = [], []
    for number in range(12):
        group = {"group_id": f"g{number}", "group_size": 3} if number % 3 == 0 else {}
        put = bench.put(num_bytes=11_000, **group)
        sure.append(bench.store.surely_fit([put]))
        verdicts.append(bench.commit(put)[0].verdict)
    assert "full" in verdicts and sum(sure) > 4
    assert all(verdict == "stored" for verdict, was_sure in zip(verdicts, sure, strict=True) if was_sure)
