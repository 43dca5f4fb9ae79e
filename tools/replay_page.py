"""A comparison as something to look at: a table for the terminal, one self-contained HTML page of charts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import jinja2
from markupsafe import Markup
from rich.table import Table

from vagen.tools.charts import Series, line_chart, number
from vagen.tools.replay_compare import Comparison
from vagen.tools.replay_measure import Bucket, Measured

__all__ = ["comparison_table", "render_page", "staleness_note"]

_OF_THE_DATA: tuple[tuple[str, str, Callable[[Bucket], float]], ...] = (
    ("|log ratio|", "Mean absolute log importance ratio, model over behaviour policy.", lambda b: b.log_ratio),
    ("ESS of the ratios", "Effective sample size as a share, before any correction.", lambda b: b.ess),
)
_OF_A_CORRECTION: tuple[tuple[str, str, Callable[[Measured], float | None]], ...] = (
    (
        "ESS of the gradient weights",
        "Of the factors with which advantages enter the policy gradient.",
        lambda m: m.weight_ess,
    ),
    ("Truncated", "Share of tokens whose weight is capped.", lambda m: m.truncated_share),
    ("Rejected", "Share of tokens with weight 0.", lambda m: m.rejected_share),
    ("Clipped", "Share of tokens whose objective is flat.", lambda m: m.clipped_share),
    (
        "Gradient norm",
        "Policy loss masked to the bucket, mean over its tokens, before clipping.",
        lambda m: m.grad_norm,
    ),
    (
        "Value error",
        "Root mean square of the critic's value minus the correction's own return.",
        lambda m: m.value_error,
    ),
)


def staleness_note(comparison: Comparison) -> str:
    """One sentence on what staleness means here, and what was left out."""
    if comparison.at_step is None:
        meaning = "staleness as recorded when the trajectories were trained, not against this model (--at-step)"
    else:
        meaning = f"staleness against the model, which is of learner step {comparison.at_step}"
    return meaning + (f"; {comparison.left_out} trajectories are in no bucket" if comparison.left_out else "")


def comparison_table(comparison: Comparison) -> Table:
    """One row a correction and bucket, in the order of the comparison."""
    table = Table(title=f"{comparison.archive} on {comparison.model}", caption=staleness_note(comparison))
    for heading in ("correction", "staleness"):
        table.add_column(heading, no_wrap=True)
    for heading in ("n", "tokens", "|log w|", "ESS", "ESS grad", "trunc", "reject", "clip", "grad", "value err"):
        table.add_column(heading, justify="right", no_wrap=True)
    for result in comparison.corrections:
        for bucket, measured in zip(comparison.buckets, result.buckets, strict=True):
            table.add_row(
                result.name,
                bucket.name,
                str(bucket.trajectories),
                str(bucket.tokens),
                f"{bucket.log_ratio:.4f}",
                f"{bucket.ess:.3f}",
                f"{measured.weight_ess:.3f}",
                f"{measured.truncated_share:.3f}",
                f"{measured.rejected_share:.3f}",
                f"{measured.clipped_share:.3f}",
                f"{measured.grad_norm:.4f}",
                "-" if measured.value_error is None else f"{measured.value_error:.4f}",
            )
        table.add_section()
    return table


def render_page(comparison: Comparison) -> str:
    """The page as HTML: every figure against staleness, one line a correction."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("vagen.tools", "templates"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["number"] = number
    return environment.get_template("replay.html").render(
        archive=Path(comparison.archive).name,
        comparison=comparison,
        note=staleness_note(comparison),
        figures=[*_data_figures(comparison), *_correction_figures(comparison)],
    )


def _data_figures(comparison: Comparison) -> list[tuple[str, str, Markup]]:
    return [
        (
            title,
            note,
            _chart([Series(name=title, points=[(b.staleness_mean, of(b)) for b in comparison.buckets], marked=True)]),
        )
        for title, note, of in _OF_THE_DATA
    ]


def _correction_figures(comparison: Comparison) -> list[tuple[str, str, Markup]]:
    return [
        (
            title,
            note,
            _chart(
                [
                    Series(
                        name=result.name,
                        points=[
                            (bucket.staleness_mean, value)
                            for bucket, measured in zip(comparison.buckets, result.buckets, strict=True)
                            if (value := of(measured)) is not None
                        ],
                        marked=True,
                    )
                    for result in comparison.corrections
                ]
            ),
        )
        for title, note, of in _OF_A_CORRECTION
    ]


def _chart(series: list[Series]) -> Markup:
    return line_chart(series, x_label="staleness in learner steps, mean of the bucket")
