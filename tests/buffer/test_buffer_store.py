"""What is stored, claimed, evicted and freed, on a real Valkey."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest

from vagen.buffer.accounting import read_accounting
from vagen.buffer.connection import make_client
from vagen.buffer.keys import Key, Keys
from vagen.buffer.learner_store import LearnerStore
from vagen.buffer.requests import Beat
from vagen.buffer.server import EmbeddedValkey
from vagen.common.errors import BufferUnavailableError, ConfigError, InfrastructureError


@pytest.fixture(params=["valkey", "redis_server"])
def valkey(request, tmp_path):
    """The contract holds on the embedded Valkey and on Redis."""
    if request.param == "redis_server":
        yield request.getfixturevalue("redis_server")
        return
    server = EmbeddedValkey(tmp_path / "valkey")
    server.start()
    yield server
    server.stop()


def test_payload_comes_back_as_it_came(bench):
    bench = bench()
    bench.learn()
    put = bench.put()
    bench.commit(put)
    manifest = bench.learner.claim(0, 1, 0)
    assert manifest.ids == [put.trajectory_id]
    assert bench.learner.fetch(manifest.ids) == [bytes(put.payload)]


@pytest.mark.parametrize(
    "payload", [b"", b"short", b"\r\n$3\r\n", os.urandom(300_000)], ids=["empty", "short", "RESP", "long"]
)
def test_a_command_arrives_whatever_its_arguments_are(valkey, payload):
    client = make_client(valkey.url)
    pipe = client.pipeline(transaction=True)
    pipe.set("k:é", memoryview(payload), nx=True)
    pipe.eval("return ARGV", 0, memoryview(payload)[1:], "é", 7, 2.5, b"\0", payload)
    pipe.get("k:é")
    assert pipe.execute() == [True, [payload[1:], "é".encode(), b"7", b"2.5", b"\0", payload], payload]
    client.close()


def test_resend_is_stored_once_whatever_became_of_the_first(bench):
    bench = bench()
    bench.learn()
    put = bench.put()
    verdicts = [bench.commit(put)[0].verdict, bench.commit(put)[0].verdict]
    bench.learner.claim(0, 1, 0)
    verdicts.append(bench.commit(put)[0].verdict)
    bench.learner.done([0])
    verdicts.append(bench.commit(put)[0].verdict)
    assert verdicts == ["stored", "duplicate", "duplicate", "duplicate"]
    assert bench.learner.claim(1, 1, 0) is None
    assert bench.bytes_in_redis() == 0
    accounting = bench.learner.accounting()
    assert (accounting.trained, accounting.pending, accounting.duplicates) == (1, 0, 3)


def test_resend_within_one_batch(bench):
    bench = bench()
    bench.learn()
    put = bench.put()
    assert [outcome.verdict for outcome in bench.commit(put, put)] == ["stored", "duplicate"]


def test_claim_is_sealed_over_a_kill_of_redis(bench):
    bench = bench()
    bench.learn()
    for _ in range(6):
        bench.store_one()
    first = bench.learner.claim(1, 4, 0)
    assert len(first.entries) == 4
    assert [entry.staleness for entry in first.entries] == [1] * 4
    os.kill(bench.valkey.pid, signal.SIGKILL)
    bench.valkey._process.wait()
    bench.valkey.start()
    bench.publish(1)
    for _ in range(4):
        bench.store_one(version=2)
    assert bench.learner.claim(1, 4, 0) == first
    second = bench.learner.claim(2, 4, 0)
    assert not set(first.ids) & set(second.ids)
    assert bench.learner.pending_manifests() == [1, 2]
    bench.learner.register("another", step=1, batch_size=4, max_staleness=2)
    assert bench.learner.rollback(0) == [1, 2]
    assert [bench.learner.claim(1, 4, 0), bench.learner.claim(2, 4, 0)] == [first, second]


def test_learner_waits_out_a_restart_of_redis(bench):
    bench = bench()
    bench.learn()
    bench.store_one()
    os.kill(bench.valkey.pid, signal.SIGKILL)
    bench.valkey._process.wait()
    restart = threading.Timer(0.5, bench.valkey.start)
    restart.start()
    assert len(bench.learner.claim(0, 1, 0).entries) == 1
    restart.join()


def test_learner_gives_up_on_a_dead_redis(bench):
    bench = bench()
    bench.learner._timeout_s = 0.3
    os.kill(bench.valkey.pid, signal.SIGKILL)
    bench.valkey._process.wait()
    started = time.monotonic()
    with pytest.raises(BufferUnavailableError, match="propose"):
        bench.learner.claim(0, 1, 0)
    assert time.monotonic() - started < 5


def test_claim_takes_the_freshest_or_the_oldest(bench):
    bench = bench()
    bench.learn(max_staleness=5)
    for step in (1, 2, 3):
        bench.publish(step)
    ids = [bench.store_one(version=version) for version in (3, 1, 4, 2)]
    assert bench.learner.claim(3, 2, 0).ids == [ids[2], ids[0]]
    assert bench.learner.claim(4, 2, 0, "oldest").ids == [ids[1], ids[3]]


def test_stale_is_evicted_at_the_claim_and_counted(bench):
    bench = bench()
    bench.learn(max_staleness=2)
    bench.publish(1)
    bench.store_one(version=[2, 2, 1])
    kept = bench.store_one(version=2)
    manifest = bench.learner.claim(3, 1, 0)
    assert [(entry.trajectory_id, entry.oldest_step, entry.staleness) for entry in manifest.entries] == [(kept, 1, 2)]
    accounting = bench.learner.accounting()
    assert (accounting.stale, accounting.claimed, accounting.ready) == (1, 1, 0)
    assert bench.bytes_in_redis() == bench.learner.status().num_bytes == manifest.num_bytes


def test_staleness_counts_learner_steps_not_versions(bench):
    bench = bench()
    bench.learn(max_staleness=2)
    for _ in range(10):
        bench.publish(0)
    bench.store_one(version=1)
    assert len(bench.learner.claim(2, 1, 0).entries) == 1


def test_late_arrival_is_stale_and_late_resend_is_not_counted_again(bench):
    bench = bench()
    bench.learn(max_staleness=1)
    late = bench.put()
    trained = bench.put()
    bench.commit(trained)
    bench.learner.claim(0, 1, 0)
    bench.learner.done([0])
    bench.publish(5)
    bench.store_one(version=2)
    bench.learner.claim(5, 1, 0)
    client = make_client(bench.valkey.url)
    assert client.zscore(Keys("run")[Key.SEEN], trained.trajectory_id) is None, "seen is trimmed"
    # Both are too old now. One was never decided, the other was trained: only the first is counted.
    outcomes = bench.commit(late, trained, late)
    assert [outcome.verdict for outcome in outcomes] == ["stale", "duplicate", "duplicate"]
    assert outcomes[0].field == "policy_versions"
    accounting = bench.learner.accounting()
    assert (accounting.stale, accounting.trained, accounting.claimed) == (1, 1, 1)
    assert bench.bytes_in_redis() == bench.learner.status().num_bytes


def test_step_going_back_never_reopens_what_was_forgotten(bench):
    bench = bench()
    bench.learn(max_staleness=1)
    put = bench.put()
    bench.commit(put)
    bench.learner.claim(0, 1, 0)
    bench.learner.done([0])
    bench.publish(5)
    bench.store_one(version=2)
    bench.learner.claim(5, 1, 0)
    bench.learner.register("another", step=1, batch_size=4, max_staleness=1)
    bench.learner.rollback(0)
    assert bench.commit(put)[0].verdict == "duplicate"


def test_unknown_version_is_refused_once(bench):
    bench = bench()
    bench.learn()
    put = bench.put(version=[1, 7, 1])
    outcomes = bench.commit(put) + bench.commit(put)
    assert [(outcome.verdict, outcome.field) for outcome in outcomes] == [("refused", "policy_versions")] * 2
    assert "version 7" in outcomes[0].problem and outcomes[0].problem == outcomes[1].problem
    accounting = bench.learner.accounting()
    assert (accounting.refused, accounting.refused_by_field) == (1, {"policy_versions": 1})
    assert bench.bytes_in_redis() == 0


class TestGroups:
    def test_ready_when_complete(self, bench):
        bench = bench()
        bench.learn()
        for _ in range(2):
            bench.store_one(group_id="g", group_size=3)
        assert bench.learner.claim(0, 2, 0) is None
        assert bench.learner.accounting().awaiting_group == 2
        bench.store_one(group_id="g", group_size=3)
        manifest = bench.learner.claim(0, 2, 0)
        assert [entry.group_id for entry in manifest.entries] == ["g"] * 3, "whole groups only"

    def test_ready_when_timed_out_and_late_member_waits_anew(self, bench):
        bench = bench(group_timeout_s=10)
        bench.learn()
        bench.store_one(group_id="g", group_size=3)
        bench.now += 9
        bench.store_one(group_id="g", group_size=3)
        assert bench.tick() == (0, 0, 0)
        assert bench.tick(after_s=1.1) == (0, 1, 0), "the time runs from the first member"
        assert bench.learner.status().room_bytes == 0
        assert len(bench.learner.claim(0, 2, 0).entries) == 2
        bench.store_one(group_id="g", group_size=3)
        assert bench.learner.claim(1, 1, 0) is None
        bench.tick(after_s=11)
        assert len(bench.learner.claim(1, 1, 0).entries) == 1

    def test_late_member_joins_a_group_that_is_still_ready(self, bench):
        bench = bench(group_timeout_s=10)
        bench.learn()
        bench.store_one(group_id="g", group_size=3)
        bench.tick(after_s=11)
        bench.store_one(group_id="g", group_size=3)
        assert len(bench.learner.claim(0, 1, 0).entries) == 2

    def test_odd_sizes_cannot_block_the_learner(self, bench):
        bench = bench()
        bench.learn()
        for group in "ab":
            for _ in range(3):
                bench.store_one(group_id=group, group_size=3)
        assert len(bench.learner.claim(0, 4, 0).entries) == 6
        assert bench.learner.accounting().ready == 0

    def test_exact_fit_is_preferred(self, bench):
        bench = bench()
        bench.learn()
        bench.publish(1)
        single = bench.store_one(version=1)
        for _ in range(3):
            bench.store_one(version=2, group_id="a", group_size=3)
        for _ in range(2):
            bench.store_one(version=1, group_id="b", group_size=2)
        manifest = bench.learner.claim(1, 4, 0)
        assert single in manifest.ids and len(manifest.ids) == 4

    def test_only_the_stale_members_are_evicted(self, bench):
        bench = bench()
        bench.learn(max_staleness=1)
        bench.publish(1)
        old = bench.store_one(version=1, group_id="g", group_size=2)
        new = bench.store_one(version=2, group_id="g", group_size=2)
        manifest = bench.learner.claim(2, 1, 0)
        assert manifest.ids == [new] and old not in manifest.ids
        assert bench.learner.accounting().stale == 1

    def test_group_of_stale_members_vanishes(self, bench):
        bench = bench()
        bench.learn(max_staleness=1)
        for _ in range(2):
            bench.store_one(group_id="g", group_size=2)
        assert bench.learner.claim(5, 1, 0) is None
        accounting = bench.learner.accounting()
        assert (accounting.stale, accounting.pending) == (2, 0)
        assert bench.bytes_in_redis() == 0 == bench.learner.status().num_bytes


class TestCapacity:
    def test_full_is_full_until_done(self, bench):
        bench = bench(capacity_bytes=1 << 16)
        bench.learn()
        puts = [bench.put(num_bytes=20000) for _ in range(4)]
        assert bench.store.fitting(puts) == [True, True, True, False]
        assert [outcome.verdict for outcome in bench.commit(*puts)] == ["stored"] * 3 + ["full"]
        assert bench.bytes_in_redis() <= 1 << 16
        bench.learner.claim(0, 3, 0)
        assert bench.store.fitting(puts[3:]) == [False], "claimed payloads still take room"
        bench.learner.done([0])
        assert bench.store.fitting(puts[3:]) == [True]
        assert bench.commit(puts[3])[0].verdict == "stored"

    def test_first_member_keeps_room_for_its_group(self, bench):
        bench = bench(capacity_bytes=1 << 16)
        bench.learn()
        bench.store_one(num_bytes=14000, group_id="g", group_size=3)
        assert bench.store.fitting([bench.put(num_bytes=20000)]) == [False]
        members = [bench.put(num_bytes=14000, group_id="g", group_size=3) for _ in range(2)]
        assert bench.store.fitting(members) == [True, True]
        assert [outcome.verdict for outcome in bench.commit(*members)] == ["stored", "stored"]
        status = bench.learner.status()
        assert (status.room_bytes, status.ready) == (0, 3)


def test_done_frees_counts_once_and_knows_the_filtered(bench):
    bench = bench()
    bench.learn()
    for _ in range(4):
        bench.store_one()
    manifest = bench.learner.claim(0, 4, 0)
    bench.learner.mark_trained(0)
    assert bench.learner.status().untrained == 0
    assert bench.learner.done([0], filtered=manifest.ids[:1]) == 4
    assert bench.learner.done([0]) == 0
    accounting = bench.learner.accounting()
    assert (accounting.trained, accounting.filtered, accounting.pending) == (3, 1, 0)
    assert bench.learner.status().num_bytes == 0 == bench.bytes_in_redis()
    with pytest.raises(InfrastructureError, match=manifest.ids[0]):
        bench.learner.fetch(manifest.ids)


def test_waiting_claim_wakes_when_enough_arrived(bench):
    bench = bench()
    bench.learn()
    bench.store_one()
    found = []
    waiter = threading.Thread(target=lambda: found.append(bench.learner.claim(0, 2, 20)))
    waiter.start()
    started = time.monotonic()
    bench.store_one()
    waiter.join(timeout=10)
    assert len(found[0].entries) == 2
    assert time.monotonic() - started < 5


def test_versions_never_go_back(bench):
    bench = bench()
    first = bench.publish(3)
    os.kill(bench.valkey.pid, signal.SIGKILL)
    bench.valkey._process.wait()
    bench.valkey.start()
    assert bench.publish(2) == first + 1
    assert bench.learner.version_steps([first, first + 1, 99]) == {first: 3, first + 1: 2}


def test_sequence_gaps_stay_bounded(bench):
    bench = bench()
    bench.learn()
    puts = [bench.put(actor_seq=seq) for seq in (1, 3, 4)]
    bench.commit(*puts)
    client, keys = make_client(bench.valkey.url), Keys("run")
    low, above = keys[Key.SEQ_LOW], keys.of(Key.SEQ_ABOVE, "actor-0")
    assert (client.hget(low, "actor-0"), client.zcard(above)) == (b"1", 2)
    bench.commit(bench.put(actor_seq=2))
    assert (client.hget(low, "actor-0"), client.zcard(above)) == (b"4", 0)
    client.zadd(above, {str(seq): seq for seq in range(6, 4101)})
    bench.commit(bench.put(actor_seq=5000))
    assert (client.hget(low, "actor-0"), client.zcard(above)) == (b"4", 4096)
    bench.commit(bench.put(actor_seq=9000))
    assert (client.hget(low, "actor-0"), client.zcard(above)) == (b"4100", 2)


def test_runs_do_not_see_each_other(bench):
    bench = bench()
    bench.learn()
    bench.store_one()
    assert read_accounting(make_client(bench.valkey.url), Keys("other")).pending == 0


def test_no_redis_is_said_within_seconds(tmp_path):
    started = time.monotonic()
    with pytest.raises(BufferUnavailableError, match="start `vagen-buffer serve`"):
        LearnerStore.connect(f"unix://{tmp_path}/nothing.sock", "run")
    assert time.monotonic() - started < 10
    with pytest.raises(ConfigError, match="redis_url"):
        LearnerStore.connect("http://nonsense", "run")


def test_made_up_actors_do_not_make_redis_grow(bench, heartbeat):
    bench = bench()
    bench.learn()
    client, keys = make_client(bench.valkey.url), Keys("run")
    bench.commit(Beat(b"p", heartbeat()))
    bench.store_one()
    crowd = {f"made-up-{i}": 1 for i in range(10_000)}
    client.hset(keys[Key.SEQ_LOW], mapping=crowd)
    beat = '{"incarnation":"","journalled":0,"in_flight":0,"at":0,"closing":true}'
    client.hset(keys[Key.ACTORS], mapping=dict.fromkeys(crowd, beat))
    sizes = [client.hlen(keys[key]) for key in (Key.SEQ_LOW, Key.ACTORS)]
    (outcome,) = bench.commit(Beat(b"p", heartbeat(actor_id="one-more")))
    assert outcome.verdict == "refused" and "10,000 actors" in outcome.reason
    bench.store_one(actor_id="another")
    assert [client.hlen(keys[key]) for key in (Key.SEQ_LOW, Key.ACTORS)] == sizes
    assert client.exists(keys.of(Key.SEQ_ABOVE, "another")) == 0
    assert bench.commit(Beat(b"p", heartbeat(journalled=7)))[0].verdict == "ok", "known ones go on"
    put = bench.put(actor_seq=2)
    assert [bench.commit(put)[0].verdict for _ in range(2)] == ["stored", "duplicate"]
    assert client.hget(keys[Key.SEQ_LOW], "actor-0") == b"2"
