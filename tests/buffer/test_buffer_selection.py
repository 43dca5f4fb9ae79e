"""Orders, importance weights and partial groups: what a step takes, on a real Valkey."""

from __future__ import annotations

import threading
from collections import Counter

import pytest

from vagen.buffer.connection import make_client
from vagen.buffer.keys import Key, Keys
from vagen.buffer.manifest import Manifest
from vagen.buffer.selection.config import PriorityConfig
from vagen.buffer.selection.priority import Prioritizer, get_priority
from vagen.buffer.selection.selector import _entry, fit
from vagen.buffer.selection.units import Unit, read_candidate
from vagen.common.errors import ConfigError, TrajectoryError
from vagen.common.wire import decode_trajectory


def by_reward(alpha: float = 1.0) -> PriorityConfig:
    return PriorityConfig(function="total_reward", alpha=alpha)


def test_uniform_draws_every_unit_equally_often(bench):
    """300 draws of 4 of 12 units: each is drawn 100 times on average, with a standard deviation of 8."""
    bench = bench()
    bench.learn(batch_size=4)
    for _ in range(4):
        bench.store_group("01")
    for _ in range(8):
        bench.store_one()
    drawn: Counter[str] = Counter()
    for seed in range(300):
        proposal = bench.learner.propose(0, 4, 4, "uniform", seed, 0)
        names = [unit.name for unit in fit(proposal.units, 4)]
        assert len(set(names)) == len(names)
        drawn.update([proposal.units[0].name])
    assert len(drawn) == 12
    assert max(drawn.values()) < 25 + 5 * 4.8 and min(drawn.values()) > 25 - 4 * 4.8


def test_priority_draws_in_proportion_to_the_priority(bench):
    """Keys -log(u) / w: of 200 units of weight 1 and 200 of weight 3, the first 40 hold about 30 of the heavy."""
    bench = bench(priority=by_reward())
    bench.learn(batch_size=40)
    heavy = set()
    for _ in range(200):
        light = bench.put(rewards=bench.reward(1.0))
        put = bench.put(rewards=bench.reward(3.0))
        bench.commit(light, put)
        heavy.add(put.trajectory_id)
    manifest = bench.selector(order="priority").claim(0, 40, 0)
    assert 20 < len(heavy & set(manifest.ids)) < 39


def test_units_that_stayed_behind_are_drawn_like_new_ones(bench):
    """An exponential has no memory: after half of 400 was drawn, 200 old and 200 new units of equal weight share a
    draw of 100. Keys from zero for the new ones would leave the old ones almost nothing.
    """
    bench = bench(priority=by_reward())
    bench.learn(batch_size=100)
    old = set()
    for _ in range(20):
        puts = [bench.put(rewards=bench.reward(1.0)) for _ in range(20)]
        bench.commit(*puts)
        old |= {put.trajectory_id for put in puts}
    selector = bench.selector(order="priority")
    for step in range(2):
        old -= set(selector.claim(step, 100, 0).ids)
    for _ in range(10):
        bench.commit(*(bench.put(rewards=bench.reward(1.0)) for _ in range(20)))
    assert 25 < len(old & set(selector.claim(2, 100, 0).ids)) < 75


def test_weights_undo_the_drawing(bench):
    bench = bench(priority=by_reward(alpha=0.5))
    bench.learn(batch_size=3)
    rewards = {bench.store_scored(True, reward=reward): reward for reward in (1.0, 4.0, 9.0)}
    manifest = bench.selector(order="priority", beta=0.5).claim(0, 3, 0)
    # p = sqrt(reward) / 6, N = 3: (N p)^-0.5 over that of the smallest, which is the largest weight.
    expected = {one: (reward**0.5) ** -0.5 for one, reward in rewards.items()}
    assert {e.trajectory_id: e.weight for e in manifest.entries} == pytest.approx(expected, rel=1e-5)
    total, squares = sum(expected.values()), sum(w * w for w in expected.values())
    assert manifest.weight_ess == pytest.approx(total**2 / (3 * squares), rel=1e-5)


def test_a_group_has_one_priority_the_mean_of_its_members(bench):
    bench = bench(priority=by_reward())
    bench.learn()
    bench.store_group("11", group_id="g")
    single = bench.store_scored(True, reward=3.0)
    manifest = bench.selector(order="priority", beta=1.0).claim(0, 3, 0)
    weights = {entry.trajectory_id: entry.weight for entry in manifest.entries}
    assert sorted(weights.values()) == pytest.approx([1 / 3, 1, 1]) and weights[single] == pytest.approx(1 / 3)


@pytest.mark.parametrize("order", ["freshest", "oldest", "uniform"])
def test_other_orders_weigh_nothing(bench, order):
    bench = bench(priority=by_reward())
    bench.learn()
    for reward in (1.0, 2.0, 3.0):
        bench.store_scored(True, reward=reward)
    manifest = bench.selector(order=order).claim(0, 3, 0)
    assert manifest.has_equal_weights and manifest.weight_ess == 1.0


