"""The whole pipeline at work: how much it generates and trains a second, and who waits."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path

import yaml

from vagen.actor.config import ActorConfig
from vagen.common.config import section
from vagen.common.errors import ConfigError
from vagen.tools.bench import Figure, Figures, benchmark
from vagen.tools.runs import RunDir
from vagen.tools.telemetry import time_shares

_WAITS = {
    "actor": ("credit", "admission", "window"),
    "buffer": ("messages",),
    "learner": ("wait_data",),
}
_OPTIONS = ("run_dir", "config", "steps")


@benchmark("pipeline")
def pipeline(options: Mapping[str, str]) -> Figures:
    """Throughput and waiting of all processes together; option run_dir=DIR reads a run instead of making one."""
    for key in options:
        if key not in _OPTIONS:
            raise ConfigError(f"--option {key}: unknown; known are {', '.join(_OPTIONS)}")
    if "run_dir" in options:
        return figures_of(RunDir(Path(options["run_dir"])))
    with tempfile.TemporaryDirectory(prefix="vagen-bench-") as folder:
        root = Path(folder) / "run"
        _short_run(root, options.get("config", "frozenlake"), options.get("steps", "10"))
        return figures_of(RunDir(root))


def figures_of(run: RunDir) -> Figures:
    """The figures of a run's folder, over the time from its first to its last learner step.

    Raises `ConfigError` when it has fewer than two steps or no telemetry.
    """
    steps, telemetry = run.read_steps(), run.read_telemetry()
    if len(steps) < 2 or not telemetry:
        raise ConfigError(f"{run.root}: expected at least 2 learner steps and telemetry, got {len(steps)} steps")
    span = steps[-1].time - steps[0].time
    during = [sample for sample in telemetry if steps[0].time <= sample.time <= steps[-1].time]
    if span <= 0 or len(during) < 2:
        raise ConfigError(f"{run.root}: too short to be measured, {span:.1f} s and {len(during)} samples")
    first, last = during[0], during[-1]
    generated = last.counters.get("actor_tokens_total", 0.0) - first.counters.get("actor_tokens_total", 0.0)
    figures = {
        "trajectories_per_s": Figure(value=sum(s.num_trajectories for s in steps[1:]) / span, unit="trajectories/s"),
        "generated_tokens_per_s": Figure(value=generated / (last.time - first.time), unit="tokens/s"),
        "trained_tokens_per_s": Figure(value=sum(s.policy_tokens for s in steps[1:]) / span, unit="tokens/s"),
        "step_seconds": Figure(value=span / (len(steps) - 1), unit="s"),
    }
    slots = {"actor": section(_recipe(run), "actor", ActorConfig).concurrency}
    for process, shares in time_shares(first, last, slots).items():
        # An engine does nothing but compute and pause: what is left, it waited for requests.
        waited = 1 - sum(shares.values()) if process == "engine" else sum(shares.get(w, 0.0) for w in _WAITS[process])
        figures[f"{process}_waited_share"] = Figure(value=min(1.0, max(0.0, waited)), unit="share of time")
    return figures


def _recipe(run: RunDir) -> dict[str, object]:
    return yaml.safe_load(run.recipe.read_text()) if run.recipe.is_file() else {}


def _short_run(root: Path, config: str, steps: str) -> None:
    from vagen.tools.demo import DemoOptions, prepare, run_demo
    from vagen.tools.screen import LogView

    overrides = (f"learner.total_steps={steps}", "demo.levels=1", "demo.eval_every_steps=0", "sft.steps=100")
    with prepare(DemoOptions(config=config, run_dir=root, overrides=overrides)) as prepared:
        run_demo(prepared, LogView())
