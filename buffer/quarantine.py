"""Keeps payloads that were refused, for a person to look at: `<run-dir>/buffer/quarantine/`.

Owns the folder and its bound. Each entry is `<trajectory id>.payload` with a sidecar `<trajectory id>.json` that says
why. A thread writes them, so that the ingest never waits for the disk; what is more than the bound allows is dropped
and counted: entries beyond the total (oldest first), and entries beyond one total a minute, so that a hostile sender
can neither fill the disk nor keep it busy.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import xxhash

from vagen.buffer.requests import HOSTILE, BadPut, Put
from vagen.common.errors import TrajectoryError, WireError
from vagen.common.metrics import Metrics
from vagen.common.wire import decode_trajectory

logger = logging.getLogger(__name__)

_BLOCK_BYTES = 4096
"""What the smallest file takes on a disk."""
_SUFFIXES = (".partial", ".payload", ".json")
_REFILL_S = 60.0
_MAX_QUEUED = 64
_MAX_QUEUED_BYTES = 64 << 20


class Quarantined(msgspec.Struct, frozen=True, kw_only=True):
    """Contents of a sidecar."""

    trajectory_id: str
    field: str
    problem: str
    received_at: float
    """Unix time in seconds."""
    actor_id: str | None
    """None where the payload could not be decoded."""
    actor_seq: int
    num_bytes: int
    checksum: str
    """xxh3-64 of the payload as it came, in hex."""
    declared_bytes: int
    declared_checksum: str
    """What the envelope said of it."""
    has_payload: bool = True
    """False for one that is larger than the whole bound."""

    @property
    def is_intact(self) -> bool:
        """Whether the payload is what its sender announced."""
        return (self.num_bytes, self.checksum) == (self.declared_bytes, self.declared_checksum)


class _Refused(msgspec.Struct, frozen=True):
    """What is to be written."""

    request: Put | BadPut
    field: str
    problem: str
    received_at: float
    cost: int


class Quarantine:
    """The bounded folder of one ingest; `offer` is for its thread alone."""

    def __init__(
        self, folder: Path, limit_bytes: int, metrics: Metrics, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Continues the folder of an earlier process; `limit_bytes` > 0 counts whole disk blocks, sidecars included."""
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._folder = folder
        self._limit = limit_bytes
        self._metrics = metrics
        self._clock = clock
        self._entries: OrderedDict[str, int] = OrderedDict()
        """Cost in bytes by trajectory id, oldest first."""
        self._lock = threading.Lock()
        self._allowance, self._refilled_at = float(limit_bytes), clock()
        self._queue: queue.Queue[_Refused | None] = queue.Queue(_MAX_QUEUED)
        self._queued_bytes = 0
        self._take_over()
        self._thread = threading.Thread(target=self._write_all, name="quarantine", daemon=True)
        self._thread.start()

    @property
    def num_bytes(self) -> int:
        """Disk space taken."""
        with self._lock:
            return sum(self._entries.values())

    def offer(self, request: Put | BadPut, field: str, problem: str) -> None:
        """Keep a refused payload if the bounds allow it; never waits."""
        with self._lock:
            if request.trajectory_id in self._entries:
                return
        size = len(request.payload)
        cost = _disk_bytes(size if size <= self._limit else 0) + _BLOCK_BYTES
        now = self._clock()
        refill = self._limit * (now - self._refilled_at) / _REFILL_S
        self._allowance, self._refilled_at = min(float(self._limit), self._allowance + refill), now
        if cost > min(self._allowance, self._limit) or self._queued_bytes + size > _MAX_QUEUED_BYTES:
            self._metrics.count("vagen_buffer_quarantined_total", fate="skipped")
            return
        try:
            self._queue.put_nowait(_Refused(request, field, problem, time.time(), cost))
        except queue.Full:
            self._metrics.count("vagen_buffer_quarantined_total", fate="skipped")
            return
        with self._lock:
            self._queued_bytes += size
        self._allowance -= cost

    def close(self) -> None:
        """Write what is queued and stop."""
        self._queue.put(None)
        self._thread.join()

    def _write_all(self) -> None:
        while (refused := self._queue.get()) is not None:
            try:
                self._write(refused)
                self._metrics.count("vagen_buffer_quarantined_total", fate="kept")
            except OSError as error:
                logger.error("cannot quarantine %s: %s", refused.request.trajectory_id, error)
                self._remove(refused.request.trajectory_id)
                self._metrics.count("vagen_buffer_quarantined_total", fate="skipped")
            with self._lock:
                self._queued_bytes -= len(refused.request.payload)

    def _write(self, refused: _Refused) -> None:
        request, origin = refused.request, refused.request.origin
        payload, name = request.payload, request.trajectory_id
        checksum = xxhash.xxh3_64_hexdigest(payload)
        declared = request.envelope
        sidecar = Quarantined(
            trajectory_id=name,
            field=refused.field,
            problem=refused.problem,
            received_at=refused.received_at,
            actor_id=None if origin is None else origin.actor_id,
            actor_seq=declared.actor_seq,
            num_bytes=len(payload),
            checksum=checksum,
            declared_bytes=declared.num_bytes,
            declared_checksum=f"{declared.checksum:016x}",
            has_payload=len(payload) <= self._limit,
        )
        self._make_room(name, refused.cost)
        if sidecar.has_payload:
            _write_new(self._folder / f"{name}.payload", payload)
        _write_new(self._folder / f"{name}.json", msgspec.json.format(msgspec.json.encode(sidecar), indent=1))

    def _make_room(self, name: str, cost: int) -> None:
        """Remove the oldest until the newcomer fits, then count it in."""
        with self._lock:
            total = sum(self._entries.values()) - self._entries.get(name, 0)
            gone = [] if name not in self._entries else [name]
            for oldest, held in self._entries.items():
                if total + cost <= self._limit:
                    break
                if oldest != name:
                    gone.append(oldest)
                    total -= held
        for entry in gone:
            self._remove(entry)
        with self._lock:
            self._entries[name] = cost

    def _remove(self, name: str) -> None:
        # The sidecar goes last: what a crash leaves of a removal is removed by the next start.
        for suffix in _SUFFIXES:
            (self._folder / f"{name}{suffix}").unlink(missing_ok=True)
        with self._lock:
            self._entries.pop(name, None)

    def _take_over(self) -> None:
        """Count in what an earlier process left, oldest first, and remove what it did not finish."""
        sizes: dict[str, int] = {}
        ages: dict[str, float] = {}
        for file in (file for file in self._folder.iterdir() if file.suffix in _SUFFIXES):
            state = file.stat(follow_symlinks=False)
            sizes[file.stem] = sizes.get(file.stem, 0) + _disk_bytes(state.st_size)
            if file.suffix == ".json":
                ages[file.stem] = state.st_mtime
        self._entries.update((name, sizes[name]) for name in sorted(ages, key=ages.__getitem__))
        for name in sizes.keys() - ages.keys():
            self._remove(name)
        while sum(self._entries.values()) > self._limit:
            self._remove(next(iter(self._entries)))


