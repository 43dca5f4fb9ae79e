"""`vagen buffer top` shows what is in Redis, lives through an outage, and leaves the terminal as it was."""

from __future__ import annotations

import io
import json
import os
import pty
import select
import signal
import subprocess
import sys
import termios

import pytest
from rich.console import Console
from typer.testing import CliRunner

from vagen.buffer.accounting import read_ready_staleness
from vagen.buffer.connection import make_client
from vagen.buffer.keys import Keys
from vagen.buffer.requests import Beat
from vagen.buffer.settings import change_settings
from vagen.tools.buffer_top import Watch, render
from vagen.tools.cli import app


@pytest.fixture
def busy(bench, heartbeat):
    """A buffer with 1 trained, 2 stale by one step, 3 fresh, 1 that awaits its group, 1 refused and a live setting."""
    made = bench()
    made.store.announce()
    made.learn(max_staleness=3)
    made.commit(Beat(b"peer", heartbeat(journalled=9, in_flight=1)))
    assert made.learner.admit_engine("http://engine", "e1", 1)
    made.store_one()
    made.learner.claim(0, 1, 0)
    made.learner.mark_trained(0)
    made.learner.done([0])
    made.publish(1)
    for version in (1, 1, 2, 2, 2):
        made.store_one(version=version)
    made.store_one(version=2, group_id="g", group_size=2)
    made.commit(made.put(version=77))
    change_settings(make_client(made.valkey.url), Keys("run"), {"max_running": 77}, "somebody")
    return made


def top(bench, *words):
    where = ("--redis", bench.valkey.url, "--run", "run", "--interval", "0.1")
    done = CliRunner().invoke(app, ["buffer", "top", *where, *words], env={"COLUMNS": "120"})
    assert done.exit_code == 0, done.output
    return done.stdout


def test_json_tells_what_is_there(busy):
    told = json.loads(top(busy, "--json"))
    accounting = told["accounting"]
    assert (accounting["produced"], accounting["trained"], accounting["ready"]) == (9, 1, 5)
    assert (accounting["awaiting_group"], accounting["refused"], accounting["in_flight"]) == (1, 1, 1)
    assert accounting["identity_holds"]
    assert told["staleness"]["units"] == {"0": 3, "1": 2}
    assert (told["engines"][0]["url"], told["engines"][0]["policy_version"]) == ("http://engine", 1)
    assert told["rates"] == dict.fromkeys(("stored", "trained", "filtered", "stale", "refused", "evicted"), 0.0)
    assert told["stored"] == 7
    live = [setting["name"] for setting in told["settings"] if setting["source"] == "live"]
    assert live == ["max_running"]


def test_one_frame_for_people(busy):
    text = top(busy, "--once")
    for part in (
        "learner step 1",
        "holds",
        "actor actor-0",
        "engine http://engine",
        "max_running 77 (live)",
        "at most 3",
    ):
        assert part in text, part


def test_several_shards_are_shown_as_one_and_where_they_differ(two_shards):
    parts = two_shards()
    for bench, number in zip(parts.benches, (2, 3), strict=True):
        for _ in range(number):
            bench.store_one()
    change_settings(*parts.places[1], {"max_running": 9}, "somebody")
    where = ("buffer", "top", "--redis", parts.url, "--run", "run", "--shards", "2", "--interval", "0.1")
    told = json.loads(CliRunner().invoke(app, [*where, "--json"]).stdout)
    assert (told["accounting"]["ready"], told["stored"], told["staleness"]["units"]) == (5, 5, {"0": 5})
    assert {s["name"]: s["by_shard"] for s in told["settings"] if s["by_shard"]} == {"max_running": [256, 9]}
    assert json.loads(CliRunner().invoke(app, [*where, "--json", "--shard", "1"]).stdout)["stored"] == 3
    text = CliRunner().invoke(app, [*where, "--once"], env={"COLUMNS": "300"}).stdout
    assert "buffer of run run · 2 shards" in text and "max_running [256,9] shards differ" in text
    shown = CliRunner().invoke(app, ["buffer", "settings", *where[2:-2]]).stdout
    assert "warning: max_running: shards differ, 0 has 256, 1 has 9" in shown
    assert parts.learner.changed_settings()["max_running"]["by_shard"] == [256, 9]
    change_settings(*parts.places[0], {"max_running": 9}, "somebody")
    assert parts.learner.changed_settings() == {"max_running": {"value": 9, "source": "live"}}


