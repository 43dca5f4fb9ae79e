"""Successes that are kept and trained on again: bounded, apart from the accounting identity."""

from __future__ import annotations

import pytest

from vagen.buffer.accounting import format_accounting
from vagen.buffer.keys import Key
from vagen.buffer.selection.config import ReplayConfig

KEPT = {"replay_max_bytes": 1 << 20, "replay_max_staleness": 8}


@pytest.fixture
def trained(bench):
    """A bench whose step 0 trained two successes and two failures; returns it with the ids of the successes."""

    def make(**more):
        made = bench()
        made.learn(batch_size=4, max_staleness=8, **(KEPT | more))
        ids = made.store_group("0011")
        made.learner.claim(0, 4, 0)
        made.learner.done([0])
        return made, ids[2:]

    return make


def replaying(bench, share=0.5, **more):
    return bench.selector(order="oldest", replay=ReplayConfig(share=share), **more)


def test_off_by_default(bench):
    bench = bench()
    bench.learn()
    bench.store_group("11")
    bench.learner.claim(0, 2, 0)
    bench.learner.done([0])
    assert bench.bytes_in_redis(Key.REPLAY_PAYLOAD) == bench.learner.status().replay_bytes == 0


def test_successes_alone_are_kept_and_room_is_given_back(trained):
    bench, successes = trained()
    status = bench.learner.status()
    assert status.num_bytes == 0 == bench.bytes_in_redis()
    assert status.replay_bytes == bench.bytes_in_redis(Key.REPLAY_PAYLOAD) > 0
    assert len(bench.learner.fetch(successes)) == 2


def test_a_batch_takes_its_share_and_no_more(trained):
    bench, successes = trained()
    fresh = [bench.store_one() for _ in range(4)]
    manifest = replaying(bench, share=0.49).claim(1, 4, 0)
    assert [entry.replayed for entry in manifest.entries] == [False] * 3 + [True]
    assert set(manifest.ids[:3]) <= set(fresh) and manifest.ids[3] in successes
    assert manifest.num_replayed == 1
    entry = manifest.entries[3]
    assert (entry.staleness, entry.weight) == (1, 1.0)


def test_a_step_can_be_filled_by_replay_where_fresh_data_lacks(trained):
    bench, successes = trained()
    bench.store_one()
    assert replaying(bench).claim(1, 4, 0) is None, "the share is a bound"
    bench.store_one()
    assert set(replaying(bench).claim(1, 4, 0).ids[2:]) == set(successes)


def test_claim_again_is_identical_and_a_claimed_one_is_in_one_batch_only(trained):
    bench, successes = trained()
    for _ in range(6):
        bench.store_one()
    first = replaying(bench).claim(1, 4, 0)
    assert set(first.ids[2:]) == set(successes)
    second = replaying(bench).claim(2, 4, 0)
    assert second.num_replayed == 0
    assert replaying(bench).claim(1, 4, 0) == first
    assert len(bench.learner.fetch(first.ids)) == 4


def test_reuse_is_counted_apart_and_first_training_once(trained):
    bench, _ = trained()
    for step in (1, 2):
        bench.store_one(success=False)
        bench.store_one(success=False)
        replaying(bench).claim(step, 4, 0)
        status = bench.learner.status()
        assert (status.claimed, status.untrained) == (2, 2)
        bench.learner.mark_trained(step)
        assert bench.learner.done([step]) == 2
        assert bench.learner.done([step]) == 0
    accounting = bench.learner.accounting()
    assert (accounting.trained, accounting.replayed, accounting.claimed) == (8, 4, 0)
    assert accounting.accounted == 8
    assert "replayed 4" in format_accounting(accounting)


def test_too_stale_is_forgotten(trained):
    bench, _ = trained(replay_max_staleness=3)
    bench.publish(3)
    for _ in range(8):
        bench.store_one(version=2, success=False)
    assert replaying(bench).claim(3, 4, 0).num_replayed == 2
    bench.learner.done([3])
    assert replaying(bench).claim(4, 4, 0).num_replayed == 0
    assert bench.learner.status().replay_bytes == 0 == bench.bytes_in_redis(Key.REPLAY_PAYLOAD)


def test_the_bound_holds_and_the_oldest_go_first(bench):
    bench = bench()
    bench.learn(batch_size=1, max_staleness=8, replay_max_bytes=10_000, replay_max_staleness=8)
    ids = []
    for step in range(4):
        ids.append(bench.store_one(version=step + 1))
        bench.learner.claim(step, 1, 0)
        bench.learner.done([step])
        assert bench.learner.status().replay_bytes <= 10_000
        bench.publish(step + 1)
    kept = [bench.learner.fetch([one]) for one in ids[-2:]]
    assert len(kept) == 2
    with pytest.raises(Exception, match=ids[0]):
        bench.learner.fetch(ids[:1])


def test_a_claimed_one_is_not_forgotten_before_its_step_is_done(trained):
    bench, successes = trained()
    for _ in range(2):
        bench.store_one()
    manifest = replaying(bench).claim(1, 4, 0)
    bench.learner.register("another", step=1, batch_size=4, max_staleness=8)
    assert len(bench.learner.fetch(manifest.ids)) == 4, "replay was turned off, the batch stays whole"
    bench.learner.done([1])
    assert bench.learner.status().replay_bytes == 0 == bench.bytes_in_redis(Key.REPLAY_PAYLOAD)


def test_a_resend_of_a_kept_one_leaves_it_alone(bench):
    bench = bench()
    bench.learn(batch_size=1, **KEPT)
    put = bench.put()
    bench.commit(put)
    bench.learner.claim(0, 1, 0)
    bench.learner.done([0])
    assert bench.commit(put)[0].verdict == "duplicate"
    assert bench.learner.fetch([put.trajectory_id]) == [bytes(put.payload)]
    assert bench.bytes_in_redis() == 0
