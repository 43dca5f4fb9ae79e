"""`vagen buffer top`: what a person sees of a running buffer.

Owns the rendering, a pure function of a `Frame`, and the loop that looks and shows. What is read belongs to
`vagen.buffer.overview`.
"""

from __future__ import annotations

import contextlib
import os
import select
import sys
import termios
import time
import tty
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import redis
from rich.bar import Bar
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from vagen.buffer.accounting import REASONS
from vagen.buffer.connection import TRANSIENT
from vagen.buffer.keys import Keys
from vagen.buffer.overview import Overview, add_overviews, rates, read_overview
from vagen.buffer.quarantine import read_quarantine
from vagen.common.text import printable

_MAX_ROWS = 12
"""Actors and engines shown; the rest is counted."""


@dataclass(frozen=True, kw_only=True)
class Frame:
    """Everything on the screen at one moment."""

    title: str
    overview: Overview
    rates: dict[str, float]
    quarantined: int | None = None
    """None where the run's folder is not at hand."""
    problem: str = ""
    """Why the overview is not of this moment."""


class Watch:
    """Looks at one shard, or at several as one; each frame knows the rates since the last."""

    def __init__(self, shards: Sequence[tuple[redis.Redis, Keys]], title: str, quarantines: Sequence[Path]) -> None:
        """A client and the keys of each shard, and the folders of what they refused where those are at hand."""
        self._shards = shards
        self._title = title
        self._quarantines = quarantines
        self._last: Frame | None = None

    def look(self) -> Frame:
        """May raise one of `connection.TRANSIENT`."""
        overview = add_overviews([read_overview(client, keys) for client, keys in self._shards])
        refused = [len(read_quarantine(folder)) for folder in self._quarantines]
        self._last = Frame(
            title=self._title,
            overview=overview,
            rates=rates(self._last.overview if self._last else None, overview),
            quarantined=sum(refused) if refused else None,
        )
        return self._last


def show_once(watch: Watch, interval_s: float, *, as_json: bool, console: Console) -> None:
    """Two looks `interval_s` apart, since rates need two, and one frame."""
    watch.look()
    time.sleep(interval_s)
    frame = watch.look()
    if as_json:
        console.file.write(msgspec.json.encode(to_plain(frame)).decode() + "\n")
    else:
        console.print(render(frame))


def show(watch: Watch, interval_s: float, console: Console) -> None:
    """Redraw every `interval_s` seconds until q or Ctrl-C; while Redis is away, keep the last frame and say so."""
    frame = watch.look()
    with Live(render(frame), console=console, auto_refresh=False, screen=True) as screen, _keys() as pressed:
        with contextlib.suppress(KeyboardInterrupt):
            while pressed(interval_s) != "q":
                try:
                    frame = watch.look()
                except TRANSIENT as error:
                    frame = Frame(**{**frame.__dict__, "problem": f"Redis is away: {error}"})
                screen.update(render(frame), refresh=True)


def to_plain(frame: Frame) -> dict[str, Any]:
    """The frame as plain data, for machines."""
    accounting = frame.overview.accounting
    plain: dict[str, Any] = msgspec.to_builtins(frame.overview, str_keys=True)
    plain["accounting"] |= {"pending": accounting.pending, "identity_holds": accounting.identity_holds}
    return plain | {"rates": frame.rates, "quarantined": frame.quarantined}


def render(frame: Frame) -> RenderableType:
    """The whole screen, about 30 lines for a few actors."""
    top = Table.grid(expand=True, padding=(0, 1))
    top.add_column(ratio=2)
    top.add_column(ratio=3)
    top.add_row(_identity_panel(frame), Group(_bytes_panel(frame.overview), _staleness_panel(frame.overview)))
    return Group(_header(frame), top, _members_panel(frame.overview), _settings_panel(frame))


def _header(frame: Frame) -> RenderableType:
    status = frame.overview.status
    step = "no learner yet" if status.learner_step < 0 else f"learner step {status.learner_step}"
    version = "–" if status.policy_version < 0 else str(status.policy_version)
    table = Table.grid(expand=True, padding=(0, 1))
    table.add_column()
    table.add_column(justify="right")
    table.add_row(
        Text(printable(frame.title), style="bold"),
        Text(f"{step} · version {version} · {status.running} episodes run · q quits", style="dim"),
    )
    if frame.problem:
        table.add_row(Text(printable(frame.problem), style="bold red"), "")
    return table


def _identity_panel(frame: Frame) -> Panel:
    accounting = frame.overview.accounting
    table = Table.grid(expand=True, padding=(0, 1))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    stored = frame.rates.get("stored")
    table.add_row("produced", f"{accounting.produced:,}", "" if stored is None else f"{stored:.1f}/s stored")
    for reason in REASONS:
        rate = frame.rates.get(reason)
        table.add_row(f"  {reason}", f"{getattr(accounting, reason):,}", f"{rate:.1f}/s" if rate is not None else "")
    if accounting.identity_holds:
        table.add_row("identity", Text("holds", style="green"), "")
    else:
        off = accounting.produced - accounting.accounted
        table.add_row("identity", Text(f"{off:+,}", style="yellow"), f"{accounting.actors_age_s:.1f} s old")
    table.add_row("malformed", f"{accounting.malformed:,}", "")
    if frame.quarantined is not None:
        table.add_row("quarantined", f"{frame.quarantined:,}", "")
    return Panel(table, title="trajectories", title_align="left")