@pytest.mark.parametrize("order", ["freshest", "uniform"])
def test_a_manifest_says_how_many_tokens_each_trajectory_has(bench, order):
    bench = bench()
    bench.learn()
    stored = [bench.store_one() for _ in range(3)]
    manifest = bench.selector(order=order).claim(0, 3, 0)
    payloads = bench.learner.read(manifest.entries)
    tokens = [decode_trajectory(payload).num_tokens for payload in payloads]
    assert sorted(manifest.ids) == sorted(stored) and manifest.sizes == tokens == [10] * 3


def test_what_was_stored_before_tokens_were_kept_is_sized_by_its_bytes():
    old, new = (
        read_candidate(b"01", b"3:2000:0.5:1:2:" + tokens + b":4:taskgroup", 5) for tokens in (b"40", b"40/512")
    )
    assert (old.num_policy_tokens, old.num_tokens) == (40, 0)
    assert (new.num_policy_tokens, new.num_tokens, new.num_bytes, new.group_id) == (40, 512, 2000, "group")
    entries = [_entry(candidate, 1.0, is_replayed=False) for candidate in (new, old)]
    assert Manifest(step=0, entries=tuple(entries), sealed_at=0.0).sizes == [2000, 2000]
    assert Manifest(step=0, entries=(entries[0],), sealed_at=0.0).sizes == [512]


def test_what_was_stored_before_there_were_priorities_is_drawn_last(bench, valkey, make_trajectory):
    plain = bench()
    plain.learn()
    before = plain.store_one()
    ranked = bench(priority=by_reward())
    ranked.seq = plain.seq
    after = [ranked.store_scored(True) for _ in range(2)]
    selector = ranked.selector(order="priority")
    assert set(selector.claim(0, 2, 0).ids) == set(after)
    assert selector.claim(1, 1, 0).ids == [before]


@pytest.mark.slow
@pytest.mark.parametrize("order", ["freshest", "oldest", "uniform", "priority"])
def test_a_claim_of_512_costs_hardly_more_from_200_000_than_from_20_000(bench, order):
    """The entries have no payloads: a claim does not touch them. One that went through all would take ten times."""
    bench = bench(priority=by_reward())
    bench.learn(batch_size=512)
    redis, keys = make_client(bench.valkey.url), Keys("run")

    def fill(start: int, end: int) -> None:
        for first in range(start, end, 10_000):
            part = [f"{index:026d}" for index in range(first, first + 10_000)]
            redis.hset(keys[Key.LIVE], mapping=dict.fromkeys(part, "0:300000:1.0:1:4:200:11:frozen_lakeg"))
            redis.hset(keys[Key.WEIGHTS], mapping=dict.fromkeys(part, 1_000_000))
            redis.zadd(keys[Key.READY], dict.fromkeys(part, 0))
            redis.zadd(keys[Key.PICKS], {name: hash(name) % 1_000_003 for name in part})
        redis.hset(keys[Key.STAT], mapping={"ready": end, "weight": 1_000_000 * end})

    def spent_s() -> float:
        """CPU time of the thread that serves commands: what a claim takes it, however busy the machine is."""
        cpu = redis.info("cpu")
        return cpu["used_cpu_user_main_thread"] + cpu["used_cpu_sys_main_thread"]

    def claim_s() -> float:
        spent = []
        for _ in range(5):
            started = spent_s()
            assert len(bench.selector(order=order).claim(0, 512, 0).entries) == 512
            spent.append(spent_s() - started)
            redis.delete(keys.of(Key.MANIFEST, 0))
        return min(spent)

    fill(0, 20_000)
    few = claim_s()
    fill(20_000, 200_000)
    many = claim_s()
    print(f"{order}: {1000 * few:.1f} ms of server time from 20,000, {1000 * many:.1f} ms from 200,000")
    assert many < 3 * few


class TestPriorities:
    def test_named(self, make_trajectory):
        trajectory = make_trajectory()
        found = {name: get_priority(name)(trajectory) for name in ("total_reward", "surprise", "num_turns", "success")}
        assert found == pytest.approx({"total_reward": 1.0, "surprise": 0.5, "num_turns": 1, "success": 1})

    def test_one_of_your_own(self, make_trajectory):
        config = PriorityConfig(function="fractions:Fraction")
        with pytest.raises(TrajectoryError, match="priority: fractions:Fraction raised"):
            Prioritizer(config).draw(make_trajectory())
        with pytest.raises(ConfigError, match="priority.function: cannot import 'nowhere:f'"):
            get_priority("nowhere:f")
        with pytest.raises(ConfigError, match="expected one of num_turns, success"):
            get_priority("magic")

    def test_one_that_fails_refuses_the_trajectory(self, make_trajectory, bench):
        bench = bench(priority=PriorityConfig(function="math:lgamma"))
        bad = bench.read(bench.make(actor_seq=1))
        assert (bad.field, bench.commit(bad)[0].verdict) == ("priority", "refused")
        assert bench.learner.accounting().refused_by_field == {"priority": 1}

    @pytest.mark.parametrize(("alpha", "weights"), [(1.0, [500_000, 2_000_000]), (0.0, [1_000_000] * 2)])
    def test_alpha_and_epsilon(self, make_trajectory, bench, alpha, weights):
        bench = bench()
        prioritizer = Prioritizer(PriorityConfig(function="total_reward", alpha=alpha, epsilon=0.5))
        draws = [prioritizer.draw(make_trajectory(rewards=bench.reward(reward))) for reward in (-3.0, 2.0)]
        assert [draw.weight for draw in draws] == weights


