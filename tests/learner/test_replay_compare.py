"""`vagen replay`: which trajectories, which model, which corrections; the same bits every time."""

from __future__ import annotations

import json

import msgspec
import numpy as np
import pytest
from typer.testing import CliRunner

from vagen.buffer.archive.reader import open_archive
from vagen.common.config import read_recipe
from vagen.common.errors import ConfigError
from vagen.learner.replay import ReplayOptions
from vagen.learner.replay_run import run_replay
from vagen.tools.cli import app
from vagen.tools.replay_command import parse_corrections
from vagen.tools.replay_compare import CompareOptions, Correction, compare, select


def quietly(doing: str, done: int, total: int) -> None:
    pass


@pytest.fixture
def options(make_archive, model_dir):
    """Corrections on four steps of an archive, seen from step 4."""

    def make(*names: str, **fields) -> CompareOptions:
        shared, corrections = parse_corrections(",".join(names), ())
        values = {"path": make_archive(), "model_dir": model_dir, "config": "frozenlake", "at_step": 4}
        return CompareOptions(corrections=corrections, overrides=shared, **(values | fields))

    return make


def test_staleness_is_against_the_models_step_and_groups_stay_whole(make_archive):
    archive = open_archive(make_archive(num_steps=6))
    oldest = archive.table(["oldest_step"])["oldest_step"].to_numpy()
    groups = np.array(archive.table(["group_id"])["group_id"].to_pylist())
    chosen = select(archive, 3, (0, 1, 2), per_bucket=100, seed=0)
    assert (chosen.staleness == 3 - oldest[chosen.indices]).all()
    assert sorted(chosen.indices) == np.flatnonzero(oldest <= 3).tolist()
    assert chosen.left_out == (oldest > 3).sum()
    few = select(archive, 5, (0, 2, 4), per_bucket=3, seed=0)
    for low, high in ((0, 1), (2, 3), (4, 9)):
        assert ((few.staleness >= low) & (few.staleness <= high)).sum() == 4, "two groups of two for 3"
    assert all((groups == groups[index]).sum() == (groups[few.indices] == groups[index]).sum() for index in few.indices)
    recorded = select(archive, None, (0, 1), per_bucket=100, seed=0)
    assert set(recorded.staleness) == {0, 1, 2} and recorded.left_out == 0
    with pytest.raises(ConfigError, match="none is at least as old as the model, of step 3"):
        select(archive, 3, (50,), per_bucket=4, seed=0)


def test_a_group_with_a_member_newer_than_the_model_is_left_out(make_archive):
    def split(record):
        return msgspec.structs.replace(record, oldest_step=3 if record.position == 0 else 0)

    chosen = select(open_archive(make_archive(num_steps=2, change=split)), 2, (0,), per_bucket=100, seed=0)
    assert chosen.indices.tolist() == [2, 3, 4, 5, 8, 9, 10, 11] and chosen.left_out == 4


def test_the_same_comparison_gives_the_same_bits(options):
    asked = options("default", "uncorrected", "plain_ppo", "m2po")
    first = compare(asked, quietly)
    assert compare(asked, quietly) == first
    assert [bucket.name for bucket in first.buckets] == ["1", "2-3", "4-7"]
    assert [result.name for result in first.corrections] == ["default", "uncorrected", "plain_ppo", "m2po"]
    default, uncorrected, plain_ppo, m2po = (result.buckets for result in first.corrections)
    assert default[2].value_error != uncorrected[2].value_error
    assert default[2].truncated_share == uncorrected[2].truncated_share > 0
    assert plain_ppo[2].clipped_share > 0 == default[2].clipped_share
    assert m2po[2].rejected_share > 0


def test_progress_ends_complete(options):
    seen = []
    compare(options("default", "icepop"), lambda *progress: seen.append(progress))
    assert seen[0] == ("scoring", 0, 7) and seen[-1] == ("done", 7, 7)
    assert [done for _, done, _ in seen] == sorted({done for _, done, _ in seen})


