"""The folder of a demo: when it is refused, continued and removed; ports and seeds written into the recipe."""

from __future__ import annotations

import json
import socket

import pytest
import yaml

from vagen.common.errors import ConfigError
from vagen.tools.demo import DemoOptions, prepare
from vagen.tools.launch import Launcher, assign_ports
from vagen.tools.runs import RunDir


def interrupted(root, *, reason="interrupted"):
    """A run as a demo leaves it."""
    with prepare(DemoOptions(run_dir=root, seed=3)) as prepared:
        state = prepared.state
    state.exit_reason, state.stage = reason, "train"
    (root / "demo.json").write_text(
        json.dumps({"config": state.config, "seed": 3, "started_at": 1.0, "exit_reason": reason, "stage": "train"})
    )
    (root / "eval").mkdir()
    (root / "eval" / "before.json").write_text("{}")


def test_a_new_folder_gets_the_recipe_with_seed_ports_and_overrides(tmp_path):
    root = tmp_path / "run"
    options = DemoOptions(run_dir=root, seed=3, overrides=["learner.total_steps=7"])
    with prepare(options) as prepared:
        raw = yaml.safe_load((root / "recipe.yaml").read_text())
        assert raw["learner"]["total_steps"] == prepared.recipe.learner.total_steps == 7
        assert raw["run"]["seed"] == raw["engine"]["seed"] == 3
        assert raw["actor"]["base_seed"] == 3_000_000
        assert raw["engine"]["port"] == prepared.recipe.engine.port > 0
        assert prepared.recipe.buffer.endpoint == raw["buffer"]["endpoint"]
        assert prepared.state.config == "frozenlake"


def test_two_demos_do_not_share_a_folder(tmp_path):
    options = DemoOptions(run_dir=tmp_path / "run")
    with prepare(options), pytest.raises(ConfigError, match="another `vagen demo` uses this folder now"):
        with prepare(DemoOptions(run_dir=tmp_path / "run")):
            pass


def test_an_unfinished_run_wants_to_be_told_what_to_do(tmp_path):
    interrupted(tmp_path)
    with pytest.raises(ConfigError, match="stage train.*--resume continues it, --fresh removes it"):
        with prepare(DemoOptions(run_dir=tmp_path, seed=3)):
            pass


def test_resume_keeps_what_is_there(tmp_path):
    interrupted(tmp_path)
    with prepare(DemoOptions(run_dir=tmp_path, resume=True)) as prepared:
        assert prepared.state.attempts == 2 and prepared.state.seed == 3
        assert prepared.recipe.run.seed == 3
        assert (tmp_path / "eval" / "before.json").exists()


def test_resume_does_not_change_the_recipe(tmp_path):
    interrupted(tmp_path)
    with pytest.raises(ConfigError, match="--set: a resumed run keeps its recipe"):
        with prepare(DemoOptions(run_dir=tmp_path, resume=True, overrides=["learner.total_steps=9"])):
            pass


def test_fresh_removes_what_is_there(tmp_path):
    interrupted(tmp_path)
    with prepare(DemoOptions(run_dir=tmp_path, fresh=True, seed=4)) as prepared:
        assert prepared.state.attempts == 1 and prepared.recipe.run.seed == 4
        assert not (tmp_path / "eval").exists()


@pytest.mark.parametrize("resume", [False, True])
def test_a_finished_run_is_left_alone(tmp_path, resume):
    interrupted(tmp_path, reason="finished")
    with pytest.raises(ConfigError, match="holds a finished run, report .*; --fresh removes it"):
        with prepare(DemoOptions(run_dir=tmp_path, resume=resume)):
            pass


@pytest.mark.parametrize("fresh", [False, True])
def test_a_folder_of_something_else_is_never_touched(tmp_path, fresh):
    (tmp_path / "thesis.tex").write_text("precious")
    with pytest.raises(ConfigError, match="not empty and not the folder of a demo"):
        with prepare(DemoOptions(run_dir=tmp_path, fresh=fresh)):
            pass
    assert (tmp_path / "thesis.tex").read_text() == "precious"


def test_nothing_to_resume(tmp_path):
    with pytest.raises(ConfigError, match="no run to resume there"):
        with prepare(DemoOptions(run_dir=tmp_path / "run", resume=True)):
            pass
    with pytest.raises(ConfigError, match="at most one of them"):
        DemoOptions(resume=True, fresh=True)


def test_a_taken_port_is_replaced_and_a_free_one_kept():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        raw = {"engine": {"port": port}, "buffer": {"endpoint": f"tcp://127.0.0.1:{port}"}}
        assign_ports(raw)
        assert raw["engine"]["port"] != port and not raw["buffer"]["endpoint"].endswith(f":{port}")
    again = json.loads(json.dumps(raw))
    assign_ports(again)
    assert again == raw


def test_command_lines_carry_the_folder_and_what_others_announced(tmp_path):
    run = RunDir(tmp_path)
    launch = Launcher(run)
    with pytest.raises(ConfigError, match="expected an entry 'url' from the engine"):
        launch.evaluation(tmp_path / "out.json", 5, 0)
    run.ready("engine").parent.mkdir()
    run.ready("engine").write_text('{"pid": 1, "url": "http://127.0.0.1:7"}')
    spec = launch.evaluation(tmp_path / "out.json", 5, 0)
    assert "--engine http://127.0.0.1:7" in spec.command and "--levels 5" in spec.command
    assert spec.command.startswith("env OMP_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE")
