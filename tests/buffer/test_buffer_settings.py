"""Settings that change while a run goes on: checks, effect, persistence, the log of changes."""

from __future__ import annotations

import json
import os
import random
import signal

import pytest
from typer.testing import CliRunner

from vagen.buffer.connection import make_client
from vagen.buffer.keys import Keys
from vagen.buffer.live_settings import LIVE_SETTINGS
from vagen.buffer.requests import Ask, Beat
from vagen.buffer.settings import change_settings, read_changes, read_settings
from vagen.common.errors import ConfigError
from vagen.common.wire import CreditRequest
from vagen.tools.cli import app


def live(bench, **changes):
    return change_settings(make_client(bench.valkey.url), Keys("run"), changes, "somebody")


def value(bench, name):
    return next(s for s in read_settings(make_client(bench.valkey.url), Keys("run")) if s.name == name)


@pytest.fixture
def paced(bench, heartbeat):
    """A bench whose learner wants 4 a step and whose only engine is admitted."""

    def make(max_staleness=1, **config):
        made = bench(**config)
        made.store.announce()
        made.learn(batch_size=4, max_staleness=max_staleness)
        made.commit(Beat(b"peer", heartbeat()))
        assert made.learner.admit_engine("http://engine", "e1", 1)
        return made

    return make


def ask(bench, want=100):
    (outcome,) = bench.commit(Ask(b"peer", CreditRequest(run_id="run", actor_id="actor-0", want=want)))
    return [task.task_index for task in outcome.tasks]


@pytest.mark.parametrize(
    ("name", "bad", "message"),
    [
        ("max_staleness", -1, "$.learner.max_staleness: expected int >= 0, below 2147483648, got -1"),
        ("max_staleness", 0, "$.learner.max_staleness: expected int >= 1 = learner.publish_every - 1"),
        ("max_staleness", "many", '$.learner.max_staleness: expected int, got "many"'),
        ("capacity_bytes", 100, "$.buffer.capacity_bytes: expected int >= 65536, got 100"),
        ("capacity_bytes", 70_000, "$.buffer.capacity_bytes: expected int >= 100000 = what the registered learner"),
        ("when_full", "drop", "$.buffer.when_full"),
        ("max_running", 0, "$.buffer.max_running: expected int >= 1, got 0"),
        ("group_timeout_s", 0, "$.buffer.group_timeout_s: expected seconds > 0, got 0"),
    ],
)
def test_bad_values_change_nothing(bench, name, bad, message):
    bench = bench()
    bench.learner.register(
        "learner", step=0, batch_size=4, max_staleness=2, publish_every=2, required_capacity_bytes=100_000
    )
    with pytest.raises(ConfigError) as error:
        live(bench, **({"max_running": 7} | {name: bad}))
    assert str(error.value).startswith(message)
    assert value(bench, "max_running").source == "recipe"


def test_every_setting_is_told_by_its_recipe(paced):
    bench = paced(capacity_bytes=1 << 20, when_full="drop_oldest")
    states = {state.name: state for state in read_settings(make_client(bench.valkey.url), Keys("run"))}
    assert set(states) == set(LIVE_SETTINGS)
    assert all(state.value is not None and state.value == state.recipe for state in states.values())
    assert (states["when_full"].value, states["max_staleness"].value) == ("drop_oldest", 1)


def test_pacing_follows_at_once_both_ways(paced):
    bench = paced(max_staleness=1)
    live(bench, order="oldest")
    assert len(ask(bench)) == 8
    live(bench, max_staleness=2)
    assert len(ask(bench)) == 4
    live(bench, max_staleness=0)
    assert ask(bench) == []
    live(bench, max_staleness=5, max_running=14)
    assert len(ask(bench)) == 2, "max_running is the bound now"
    live(bench, max_running=None)
    assert len(ask(bench)) == 10


