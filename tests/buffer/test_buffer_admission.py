"""Who may start how many episodes: the rule, and the leases behind it."""

from __future__ import annotations

import os
import signal
import time

import numpy as np
import pytest
from msgspec.structs import replace

from vagen.buffer.admission import Pacing, start_credits
from vagen.buffer.connection import make_client
from vagen.buffer.keys import Keys
from vagen.buffer.requests import Ask, Beat, Failure
from vagen.buffer.settings import change_settings
from vagen.common.trajectory import BootstrapPrompt, End
from vagen.common.wire import CreditRequest, EpisodeFailed


@pytest.mark.parametrize(
    ("change", "credits", "reason"),
    [
        ({}, 22, ""),
        ({"batch_size": None}, 0, "no learner"),
        ({"engines": 0}, 0, "no engine"),
        ({"max_running": 12}, 7, ""),
        ({"max_running": 5}, 0, "5 episodes run of at most 5"),
        ({"ready": 12}, 10, ""),
        ({"ready": 60}, 0, "70 trajectories are ahead of the learner, at most 32"),
        ({"ready": 22}, 0, "32 trajectories"),
        ({"max_staleness": 0}, 0, "10 trajectories are ahead of the learner, at most 8"),
        ({"steps_left": 9}, 22, ""),
        ({"steps_left": 3}, 14, ""),
        ({"steps_left": 1}, 0, "10 trajectories are ahead of the learner, its last steps take 8"),
    ],
)
def test_rule(change, credits, reason):
    # (3 + 1) * 8 = 32 may be ahead, 5 are claimed and untrained, 5 run.
    values = {"max_running": 100, "batch_size": 8, "max_staleness": 3, "ready": 0, "untrained": 5, "running": 5}
    granted, why = start_credits(Pacing(**(values | {"engines": 1} | change)))
    assert granted == credits
    assert reason in why and bool(why) == (credits == 0)


@pytest.fixture
def paced(bench, heartbeat):
    """A bench with a learner of B = 4 and max_staleness = 1, and one admitted engine; `ask` asks for tasks."""

    def make(**config):
        made = bench(**config)
        made.learn(batch_size=4, max_staleness=1)
        made.commit(Beat(b"peer", heartbeat()))
        assert made.learner.admit_engine("http://engine", "e1", 1)
        return made

    return make


def ask(bench, want, actor="actor-0", engines=()):
    (outcome,) = bench.commit(Ask(b"peer", CreditRequest(run_id="run", actor_id=actor, want=want, engines=engines)))
    return [(task.task_index, task.attempt) for task in outcome.tasks], outcome.reason


def beat(bench, heartbeat, *tasks, **fields):
    bench.commit(Beat(b"peer", heartbeat(running_tasks=tasks, **fields)))


def fail(bench, task, attempt, actor="actor-0"):
    message = EpisodeFailed(run_id="run", actor_id=actor, task_index=task, attempt=attempt, error="boom")
    return bench.commit(Failure(b"peer", message))


def test_no_learner_then_no_engine(bench, heartbeat):
    bench = bench()
    assert ask(bench, 1) == ([], "no learner has registered")
    bench.learn()
    assert ask(bench, 1) == ([], "no engine is admitted")
    beat(bench, heartbeat)
    assert ask(bench, 1) == ([], "no engine is admitted")
    bench.learner.admit_engine("http://engine", "e1", 1)
    assert ask(bench, 1) == ([(0, 0)], "")


def test_credits_follow_what_is_ahead_of_the_learner(paced, heartbeat):
    bench = paced()
    change_settings(make_client(bench.valkey.url), Keys("run"), {"order": "oldest"}, "somebody")
    assert ask(bench, 100)[0] == [(index, 0) for index in range(8)]
    assert ask(bench, 1)[0] == []
    for index in range(4):
        bench.store_one(task_index=index)
    assert ask(bench, 1)[0] == [], "a finished episode is as far ahead as a running one"
    bench.learner.claim(0, 4, 0)
    assert ask(bench, 1)[0] == [], "and so is a claimed one"
    bench.learner.mark_trained(0)
    assert ask(bench, 100)[0] == [(index, 0) for index in range(8, 12)], "pacing does not wait for the checkpoint"
    bench.learner.rollback(-1)
    assert bench.learner.status().untrained == 4, "what is to be trained again counts again"


def test_several_askers_in_one_batch_share_the_credits(paced):
    bench = paced()
    outcomes = bench.commit(*(Ask(b"peer", CreditRequest(run_id="run", actor_id=f"a{i}", want=5)) for i in range(3)))
    assert [len(outcome.tasks) for outcome in outcomes] == [5, 3, 0]
    assert len({task.task_index for outcome in outcomes for task in outcome.tasks}) == 8


def test_max_running(paced):
    bench = paced(max_running=3)
    assert len(ask(bench, 100)[0]) == 3
    assert ask(bench, 1) == ([], "3 episodes run of at most 3")


