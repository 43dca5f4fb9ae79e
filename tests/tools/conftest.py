"""A run's folder with plausible content, in the format that the processes write."""

from __future__ import annotations

import base64
import io
import json
import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

RECIPE = """\
run: {name: synthetic, seed: 7}
learner: {total_steps: 30, batch_size: 96}
actor: {concurrency: 64}
demo: {levels: 1000}
"""


def step_line(step: int, rng: random.Random) -> dict:
    progress = 1 - math.exp(-step / 9)
    return {
        "step": step,
        "time": 1000.0 + 4 * step,
        "wall_s": 4.0 * step,
        "version": step + 2,
        "num_trajectories": 96,
        "success": 0.27 + 0.58 * progress + rng.gauss(0, 0.03),
        "reward_mean": 0.2 + 0.7 * progress,
        "reward_by_component": {"task": 0.25 + 0.6 * progress, "format": 0.03 + 0.05 * progress},
        "turns_mean": 4.0,
        "policy_tokens": 3000,
        "context_tokens": 8000,
        "staleness": {"0": 4, "1": 52, "2": 30, "3": 10},
        "mixed_version_trajectories": rng.randrange(5, 40),
        "entropy": 0.6 - 0.2 * progress,
        "loss": {"policy": rng.gauss(0, 0.02), "value": 0.1 * (1 - progress), "kl": 0.01, "total": 0.05},
        "grad_norm": 0.5,
        "lr": 3e-4,
        "clip_fraction": 0.05,
        "ratio": {"mean": 1.0, "max": 3.0, "p99": 1.6, "ess": 0.93, "truncated_share": 0.01},
        "mismatch_current_version": 1e-6,
        "explained_variance": 0.4,
        "probe_mismatch": abs(rng.gauss(1e-6, 2e-7)),
        "seconds": {"wait_data": 1.0, "update": 2.5, "total": 4.0},
        "publishes": [
            {"version": step + 2, "seconds": 0.2, "stall_s": 0.05, "ok": ["http://127.0.0.1:1"], "failed": {}}
        ],
        "skipped_updates": 0,
    }


def picture(shade: int) -> str:
    image = Image.new("RGB", (56, 56), (205, 230, 250))
    image.paste((shade, 80, 120), (14, 28, 28, 42))
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return base64.b64encode(buffer.getvalue()).decode()


def evaluation(success: float, interval: tuple[float, float], levels: int = 1000, num_transcripts: int = 3) -> dict:
    turn = {
        "image_png_b64": picture(40),
        "response": "<think>down right</think><answer>Right</answer>",
        "reward": 0.02,
        "actions": ["Right"],
    }
    return {
        "success": success,
        "interval": list(interval),
        "levels": levels,
        "turns_mean": 4.1,
        "format_rate": 0.97,
        "seconds": 12.0,
        "policy_versions": [31, 31],
        "transcripts": [
            {"seed": 1_000_000 + i, "success": success > 0.5, "turns": [turn] * (3 + i)} for i in range(num_transcripts)
        ],
    }


def telemetry_line(index: int) -> dict:
    return {
        "time": 1000.0 + 2 * index,
        "counters": {"actor_tokens_total": 6000.0 * index, "learner_tokens_total[policy]": 4300.0 * index},
        "seconds": {
            "actor": {"engine": 90.0 * index, "credit": 20.0 * index},
            "engine": {"busy": 1.5 * index, "paused": 0.1 * index},
            "buffer": {"messages": 1.9 * index},
            "learner": {"wait_data": 0.5 * index, "forward": 0.4 * index, "update": 1.0 * index},
        },
        "observed_s": {name: 2.0 * index for name in ("actor", "engine", "buffer", "learner")},
        "gauges": {"ready": 80.0, "claimed": 96.0, "running": 64.0, "running_episodes": 64.0},
    }


def write_run(root: Path, *, steps: int = 30, finished: bool = True, seed: int = 3) -> Path:
    """A whole run, or one that was interrupted after `steps` steps and has no evaluation after."""
    rng = random.Random(seed)
    for folder in ("learner", "eval", "buffer"):
        (root / folder).mkdir(parents=True, exist_ok=True)
    (root / "recipe.yaml").write_text(RECIPE)
    (root / "learner" / "metrics.jsonl").write_text("".join(json.dumps(step_line(s, rng)) + "\n" for s in range(steps)))
    (root / "telemetry.jsonl").write_text("".join(json.dumps(telemetry_line(i)) + "\n" for i in range(2 * steps)))
    (root / "eval" / "before.json").write_text(json.dumps(evaluation(0.268, (0.241, 0.296))))
    curve = [
        {**evaluation(0.5 + s / 90, (0.43 + s / 90, 0.57 + s / 90), 200, 0), "step": s, "time": 1000.0 + 4 * s}
        for s in range(10, steps, 10)
    ]
    (root / "eval" / "curve.jsonl").write_text("".join(json.dumps(point) + "\n" for point in curve))
    state = {
        "config": "frozenlake",
        "seed": 7,
        "started_at": 990.0,
        "finished_at": 1200.0,
        "exit_reason": "finished" if finished else "interrupted",
        "exit_code": 0 if finished else 130,
        "active_s": 210.0,
        "stage_seconds": {"warm start": 40.0, "train": 120.0},
        "cpu_seconds": {"sft": 39.5, "engine": 70.0, "learner": 95.25, "actor": 20.0, "buffer": 5.0},
        "events": ["00:03 engine was killed by SIGKILL", "00:09 engine is back, pid 4711"],
    }
    (root / "demo.json").write_text(json.dumps(state))
    if finished:
        (root / "eval" / "after.json").write_text(json.dumps(evaluation(0.842, (0.818, 0.863))))
        audit = {"produced": 3000, "trained": 2880, "filtered": 0, "stale": 90, "refused": 0, "evicted": 0}
        audit |= {"pending": 30, "in_flight": 0, "identity_holds": True, "failed_episodes": 1}
        (root / "buffer" / "audit.json").write_text(json.dumps(audit))
    return root


@pytest.fixture
def make_run(tmp_path: Path) -> Callable[..., Path]:
    """Writes a run's folder below `tmp_path`; see `write_run` for the arguments."""

    def make(**options: Any) -> Path:
        return write_run(tmp_path / "run", **options)

    return make
