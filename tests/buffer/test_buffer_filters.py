"""Filters: what they drop, that a step never shrinks for it, and that a crash leaves nothing half done."""

from __future__ import annotations

import logging
import os
import signal
import threading

import pytest

from vagen.buffer.requests import Ask, Beat
from vagen.buffer.selection.config import FilterConfig, SelectionConfig
from vagen.buffer.selection.filters import FILTERS, UnitFilter, make_filter
from vagen.buffer.selection.selector import Selector
from vagen.buffer.selection.units import Candidate, Unit
from vagen.common.errors import BufferUnavailableError, ConfigError
from vagen.common.wire import CreditRequest


def unit(name: str, *rewards: float) -> Unit:
    """A group whose members succeed where their reward is positive."""
    members = [
        Candidate(
            trajectory_id=f"{name}{index}",
            group_id=name,
            task="frozen_lake",
            total_reward=reward,
            success=reward > 0,
            num_turns=3,
            num_policy_tokens=40,
            staleness=0,
            oldest_step=0,
            num_bytes=1000,
        )
        for index, reward in enumerate(rewards)
    ]
    return Unit(name=name, members=tuple(members))


SPREAD = [unit("a", 0, 0), unit("b", 0, 1), unit("c", 0, 4), unit("d", 1, 1), unit("e", 0, 2)]
"""Population variances 0, 0.25, 4, 0, 1."""


def kept(name: str, units=SPREAD, **options) -> str:
    """Names of the units that are left, in order."""
    dropped = set(make_filter(FilterConfig(name=name, options=options))(units))
    assert all(not dropped & ids or ids <= dropped for ids in ({m.trajectory_id for m in u.members} for u in units))
    return "".join(u.name for u in units if u.members[0].trajectory_id not in dropped)


def short_episodes(units):
    """A filter of a user's own: drops single episodes, not whole groups."""
    return [member.trajectory_id for unit in units for member in unit.members if member.num_turns < 2]


class Reward(UnitFilter, frozen=True, kw_only=True):
    """One with options."""

    at_least: float

    def __call__(self, units):
        return [m.trajectory_id for u in units for m in u.members if m.total_reward < self.at_least]


class TestDefinitions:
    def test_reward_variance(self):
        assert kept("reward_variance") == "bce"
        assert kept("reward_variance", min_variance=0.5) == "ce"

    def test_reward_variance_top_p(self):
        assert kept("reward_variance_top_p", p=0.7) == "c"
        assert kept("reward_variance_top_p", p=0.9) == "ce"
        assert kept("reward_variance_top_p", p=1.0) == "bce"
        assert kept("reward_variance_top_p", [unit("a", 1, 1), unit("b", 0, 0)]) == "ab", "no variance: keep all"

    def test_starpo_s(self):
        assert kept("starpo_s", share=0.4) == "ce"
        assert kept("starpo_s", share=0.6) == "bce"
        assert kept("starpo_s", share=0.01) == "c", "at least one"
        assert make_filter(FilterConfig(name="starpo_s")).pool(8) == 32

    def test_all_same(self):
        assert kept("all_same") == "bce"

    def test_difficulty(self):
        units = [unit(str(count), *[1] * count, *[0] * (4 - count)) for count in range(5)]
        assert kept("difficulty", units) == "123"
        assert kept("difficulty", units, low=0.5, high=1.0) == "234"

    def test_of_your_own(self):
        path = f"{__name__}:Reward"
        assert make_filter(FilterConfig(name=path, options={"at_least": 1.0}))([unit("a", 0, 1)]) == ["a0"]
        with pytest.raises(ConfigError, match=r"filters.options.at_least: expected float, got \"much\""):
            make_filter(FilterConfig(name=path, options={"at_least": "much"}))
        with pytest.raises(ConfigError, match="options: expected none for a function"):
            make_filter(FilterConfig(name=f"{__name__}:short_episodes", options={"turns": 2}))

    @pytest.mark.parametrize(
        ("name", "options", "message"),
        [
            ("magic", {}, "filters.name: expected one of all_same, difficulty, reward_variance, "),
            ("nowhere:f", {}, "filters.name: cannot import 'nowhere:f'"),
            (f"{__name__}:SPREAD", {}, "expected a UnitFilter or a function"),
            ("starpo_s", {"share": 0}, "filters.options.share: expected float > 0"),
            ("starpo_s", {"shares": 0.5}, "filters.options.shares: unknown key"),
            ("difficulty", {"low": 0.9, "high": 0.1}, "float <= high"),
        ],
    )
    def test_wrong_settings(self, name, options, message):
        with pytest.raises(ConfigError) as caught:
            make_filter(FilterConfig(name=name, options=options))
        assert message in str(caught.value)

    def test_those_that_compare_say_that_they_need_groups(self):
        assert all(kind.needs_groups for kind in FILTERS.values())
        assert not make_filter(FilterConfig(name=f"{__name__}:short_episodes")).needs_groups