def read_quarantine(folder: Path) -> list[Quarantined]:
    """All entries, newest first; what is removed meanwhile is left out."""
    entries = []
    for file in folder.glob("*.json"):
        with contextlib.suppress(FileNotFoundError, msgspec.MsgspecError):
            entries.append(msgspec.json.decode(file.read_bytes(), type=Quarantined))
    return sorted(entries, key=lambda entry: entry.received_at, reverse=True)


def summarize(folder: Path, entry: Quarantined) -> dict[str, Any]:
    """What can be decoded of a payload: its names and counts, or why it cannot be."""
    if not entry.has_payload:
        return {"error": "the payload is larger than buffer.quarantine_bytes and was not kept"}
    try:
        trajectory = decode_trajectory((folder / f"{entry.trajectory_id}.payload").read_bytes())
        return {
            "run_id": trajectory.run_id,
            "actor_id": trajectory.actor_id,
            "env_name": trajectory.env_name,
            "task_index": trajectory.task_index,
            "group_id": trajectory.group_id,
            "group_size": trajectory.group_size,
            "end": str(trajectory.end.value),
            "rows": len(trajectory.rows),
            "turns": len(trajectory.turns),
            "tokens": sum(len(row.token_ids) for row in trajectory.rows),
            "images": len(trajectory.images),
        }
    except FileNotFoundError:
        return {"error": "removed meanwhile"}
    except (TrajectoryError, WireError, *HOSTILE) as error:
        return {"error": f"{type(error).__name__}: {error}"}


def _disk_bytes(size: int) -> int:
    return -(-size // _BLOCK_BYTES) * _BLOCK_BYTES


def _write_new(path: Path, content: bytes | memoryview) -> None:
    partial = path.with_suffix(".partial")
    partial.unlink(missing_ok=True)
    with os.fdopen(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(content)
    partial.replace(path)
