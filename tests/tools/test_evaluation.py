"""`vagen eval` and `vagen sft` with a real engine and a small model made from nothing."""

from __future__ import annotations

import base64
import json
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from vagen.common.config import read_recipe
from vagen.envs.base import encode_png
from vagen.envs.registry import make_core
from vagen.tools.child import ProcessSpec
from vagen.tools.evaluate import FIRST_SEED
from vagen.tools.launch import ENVIRONMENT, console_script
from vagen.tools.supervisor import Supervisor

SMALL = ("sft.turns=300", "sft.steps=20", "sft.batch_rows=16", "model.num_layers=1", "model.vision_num_layers=1")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("warm") / "model"
    words = [word for setting in SMALL for word in ("--set", setting)]
    done = subprocess.run(
        [console_script("vagen"), "sft", "--config", "frozenlake", "--out", str(folder), *words],
        env={**os.environ, **ENVIRONMENT},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(scope="module")
def engine(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("engine")
    supervisor = Supervisor(restart_grace_s=1, stop_timeout_s=10)
    argv = (console_script("vagen-actor"), "engine", "--model", str(model), "--config", "frozenlake")
    supervisor.start(
        ProcessSpec(
            name="engine",
            argv=(*argv, "--ready-file", str(folder / "ready.json")),
            log=folder / "engine.log",
            ready=folder / "ready.json",
            env=ENVIRONMENT,
        )
    )
    try:
        supervisor.wait_ready("engine", 120)
        yield json.loads((folder / "ready.json").read_text())["url"]
    finally:
        supervisor.stop_all()


def run_eval(engine: str, model: Path, *words: str) -> subprocess.CompletedProcess[str]:
    argv = [console_script("vagen"), "eval", "--engine", engine, "--model", str(model), "--config", "frozenlake"]
    return subprocess.run([*argv, *words], capture_output=True, text=True, timeout=120, check=False)


def test_result_file_and_transcripts_of_held_out_levels(engine, model, tmp_path):
    out = tmp_path / "result.json"
    done = run_eval(engine, model, "--levels", "24", "--transcripts", "2", "--out", str(out))
    assert done.returncode == 0, done.stderr
    result = json.loads(out.read_text())
    low, high = result["interval"]
    assert 0 <= low <= result["success"] <= high <= 1
    assert result["levels"] == 24 and 1 <= result["turns_mean"] <= 8 and 0 <= result["format_rate"] <= 1
    assert result["policy_versions"] == [0, 0]
    assert f"success {result['success']:.3f}" in done.stdout

    core = make_core("frozen_lake", {**read_recipe("frozenlake")["env"]["config"], "split": "validation"})
    assert [transcript["seed"] for transcript in result["transcripts"]] == [FIRST_SEED, FIRST_SEED + 1]
    for transcript in result["transcripts"]:
        observation, _ = core.reset(transcript["seed"])
        shown = base64.b64decode(transcript["turns"][0]["image_png_b64"])
        assert shown == encode_png(observation.images[0])
        assert transcript["closing_png_b64"]
        assert all(set(turn) == {"image_png_b64", "response", "reward", "actions"} for turn in transcript["turns"])


def test_greedy_evaluation_is_repeatable(engine, model, tmp_path):
    results = []
    for name in ("a.json", "b.json"):
        words = ("--levels", "16", "--greedy", "--transcripts", "16", "--out", str(tmp_path / name))
        assert run_eval(engine, model, *words).returncode == 0
        results.append(json.loads((tmp_path / name).read_text())["transcripts"])
    assert results[0] == results[1]


def test_no_engine_is_one_line(model):
    done = run_eval("http://127.0.0.1:1", model, "--levels", "2", "--set", "actor.connect_timeout_s=0.5")
    assert done.returncode == 1
    assert done.stderr.startswith("error: no engine answers at http://127.0.0.1:1 within 0.5 s")
    assert done.stderr.count("\n") == 1


def test_an_environment_without_a_validation_split_is_refused(engine, model):
    done = run_eval(engine, model, "--set", "env.name=nothing")
    assert done.returncode == 2 and "nothing" in done.stderr


def test_an_engine_that_dies_fails_the_evaluation_instead_of_shortening_it(model, tmp_path):
    ready = tmp_path / "ready.json"
    argv = [console_script("vagen-actor"), "engine", "--model", str(model), "--ready-file", str(ready)]
    supervisor = Supervisor(restart_grace_s=30, stop_timeout_s=10)
    supervisor.start(ProcessSpec(name="engine", argv=tuple(argv), log=tmp_path / "log", ready=ready, env=ENVIRONMENT))
    try:
        supervisor.wait_ready("engine", 120)
        url = json.loads(ready.read_text())["url"]
        out = tmp_path / "out.json"
        settings = ("actor.engine_retries=0", "actor.connect_timeout_s=0.5")
        words = [word for setting in settings for word in ("--set", setting)]
        playing = subprocess.Popen(
            [console_script("vagen"), "eval", "--engine", url, "--model", str(model), "--config", "frozenlake"]
            + ["--levels", "100000", "--out", str(out), *words],
            stderr=subprocess.PIPE,
            text=True,
        )
        engine_process = supervisor.processes["engine"]
        supervisor.wait(lambda: engine_process.cpu_seconds > 3, 120, "the engine generates")
        engine_process.signal(signal.SIGKILL)
        _, errors = playing.communicate(timeout=60)
        assert playing.returncode == 1
        assert errors.splitlines()[-1].startswith("error: ")
        assert not out.exists()
    finally:
        supervisor.stop_all()


def test_a_local_engine_is_started_for_the_evaluation_alone(model):
    done = run_eval("local", model, "--levels", "4")
    assert done.returncode == 0, done.stderr
    assert "on 4 held-out levels" in done.stdout


def test_a_local_engine_that_cannot_start_says_why(tmp_path):
    done = run_eval("local", tmp_path / "nothing", "--levels", "4")
    assert done.returncode == 1
    assert "Fatal Python error" not in done.stderr
    assert done.stderr.startswith("error: ") and str(tmp_path / "nothing") in done.stderr