class TestRefill:
    def test_a_step_is_full_or_waits(self, bench):
        bench = bench()
        bench.learn(batch_size=4)
        good = bench.store_group("01")
        bench.store_group("00")
        bench.store_group("11")
        selector = bench.selector(["all_same"])
        assert selector.claim(0, 4, 0) is None
        accounting = bench.learner.accounting()
        assert (accounting.ready, accounting.filtered_by_reason) == (2, {"all_same": 4}), "counted at once"
        assert bench.bytes_in_redis() == bench.learner.status().num_bytes
        bench.store_group("00")
        good += bench.store_group("10")
        manifest = selector.claim(0, 4, 0)
        assert set(manifest.ids) == set(good)
        assert (manifest.considered, manifest.filtered) == (10, {"all_same": 6})
        assert manifest.filtered_share == 0.6

    def test_the_arrival_of_enough_wakes_it(self, bench):
        bench = bench()
        bench.learn(batch_size=2)
        bench.store_group("00")
        found = []
        waiter = threading.Thread(target=lambda: found.append(bench.selector(["all_same"]).claim(0, 2, 30)))
        waiter.start()
        other = type(bench.learner).connect(bench.valkey.url, "run", timeout_s=10)
        while other.accounting().filtered < 2:
            pass
        good = bench.store_group("01")
        waiter.join(timeout=20)
        assert set(found[0].ids) == set(good)

    def test_what_ranks_is_not_weakened_by_a_trickle(self, bench):
        """StarPO-S keeps a quarter of all the groups that the step has seen, however few come at a time."""
        bench = bench()
        bench.learn(batch_size=4)
        selector, groups = bench.selector([("starpo_s", {"share": 0.25})]), 0
        manifest = None
        while manifest is None:
            for _ in range(2):
                groups += 1
                for reward in (0.0, 1.0 / groups):
                    bench.store_scored(True, reward=reward, group_id=f"g{groups}", group_size=2)
            manifest = selector.claim(0, 4, 0)
        assert groups == 8
        assert {entry.group_id for entry in manifest.entries} == {"g1", "g7"}, "the best of those not dropped before"

    def test_single_trajectories_leave_their_group(self, bench):
        bench = bench()
        bench.learn(batch_size=4)
        first = [bench.store_scored(True, reward=reward, group_id="a", group_size=2) for reward in (0.0, 2.0)]
        second = [bench.store_scored(True, reward=reward, group_id="b", group_size=2) for reward in (3.0, 4.0)]
        path = f"{__name__}:Reward"
        selector = bench.selector([(path, {"at_least": 1.0})])
        assert selector.claim(0, 4, 0) is None
        assert bench.learner.accounting().filtered_by_reason == {path: 1}
        third = bench.store_scored(True, reward=5.0)
        assert set(selector.claim(0, 4, 0).ids) == {first[1], *second, third}

    def test_filters_are_applied_in_turn_and_counted_apart(self, bench):
        bench = bench()
        bench.learn(batch_size=2)
        bench.store_group("00", group_id="a")
        bench.store_group("0001", group_id="b")
        good = bench.store_group("01", group_id="c")
        selector = bench.selector(["all_same", ("difficulty", {"low": 0.4, "high": 0.6})], order="oldest")
        assert set(selector.claim(0, 2, 0).ids) == set(good)
        assert bench.learner.accounting().filtered_by_reason == {"all_same": 2, "difficulty": 4}

    def test_the_next_step_starts_with_what_was_kept(self, bench):
        bench = bench()
        bench.learn(batch_size=2)
        groups = [bench.store_group("01") for _ in range(2)]
        selector = bench.selector(["all_same"], order="oldest")
        taken = [selector.claim(step, 2, 0).ids for step in range(2)]
        assert sorted(taken) == sorted(groups)


