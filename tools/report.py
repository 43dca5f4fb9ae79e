"""`report.html`: one self-contained page about a run, made from its folder alone.

Owns what is shown and in which order; `vagen.tools.charts` draws, `templates/report.html` lays out, and
`vagen.tools.summary` defines the figures. Sections that the run did not come to say so.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import jinja2
import msgspec
import yaml
from markupsafe import Markup

from vagen.actor.config import ActorConfig
from vagen.common.config import section
from vagen.common.errors import ConfigError
from vagen.common.redaction import redact
from vagen.tools.charts import Series, bar_chart, interval_chart, line_chart, number, share_bars
from vagen.tools.runs import Evaluation, RunDir, StepRecord, TelemetrySample, Transcript
from vagen.tools.summary import build_summary, verdict
from vagen.tools.telemetry import time_shares

_RATE_WINDOW_S = 10.0
_MAX_RATE_POINTS = 60
_COUNTED_APART = ("duplicates", "malformed", "failed_episodes", "tasks_abandoned", "episodes_abandoned")
_ACCOUNTING_TERMS = ("trained", "filtered", "stale", "refused", "evicted", "pending", "in_flight")


@dataclass(frozen=True, kw_only=True)
class Figure:
    """One titled chart; `svg` is empty when there is nothing to draw."""

    title: str
    note: str
    svg: Markup


def write_report(root: Path) -> Path:
    """Write `report.html` of a run, complete or partial, and return its path.

    Raises `ConfigError` when the folder is not that of a run.
    """
    run = RunDir(root)
    known = (run.state, run.recipe, run.metrics, run.summary)
    if not any(path.is_file() for path in known):
        raise ConfigError(
            f"{root}: not the folder of a run (expected {' or '.join(path.name for path in known)} in it)"
        )
    run.report.write_text(render_report(run), encoding="utf-8")
    return run.report


def render_report(run: RunDir) -> str:
    """The page as HTML."""
    summary = json.loads(run.summary.read_text()) if run.summary.is_file() else _plain(build_summary(run))
    steps, telemetry = run.read_steps(), run.read_telemetry()
    before, after = run.read_evaluation("before"), run.read_evaluation("after")
    kind, sentence = verdict(summary)
    state = run.read_state()
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("vagen.tools", "templates"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["number"] = number
    return environment.get_template("report.html").render(
        title=f"{summary['config'] or run.root.name} · seed {summary['seed']}",
        verdict_kind=kind,
        verdict=sentence,
        written_at=time.strftime("%Y-%m-%d %H:%M:%S %Z"),
        summary=summary,
        tiles=_tiles(summary),
        intervals=_intervals(summary, before, after),
        figures=_figures(run, summary, steps, telemetry),
        shares=share_bars(time_shares(None, telemetry[-1], _slots(run))) if telemetry else Markup(""),
        publishes=[(record, publish) for record in steps for publish in record.publishes],
        steps=steps,
        accounting=_accounting(summary["accounting"]),
        pairs=list(_pairs(before, after)),
        events=state.events if state else [],
        recipe=redact(run.recipe.read_text()) if run.recipe.is_file() else "",
        folder=run.root.name,
    )


def _plain(summary: dict[str, Any]) -> dict[str, Any]:
    plain: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(summary))
    return plain


def _tiles(summary: dict[str, Any]) -> list[tuple[str, str, str]]:
    """Label, value and a note for the row of figures on top."""

    def shown(value: Any, form: Callable[[Any], str] = number) -> str:
        return "–" if value is None else form(value)

    stalest = max((int(key) for key in summary["staleness"]), default=None)
    return [
        ("before", shown(summary["heldout_success_before"], "{:.3f}".format), "held-out success"),
        ("after", shown(summary["heldout_success_after"], "{:.3f}".format), "held-out success"),
        ("time", shown(summary["minutes"], "{:.1f} min".format), f"{summary['cpu_seconds']['total']:.0f} CPU seconds"),
        ("steps", f"{summary['steps']}", f"{summary['episodes_trained']} episodes trained"),
        (
            "versions",
            f"{summary['versions_published']}",
            f"{summary['versions_published_while_running']} while episodes ran",
        ),
        ("mixed", f"{summary['mixed_version_trajectories_trained']}", "trained episodes of several versions"),
        ("staleness", shown(stalest), "largest, in learner steps"),
        ("mismatch", shown(summary["logprob_mismatch_max"], "{:.1e}".format), "engine against learner, largest"),
    ]


def _intervals(summary: dict[str, Any], before: Evaluation | None, after: Evaluation | None) -> Markup:
    rows = [
        (name, evaluation.success, evaluation.interval)
        for name, evaluation in (("before", before), ("after", after))
        if evaluation is not None
    ]
    goals = summary["targets"]
    lines = {f"before < {goals['before_below']:g}": goals["before_below"]}
    lines[f"after ≥ {goals['after_at_least']:g}"] = goals["after_at_least"]
    return interval_chart(rows, lines) if rows else Markup("")


def _figures(
    run: RunDir, summary: dict[str, Any], steps: Sequence[StepRecord], telemetry: Sequence[TelemetrySample]
) -> list[Figure]:
    def curve(name: str, value: Callable[[StepRecord], float | None], **style: Any) -> Series:
        points = [(float(record.step), y) for record in steps if (y := value(record)) is not None]
        return Series(name=name, points=points, **style)

    components = sorted({name for record in steps for name in record.reward_by_component})
    parts = sorted({name for record in steps for name in record.loss})
    figures = [
        Figure(
            title="Success on held-out levels",
            note="Validation levels, never trained on; band: 95 % Wilson interval.",
            svg=_heldout_chart(run, summary),
        ),
        Figure(
            title="Success while training",
            note="Share of the episodes of each batch.",
            svg=line_chart([curve("training", lambda r: r.success)], y_range=(0, 1)),
        ),
        Figure(
            title="Reward by component",
            note="Mean per episode.",
            svg=line_chart(
                [curve(name, lambda r, name=name: r.reward_by_component.get(name)) for name in components]  # type: ignore[misc]
            ),
        ),
        Figure(
            title="Staleness at consumption",
            note="Learner step minus the step of the episode's oldest token; all trained episodes.",
            svg=bar_chart(summary["staleness"], x_label="learner steps"),
        ),
        Figure(
            title="Losses",
            note="",
            svg=line_chart([curve(name, lambda r, name=name: r.loss.get(name)) for name in parts]),  # type: ignore[misc]
        ),
        Figure(
            title="Entropy",
            note="Mean over policy tokens, in nats.",
            svg=line_chart([curve("entropy", lambda r: r.entropy)]),
        ),
        Figure(
            title="Importance ratio",
            note="ess: effective sample size as a share of the batch.",
            svg=line_chart(
                [
                    curve("mean", lambda r: r.ratio.mean),
                    curve("ess", lambda r: r.ratio.ess),
                    curve("truncated share", lambda r: r.ratio.truncated_share),
                ]
            ),
        ),
        Figure(
            title="Engine against learner",
            note="Mean |difference| of log-probabilities on probe prompts, of the publishes that were probed.",
            svg=line_chart([curve("probe mismatch", lambda r: r.probe_mismatch, marked=True)]),
        ),
        Figure(title="Tokens a second", note="", svg=_throughput_chart(telemetry)),
    ]
    return [figure for figure in figures if figure.svg]


def _heldout_chart(run: RunDir, summary: dict[str, Any]) -> Markup:
    points = [(float(p.step), p.success, p.interval) for p in run.read_curve() if p.step is not None]
    for name, step in (("before", 0.0), ("after", float(summary["steps"]))):
        evaluation = run.read_evaluation(name)
        if evaluation is not None:
            points = [point for point in points if point[0] != step]
            points.append((step, evaluation.success, evaluation.interval))
    points.sort()
    series = Series(
        name="held-out",
        points=[(step, success) for step, success, _ in points],
        band=[interval for _, _, interval in points],
        marked=True,
    )
    return line_chart([series], y_range=(0, 1), target=summary["targets"]["after_at_least"])


def _throughput_chart(telemetry: Sequence[TelemetrySample]) -> Markup:
    if len(telemetry) < 2:
        return Markup("")
    begin, end = telemetry[0].time, telemetry[-1].time
    width = max(_RATE_WINDOW_S, (end - begin) / _MAX_RATE_POINTS)
    kept = [telemetry[0]]
    for sample in telemetry:
        if sample.time - kept[-1].time >= width:
            kept.append(sample)
    pairs = list(pairwise(kept))

    def series(name: str, counter: str) -> Series:
        points = [
            (b.time - begin, (b.counters.get(counter, 0.0) - a.counters.get(counter, 0.0)) / (b.time - a.time))
            for a, b in pairs
        ]
        return Series(name=name, points=points if any(y for _, y in points) else [])

    return line_chart(
        [series("generated", "actor_tokens_total"), series("trained", "learner_tokens_total[policy]")],
        x_label="seconds since the start",
    )


def _slots(run: RunDir) -> dict[str, int]:
    recipe = yaml.safe_load(run.recipe.read_text()) if run.recipe.is_file() else {}
    return {"actor": section(recipe, "actor", ActorConfig).concurrency}


def _accounting(audit: dict[str, Any] | None) -> dict[str, Any] | None:
    if audit is None:
        return None
    return {
        "produced": audit.get("produced"),
        "terms": [(term.replace("_", " "), audit[term]) for term in _ACCOUNTING_TERMS if term in audit],
        "holds": audit.get("identity_holds"),
        "apart": [(key.replace("_", " "), audit[key]) for key in _COUNTED_APART if key in audit],
    }


def _pairs(
    before: Evaluation | None, after: Evaluation | None
) -> Iterator[tuple[int, Transcript | None, Transcript | None]]:
    """Episodes of the same seed side by side, in the order they were kept."""
    sides = [
        {transcript.seed: transcript for transcript in evaluation.transcripts} if evaluation else {}
        for evaluation in (before, after)
    ]
    for seed in dict.fromkeys([*sides[0], *sides[1]]):
        yield seed, sides[0].get(seed), sides[1].get(seed)
