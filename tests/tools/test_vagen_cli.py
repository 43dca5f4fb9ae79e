"""The command `vagen` as a person calls it."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from pathlib import Path

import pytest

VAGEN = Path(sys.executable).with_name("vagen")


def vagen(*words: str | Path, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run([VAGEN, *words], capture_output=True, text=True, timeout=120, check=False, cwd=cwd)


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["demo"],
        ["eval"],
        ["sft"],
        ["report"],
        ["bench"],
        ["buffer", "audit"],
        ["buffer", "set"],
        ["buffer", "top"],
        ["config", "check"],
        ["doctor", "engine"],
        ["sglang"],
        ["watch-engine"],
    ],
)
def test_help_answers_at_once(words):
    # Processor time, since a wall clock on a busy machine measures the others.
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = vagen(*words, "--help")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.returncode == 0 and "Usage: vagen" in done.stdout
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 1.0


def test_help_has_examples():
    assert "vagen demo --seed 2" in vagen("--help").stdout
    assert "--resume" in vagen("demo", "--help").stdout


def test_the_list_of_benchmarks_needs_no_torch():
    code = "import sys; from vagen.tools.bench import describe; print(describe()); sys.exit('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0 and len(done.stdout.splitlines()) == 9


def test_report_prints_the_path(make_run):
    root = make_run()
    done = vagen("report", root)
    assert done.returncode == 0
    assert done.stdout.strip() == str(root / "report.html")


def test_report_of_a_folder_that_is_none(tmp_path):
    done = vagen("report", tmp_path / "nothing")
    assert done.returncode == 2
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1


def test_bench_lists_and_measures(make_run):
    assert "pipeline" in vagen("bench").stdout
    root = make_run()
    done = vagen("bench", "pipeline", "--json", "--option", f"run_dir={root}")
    assert done.returncode == 0
    result = json.loads(done.stdout)
    assert set(result) == {"figures", "machine", "command"}
    figures = result["figures"]
    assert all(set(figure) == {"value", "unit"} for figure in figures.values())
    # 29 steps of 96 episodes and 3000 tokens in 116 s; 6000 generated tokens every 2 s.
    assert figures["trajectories_per_s"]["value"] == pytest.approx(24)
    assert figures["trained_tokens_per_s"]["value"] == pytest.approx(750)
    assert figures["generated_tokens_per_s"]["value"] == pytest.approx(3000)
    assert figures["learner_waited_share"]["value"] == pytest.approx(0.25)
    assert figures["engine_waited_share"]["value"] == pytest.approx(0.2)
    assert figures["actor_waited_share"]["value"] == pytest.approx(20 / 128)
    assert {"cpu", "cores", "memory_gib", "python", "torch"} <= set(result["machine"])
    assert result["command"].startswith("vagen bench pipeline --json")
    assert "trajectories/s" in vagen("bench", "pipeline", "--option", f"run_dir={root}").stdout


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["bench", "nothing"], "bench nothing: unknown; known are ablation, advantages, archive, broadcast, buffer, "),
        (["bench", "pipeline", "--option", "x"], "error: --option x: expected key=value"),
        (["bench", "pipeline", "--option", "x=1"], "error: --option x: unknown; known are"),
        (["config", "check", "no-such-recipe"], "error: no-such-recipe: no such file, and no recipe of that name"),
    ],
)
def test_wrong_words_are_one_line(words, message):
    done = vagen(*words)
    assert done.returncode == 2
    assert message in done.stderr and done.stderr.count("\n") == 1


def test_doctor_speaks_of_everything():
    text = vagen("doctor").stdout
    for part in ("python", "torch", "valkey", "cores", "loopback"):
        assert part in text
