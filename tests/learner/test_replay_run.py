"""`vagen-learner run --replay`: the same bits every time, also after a kill; what cannot work is one line."""

from __future__ import annotations

import json
import math
import os
import random
import subprocess
import time
from pathlib import Path

import pytest

from vagen.common.config import read_recipe
from vagen.common.errors import ConfigError
from vagen.learner.replay import ReplayOptions
from vagen.learner.replay_run import run_replay
from vagen.tools.launch import console_script
from vagen.tools.report import write_report

NUM_STEPS = 6
SETTINGS = (
    "learner.batch_size=6",
    "learner.minibatch_rows=8",
    "learner.total_steps=20",
    "learner.checkpoint_every=2",
    "learner.optimizer.warmup_updates=4",
)
TWICE = {"order": "shuffled", "epochs": 2}
WALL_CLOCK = ("time", "wall_s", "seconds", "checkpoint")


class Killed(BaseException):
    """Ends a replay where no code of ours may tidy up."""


@pytest.fixture(scope="module")
def archive(write_archive, tmp_path_factory):
    return write_archive(tmp_path_factory.mktemp("saved") / "archive", num_steps=NUM_STEPS)


@pytest.fixture(scope="module")
def replay_into(archive, model_dir):
    """Replays into a run folder in this process, up to a kill after `num_lines`; returns the step reached."""

    def run(folder: Path, settings=(), num_lines=None, **options) -> int:
        def kill(line):
            if num_lines is not None and len(lines(folder)) == num_lines:
                raise Killed

        recipe = read_recipe("frozenlake", [*SETTINGS, *settings])
        return run_replay(recipe, model_dir, folder, ReplayOptions(path=archive, **options), on_step=kill)

    return run


@pytest.fixture
def replay(replay_into, tmp_path):
    """The same into the folder `name` of the test."""
    return lambda name, *args, **options: replay_into(tmp_path / name, *args, **options)


@pytest.fixture(scope="module")
def twice(replay_into, tmp_path_factory):
    """The run of two shuffled passes over the archive, never cut off."""
    folder = tmp_path_factory.mktemp("twice") / "run"
    assert replay_into(folder, **TWICE) == 2 * NUM_STEPS
    return folder


@pytest.fixture
def command(archive, model_dir, tmp_path):
    """The same as a person types it."""

    def make(name: str, *words: str, settings=()) -> list[str]:
        options = [word for setting in (*SETTINGS, *settings) for word in ("--set", setting)]
        start = [console_script("vagen-learner"), "run", "--config", "frozenlake", "--model", str(model_dir)]
        return [*start, "--run-dir", str(tmp_path / name), *words, *options]

    return make


def lines(folder) -> list[dict]:
    file = folder / "learner" / "metrics.jsonl"
    return [json.loads(line) for line in file.read_text().split("\n")[:-1]] if file.is_file() else []


def numbers(folder) -> dict[int, dict]:
    """The last line of each step without what a clock says."""
    return {line["step"]: {k: v for k, v in line.items() if k not in WALL_CLOCK} for line in lines(folder)}