def _bytes_panel(overview: Overview) -> Panel:
    status = overview.status
    table = Table.grid(expand=True, padding=(0, 1))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    table.add_column(ratio=1)
    rows = (
        ("held", status.num_bytes, "blue"),
        ("claimed", status.claimed_bytes, "magenta"),
        ("promised", status.room_bytes, "cyan"),
        ("capacity", status.capacity_bytes, "dim"),
    )
    largest = max(status.capacity_bytes, status.num_bytes + status.room_bytes, 1)
    for name, size, color in rows:
        table.add_row(name, megabytes(size), Bar(largest, 0, size, color="white" if color == "dim" else color))
    return Panel(table, title="bytes", title_align="left")


def _staleness_panel(overview: Overview) -> Panel:
    table = Table.grid(expand=True, padding=(0, 1))
    table.add_column(style="dim", no_wrap=True, justify="right")
    table.add_column(justify="right", no_wrap=True)
    table.add_column(ratio=1)
    units = overview.staleness.units
    bound = next(state.value for state in overview.settings if state.name == "max_staleness")
    most = max(units.values(), default=1)
    for staleness, count in list(units.items())[:_MAX_ROWS]:
        is_late = bound is not None and staleness > bound
        table.add_row(str(staleness), str(count), Bar(most, 0, count, color="red" if is_late else "magenta"))
    if not units:
        table.add_row("", "", Text("nothing is ready", style="dim"))
    told = "" if bound is None else f", at most {bound} are claimed"
    return Panel(table, title=f"staleness of ready units (learner steps{told})", title_align="left")


def _members_panel(overview: Overview) -> Panel:
    table = Table(expand=True, box=None, padding=(0, 1), header_style="dim")
    for heading, side in (("member", "left"), ("state", "left"), ("journalled", "right"), ("in flight", "right")):
        table.add_column(heading, justify="right" if side == "right" else "left", no_wrap=True)
    actors, engines = overview.accounting.actors, overview.engines
    for actor in actors[:_MAX_ROWS]:
        state = "closed" if actor.closing else f"heard {actor.age_s:.1f} s ago"
        table.add_row(f"actor {printable(actor.actor_id, 60)}", state, f"{actor.journalled:,}", str(actor.in_flight))
    if len(actors) > _MAX_ROWS:
        table.add_row(f"{len(actors) - _MAX_ROWS} more actors", "", "", "")
    for engine in engines[:_MAX_ROWS]:
        state = "takes no traffic" if engine.policy_version is None else f"version {engine.policy_version}"
        state += ", late" if engine.is_late else ""
        table.add_row(f"engine {printable(engine.url, 60)}", f"{state}, {printable(engine.kind, 20)}", "", "")
    if len(engines) > _MAX_ROWS:
        table.add_row(f"{len(engines) - _MAX_ROWS} more engines", "", "", "")
    if not actors and not engines:
        table.add_row(Text("no actor and no engine yet", style="dim"), "", "", "")
    return Panel(table, title="actors and engines", title_align="left")


def _settings_panel(frame: Frame) -> Panel:
    text = Text()
    for state in frame.overview.settings:
        is_live = state.source == "live"
        value = state.value if state.by_shard is None else state.by_shard
        shown = "–" if value is None else printable(value if isinstance(value, str) else as_json(value), 60)
        text.append(f"{state.name} ", style="dim")
        text.append(shown, style="bold yellow" if is_live else "")
        text.append(" (live)" if is_live else "", style="yellow")
        text.append(" not in force" if state.problem else "", style="bold red")
        text.append(" shards differ" if state.by_shard else "", style="bold red")
        text.append("   ")
    return Panel(text, title="settings", title_align="left")


def as_json(value: object) -> str:
    """The value in one line."""
    return msgspec.json.encode(value).decode()


def megabytes(size: int) -> str:
    """Bytes in the unit that fits."""
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size >= scale:
            return f"{size / scale:.1f} {unit}"
    return f"{size} B"


@contextlib.contextmanager
def _keys() -> Iterator[Callable[[float], str]]:
    """A function that waits for one key for so many seconds; without a keyboard it just waits."""
    if not sys.stdin.isatty():

        def wait(timeout_s: float) -> str:
            time.sleep(timeout_s)
            return ""

        yield wait
        return
    number = sys.stdin.fileno()
    before = termios.tcgetattr(number)
    tty.setcbreak(number)

    def pressed(timeout_s: float) -> str:
        return os.read(number, 1).decode(errors="replace") if select.select([number], [], [], timeout_s)[0] else ""

    try:
        yield pressed
    finally:
        termios.tcsetattr(number, termios.TCSADRAIN, before)
