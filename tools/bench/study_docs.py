"""The generated parts of docs/staleness.md and docs/estimators.md: tables and a figure, from cached runs.

A part lies between `<!-- begin NAME -->` and `<!-- end NAME -->`; what is written around it by hand stays.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from vagen.tools.bench.documents import replace_parts
from vagen.tools.bench.study import RunResult
from vagen.tools.bench.study_figure import Line, success_figure
from vagen.tools.bench.study_plan import (
    CORRECTIONS,
    DEFAULT,
    ESTIMATORS,
    PAIRED_STALENESS,
    STALENESS,
    UNCORRECTED,
    Variant,
)
from vagen.tools.bench.study_summary import Results, Sample
from vagen.tools.statistics import wilson_interval

__all__ = ["update_estimators", "update_staleness"]

_IN_FIGURE = ("default", "uncorrected", "decoupled", "plain_ppo", "none")


def update_staleness(path: Path, results: Results) -> None:
    """Replace the parts `headline`, `runs`, `correction`, `grid`, `figure` and `cost` of a markdown file.

    Writes the figure beside it. Raises `ConfigError` when the file lacks a part.
    """
    figure = path.with_suffix(".svg")
    lines = [_line(results, variant) for variant in CORRECTIONS if variant.name in _IN_FIGURE]
    figure.write_text(success_figure([line for line in lines if line.points]))
    parts = {
        "headline": _headline(results),
        "runs": _single_runs([run for k in (0, *STALENESS) for run in results.headline_runs(k)]),
        "correction": _correction(results),
        "grid": _grid(results),
        "figure": f"![Held-out success against staleness]({figure.name})",
        "cost": _cost(results),
    }
    path.write_text(replace_parts(path, parts))


def update_estimators(path: Path, results: Results) -> None:
    """Replace the parts `ablation` and `cost` of a markdown file. Raises `ConfigError` when it lacks one."""
    rows = []
    for variant in ESTIMATORS:
        runs, success = results.runs(variant, 0), results.success(variant, 0)
        if success is None:
            continue
        lowest, highest = min(success.values), max(success.values)
        formats = sum(run.final.format_rate for run in runs) / len(runs)
        halfway = [run.curve[len(run.curve) // 2].success for run in runs if run.curve]
        middle = f"{sum(halfway) / len(halfway):.3f}" if halfway else ""
        rows.append(
            [
                variant.title,
                f"{success.mean:.3f}",
                _interval(success),
                f"{lowest:.3f}-{highest:.3f}",
                middle,
                f"{formats:.3f}",
                str(len(runs)),
            ]
        )
    header = ["estimator", "success", "95 % (t)", "seeds from-to", "halfway (200 levels)", "format", "seeds"]
    path.write_text(replace_parts(path, {"ablation": _table(header, rows), "cost": _cost(results)}))


def _headline(results: Results) -> str:
    rows = []
    for staleness in (0, *STALENESS):
        success, ratio = results.headline_success(staleness), results.ratio(staleness)
        runs = results.headline_runs(staleness)
        if success is None or ratio is None:
            continue
        kept = ["1", ""] if staleness == 0 else [f"{ratio.mean:.3f}", _interval(ratio)]
        rows.append(
            [
                str(staleness),
                f"{success.mean:.3f}",
                _interval(success),
                *kept,
                f"{_mean_of(runs, 'ess'):.2f}",
                f"{_mean_of(runs, 'log_ratio'):.2f}",
                str(len(runs)),
            ]
        )
    header = ["staleness", "success", "95 % (t)", "of on-policy", "95 % (t)", "ESS", "mean abs. log-ratio", "seeds"]
    return _table(header, rows)


def _single_runs(runs: Sequence[RunResult]) -> str:
    rows = []
    for run in runs:
        low, high = wilson_interval(run.final.solved, run.final.levels)
        rows.append(
            [
                str(run.spec.staleness),
                str(run.spec.seed),
                f"{run.final.success:.3f}",
                f"{low:.3f}-{high:.3f}",
                f"{run.final.format_rate:.3f}",
                f"{run.cpu_s:.0f}",
            ]
        )
    return _table(["staleness", "seed", "success", "95 % (Wilson)", "format", "CPU-s"], rows)


def _correction(results: Results) -> str:
    rows = []
    for variant in (DEFAULT, UNCORRECTED):
        success = results.success(variant, PAIRED_STALENESS)
        if success is not None:
            rows.append(
                [
                    variant.title,
                    f"{success.mean:.3f}",
                    _interval(success),
                    f"{min(success.values):.3f}",
                    str(len(success.values)),
                ]
            )
    gain = results.correction_gain()
    if gain is not None:
        rows.append(["difference, paired", f"{gain.mean:+.3f}", _interval(gain), "", str(len(gain.values))])
    return _table([f"staleness {PAIRED_STALENESS}", "success", "95 % (t)", "lowest seed", "seeds"], rows)


def _grid(results: Results) -> str:
    columns = (0, *STALENESS)
    rows = []
    for variant in CORRECTIONS:
        cells = [results.success(variant, k) for k in columns]
        if any(cells):
            shown = [
                "" if cell is None else f"{cell.mean:.3f} ({min(cell.values):.3f}; {len(cell.values)})"
                for cell in cells
            ]
            rows.append([variant.title, *shown])
    return _table(["correction", *(f"k = {k}" for k in columns)], rows)


def _cost(results: Results) -> str:
    runs = results.all
    if not runs:
        return "No runs yet."
    spec = runs[0].spec
    cpu = sum(run.cpu_s for run in runs)
    return (
        f"{len(runs)} runs of {spec.steps} steps x {spec.episodes} episodes, {cpu / len(runs):.0f} CPU-seconds a run "
        f"({cpu / 60:.0f} CPU-minutes together), torch {runs[0].torch}, one thread."
    )


def _line(results: Results, variant: Variant) -> Line:
    points = []
    for staleness in (0, *STALENESS):
        # On fresh data every correction is the same training, up to the KL.
        success = results.success(variant, staleness)
        if success is not None:
            points.append((staleness, success.values))
    return Line(title=variant.title, points=tuple(points))


def _mean_of(runs: Sequence[RunResult], field: str) -> float:
    values = [float(getattr(step, field)) for run in runs for step in run.steps]
    return sum(values) / len(values)


def _interval(sample: Sample) -> str:
    if len(sample.values) < 2:
        return "one seed"
    low, high = sample.interval
    return f"{low:.3f} to {high:.3f}"


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