@pytest.mark.parametrize("options", [{}, TWICE], ids=["archive", "shuffled"])
def test_a_replay_that_is_cut_off_goes_on_with_the_bits_of_one_that_was_not(request, replay, tmp_path, options):
    last_step = NUM_STEPS * options.get("epochs", 1)
    if options:
        uncut = request.getfixturevalue("twice")
    else:
        uncut = tmp_path / "whole"
        assert replay("whole") == last_step
    waiting = ("learner.asynchronous_checkpoints=false",)
    for num_lines in (3, 6):
        with pytest.raises(Killed):
            replay("cut", waiting, num_lines=num_lines, **options)
    assert replay("cut", waiting, **options) == last_step
    assert json.loads((tmp_path / "cut" / "learner" / "ready.json").read_text())["first_step"] == 4
    whole, cut = numbers(uncut), numbers(tmp_path / "cut")
    assert sorted(whole) == list(range(last_step))
    assert cut == whole
    assert len(lines(tmp_path / "cut")) > last_step, "steps after a checkpoint were repeated"


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_losses_after_kills_at_random_moments_are_those_of_a_run_without(replay, command, archive, tmp_path):
    """kill -9 in mid-save, after a step and anywhere; then at least 20 more steps, bit for bit."""
    seed = int(os.environ.get("KILL_SEED", random.randrange(1 << 32)))
    print(f"KILL_SEED={seed}")
    rng = random.Random(seed)
    epochs = math.ceil(40 / NUM_STEPS)
    options = ("--replay", str(archive), "--replay-order", "shuffled", "--replay-epochs", str(epochs))
    argv = command("killed", *options, settings=("learner.total_steps=40",))
    checkpoints = tmp_path / "killed" / "learner" / "checkpoints"
    moments = ["saving", "recorded", "anywhere"]
    rng.shuffle(moments)
    while moments or not any(checkpoints.glob("step-*")):
        moment = moments[-1] if moments else "recorded"
        process = subprocess.Popen(argv, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        wait_for_lines(process, tmp_path / "killed", rng.randint(2, 4))
        if moment == "saving":
            while not any(checkpoints.glob(".*.incomplete")):
                assert process.poll() is None
        elif moment == "anywhere":
            time.sleep(rng.uniform(0.0, 0.3))
        process.kill()
        process.wait(10)
        if moments and (moment != "saving" or any(checkpoints.glob(".*.incomplete"))):
            moments.pop()
    done = subprocess.run(argv, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    first_step = json.loads((tmp_path / "killed" / "learner" / "ready.json").read_text())["first_step"]
    assert 0 < first_step <= 20
    replay("whole", order="shuffled", epochs=epochs, settings=("learner.total_steps=40",))
    whole = numbers(tmp_path / "whole")
    assert numbers(tmp_path / "killed") == whole and len(whole) == 40
    for line in lines(tmp_path / "killed"):
        assert line["loss"] == whole[line["step"]]["loss"], "of the lines that a kill left behind as well"


def wait_for_lines(process, folder, count):
    target, deadline = len(lines(folder)) + count, time.monotonic() + 300
    while len(lines(folder)) < target:
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.005)


def test_another_seed_draws_other_batches(replay, tmp_path):
    for seed in (0, 1):
        replay(f"seed{seed}", (f"run.seed={seed}", "learner.total_steps=1"), order="shuffled")
    losses = [[line["loss"] for line in lines(tmp_path / f"seed{seed}")] for seed in (0, 1)]
    assert losses[0] != losses[1]


def test_a_replay_leaves_journal_model_and_report_like_a_live_run(replay, tmp_path):
    settings = ("learner.max_staleness=1",)
    assert replay("run", settings) == NUM_STEPS
    written = lines(tmp_path / "run")
    assert written[3]["staleness"] == {"0": 2, "1": 2, "2": 2}
    assert written[3]["replay"] == {"order": "archive", "beyond_max_staleness": 2}
    assert written[3]["mismatch_current_version"] is not None and written[3]["mismatch_stale"] is not None
    learner = tmp_path / "run" / "learner"
    assert (learner / "export-step-00000006" / "model.safetensors").is_file()
    assert not (learner / "export").exists(), "the run of 20 steps is not complete"
    assert {line["checkpoint"]["step"] for line in written if "checkpoint" in line} >= {2, 4}
    assert "Staleness at consumption" in write_report(tmp_path / "run").read_text()
    assert replay("run", settings) == NUM_STEPS and len(lines(tmp_path / "run")) == NUM_STEPS, "nothing is left"


def test_further_epochs_go_on_from_the_last_and_the_last_step_replaces_the_export(replay, twice, tmp_path):
    replay("one-by-one", (f"learner.total_steps={NUM_STEPS}",), epochs=1, order="shuffled")
    export = tmp_path / "one-by-one" / "learner" / "export" / "model.safetensors"
    early = export.read_bytes()
    replay("one-by-one", (f"learner.total_steps={2 * NUM_STEPS}",), **TWICE)
    written = lines(tmp_path / "one-by-one")
    assert [line["replay"]["epoch"] for line in written] == [0] * NUM_STEPS + [1] * NUM_STEPS
    assert [line["staleness"] for line in written] == [line["staleness"] for line in lines(twice)]
    assert export.read_bytes() != early


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--replay", "ARCHIVE", "--redis", "redis://127.0.0.1:1/0"), "leave --redis out"),
        (("--replay", "nowhere"), "nowhere: no such folder"),
        ((), "expected --redis"),
        (("--redis", "redis://127.0.0.1:1/0", "--replay-epochs", "2"), "expected --replay with them"),
    ],
)
def test_what_cannot_be_replayed_is_one_line(command, archive, words, message):
    argv = command("run", *(str(archive) if word == "ARCHIVE" else word for word in words))
    done = subprocess.run(argv, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: ") and message in line


def test_an_archive_smaller_than_a_batch_is_refused(replay):
    with pytest.raises(ConfigError, match=f"expected int <= {6 * NUM_STEPS}"):
        replay("run", ("learner.batch_size=1000",), order="shuffled")