def test_lowered_bound_evicts_at_the_next_claim_and_raised_one_lets_older_data_in(paced):
    bench = paced(max_staleness=3)
    for step in (1, 2, 3):
        bench.publish(step)
    ids = [bench.store_one(version=version) for version in (1, 2, 3, 4)]
    live(bench, max_staleness=1)
    assert bench.learner.accounting().stale == 0
    assert bench.learner.claim(3, 2, 0).ids == ids[:1:-1]
    assert bench.learner.accounting().stale == 2
    assert [bench.commit(bench.put(version=v))[0].verdict for v in (2, 3)] == ["stale", "stored"]
    live(bench, max_staleness=3)
    old = bench.put(version=2)
    assert [bench.commit(put)[0].verdict for put in (old, old)] == ["stored", "duplicate"]
    assert [entry.staleness for entry in bench.learner.claim(4, 2, 0).entries] == [2, 3]
    assert bench.learner.accounting().stale == 3


def test_stale_arrival_stays_decided_when_the_bound_is_raised(paced):
    bench = paced(max_staleness=3)
    bench.publish(1)
    bench.store_one(version=2)
    assert bench.learner.claim(1, 1, 0) is not None
    live(bench, max_staleness=0)
    put = bench.put(version=1)
    assert bench.commit(put)[0].verdict == "stale"
    live(bench, max_staleness=3)
    assert bench.commit(put)[0].verdict == "duplicate"
    assert (bench.learner.accounting().stale, bench.learner.accounting().ready) == (1, 0)


@pytest.mark.parametrize("seed", range(2))
def test_run_never_starves_while_the_bound_moves(paced, seed):
    """Actors that only start what is granted, and a learner: a step comes out of every few rounds."""
    bench, rng = paced(max_staleness=2), random.Random(seed)
    running: list[tuple[int, int]] = []
    step = idle = 0
    while step < 25:
        if rng.random() < 0.3:
            live(bench, max_staleness=rng.randint(0, 6))
        running += [(task, step + 1) for task in ask(bench, 16)]
        rng.shuffle(running)
        for task, version in [running.pop() for _ in range(min(len(running), 6))]:
            bench.commit(bench.put(task_index=task, version=version))
        manifest = bench.learner.claim(step, 4, 0)
        idle = 0 if manifest else idle + 1
        assert idle < 8, bench.learner.status()
        if manifest:
            bound = value(bench, "max_staleness").value
            assert all(entry.staleness <= bound for entry in manifest.entries)
            bench.learner.mark_trained(step)
            bench.learner.done([step])
            step += 1
            bench.publish(step)


def test_group_timeout_holds_for_groups_that_wait_already(bench):
    bench = bench(group_timeout_s=1000)
    bench.learn()
    bench.store_one(group_id="g", group_size=2)
    assert bench.tick(after_s=20) == (0, 0, 0)
    live(bench, group_timeout_s=30)
    assert bench.tick(after_s=9) == (0, 0, 0)
    assert bench.tick(after_s=2) == (0, 1, 0)


def test_capacity_changes_at_once_for_both_scripts(bench):
    bench = bench(capacity_bytes=1 << 20)
    bench.learn()
    bench.store_one(num_bytes=50_000)
    put = bench.put(num_bytes=30_000)
    live(bench, capacity_bytes=1 << 16)
    assert (bench.store.fitting([put]), bench.commit(put)[0].verdict) == ([False], "full")
    assert bench.learner.status().capacity_bytes == 1 << 16
    live(bench, capacity_bytes=None)
    assert (bench.store.fitting([put]), bench.commit(put)[0].verdict) == ([True], "stored")