class TestPartialGroups:
    def test_trained(self, bench):
        bench = bench(group_timeout_s=10)
        bench.learn()
        ids = bench.store_group("01", group_size=3)
        bench.tick(after_s=11)
        assert set(bench.learner.claim(0, 2, 0).ids) == set(ids)

    def test_dropped_and_counted_when_their_time_is_over(self, bench):
        bench = bench(group_timeout_s=10, partial_groups="drop")
        bench.store.announce()
        bench.learn()
        bench.store_group("01", group_id="g", group_size=3)
        whole = bench.store_group("01")
        assert bench.tick(after_s=11) == (0, 1, 0)
        assert set(bench.learner.claim(0, 2, 0).ids) == set(whole)
        accounting = bench.learner.accounting()
        assert (accounting.filtered_by_reason, accounting.pending) == ({"partial_group": 2}, 2)
        assert bench.bytes_in_redis() == bench.learner.status().num_bytes
        assert bench.learner.status().room_bytes == 0

    def test_a_late_member_is_partial_on_its_own(self, bench):
        bench = bench(group_timeout_s=10, partial_groups="drop")
        bench.learn()
        bench.store_group("01", group_id="g", group_size=3)
        bench.tick(after_s=11)
        bench.store_group("1", group_id="g", group_size=3)
        bench.tick(after_s=11)
        assert bench.learner.accounting().filtered_by_reason == {"partial_group": 3}

    def test_what_staleness_leaves_of_a_group_is_partial(self, bench):
        bench = bench(partial_groups="drop")
        bench.store.announce()
        bench.learn(max_staleness=1)
        bench.publish(1)
        bench.store_one(version=1, group_id="g", group_size=2)
        bench.store_one(version=2, group_id="g", group_size=2)
        assert bench.learner.claim(2, 1, 0) is None
        accounting = bench.learner.accounting()
        assert (accounting.stale, accounting.filtered_by_reason) == (1, {"partial_group": 1})


def test_other_ranks_wait_for_the_seal_of_the_first(bench):
    bench = bench()
    bench.learn()
    assert bench.learner.wait_sealed(0, 0) is None
    found = []
    other = type(bench.learner).connect(bench.valkey.url, "run", timeout_s=10)
    waiter = threading.Thread(target=lambda: found.append(other.wait_sealed(0, 20)))
    waiter.start()
    bench.store_one()
    manifest = bench.learner.claim(0, 1, 0)
    waiter.join(timeout=10)
    assert found == [manifest]


def test_two_that_decide_agree(bench):
    """A learner that was taken for dead may still be choosing when its successor seals."""
    bench = bench()
    bench.learn()
    for _ in range(4):
        bench.store_one()
    selectors = [bench.selector(order="uniform") for _ in range(2)]
    proposals = [bench.learner.propose(0, 2, 2, "uniform", seed, 0) for seed in (1, 2)]
    assert all(len(proposal.units) == 2 for proposal in proposals)
    assert selectors[0].claim(0, 2, 0) == selectors[1].claim(0, 2, 0)


def test_a_group_that_grew_since_its_proposal_is_proposed_again(bench):
    bench = bench(group_timeout_s=10)
    bench.learn()
    bench.store_group("0", group_id="g", group_size=3)
    bench.tick(after_s=11)
    store = Interrupted(bench.learner, lambda: bench.store_group("1", group_id="g", group_size=3))
    selector = bench.selector()
    selector._store = store
    assert len(selector.claim(0, 1, 0).entries) == 2
    assert store.refused == [["g:g"]]
    assert bench.learner.accounting().ready == 0


class Interrupted:
    """Passes calls on; between the first proposal and its decision, something happens."""

    def __init__(self, learner, happening) -> None:
        self.propose, self.wait_ready = learner.propose, learner.wait_ready
        self._decide, self._happening = learner.decide, [happening]
        self.refused: list[list[str]] = []

    def decide(self, step, decision, manifest):
        if self._happening:
            self._happening.pop()()
        sealed, changed = self._decide(step, decision, manifest)
        if changed:
            self.refused.append(changed)
        return sealed, changed


def test_fit_passes_over_what_exceeds():
    units = {name: Unit(name=name, members=(None,) * size) for name, size in zip("abcd", (3, 3, 1, 2), strict=True)}
    names = lambda wanted: [unit.name for unit in fit(list(units.values()), wanted)]  # noqa: E731
    assert (names(4), names(9), names(2), names(8)) == (["a", "c"], list("abcd"), ["c", "a"], list("abcd"))
