"""Order and filters that are set while a learner chooses: when they hold, what is counted, what cannot be applied."""

from __future__ import annotations

import logging
import os
import signal
import sys

import pytest
from typer.testing import CliRunner

from vagen.buffer.connection import make_client
from vagen.buffer.keys import Keys
from vagen.buffer.selection.config import PriorityConfig, SelectionConfig
from vagen.buffer.settings import change_settings, combine_settings, read_settings, warnings
from vagen.buffer.sharded_store import make_selector
from vagen.common.errors import ConfigError
from vagen.tools.cli import app

ALL_SAME = [{"name": "all_same"}]


def live(bench, **changes):
    return change_settings(make_client(bench.valkey.url), Keys("run"), changes, "somebody")


def state(bench, name):
    return next(s for s in read_settings(make_client(bench.valkey.url), Keys("run")) if s.name == name)


@pytest.fixture
def learning(bench):
    """A bench whose learner wants 2 a step and a selector that looks at the live settings."""

    def make(selection=SelectionConfig(), group_size=2, **config):
        made = bench(**config)
        made.store.announce()
        made.learn(batch_size=2, max_staleness=5, group_size=group_size, selection=selection)
        return made, make_selector(made.learner, selection)

    return make


@pytest.fixture
def own_module(tmp_path, monkeypatch):
    """Writes or removes a module with a filter `nothing`."""
    monkeypatch.syspath_prepend(tmp_path)
    name = f"own_filters_{tmp_path.name}".replace("-", "_")

    def change(text):
        sys.modules.pop(name, None)
        file = tmp_path / f"{name}.py"
        file.unlink(missing_ok=True)
        if text:
            file.write_text(text)
        return f"{name}:nothing"

    return change


def test_order_holds_from_the_next_step_and_over_restarts(learning, caplog):
    bench, selector = learning()
    for step in (1, 2, 3):
        bench.publish(step)
    ids = [bench.store_one(version=version) for version in (1, 2, 3, 4)]
    with caplog.at_level(logging.INFO, "vagen.buffer.selection"):
        assert selector.claim(3, 1, 0).ids == [ids[3]]
        live(bench, order="oldest")
        assert selector.claim(3, 1, 0).ids == [ids[3]], "a sealed step stays as it is"
        assert selector.claim(4, 1, 0).ids == [ids[0]]
    assert 'batches are chosen by order = "oldest", filters = []' in caplog.text
    os.kill(bench.valkey.pid, signal.SIGKILL)
    bench.valkey._process.wait()
    bench.valkey.start()
    again = make_selector(type(bench.learner).connect(bench.valkey.url, "run", timeout_s=10), SelectionConfig())
    assert again.claim(5, 1, 0).ids == [ids[1]]
    live(bench, order=None)
    assert again.claim(6, 1, 0).ids == [ids[2]]
    assert (state(bench, "order").value, state(bench, "order").source) == ("freshest", "recipe")


def test_a_step_that_waits_begins_again_and_every_trajectory_is_counted_once(learning):
    bench, selector = learning(SelectionConfig(order="oldest"))
    live(bench, filters=ALL_SAME)
    same = bench.store_group("00")
    assert selector.claim(0, 2, 0) is None
    kept = bench.store_group("0001")
    live(bench, filters=[{"name": "difficulty", "options": {"low": 0.4}}])
    assert selector.claim(0, 2, 0) is None, "the new filter drops what the former one would have kept"
    assert bench.learner.accounting().filtered_by_reason == {"all_same": 2, "difficulty": 4}
    third = bench.store_group("11")
    live(bench, filters=[])
    manifest = selector.claim(0, 2, 0)
    assert set(manifest.ids) == set(third), "without filters everything will do"
    assert (manifest.considered, manifest.filtered) == (8, {"all_same": 2, "difficulty": 4})
    accounting = bench.learner.accounting()
    assert (accounting.claimed, accounting.ready, accounting.filtered) == (2, 0, len(same) + len(kept))
    assert bench.bytes_in_redis() == bench.learner.status().num_bytes
    assert bench.learner.done([0]) == 2
    assert bench.learner.accounting().trained == 2


def test_what_was_kept_by_the_former_order_has_no_precedence(learning):
    bench, selector = learning(SelectionConfig(order="oldest"))
    bench.publish(1)
    live(bench, filters=ALL_SAME)
    bench.store_group("00", group_id="a", version=1)
    bench.store_group("01", group_id="b", version=1)
    assert selector.claim(1, 4, 0) is None
    for name in "cd":
        bench.store_group("01", group_id=name, version=2)
    live(bench, order="freshest")
    manifest = selector.claim(1, 4, 0)
    assert {entry.group_id for entry in manifest.entries} == {"c", "d"}
    assert (manifest.considered, manifest.filtered) == (6, {"all_same": 2})