def test_lease_ends_without_heartbeat_and_the_task_goes_first(paced, heartbeat):
    bench = paced(lease_s=10, heartbeat_timeout_s=1000)
    ask(bench, 3)
    bench.now += 6
    beat(bench, heartbeat, 0, 2)
    assert bench.tick(after_s=5) == (1, 0, 0), "task 1 was never listed"
    assert ask(bench, 2, "actor-1")[0] == [(1, 1), (3, 0)]
    bench.now += 6
    beat(bench, heartbeat, 0, 1, 2)
    assert bench.tick(after_s=5) == (2, 0, 0), "the former owner of task 1 does not renew actor-1's lease"
    assert ask(bench, 3, "actor-1")[0] == [(1, 2), (3, 1), (4, 0)]


def test_silent_actor_takes_its_task_up_again(paced, heartbeat):
    bench = paced(lease_s=10, heartbeat_timeout_s=1000)
    ask(bench, 1)
    bench.tick(after_s=11)
    beat(bench, heartbeat, 0)
    assert bench.learner.status().running == 1
    assert ask(bench, 1)[0] == [(1, 0)]


def test_last_fragment_ends_the_lease(paced):
    bench = paced()
    ask(bench, 2)
    bench.store_one(task_index=0)
    assert bench.learner.status().running == 1
    bench.store_one(task_index=1)
    assert bench.learner.status().running == 0
    assert ask(bench, 1)[0] == [(2, 0)]


def test_late_result_of_a_lost_attempt_is_kept_and_leaves_the_new_lease(paced, heartbeat):
    bench = paced(lease_s=10, heartbeat_timeout_s=1000)
    ask(bench, 1)
    bench.tick(after_s=11)
    assert ask(bench, 1, "actor-1")[0] == [(0, 1)]
    bench.store_one(task_index=0, attempt=0)
    assert bench.learner.status().running == 1
    bench.store_one(task_index=0, attempt=1)
    assert bench.learner.status().running == 0


def test_refused_and_stale_results_end_the_lease(paced):
    bench = paced()
    ask(bench, 1)
    assert bench.commit(bench.put(task_index=0, version=99))[0].verdict == "refused"
    assert bench.learner.status().running == 0


def test_failed_episode_is_granted_again_and_counted_once(paced):
    bench = paced(max_attempts=3)
    ask(bench, 1)
    fail(bench, 0, 0)
    fail(bench, 0, 0)
    fail(bench, 0, 0, "somebody-else")
    assert ask(bench, 1)[0] == [(0, 1)]
    fail(bench, 0, 0)
    assert bench.learner.status().running == 1, "a resend about the first attempt does not end the second"
    fail(bench, 0, 1)
    assert ask(bench, 1)[0] == [(0, 2)]
    fail(bench, 0, 2)
    assert ask(bench, 1)[0] == [(1, 0)], "three attempts are enough"
    accounting = bench.learner.accounting()
    assert (accounting.failed_episodes, accounting.tasks_abandoned) == (3, 1)


def test_closing_actor_returns_its_tasks_at_once(paced, heartbeat):
    bench = paced()
    ask(bench, 2)
    ask(bench, 1, "actor-1")
    beat(bench, heartbeat, 0, closing=True)
    assert bench.learner.status().running == 1
    assert ask(bench, 2, "actor-1")[0] == [(0, 1), (1, 1)]


def test_cut_episode_whose_rest_never_comes_is_counted(paced):
    bench = paced(lease_s=10)
    ask(bench, 1)
    prompt = BootstrapPrompt(token_ids=np.array([1, 2], np.int32))
    bench.store_one(task_index=0, is_last=False, end=End.CUT, bootstrap=prompt)
    assert bench.learner.status().running == 1, "only the last fragment ends the lease"
    bench.tick(after_s=11)
    assert ask(bench, 1, "actor-1")[0] == [(0, 1)]
    assert bench.learner.accounting().episodes_abandoned == 1


def test_restart_of_redis_grants_no_burst(paced):
    bench = paced()
    first = ask(bench, 5)[0]
    os.kill(bench.valkey.pid, signal.SIGKILL)
    bench.valkey._process.wait()
    bench.valkey.start()
    bench.now += 1000
    bench.store._client.close()
    bench.store.renew_all(bench.now)
    assert bench.tick() == (0, 0, 0), "nobody could send a heartbeat meanwhile"
    second = ask(bench, 100)[0]
    assert len(first) + len(second) == 8
    assert {index for index, _ in second} == {5, 6, 7}


def test_engine_leaves_with_its_heartbeats_and_loses_admission_with_a_restart(bench, heartbeat):
    bench = bench(heartbeat_timeout_s=10)
    bench.learn()
    beat(bench, heartbeat)
    assert [(engine.url, engine.incarnation) for engine in bench.learner.engines()] == [("http://engine", "e1")]
    assert not bench.learner.admit_engine("http://engine", "e0", 1), "not that incarnation"
    assert bench.learner.admit_engine("http://engine", "e1", 1)
    beat(bench, heartbeat)
    assert bench.learner.status().engines == 1
    (engine,) = heartbeat().engines
    beat(bench, heartbeat, engines=(replace(engine, incarnation="e2"),))
    assert bench.learner.status().engines == 0
    assert bench.learner.admit_engine("http://engine", "e2", 1)
    assert not bench.learner.withdraw_engine("http://engine", "e1")
    assert bench.learner.withdraw_engine("http://engine", "e2")
    assert bench.learner.admit_engine("http://engine", "e2", 1)
    assert bench.tick(after_s=11) == (0, 0, 1)
    assert bench.learner.engines() == [] and bench.learner.status().engines == 0
    assert bench.learner.status().policy_version == 1


