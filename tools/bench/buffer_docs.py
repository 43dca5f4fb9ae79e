"""Writes what a benchmark measured into a document, between its markers."""

from __future__ import annotations

import datetime
from collections.abc import Mapping
from pathlib import Path

from vagen.tools.bench import Figure, Report, machine
from vagen.tools.bench.documents import replace_parts

_GOALS = {"memory_vs_best_peer": ">= 1", "durable_vs_fsync_limit": ">= 0.8", "claim_512_of_200k_ms": "<= 20"}


def update_buffer(path: Path, report: Report) -> None:
    """Replace the part `buffer` of the document. Raises `ConfigError` where it has none."""
    update_part(path, "buffer", report, _GOALS)


def update_part(path: Path, part: str, report: Report, goals: Mapping[str, str]) -> None:
    """Replace a part of the document; `goals` are by figure. Raises `ConfigError` where it has no such part."""
    path.write_text(replace_parts(path, {part: table(report.figures, report.notes, goals)}))


def table(figures: Mapping[str, Figure], notes: tuple[str, ...], goals: Mapping[str, str] = _GOALS) -> str:
    """The figures as Markdown, with where and when they were measured."""
    rows = [f"| {key} | {_row(figure)} | {goals.get(key, '')} |" for key, figure in figures.items()]
    here = machine()
    where = f"{here['cpu']}, {here['cores']} cores, {here['memory_gib']} GiB, {here['system']}"
    today = datetime.date.today().isoformat()
    head = ["| figure | median | least to greatest | unit | goal |", "| --- | --- | --- | --- | --- |"]
    return "\n".join([*head, *rows, "", f"Measured on {today} on {where}.", "", *(f"* {note}" for note in notes)])


def _row(figure: Figure) -> str:
    low_high = "" if figure.spread is None else f"{figure.spread[0]:.4g} to {figure.spread[1]:.4g}"
    return f"{figure.value:.4g} | {low_high} | {figure.unit}"