def test_the_journal_is_told(learning):
    bench, _ = learning()
    bench.learner.changed_settings()
    live(bench, order="uniform", filters=ALL_SAME)
    assert bench.learner.changed_settings() == {
        "order": {"value": "uniform", "source": "live"},
        "filters": {"value": [{"name": "all_same", "options": {}}], "source": "live"},
    }


def test_what_the_learner_cannot_import_is_told_and_changes_nothing(learning, own_module, caplog):
    bench, selector = learning(SelectionConfig(order="oldest"))
    path = own_module("def nothing(units):\n    return []\n")
    live(bench, filters=[{"name": path}])
    own_module("raise RuntimeError('no licence')")
    bench.store_one()
    second = bench.store_one()
    with caplog.at_level(logging.WARNING, "vagen.buffer.selection"):
        assert len(selector.claim(0, 1, 0).entries) == 1
        assert selector.claim(1, 1, 0).ids == [second]
    assert [record.getMessage() for record in caplog.records] == [
        f"step 0: live setting filters is not in force, the learner keeps []: "
        f"$.learner.selection.filters[0].name: cannot import '{path}': no licence"
    ]
    assert "keeps []" in state(bench, "filters").problem
    assert "no licence" in warnings([state(bench, "filters")])[0]
    shown = CliRunner().invoke(app, ["buffer", "settings", "--redis", bench.valkey.url, "--run", "run"]).stdout
    assert "warning: filters: not in force, the learner keeps []" in shown
    assert "problem" in bench.learner.changed_settings()["filters"]

    own_module("def nothing(units):\n    return [m.trajectory_id for u in units for m in u.members if u.name < '0']\n")
    live(bench, filters=[{"name": path}])
    bench.store_one()
    assert selector.claim(2, 1, 0).considered == 1, "set again, it is tried again"
    assert state(bench, "filters").problem is None


@pytest.mark.parametrize(
    ("name", "bad", "message"),
    [
        ("order", "newest", "$.learner.selection.order: "),
        ("order", "priority", "$.learner.selection.order: expected an order other than priority, the buffer"),
        ("filters", [{"name": "magic"}], "$.learner.selection.filters[0].name: expected one of all_same"),
        ("filters", [{"name": "nowhere:f"}], "$.learner.selection.filters[0].name: cannot import 'nowhere:f'"),
        ("filters", "all_same", "$.learner.selection.filters: expected array"),
        (
            "filters",
            [{"name": "all_same"}, {"name": "starpo_s", "options": {"share": 2}}],
            "$.learner.selection.filters[1].options.share: expected float <= 1.0, got 2",
        ),
    ],
)
def test_bad_values_are_refused(learning, name, bad, message):
    bench, _ = learning()
    with pytest.raises(ConfigError) as error:
        live(bench, **{name: bad})
    assert str(error.value).startswith(message)
    assert state(bench, name).source == "recipe"


def test_a_filter_that_compares_needs_groups(learning):
    bench, _ = learning(group_size=1)
    with pytest.raises(ConfigError, match="a filter of single trajectories with actor.group_size 1"):
        live(bench, filters=ALL_SAME)


def test_priority_can_be_set_where_the_buffer_ranks(learning):
    bench, selector = learning(priority=PriorityConfig(function="total_reward"))
    live(bench, order="priority")
    for reward in (1.0, 4.0):
        bench.store_scored(True, reward=reward)
    assert not selector.claim(0, 2, 0).has_equal_weights


def test_shards_that_differ_are_told(learning):
    bench, _ = learning()
    before = read_settings(make_client(bench.valkey.url), Keys("run"))
    now = live(bench, order="oldest")
    order = next(s for s in combine_settings([now, before, now]) if s.name == "order")
    assert order.by_shard == ["oldest", "freshest", "oldest"]
    assert warnings([order]) == [
        'order: shards differ, 0 has "oldest", 1 has "freshest", 2 has "oldest"; `vagen buffer set order=...` sets all'
    ]
    assert all(s.by_shard is None for s in combine_settings([now, now]))


def test_yaml_values_on_the_command_line(learning):
    bench, _ = learning()
    where = ("--redis", bench.valkey.url, "--run", "run")
    words = ["buffer", "set", "order=oldest", "filters=[{name: reward_variance, options: {min_variance: 0.5}}]", *where]
    assert CliRunner().invoke(app, words).exit_code == 0
    assert state(bench, "filters").value == [{"name": "reward_variance", "options": {"min_variance": 0.5}}]
    assert CliRunner().invoke(app, ["buffer", "set", "filters=recipe", *where]).exit_code == 0
    assert (state(bench, "filters").source, state(bench, "order").value) == ("recipe", "oldest")