def test_journalled_never_goes_back(bench, heartbeat):
    bench = bench()
    beat(bench, heartbeat, journalled=7, in_flight=2)
    beat(bench, heartbeat, journalled=5, in_flight=1)
    accounting = bench.learner.accounting()
    assert (accounting.produced, accounting.in_flight) == (7, 1)


@pytest.mark.parametrize("killed", ["ingest", "redis", "both"])
def test_restart_of_any_part_grants_no_burst(learner, connect, heartbeat, eventually, killed):
    """The state behind the credits is rebuilt: what ran goes on, also when it was down for longer than a lease."""
    lease_s = 6.0
    running, store = learner(lease_s=lease_s, heartbeat_timeout_s=60)
    client = connect(running.ready.endpoint)
    client.ask(heartbeat())
    assert store.admit_engine("http://engine", "e1", 1)
    first = client.ask(CreditRequest(run_id="run", actor_id="actor-0", want=5)).tasks
    assert len(first) == 5

    granted_at = time.monotonic()
    if killed != "redis":
        running.kill()
    if killed != "ingest":
        running.kill_valkey()
    if killed != "redis":
        eventually(lambda: time.monotonic() > granted_at + lease_s, "every lease would have ended")
        running.restart()
    tasks = tuple(task.task_index for task in first)
    client.ask(heartbeat(running_tasks=tasks))
    second = client.ask(CreditRequest(run_id="run", actor_id="actor-1", want=100)).tasks
    assert [(task.task_index, task.attempt) for task in second] == [(index, 0) for index in range(5, 9)]
    assert client.ask(CreditRequest(run_id="run", actor_id="actor-1", want=1)).tasks == ()
    assert store.status().running == 9


@pytest.mark.parametrize(
    ("max_staleness", "publish_every", "first_late_step"),
    [
        (3, 1, 3),  # weights of step 0 may begin episodes at steps 0, 1 and 2 = max_staleness - 1
        (1, 1, 1),
        (0, 1, 1),  # the learner's own last publish is never late: it waits for data of it
        (1, 2, 2),
        (3, 4, 4),
    ],
)
def test_weights_are_late_from_a_step_on(bench, heartbeat, max_staleness, publish_every, first_late_step):
    bench = bench()
    pacing = {"max_staleness": max_staleness, "publish_every": publish_every}
    bench.learn(**pacing)
    beat(bench, heartbeat)
    bench.learner.admit_engine("http://engine", "e1", 1)
    own = ("http://engine",)
    for step in range(first_late_step):
        bench.learner.register("learner", step=step, batch_size=4, **pacing)
        assert len(ask(bench, 1, engines=own)[0]) == 1, step
    bench.learner.register("learner", step=first_late_step, batch_size=4, **pacing)
    tasks, reason = ask(bench, 1, engines=own)
    assert tasks == [] and reason == "weights of version 1 are late, and no engine of the actor has newer ones"
    bench.learner.admit_engine("http://engine", "e1", bench.publish(first_late_step))
    assert len(ask(bench, 1, engines=own)[0]) == 1


def test_an_actor_whose_engines_are_all_late_is_granted_nothing(bench, heartbeat):
    bench = bench()
    bench.learn(max_staleness=2)
    (first,) = heartbeat().engines
    beat(bench, heartbeat, engines=(first, replace(first, url="http://other")))
    bench.learner.admit_engine("http://engine", "e1", 1)
    bench.learner.register("learner", step=2, batch_size=4, max_staleness=2)
    bench.learner.admit_engine("http://other", "e1", bench.publish(2))
    _, status = bench.store.commit([], bench.now)
    assert {engine.url: engine.is_late for engine in status.engines} == {"http://engine": True, "http://other": False}
    assert len(ask(bench, 1, engines=("http://engine", "http://other"))[0]) == 1
    assert ask(bench, 1, engines=("http://unknown",)) == ([], "not admitted: http://unknown")
    assert ask(bench, 1, engines=("http://engine",))[0] == []


def test_a_live_max_staleness_moves_what_is_late(bench, heartbeat):
    bench = bench()
    bench.learn(max_staleness=2)
    beat(bench, heartbeat)
    bench.learner.admit_engine("http://engine", "e1", 1)
    bench.learner.register("learner", step=2, batch_size=4, max_staleness=2)
    assert ask(bench, 1, engines=("http://engine",))[0] == []
    change_settings(make_client(bench.valkey.url), Keys("run"), {"max_staleness": 3}, "somebody")
    assert len(ask(bench, 1, engines=("http://engine",))[0]) == 1