def test_empty_run_is_shown_too(bench):
    assert "no learner yet" in top(bench(), "--once")


def test_rates_are_of_the_time_between_two_looks(busy):
    watch = Watch([(make_client(busy.valkey.url), Keys("run"))], "title", [])
    assert watch.look().rates == {}
    before = watch._last.overview
    for _ in range(6):
        busy.store_one(version=2)
    frame = watch.look()
    assert frame.rates["stored"] == pytest.approx(6 / (frame.overview.at - before.at))


def test_what_actors_call_themselves_cannot_steer_the_terminal(busy, heartbeat):
    busy.commit(Beat(b"peer", heartbeat(actor_id="a\x1b]0;x\x07\x1b[2J")))
    console = Console(file=io.StringIO(), width=120, force_terminal=False)
    shard = (make_client(busy.valkey.url), Keys("run"))
    console.print(render(Watch([shard], "title\x1b[1m", []).look()))
    assert "\x1b" not in console.file.getvalue() and "\x07" not in console.file.getvalue()


def test_staleness_of_what_is_ready_is_exact_and_the_far_end_is_summed(bench):
    bench = bench()
    bench.learn(step=0, max_staleness=1000)
    for step in range(1, 200):
        bench.publish(step)
    bench.learner.mark_trained(198)
    for version in (200, 199, 199, 137, 136, 50, 1):
        bench.store_one(version=version)
    units = read_ready_staleness(make_client(bench.valkey.url), Keys("run")).units
    assert units == {0: 1, 1: 2, 63: 4}


class Terminal:
    """The command on a pseudo-terminal."""

    def __init__(self, *words):
        self.ours, theirs = pty.openpty()
        termios.tcsetwinsize(theirs, (40, 120))
        self.before = termios.tcgetattr(theirs)
        self.theirs = theirs
        command = [sys.executable, "-c", "from vagen.tools.cli import app; app()", "buffer", "top", *words]
        self.process = subprocess.Popen(
            command, stdin=theirs, stdout=theirs, stderr=theirs, env=os.environ | {"TERM": "xterm"}
        )
        self.text = ""

    def read(self):
        if select.select([self.ours], [], [], 0.1)[0]:
            self.text += os.read(self.ours, 1 << 16).decode(errors="replace")
        return self.text

    def close(self):
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        os.close(self.ours)
        os.close(self.theirs)


def test_live_screen_survives_an_outage_and_ends_with_q(busy, eventually):
    terminal = Terminal("--redis", busy.valkey.url, "--run", "run", "--interval", "0.2")
    try:
        eventually(lambda: "learner step 1" in terminal.read(), "the first frame", 60)
        os.kill(busy.valkey.pid, signal.SIGKILL)
        busy.valkey._process.wait()
        eventually(lambda: "Redis is away" in terminal.read(), "the outage is told", 60)
        busy.valkey.start()
        busy.learner.mark_trained(4)
        eventually(lambda: "learner step 5" in terminal.read(), "it goes on", 60)
        os.write(terminal.ours, b"q")
        eventually(lambda: terminal.read() and terminal.process.poll() is not None, "q ends it", 60)
        assert terminal.process.returncode == 0
        assert termios.tcgetattr(terminal.theirs) == terminal.before
    finally:
        terminal.close()


def test_an_engine_with_late_weights_is_shown_as_such(busy):
    assert [engine["is_late"] for engine in json.loads(top(busy, "--json"))["engines"]] == [False]
    busy.learner.register("learner", step=3, batch_size=4, max_staleness=3)
    assert [engine["is_late"] for engine in json.loads(top(busy, "--json"))["engines"]] == [True]
    assert "version 1, late, local" in top(busy, "--once")
