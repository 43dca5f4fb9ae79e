"""What a person sees while a demo runs: a live screen on a terminal, log lines elsewhere.

Owns the rendering, a pure function of a `Snapshot`, and the two ways of showing it. Gathers nothing itself.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Protocol, Self

from rich.bar import Bar
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from vagen.tools.runs import Evaluation, StepRecord, num_steps

logger = logging.getLogger(__name__)

_SPARKS = " ▁▂▃▄▅▆▇█"
_STATE_STYLE = {"serving": "green", "starting": "yellow", "lost": "bold red", "failed": "bold red", "done": "dim"}
_RECENT_STEPS = 10


@dataclass(frozen=True, kw_only=True)
class ProcessView:
    """One line of the process table."""

    name: str
    state: str
    pid: int | None = None
    cpu_s: float = 0.0
    shares: Mapping[str, float] = field(default_factory=dict)
    """What it did or waited for -> share of its recent time."""


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """Everything on the screen at one moment."""

    title: str
    stage: str
    elapsed_s: float
    total_steps: int
    steps: Sequence[StepRecord] = ()
    before: Evaluation | None = None
    after: Evaluation | None = None
    curve: Sequence[Evaluation] = ()
    target: float = 1.0
    gauges: Mapping[str, float] = field(default_factory=dict)
    generated_per_s: float = 0.0
    trained_per_s: float = 0.0
    trajectories_per_s: float = 0.0
    processes: Sequence[ProcessView] = ()


class View(Protocol):
    """Where snapshots and events go."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def update(self, snapshot: Snapshot) -> None: ...

    def event(self, text: str) -> None:
        """Show one line at once, and leave it on the terminal."""
        ...


class LiveView:
    """Redraws the screen in place; events scroll by above it."""

    def __init__(self, console: Console) -> None:
        self._live = Live(console=console, refresh_per_second=4, auto_refresh=False)

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.stop()

    def update(self, snapshot: Snapshot) -> None:
        self._live.update(render(snapshot), refresh=True)

    def event(self, text: str) -> None:
        self._live.console.print(escape(text), highlight=False)


class LogView:
    """One log line every `every_s` seconds and at each change of stage."""

    def __init__(self, every_s: float = 10.0) -> None:
        self._every_s = every_s
        self._shown_at = float("-inf")
        self._stage = ""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return

    def update(self, snapshot: Snapshot) -> None:
        now = time.monotonic()
        if snapshot.stage == self._stage and now - self._shown_at < self._every_s:
            return
        self._stage, self._shown_at = snapshot.stage, now
        logger.info("%s", status_line(snapshot))

    def event(self, text: str) -> None:
        for line in text.splitlines():
            logger.info("%s", line)


def status_line(snapshot: Snapshot) -> str:
    """The snapshot in one line."""
    parts = [clock(snapshot.elapsed_s), snapshot.stage]
    if snapshot.steps:
        last = snapshot.steps[-1]
        parts.append(f"step {num_steps(snapshot.steps)}/{snapshot.total_steps}")
        parts.append(f"version {_version(snapshot)}")
        if last.success is not None:
            parts.append(f"training success {last.success:.2f}")
        parts.append(f"staleness {_staleness_text(_merge_staleness(snapshot.steps[-_RECENT_STEPS:]))}")
    if snapshot.curve:
        point = snapshot.curve[-1]
        parts.append(f"held-out {point.success:.2f} at step {point.step}")
    if "ready" in snapshot.gauges:
        parts.append("ready/claimed/running " + "/".join(str(int(snapshot.gauges.get(k, 0))) for k in _QUEUE))
    if snapshot.steps:
        parts.append(f"tokens/s generated {snapshot.generated_per_s:.0f}, trained {snapshot.trained_per_s:.0f}")
    return "  ".join(parts)


def render(snapshot: Snapshot) -> RenderableType:
    """The whole screen, about 24 lines."""
    top = Table.grid(expand=True, padding=(0, 1))
    top.add_column(ratio=3)
    top.add_column(ratio=2)
    top.add_row(_success_panel(snapshot), _flow_panel(snapshot))
    return Group(_header(snapshot), top, _process_panel(snapshot))


def sparkline(values: Sequence[float | None], width: int) -> str:
    """The last `width` values, of [0, 1], as block characters; a gap where there is none."""
    return "".join(
        " " if value is None or math.isnan(value) else _SPARKS[1 + round(min(1.0, max(0.0, value)) * 7)]
        for value in values[-width:]
    )


def clock(seconds: float) -> str:
    """`1:02:03` or `2:03`."""
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


_QUEUE = ("ready", "claimed", "running")


