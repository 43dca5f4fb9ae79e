"""The list of quarantined payloads, for people and as JSON."""

from __future__ import annotations

from pathlib import Path

import msgspec

from vagen.buffer.quarantine import Quarantined, read_quarantine, summarize
from vagen.common.text import printable
from vagen.tools.buffer_settings import columns, moment


def format_quarantine(folder: Path, *, as_json: bool = False) -> str:
    """One line an entry, or a JSON list, newest first; what others sent is shown without its control characters."""
    entries = [(entry, summarize(folder, entry)) for entry in read_quarantine(folder)]
    if as_json:
        plain = [
            msgspec.to_builtins(entry) | {"is_intact": entry.is_intact, "decoded": decoded}
            for entry, decoded in entries
        ]
        return msgspec.json.encode(plain).decode()
    if not entries:
        return f"{folder}: nothing is quarantined"
    rows = [("when", "trajectory", "actor", "bytes", "checksum", "decoded", "refused because")]
    rows += [
        (
            moment(entry.received_at),
            printable(entry.trajectory_id),
            printable(entry.actor_id or decoded.get("actor_id") or "-", 40),
            str(entry.num_bytes),
            _checksum(entry),
            _decoded(decoded),
            printable(f"{entry.field}: {entry.problem}"),
        )
        for entry, decoded in entries
    ]
    return columns(rows)


def _checksum(entry: Quarantined) -> str:
    return f"{entry.checksum} ok" if entry.is_intact else f"{entry.checksum}, sender said {entry.declared_checksum}"


def _decoded(decoded: dict[str, object]) -> str:
    if "error" in decoded:
        return "no"
    return printable(f"{decoded['env_name']}, {decoded['turns']} turns, {decoded['tokens']} tokens", 60)