def test_corrections_of_ones_own_are_named_in_front_of_the_setting():
    shared, corrections = parse_corrections(
        "default,cap4", ["run.seed=3", "cap4:learner.loss.weight_cap=4", "cap4:learner.loss.behaviour_kl=0", "b:x.y=z"]
    )
    assert shared == ["run.seed=3"]
    assert corrections == [
        Correction(name="default"),
        Correction(name="cap4", overrides=("learner.loss.weight_cap=4", "learner.loss.behaviour_kl=0")),
        Correction(name="b", overrides=("x.y=z",)),
    ]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--compare", "defualt"], "$.compare.names: expected names out of default, uncorrected, plain_ppo"),
        (["--set", "default:run.seed=1"], "$.compare.set: expected NAME: that is not one of the study's"),
        (["--set", "a:learner.critic.trunk=separate"], "$.learner.critic.trunk: expected shared for a as for default"),
        (["--set", "a:learner.loss.value_loss=two_hot"], "$.learner.loss.value_loss: expected smooth_l1 for a"),
        (["--buckets", "4,2"], "$.compare.buckets: expected ascending integers >= 0"),
        (["--at-step", "-1"], "no trajectory has a staleness of 0 or more"),
    ],
)
def test_what_cannot_be_compared_is_one_line(make_archive, model_dir, words, message):
    argv = ["replay", str(make_archive()), "--model", str(model_dir), "--config", "frozenlake", *words]
    done = CliRunner().invoke(app, argv)
    assert done.exit_code == 2
    assert done.stderr.startswith("error: ") and message in done.stderr and done.stderr.count("\n") == 1


def test_an_exported_model_knows_its_step_and_the_command_prints_and_draws(make_archive, model_dir, tmp_path):
    path = make_archive(num_steps=3)
    recipe = read_recipe("frozenlake", ["learner.batch_size=6", "learner.total_steps=3", "learner.minibatch_rows=8"])
    run_replay(recipe, model_dir, tmp_path / "run", ReplayOptions(path=path))
    page = tmp_path / "compare.html"
    export = str(tmp_path / "run" / "learner" / "export")
    argv = ["replay", str(path), "--model", export, "--config", "frozenlake", "--compare", "default,plain_ppo"]
    done = CliRunner().invoke(app, [*argv, "--json", "--out", str(page)])
    assert done.exit_code == 0, done.output
    result = json.loads(done.stdout)
    assert (result["at_step"], result["staleness"]) == (3, "against_model")
    assert [bucket["low"] for bucket in result["buckets"]] == [1, 2]
    drawn = page.read_text()
    assert drawn.count("<svg") == 8 and "plain_ppo" in drawn and "src=" not in drawn and "<script" not in drawn
    table = CliRunner().invoke(app, argv).stdout
    assert "learner step 3" in table and table.count("plain_ppo") == 2
    newest = max((tmp_path / "run" / "learner" / "checkpoints").iterdir())
    again = CliRunner().invoke(app, [*argv, "--json", "--model", str(model_dir), "--checkpoint", str(newest)])
    assert json.loads(again.stdout) | {"model": export} == result, "a checkpoint is the model exported from it"


def test_values_are_those_of_a_critic_of_its_own_which_only_a_checkpoint_has(make_archive, model_dir, tmp_path):
    path = make_archive(num_steps=3)
    # The policy does not move: what differs between start and checkpoint is the critic.
    settings = ["learner.critic={trunk: separate, lr: 1.0e-2, warmup_steps: 3}"]
    sizes = ["learner.batch_size=6", "learner.total_steps=3", "learner.minibatch_rows=8"]
    run_replay(read_recipe("frozenlake", settings + sizes), model_dir, tmp_path / "run", ReplayOptions(path=path))
    newest = max((tmp_path / "run" / "learner" / "checkpoints").iterdir())
    asked = {"path": path, "config": "frozenlake", "corrections": [Correction(name="default")], "overrides": settings}
    trained = compare(CompareOptions(**asked, model_dir=model_dir, checkpoint=newest), quietly)
    fresh = compare(CompareOptions(**asked, model_dir=model_dir, at_step=3), quietly)
    assert trained.at_step == 3 and trained.buckets == fresh.buckets
    errors, fresh_errors = ([m.value_error for m in c.corrections[0].buckets] for c in (trained, fresh))
    assert all(abs(error - other) > 0.01 for error, other in zip(errors, fresh_errors, strict=True))
    with pytest.raises(ConfigError, match=r"an exported policy without its critic; give --checkpoint"):
        compare(CompareOptions(**asked, model_dir=tmp_path / "run" / "learner" / "export"), quietly)
