"""`vagen export`: which checkpoint, what is never overwritten, and what the card says of the run."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from xml.etree import ElementTree

import pytest
import yaml
from safetensors.torch import load_file

from vagen.common.config import read_recipe
from vagen.common.errors import CheckpointError, ConfigError
from vagen.learner.export import exported_step
from vagen.learner.replay import ReplayOptions
from vagen.learner.replay_run import run_replay
from vagen.tools.export import ExportOptions, export
from vagen.tools.launch import console_script

SETTINGS = (
    "run.name=frozen-card",
    "learner.batch_size=6",
    "learner.minibatch_rows=8",
    "learner.total_steps=4",
    "learner.checkpoint_every=2",
    "learner.broadcast.api_key=sesame",
)


@pytest.fixture(scope="module")
def trained(write_archive, model_dir, tmp_path_factory):
    """A run with the checkpoints of steps 2 and 4, and the model of step 4 as the learner exported it."""
    root = tmp_path_factory.mktemp("trained")
    archive = write_archive(root / "archive", num_steps=4)
    run_replay(read_recipe("frozenlake", SETTINGS), model_dir, root / "run", ReplayOptions(path=archive))
    return root / "run"


@pytest.fixture
def run_dir(trained, tmp_path):
    """A copy of it."""
    return shutil.copytree(trained, tmp_path / "run")


def weights(folder):
    return load_file(folder / "model.safetensors")


def test_the_newest_checkpoint_is_what_the_learner_ended_with(run_dir, model_dir, tmp_path):
    done = export(ExportOptions(source=run_dir, out=tmp_path / "out"))
    assert (done.step, done.dtype, exported_step(tmp_path / "out")) == (4, "float32", 4)
    exported, trained = weights(tmp_path / "out"), weights(run_dir / "learner" / "export")
    assert exported.keys() == trained.keys()
    assert all(exported[name].equal(trained[name]) for name in trained)
    assert any(not exported[name].equal(tensor) for name, tensor in weights(model_dir).items())


def test_a_step_of_the_run_and_its_checkpoint_are_the_same(run_dir, tmp_path):
    export(ExportOptions(source=run_dir, out=tmp_path / "two", step=2))
    checkpoint = run_dir / "learner" / "checkpoints" / "step-00000002"
    elsewhere = shutil.copytree(checkpoint, tmp_path / "moved")
    assert export(ExportOptions(source=elsewhere, out=tmp_path / "moved-out")).step == 2
    two, moved, four = (weights(p) for p in (tmp_path / "two", tmp_path / "moved-out", run_dir / "learner" / "export"))
    assert all(two[name].equal(moved[name]) for name in two)
    assert any(not two[name].equal(four[name]) for name in two)
    assert "journal was not beside the checkpoint" in (tmp_path / "moved-out" / "README.md").read_text()


def test_the_card_has_the_curves_and_the_recipe_of_its_steps_without_keys(run_dir, tmp_path):
    export(ExportOptions(source=run_dir, out=tmp_path / "out", step=2))
    text = (tmp_path / "out" / "README.md").read_text()
    front, body = text.removeprefix("---\n").split("\n---\n", 1)
    assert yaml.safe_load(front)["pipeline_tag"] == "image-text-to-text"
    assert body.startswith("\n# frozen-card\n") and "| episodes trained | 12 |" in body
    recipe = yaml.safe_load(body.split("```yaml\n")[1].split("```")[0])
    assert recipe["learner"]["batch_size"] == 6 and recipe["learner"]["broadcast"]["api_key"] == "***"
    assert "sesame" not in text
    assert "sesame" not in (run_dir / "learner" / "recipe.yaml").read_text()
    figure = ElementTree.fromstring((tmp_path / "out" / "training_curves.svg").read_text())
    titles = [node.text for node in figure.iter() if node.get("class") == "title"]
    assert titles == ["Success", "Reward", "Loss"]
    assert "](training_curves.svg)" in body
    points = [node.text for node in figure.iter("{http://www.w3.org/2000/svg}title")]
    assert sum(point.startswith("total at ") for point in points) == 2, "of the two steps before the checkpoint"


def test_nothing_is_overwritten_unless_told(run_dir, tmp_path):
    out = tmp_path / "out"
    export(ExportOptions(source=run_dir, out=out, step=2))
    before = weights(out)
    with pytest.raises(ConfigError, match="already holds the model of step 2; --force replaces it"):
        export(ExportOptions(source=run_dir, out=out))
    export(ExportOptions(source=run_dir, out=out, force=True))
    assert exported_step(out) == 4 and any(not before[name].equal(tensor) for name, tensor in weights(out).items())
    assert sorted(path.name for path in tmp_path.iterdir() if path.name.startswith(".")) == []
    (tmp_path / "precious").mkdir()
    with pytest.raises(ConfigError, match="expected a model directory to replace"):
        export(ExportOptions(source=run_dir, out=tmp_path / "precious", force=True))


def test_what_fails_half_way_leaves_the_old_model(run_dir, tmp_path):
    """The command itself, under a real limit of what a file may hold."""
    out = tmp_path / "out"
    export(ExportOptions(source=run_dir, out=out, step=2))
    before = (out / "model.safetensors").read_bytes()
    limit = len(before) // 2 // 1024
    words = [console_script("vagen"), "export", str(run_dir), str(out), "--force"]
    done = subprocess.run(
        ["sh", "-c", f'ulimit -f {limit * 2} && exec "$@"', "sh", *words],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
        env={**os.environ, "COLUMNS": "200"},
    )
    (line,) = done.stderr.splitlines()
    assert done.returncode == 1 and line.startswith(f"error: {out}: could not be written") and "too large" in line
    assert exported_step(out) == 2 and (out / "model.safetensors").read_bytes() == before


def test_the_command_says_what_it_wrote(run_dir, tmp_path):
    argv = [console_script("vagen"), "export", run_dir, tmp_path / "out", "--dtype", "bfloat16", "--json"]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=240, check=False)
    answer = json.loads(done.stdout)
    assert answer["step"] == 4 and answer["dtype"] == "bfloat16" and "README.md" in answer["files"]


def test_a_step_without_a_checkpoint_is_refused(trained, tmp_path):
    with pytest.raises(ConfigError, match=r"^--step: expected one of the run's checkpoints \(2, 4\), got 3$"):
        export(ExportOptions(source=trained, out=tmp_path / "out", step=3))


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"source": "nowhere"}, ConfigError, "nowhere: no such folder"),
        ({"source": "."}, CheckpointError, "is not a complete checkpoint"),
    ],
)
def test_what_is_no_run_is_refused(tmp_path, options, error, message):
    source = tmp_path / options["source"]
    with pytest.raises(error, match=message):
        export(ExportOptions(source=source, out=tmp_path / "out"))
