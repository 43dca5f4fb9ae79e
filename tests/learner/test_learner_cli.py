"""The learner's command line: answers at once, and says in one line what is wrong and what to start."""

from __future__ import annotations

import resource
import subprocess
import time

import pytest

from vagen.common.errors import ConfigError
from vagen.learner.checkpoints import CheckpointFolder
from vagen.learner.config import LearnerConfig, ModelConfig, OptimizerConfig
from vagen.tools.launch import console_script


def run(*words: str) -> tuple[subprocess.CompletedProcess[str], float]:
    started = time.monotonic()
    argv = [console_script("vagen-learner"), *words]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=120, check=False)
    return done, time.monotonic() - started


@pytest.mark.parametrize("script", ["vagen-learner", "vagen-actor", "vagen-buffer", "vagen"])
def test_help_answers_within_a_second_of_processor_time(script):
    # Not of wall-clock time, which on a busy machine measures the others.
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run([console_script(script), "--help"], capture_output=True, text=True, timeout=60, check=False)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.returncode == 0 and "Usage" in done.stdout
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 1.0


def test_help_shows_an_example():
    done, _ = run("run", "--help")
    assert "Examples: vagen-learner run" in " ".join(done.stdout.split())


def test_a_missing_model_is_one_line(tmp_path):
    done, _ = run("run", "--config", "frozenlake", "--model", str(tmp_path), "--redis", "redis://127.0.0.1:1/0")
    assert done.returncode == 2
    assert done.stderr == f"error: {tmp_path / 'config.json'}: no such file; a model directory needs it\n"


def test_a_missing_buffer_is_one_line_within_seconds(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    done, took = run(
        *("run", "--config", "frozenlake", "--model", str(tmp_path), "--run-dir", str(tmp_path)),
        *("--redis", "redis://127.0.0.1:1/0"),
    )
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert "127.0.0.1:1" in line and "vagen-buffer" in line
    assert took < 20


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("learner.batch_size=many", '$.learner.batch_size: expected int, got "many"'),
        ("learner.batch_size=0", "$.learner.batch_size: expected int >= 1, got 0"),
        ("learner.batchsize=4", "$.learner.batchsize: unknown key"),
        ("learner.loss.clip_low=2", "$.learner.loss.clip_low"),
        ("learner.advantage.rho_bar=-1", "$.learner.advantage.rho_bar"),
        ("learner.broadcast.pause_mode=stop", "$.learner.broadcast.pause_mode"),
    ],
)
def test_wrong_settings_are_one_line_before_anything_starts(tmp_path, override, message):
    done, _ = run(
        *("run", "--config", "frozenlake", "--model", str(tmp_path), "--redis", "redis://127.0.0.1:1/0"),
        *("--run-dir", str(tmp_path / "run"), "--set", override),
    )
    assert done.returncode == 2
    assert message in done.stderr and done.stderr.count("\n") == 1
    assert not (tmp_path / "run").exists()


def test_checkpoint_folder_resumes_from_the_newest_complete_one_and_keeps_some(tmp_path):
    folder = CheckpointFolder(tmp_path, keep=2)
    assert folder.newest() is None
    for step in (3, 20, 100):
        folder.path_of(step).mkdir()
    (tmp_path / ".step-00000200.incomplete").mkdir()
    assert folder.newest() == folder.path_of(100)
    folder.prune()
    assert folder.steps() == [20, 100]
    folder.clear_incomplete()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000020", "step-00000100"]


def test_learning_rate_warms_up_over_updates_and_decays_over_the_run():
    config = OptimizerConfig(lr=1.0, lr_end_fraction=0.1, warmup_updates=4)
    assert [config.lr_at(0.0, update) for update in range(5)] == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert config.lr_at(0.5, 100) == pytest.approx(0.55)
    assert config.lr_at(1.0, 100) == pytest.approx(0.1)


def test_required_capacity_counts_everything_claimed_between_two_checkpoints():
    config = LearnerConfig(checkpoint_every=10, prefetch=1, batch_size=4, expected_trajectory_bytes=100)
    assert config.required_capacity_bytes == 13 * 400


@pytest.mark.parametrize(
    ("changes", "path"),
    [
        ({"hidden_size": 100, "num_heads": 8}, "model.hidden_size"),
        ({"num_kv_heads": 3}, "model.num_heads"),
        ({"max_pixels": 10}, "model.max_pixels"),
    ],
)
def test_model_sizes_that_cannot_be_built(changes, path):
    with pytest.raises(ConfigError, match=path):
        ModelConfig(**changes)
