"""`vagen buffer save, merge, filter, stat, relabel, recompute-rewards` as a person calls them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import numpy as np
import pytest
from typer.testing import CliRunner

from vagen.buffer.archive.operations import load_hook
from vagen.buffer.archive.reader import open_archive
from vagen.buffer.archive.selection import Selection
from vagen.buffer.archive.writer import ArchiveWriter
from vagen.buffer.config import BufferConfig
from vagen.buffer.learner_store import LearnerStore
from vagen.buffer.store import IngestStore
from vagen.common.errors import ConfigError
from vagen.common.trajectory import EngineIdentity
from vagen.common.wire import encode_trajectory
from vagen.tools.cli import app


def vagen(*words: str | Path, code: int = 0) -> str:
    """Standard output of a command that ends with `code`; standard error where that is not 0."""
    done = CliRunner().invoke(app, ["buffer", *map(str, words)])
    assert done.exit_code == code, (done.output, done.exception)
    return done.stdout if code == 0 else done.stderr


def ids(folder: Path) -> list[str]:
    return open_archive(folder).table(["trajectory_id"])["trajectory_id"].to_pylist()


def test_what_a_live_buffer_holds_is_saved_and_nothing_is_taken(valkey, tmp_path, varied, put_of):
    ingest, learner = IngestStore(valkey.url, "run", BufferConfig()), LearnerStore.connect(valkey.url, "run")
    learner.register("learner", step=3, batch_size=2, max_staleness=8)
    version = learner.next_version()
    learner.record_version(version, "learner", 1, "checksum")
    alone = [varied(number, version=version) for number in range(4)]
    waiting = varied(4, version=version, group_id="incomplete", group_size=2)
    puts = [put_of(t) for t in (*alone, waiting)]
    assert {o.verdict for o in ingest.commit(puts, time.time()).outcomes} == {"stored"}
    manifest = learner.claim(3, 2, timeout_s=10)
    assert manifest is not None
    before = learner.status(), learner.accounting()

    out = tmp_path / "saved"
    facts = json.loads(vagen("save", out, "--redis", valkey.url, "--run", "run", "--json"))
    assert facts == {"out": str(out), "trajectories": 5, "gone_meanwhile": 0}
    assert (learner.status(), learner.accounting()) == before
    archive = open_archive(out)
    assert [record.trajectory.trajectory_id for record in archive.read_step(3)] == manifest.ids
    records = list(archive.iterate())
    assert [record.staleness for record in records] == [2, 2, -1, -1, -1]
    assert {record.oldest_step for record in records} == {1}
    assert all(record.version_steps == {version: 1} for record in records)
    payloads = {encode_trajectory(record.trajectory)[1] for record in records}
    assert {len(payload) for payload in payloads} == {len(put.payload) for put in puts}
    assert sorted(ids(out)) == sorted(put.trajectory_id for put in puts)


def test_a_trajectory_that_two_steps_trained_is_merged_with_both(tmp_path, step_items, archive_of):
    items = step_items(0)
    with ArchiveWriter(tmp_path / "replayed") as writer:
        writer.write_step(0, items)
        writer.write_step(1, [msgspec.structs.replace(items[0], step=1, weight=0.5)])
    vagen("merge", tmp_path / "replayed", archive_of(steps=1), tmp_path / "replayed", "--out", tmp_path / "out")
    merged = list(open_archive(tmp_path / "out").iterate())
    assert [(record.step, record.weight) for record in merged[:5]] == [(0, 1), (0, 2), (0, 3), (0, 4), (1, 0.5)]
    assert len(merged) == 9 and merged[4].trajectory.trajectory_id == merged[0].trajectory.trajectory_id


def test_merging_takes_each_id_once_and_refuses_another_model(archive_of, tmp_path, step_items, plain):
    first, second = archive_of(steps=2, name="first"), archive_of(steps=3, name="second")
    vagen("merge", first, second, "--out", tmp_path / "both")
    vagen("merge", tmp_path / "both", first, second, "--out", tmp_path / "again")
    expected = [plain(record) for folder in (first, second) for record in open_archive(folder).iterate()]
    for folder in ("both", "again"):
        assert [plain(record) for record in open_archive(tmp_path / folder).iterate()] == expected
    engine = EngineIdentity(kind="local", incarnation="x", model_hash="other", tokenizer_hash="t")
    other = archive_of(steps=1, name="other", engine=engine)
    error = vagen("merge", first, other, "--out", tmp_path / "mixed", code=2)
    assert "first holds model m with tokenizer t" in error and "other model other" in error
    assert not (tmp_path / "mixed").exists()
    vagen("merge", first, other, "--out", tmp_path / "mixed", "--allow-mixed")
    assert len(ids(tmp_path / "mixed")) == 12


@pytest.mark.parametrize(
    ("where", "keeps"),
    [
        ("success and staleness <= 0", lambda r: r.trajectory.success and r.staleness <= 0),
        ("not success or step == 2", lambda r: not r.trajectory.success or r.step == 2),
        ("0 < step <= 1", lambda r: r.step == 1),
        ("end in ('cut', 'truncated')", lambda r: r.trajectory.end.value != "terminated"),
        ("end not in ['cut']", lambda r: r.trajectory.end.value != "cut"),
        (
            "reward.task > reward.format",
            lambda r: r.trajectory.reward_by_component["task"] > 0.1 * len(r.trajectory.turns),
        ),
        ("metrics.steps * 2 >= 4", lambda r: r.trajectory.metrics["steps"] >= 2),
        ("metrics.nothing < 1e9", lambda r: False),
        ("engine.kind == 'local' and sampling.temperature < 1", lambda r: True),
        ("num_turns % 2 == 1 and weight != -1", lambda r: len(r.trajectory.turns) % 2 == 1),
        ("True", lambda r: True),
    ],
)
def test_a_condition_keeps_what_it_says(archive_of, tmp_path, where, keeps):
    folder = archive_of(steps=3, count=5)
    records = list(open_archive(folder).iterate())
    expected = [record.trajectory.trajectory_id for record in records if keeps(record)]
    mask = Selection(where).mask(open_archive(folder))
    assert [r.trajectory.trajectory_id for r, kept in zip(records, mask, strict=True) if kept] == expected
    if expected:
        facts = json.loads(vagen("filter", folder, "--where", where, "--out", tmp_path / "out", "--json"))
        assert facts["trajectories"] == len(expected) and facts["left_out"] == 15 - len(expected)
        assert ids(tmp_path / "out") == expected
    else:
        error = vagen("filter", folder, "--where", where, "--out", tmp_path / "out", code=2)
        assert "no trajectory is left" in error and not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("where", "message"),
    [
        ("sucess", "no column 'sucess'; known are step,"),
        ("success = 1", "equality is =="),
        ("__import__('os').system('true')", "is not understood"),
        ("rows", "no column 'rows'"),
        ("engine.nothing == 1", "no column 'engine.nothing'"),
        ("().__class__", "is not understood"),
        ("task < 3", "'<' not supported between instances of 'str' and 'int'"),
        ("step / 0 > 1", "division by zero"),
        ("[step for step in (1,)]", "is not understood"),
    ],
)
def test_a_condition_that_is_none_is_one_line(archive_of, tmp_path, where, message):
    error = vagen("filter", archive_of(steps=1), "--where", where, "--out", tmp_path / "out", code=2)
    assert error.startswith(f'error: --where "{where}": ') and message in error and error.count("\n") == 1


def test_stat_counts_what_is_there(archive_of):
    folder = archive_of(steps=3, count=4)
    records = list(open_archive(folder).iterate())
    trajectories = [record.trajectory for record in records]
    facts = json.loads(vagen("stat", folder, "--json"))
    assert facts["trajectories"] == 12 and facts["steps"] == 3 and facts["untrained"] == 0
    assert facts["success"] == pytest.approx(np.mean([t.success for t in trajectories]))
    assert facts["reward_mean"] == pytest.approx(np.mean([t.total_reward for t in trajectories]))
    by_component = facts["reward_by_component"]
    assert by_component["format"] == pytest.approx(np.mean([t.reward_by_component["format"] for t in trajectories]))
    assert facts["turns"] == sum(len(t.turns) for t in trajectories)
    assert facts["tokens"] == sum(t.num_tokens for t in trajectories)
    assert facts["policy_tokens"] == sum(t.num_policy_tokens for t in trajectories)
    assert facts["staleness"] == {"0": 6, "1": 6}
    assert facts["policy_versions"] == [1, 3]
    distinct = {name: image for t in trajectories for name, image in t.images.items()}
    assert facts["images"] == len(distinct) and facts["image_bytes"] == sum(map(len, distinct.values()))
    assert facts["image_bytes_in_payloads"] == sum(len(image) for t in trajectories for image in t.images.values())
    assert facts["image_bytes_in_rows"] >= facts["image_bytes_in_payloads"] > facts["image_bytes"]
    files = sum(path.stat().st_size for path in folder.glob("*.parquet"))
    assert facts["trajectory_file_bytes"] + facts["image_file_bytes"] == files
    text = vagen("stat", folder)
    assert "12 of 12 episodes" in text and "0: 6, 1: 6" in text


HOOKS = '''
import msgspec
from vagen.common.trajectory import RewardEntry


def hindsight(trajectory):
    """Where it ended up counts as the goal: a failed episode becomes a success of another task."""
    if trajectory.success:
        return None
    last = trajectory.turns[-1]
    entry = RewardEntry(component="task", row=last.row, token=last.end - 1, value=1.0)
    others = tuple(e for e in trajectory.rewards if e.component != "task")
    return msgspec.structs.replace(trajectory, success=True, rewards=(*others, entry), task="reach where you are")


def per_turn(trajectory):
    rewards = tuple(
        RewardEntry(component="brevity", row=turn.row, token=turn.end - 1, value=-0.01) for turn in trajectory.turns
    )
    return msgspec.structs.replace(trajectory, rewards=(*trajectory.rewards, *rewards))


def broken(trajectory):
    return msgspec.structs.replace(trajectory, turns=())


def nonsense(trajectory):
    return "changed"
'''


@pytest.fixture
def hooks(tmp_path, monkeypatch) -> None:
    (tmp_path / "archive_hooks.py").write_text(HOOKS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "archive_hooks", raising=False)


def test_a_hook_relabels_in_hindsight(archive_of, tmp_path, hooks):
    folder = archive_of(steps=2, count=6)
    failed = [record for record in open_archive(folder).iterate() if not record.trajectory.success]
    facts = json.loads(
        vagen("relabel", folder, "--hook", "archive_hooks:hindsight", "--out", tmp_path / "out", "--json")
    )
    assert facts["trajectories"] == len(failed) == 6 and facts["left_out"] == 6
    for record, before in zip(open_archive(tmp_path / "out").iterate(), failed, strict=True):
        assert record.trajectory.success and record.trajectory.task == "reach where you are"
        assert record.trajectory.reward_by_component["task"] == 1.0
        assert (record.step, record.position, record.staleness) == (before.step, before.position, before.staleness)
        assert record.trajectory.images == before.trajectory.images


@pytest.mark.parametrize(
    ("hook", "message"),
    [
        ("broken", r"error: turns: is empty (trajectory 0"),
        ("nonsense", "the hook returned str, expected Trajectory or None"),
        ("missing", "has no function 'missing'"),
    ],
)
def test_a_hook_that_breaks_a_trajectory_is_refused(archive_of, tmp_path, hooks, hook, message):
    error = vagen("relabel", archive_of(), "--hook", f"archive_hooks:{hook}", "--out", tmp_path / "out", code=2)
    assert message in error and error.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_a_hook_name_that_is_none():
    with pytest.raises(ConfigError, match="expected module:function"):
        load_hook("module")
    with pytest.raises(ConfigError, match="No module named 'no_such_module'"):
        load_hook("no_such_module:f")


def test_rewards_are_recomputed_by_component(archive_of, tmp_path, hooks):
    folder = archive_of(steps=2, count=3)
    out = tmp_path / "out"
    vagen("recompute-rewards", folder, "--scale", "format=0.5", "--scale", "task=0", "--out", out)
    for record, before in zip(open_archive(out).iterate(), open_archive(folder).iterate(), strict=True):
        expected = {"format": 0.5 * before.trajectory.reward_by_component["format"]}
        assert dict(record.trajectory.reward_by_component) == pytest.approx(expected)
        bare = [msgspec.structs.replace(r.trajectory, rewards=()) for r in (record, before)]
        assert encode_trajectory(bare[0]) == encode_trajectory(bare[1])
    vagen(
        "recompute-rewards", folder, "--hook", "archive_hooks:per_turn", "--scale", "brevity=2", "--out", out, "--force"
    )
    for record in open_archive(out).iterate():
        turns = len(record.trajectory.turns)
        assert record.trajectory.reward_by_component["brevity"] == pytest.approx(-0.02 * turns)
    error = vagen("recompute-rewards", folder, "--scale", "formt=1", "--out", tmp_path / "no", code=2)
    assert "has the components format, task" in error
    assert "expected --scale" in vagen("recompute-rewards", folder, "--out", tmp_path / "no", code=2)
    assert "expected COMPONENT=FACTOR" in vagen("recompute-rewards", folder, "--scale", "task", "--out", out, code=2)


def test_nothing_is_overwritten_without_force(archive_of, tmp_path):
    folder, out = archive_of(steps=1), tmp_path / "out"
    words = ("filter", folder, "--where", "success", "--out", out)
    vagen(*words)
    assert f"{out}: exists already" in vagen(*words, code=2)
    vagen("filter", folder, "--where", "True", "--out", out, "--force")
    assert len(ids(out)) == 4
    # A failure leaves the old one.
    vagen("filter", folder, "--where", "step == 9", "--out", out, "--force", code=2)
    assert len(ids(out)) == 4
    home = tmp_path / "precious"
    home.mkdir()
    (home / "thesis.txt").write_text("words")
    assert "is no archive" in vagen("filter", folder, "--where", "True", "--out", home, "--force", code=2)
    assert (home / "thesis.txt").exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["archive", "out", "precious"]


@pytest.mark.parametrize("command", ["stat", "filter", "merge", "relabel"])
def test_a_path_that_is_no_archive_is_one_line(tmp_path, command):
    more = {"filter": ["--where", "success"], "relabel": ["--hook", "os:getcwd"]}.get(command, [])
    out = [] if command == "stat" else ["--out", tmp_path / "out"]
    error = vagen(command, tmp_path / "nothing", *more, *out, code=2)
    assert error == f"error: {tmp_path / 'nothing'}: no such folder\n"


def test_a_buffer_that_is_not_there_is_one_line(tmp_path):
    out = tmp_path / "out"
    assert "no Redis answers" in vagen("save", out, "--redis", "redis://127.0.0.1:1/0", "--run", "run", code=1)
    assert "expected either --run-dir DIR" in vagen("save", out, code=2)
    assert not out.exists()


def test_help_of_every_command_has_an_example_and_imports_nothing_heavy():
    code = """
import sys
from typer.testing import CliRunner
from vagen.tools.cli import app
for name in ("save", "load", "merge", "filter", "stat", "relabel", "recompute-rewards", "import"):
    text = CliRunner().invoke(app, ["buffer", name, "--help"]).stdout
    assert f"vagen buffer {name} " in text and "Example" in text, text
print([name for name in ("pyarrow", "torch", "numpy") if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=os.environ, timeout=60)
    assert done.stdout.strip() == "[]", done.stderr
