"""Tables of the buffer's live settings, for people and as JSON."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import datetime

import msgspec

from vagen.buffer.settings import SettingChange, SettingState, warnings
from vagen.common.text import printable


def format_settings(states: Sequence[SettingState], *, as_json: bool = False) -> str:
    """One line a setting and one about each that is not in force as set, or a JSON list."""
    if as_json:
        return msgspec.json.encode(states).decode()
    rows = [("setting", "value", "from", "recipe", "changed", "by")]
    rows += [
        (
            state.name,
            _value(state.value),
            state.source,
            _value(state.recipe),
            "" if state.changed_at is None else moment(state.changed_at),
            printable(state.changed_by or ""),
        )
        for state in states
    ]
    return "\n".join([columns(rows), *(f"warning: {printable(line)}" for line in warnings(states))])


def format_changes(changes: Sequence[SettingChange], *, as_json: bool = False) -> str:
    """One line a change, or a JSON list."""
    if as_json:
        return msgspec.json.encode(changes).decode()
    rows = [("number", "when", "setting", "old", "new", "by")]
    rows += [
        (
            str(change.number),
            moment(change.at),
            change.name,
            _value(change.old, "recipe"),
            _value(change.new, "recipe"),
            printable(change.by),
        )
        for change in changes
    ]
    return columns(rows)


def columns(rows: Sequence[Sequence[str]]) -> str:
    """Rows of text with aligned columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(_pad(row, widths)).rstrip() for row in rows)


def moment(unix_s: float) -> str:
    """Local date and time."""
    return datetime.fromtimestamp(unix_s).strftime("%Y-%m-%d %H:%M:%S")


def _pad(row: Sequence[str], widths: Sequence[int]) -> Iterable[str]:
    return (text.ljust(width) for text, width in zip(row, widths, strict=True))


def _value(value: object, missing: str = "-") -> str:
    if value is None:
        return missing
    return printable(value if isinstance(value, str) else msgspec.json.encode(value).decode())