def test_values_and_log_survive_a_kill_of_redis_and_the_log_is_bounded(bench):
    bench = bench()
    live(bench, max_running=3)
    live(bench, max_running=None, when_full="drop_oldest")
    os.kill(bench.valkey.pid, signal.SIGKILL)
    bench.valkey._process.wait()
    bench.valkey.start()
    client, keys = make_client(bench.valkey.url), Keys("run")
    assert [(c.number, c.name, c.old, c.new, c.by) for c in read_changes(client, keys)][::-1] == [
        (1, "max_running", None, 3, "somebody"),
        (2, "max_running", 3, None, "somebody"),
        (3, "when_full", None, "drop_oldest", "somebody"),
    ]
    assert (value(bench, "when_full").value, value(bench, "max_running").source) == ("drop_oldest", "recipe")
    for number in range(600):
        change_settings(client, keys, {"max_running": number + 1, "group_timeout_s": 5.5}, "somebody")
    numbers = [change.number for change in read_changes(client, keys)]
    assert numbers == list(range(1203, 203, -1))


def test_learner_hears_of_changes_once_and_at_its_start_of_live_values(paced):
    bench = paced()
    assert bench.learner.changed_settings() == {}
    live(bench, max_staleness=4)
    assert bench.learner.changed_settings() == {"max_staleness": {"value": 4, "source": "live"}}
    assert bench.learner.changed_settings() == {}
    live(bench, max_staleness=None)
    assert bench.learner.changed_settings() == {"max_staleness": {"value": 1, "source": "recipe"}}
    live(bench, max_running=9)
    bench.learner._settings = []
    assert bench.learner.changed_settings() == {"max_running": {"value": 9, "source": "live"}}


def vagen(*words):
    done = CliRunner().invoke(app, ["buffer", *map(str, words)])
    return done.exit_code, done.stdout, done.stderr


def test_commands_on_a_running_service(learner, connect, make_trajectory, eventually):
    running, store = learner(capacity_bytes=1 << 20)
    where = ("--run-dir", running.run_dir)
    held = [make_trajectory(actor_seq=seq, num_bytes=500_000) for seq in (1, 2, 3)]
    client = connect(running.ready.endpoint)
    for trajectory in held:
        client.put(trajectory)
    client.wait_acked(held[1].trajectory_id)
    code, out, _ = vagen("set", "capacity_bytes=80000", "max_staleness=7", "--by", "x\x1b[2J", *where)
    assert code == 0 and "80000" in out and "\x1b" not in out
    refusal = client.wait_refused(held[2].trajectory_id)
    assert "$.buffer.capacity_bytes = 80000" in refusal.problem, "what can never fit any more does not wait for ever"
    log = running.run_dir / "buffer" / "buffer.log"
    eventually(lambda: "setting changed: max_staleness = 7 (live" in log.read_text(), "the change is logged")

    assert running.stop() == 0
    running.restart()
    assert "live setting capacity_bytes = 80000" in log.read_text(), "said at start"
    told = {state["name"]: state for state in json.loads(vagen("settings", "--json", *where)[1])}
    assert (told["max_staleness"]["value"], told["max_staleness"]["recipe"]) == (7, 2)
    code, out, _ = vagen("set", "max_staleness=recipe", "--reset", "capacity_bytes", "--json", *where)
    assert {state["source"] for state in json.loads(out)} == {"recipe"}
    changes = json.loads(vagen("settings", "--log", "--json", *where)[1])
    assert [(change["name"], change["new"]) for change in changes[:2]] == [
        ("capacity_bytes", None),
        ("max_staleness", None),
    ]
    for words, message in [
        (("set", *where), "error: expected at least one NAME=VALUE"),
        (("set", "nothing=1", *where), "error: nothing: no live setting; known are max_staleness"),
        (("set", "max_running", *where), "error: max_running: expected NAME=VALUE"),
        (("set", "max_running=1", "max_running=2", *where), "error: max_running: given twice"),
        (("set", "max_running=0", *where), "error: $.buffer.max_running: expected int >= 1, got 0"),
        (("settings",), "error: expected either --run-dir DIR, or --redis URL together with --run NAME"),
        (("settings", "--redis", "unix:///nowhere.sock", "--run", "run"), "error: no Redis answers"),
    ]:
        code, _, err = vagen(*words)
        assert code == 2 and err.startswith(message) and err.count("\n") == 1
