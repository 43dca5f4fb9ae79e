"""A whole demo with every real process, small enough for a test: finished, interrupted, and after a kill."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from html.parser import HTMLParser
from pathlib import Path

import psutil
import pytest

from vagen.tools.launch import console_script

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

SMALL = (
    "sft.turns=300",
    "sft.steps=20",
    "sft.batch_rows=16",
    "model.num_layers=1",
    "model.vision_num_layers=1",
    "actor.concurrency=8",
    "learner.max_staleness=1",
    "learner.batch_size=16",
    "learner.total_steps=4",
    "learner.checkpoint_every=2",
    "demo.levels=20",
    "demo.eval_levels=10",
    "demo.eval_every_steps=2",
    "demo.transcripts=2",
)
EXIT_TARGET_MISSED, EXIT_INTERRUPTED = 3, 130


def start(root: Path, *words: str, settings: tuple[str, ...] = SMALL) -> subprocess.Popen[bytes]:
    options = [word for setting in settings for word in ("--set", setting)]
    argv = [console_script("vagen"), "demo", "--run-dir", str(root), "--no-screen", *words, *options]
    return subprocess.Popen(argv, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, start_new_session=True)


def finish(demo: subprocess.Popen[bytes], timeout_s: float = 400) -> tuple[int, str]:
    _, errors = demo.communicate(timeout=timeout_s)
    return demo.returncode, errors.decode()


def wait_for_steps(root: Path, demo: subprocess.Popen[bytes], count: int) -> None:
    deadline = time.monotonic() + 400
    metrics = root / "learner" / "metrics.jsonl"
    while not (metrics.is_file() and len(metrics.read_bytes().splitlines()) >= count):
        assert demo.poll() is None, f"the demo ended with {demo.returncode}"
        assert time.monotonic() < deadline, "no learner step in time"
        time.sleep(0.1)


def processes_of(root: Path) -> list[psutil.Process]:
    return [p for p in psutil.process_iter(["cmdline"]) if any(str(root) in word for word in p.info["cmdline"] or ())]


def check_finished(root: Path) -> None:
    summary = json.loads((root / "summary.json").read_text())
    assert summary["exit_reason"] == "finished" and summary["steps"] == 4
    assert summary["heldout_success_before_levels"] == summary["heldout_success_after_levels"] == 20
    assert summary["episodes_trained"] == summary["accounting"]["trained"] == 4 * 16
    assert summary["accounting"]["identity_holds"] is True
    assert summary["logprob_mismatch_max"] < 1e-3
    assert {"sft", "buffer", "engine", "actor", "learner", "eval", "demo"} <= set(summary["cpu_seconds"])
    HTMLParser().feed((root / "report.html").read_text())
    assert processes_of(root) == []


def test_from_nothing_to_a_report(tmp_path):
    root = tmp_path / "run"
    code, errors = finish(start(root))
    assert code == EXIT_TARGET_MISSED, errors
    check_finished(root)
    summary = json.loads((root / "summary.json").read_text())
    # The last always; one before it may be overtaken.
    assert 1 <= summary["versions_published_while_running"] <= summary["versions_published"] <= 4
    curve = (root / "eval" / "curve.jsonl").read_text().splitlines()
    assert [json.loads(line)["levels"] for line in curve] == [10] * len(curve)


def test_ctrl_c_stops_everything_and_resume_goes_on(tmp_path):
    root = tmp_path / "run"
    demo = start(root)
    wait_for_steps(root, demo, 2)
    os.killpg(demo.pid, signal.SIGINT)
    code, errors = finish(demo)
    assert code == EXIT_INTERRUPTED, errors
    assert processes_of(root) == []
    assert json.loads((root / "summary.json").read_text())["exit_reason"] == "interrupted"
    assert (root / "report.html").is_file()

    warm = (root / "model" / "model.safetensors").stat().st_mtime_ns
    code, errors = finish(start(root, "--resume", settings=()))
    assert code == EXIT_TARGET_MISSED, errors
    assert (root / "model" / "model.safetensors").stat().st_mtime_ns == warm
    check_finished(root)


def test_a_killed_demo_leaves_nothing_that_the_next_does_not_stop(tmp_path):
    root = tmp_path / "run"
    demo = start(root)
    wait_for_steps(root, demo, 1)
    demo.kill()
    demo.communicate()
    assert processes_of(root) != []
    code, errors = finish(start(root, "--resume", settings=()))
    assert code == EXIT_TARGET_MISSED, errors
    check_finished(root)


def test_a_learner_killed_and_started_by_hand_finishes_the_run(tmp_path):
    root = tmp_path / "run"
    demo = start(root)
    wait_for_steps(root, demo, 1)
    os.kill(json.loads((root / "learner" / "ready.json").read_text())["pid"], signal.SIGKILL)
    deadline = time.monotonic() + 60
    command = ""
    while not command:
        assert time.monotonic() < deadline and demo.poll() is None, "the death was not reported"
        events = json.loads((root / "demo.json").read_text())["events"]
        deaths = [event for event in events if "learner was killed by SIGKILL" in event]
        command = deaths[0].splitlines()[-1] if deaths else ""
        time.sleep(0.1)
    by_hand = subprocess.Popen(["sh", "-c", f"exec {command}"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    code, errors = finish(demo)
    assert by_hand.wait(timeout=30) == 0
    assert code == EXIT_TARGET_MISSED, errors
    check_finished(root)