def _header(snapshot: Snapshot) -> RenderableType:
    table = Table.grid(expand=True, padding=(0, 1))
    table.add_column()
    table.add_column(ratio=1)
    table.add_column(justify="right")
    done = num_steps(snapshot.steps)
    table.add_row(
        Text(snapshot.title, style="bold"),
        ProgressBar(total=snapshot.total_steps, completed=done),
        Text(f"{snapshot.stage} · step {done}/{snapshot.total_steps} · {clock(snapshot.elapsed_s)}"),
    )
    return table


def _success_panel(snapshot: Snapshot) -> Panel:
    table = Table.grid(expand=True, padding=(0, 1))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(ratio=1)
    for label, evaluation in (("before", snapshot.before), ("after", snapshot.after)):
        if evaluation is not None:
            table.add_row(label, _evaluation_text(evaluation, snapshot.target))
    for point in snapshot.curve[-3:]:
        table.add_row(f"step {point.step}", _evaluation_text(point, snapshot.target))
    training = [record.success for record in snapshot.steps]
    if training:
        last = training[-1]
        shown = "–" if last is None else f"{last:.2f}"
        table.add_row("training", Text(f"{sparkline(training, 40)} {shown}", style="cyan"))
        table.add_row("staleness", _staleness_bars(_merge_staleness(snapshot.steps[-_RECENT_STEPS:])))
    if not table.rows:
        table.add_row("", Text("no step and no evaluation yet", style="dim"))
    return Panel(table, title=f"success on held-out levels (target {snapshot.target:.2f})", title_align="left")


def _flow_panel(snapshot: Snapshot) -> Panel:
    table = Table.grid(expand=True, padding=(0, 1))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    table.add_column(ratio=1)
    largest = max((snapshot.gauges.get(name, 0.0) for name in (*_QUEUE, "in_flight")), default=0.0)
    for name, label in zip((*_QUEUE, "in_flight"), (*_QUEUE, "in flight"), strict=True):
        value = snapshot.gauges.get(name)
        if value is None:
            table.add_row(label, "–", "")
            continue
        table.add_row(label, str(int(value)), Bar(max(largest, 1.0), 0, value, color="blue"))
    table.add_row("generated", f"{snapshot.generated_per_s:,.0f}", "tokens/s")
    table.add_row("trained", f"{snapshot.trained_per_s:,.0f}", "tokens/s")
    table.add_row("episodes", f"{snapshot.trajectories_per_s:.1f}", "per s")
    table.add_row("version", _version(snapshot), "published")
    return Panel(table, title="flow", title_align="left")


def _process_panel(snapshot: Snapshot) -> Panel:
    table = Table(expand=True, box=None, padding=(0, 1), header_style="dim")
    for heading in ("process", "state", "pid", "CPU s"):
        table.add_column(heading, justify="right" if heading in ("pid", "CPU s") else "left", no_wrap=True)
    table.add_column("time goes to", ratio=1)
    for process in snapshot.processes:
        style = _STATE_STYLE.get(process.state, "")
        table.add_row(
            process.name,
            Text(process.state, style=style),
            str(process.pid) if process.pid is not None else "–",
            f"{process.cpu_s:.0f}",
            shares_text(process.shares),
        )
    return Panel(table, title="who waits for whom", title_align="left")


def shares_text(shares: Mapping[str, float], least: float = 0.01) -> str:
    """`wait_data 62 % · update 30 %`, largest first."""
    ordered = sorted(((share, what) for what, share in shares.items() if share >= least), reverse=True)
    return " · ".join(f"{what} {share:.0%}".replace("%", " %") for share, what in ordered) or "–"


def _evaluation_text(evaluation: Evaluation, target: float) -> Text:
    low, high = evaluation.interval
    style = "bold green" if evaluation.success >= target else "bold"
    return Text.assemble(
        (f"{evaluation.success:.3f} ", style), (f"[{low:.3f}, {high:.3f}] of {evaluation.levels} levels", "dim")
    )


def _version(snapshot: Snapshot) -> str:
    """Of the last publish."""
    return next((str(record.version) for record in reversed(snapshot.steps) if record.version is not None), "–")


def _merge_staleness(steps: Sequence[StepRecord]) -> dict[int, int]:
    merged: dict[int, int] = {}
    for record in steps:
        for staleness, count in record.staleness.items():
            merged[int(staleness)] = merged.get(int(staleness), 0) + count
    return dict(sorted(merged.items()))


def _staleness_text(histogram: Mapping[int, int]) -> str:
    total = sum(histogram.values())
    if not total:
        return "–"
    mean = sum(staleness * count for staleness, count in histogram.items()) / total
    return f"{mean:.1f} (max {max(histogram)})"


def _staleness_bars(histogram: Mapping[int, int]) -> Text:
    total = sum(histogram.values())
    text = Text()
    for staleness, count in histogram.items():
        text.append(f"{staleness}:", style="dim")
        text.append(f"{_SPARKS[max(1, round(count / total * 8))]}", style="magenta")
        text.append(f"{count / total:.0%}  ")
    text.append(f"last {_RECENT_STEPS} steps", style="dim")
    return text