def test_filtered_ones_give_back_their_credits(bench, heartbeat):
    """max_staleness 0 and a batch of 4: if filtered ones counted as ahead, the actors would never start again."""
    bench = bench()
    bench.learn(batch_size=4, max_staleness=0)
    bench.commit(Beat(b"peer", heartbeat()))
    bench.learner.admit_engine("http://engine", "e1", 1)
    selector, task, manifest, rounds = bench.selector(["all_same"]), 0, None, 0

    def ask() -> int:
        (outcome,) = bench.commit(Ask(b"peer", CreditRequest(run_id="run", actor_id="actor-0", want=100)))
        return len(outcome.tasks)

    while manifest is None:
        rounds += 1
        granted = ask()
        assert granted > 0 and ask() == 0
        for _ in range(granted):
            group = task // 2
            # Every third group differs.
            bench.store_scored(group % 3 == 2 and task % 2 == 1, group_id=f"g{group}", group_size=2, task_index=task)
            task += 1
        manifest = selector.claim(0, 4, 0)
    assert len(manifest.entries) == 4 and rounds > 1
    assert bench.learner.accounting().filtered == task - 4


def test_a_step_that_waits_because_all_is_filtered_says_so_and_goes_on(bench, caplog):
    bench = bench()
    bench.learn(batch_size=2)
    selector = bench.selector(["all_same"], remind_s=0)
    with caplog.at_level(logging.WARNING, "vagen.buffer.selection"):
        for _ in range(50):
            bench.store_group("00")
            assert selector.claim(0, 2, 0) is None
    assert len(caplog.records) == 50
    last = caplog.records[-1].getMessage()
    assert last.startswith("step 0 waits for 2 trajectories after ")
    assert last.endswith("of 100 candidates the filters dropped 100 (all_same 100), 0 are kept")
    bench.store_group("01")
    assert selector.claim(0, 2, 0).filtered == {"all_same": 100}


def test_a_kill_between_proposal_and_seal_leaves_everything_ready(bench):
    bench = bench()
    bench.learn(batch_size=2)
    bench.store_group("00", group_id="a")
    bench.store_group("01", group_id="b")

    class Killed(Exception):
        pass

    def die(*_):
        raise Killed

    selector = bench.selector(["all_same"], order="oldest")
    selector._store = type("Store", (), {"propose": bench.learner.propose, "decide": die})()
    with pytest.raises(Killed):
        selector.claim(0, 2, 0)
    accounting = bench.learner.accounting()
    assert (accounting.ready, accounting.filtered, accounting.claimed) == (4, 0, 0)
    assert len(bench.selector(["all_same"], order="oldest").claim(0, 2, 0).entries) == 2
    assert bench.learner.accounting().filtered == 2


def test_a_kill_of_redis_at_the_seal_does_all_of_it_or_nothing(bench):
    """Redis dies before the answer: the decision is asked for again and counted once."""
    bench = bench()
    bench.learn(batch_size=2)
    bench.store_group("00", group_id="a")
    bench.store_group("01", group_id="b")
    decide = bench.learner.decide

    def decide_and_die(*args):
        decide(*args)
        os.kill(bench.valkey.pid, signal.SIGKILL)
        bench.valkey._process.wait()
        bench.learner._timeout_s = 0.1
        return decide(*args)

    selector = bench.selector([("starpo_s", {"share": 0.5})])
    store = {"propose": bench.learner.propose, "decide": staticmethod(decide_and_die)}
    selector._store = type("Store", (), store)()
    with pytest.raises(BufferUnavailableError):
        selector.claim(0, 2, 0)
    bench.valkey.start()
    bench.learner._timeout_s = 10
    manifest = Selector(bench.learner, SelectionConfig()).claim(0, 2, 0)
    assert manifest.filtered == {"starpo_s": 2}
    accounting = bench.learner.accounting()
    assert (accounting.filtered_by_reason, accounting.claimed, accounting.ready) == ({"starpo_s": 2}, 2, 0)
