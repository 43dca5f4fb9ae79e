"""The files of the actor's spool: one append-only log in segments, each record checksummed.

    journal-<number>.log    META, then PUT, GONE and META in any order
    META                    JSON of `Meta`: whose journal it is, and the highest sequence number ever given
    PUT                     envelope and payload of a trajectory
    GONE                    the sequence number of one that was acked or refused

What was queued is written by one `flush`, with one fdatasync where a trajectory or a META is among it: a GONE may be
lost in a crash. A segment goes when all trajectories in it and in those before it are gone, so that no GONE goes before
what it speaks of; the newest one stays, and with it the numbers. Where a few trajectories hold up many segments, those
of the oldest are written once more, into the newest: the journal is no longer than twice what is in flight and a few
segments.

Everything behind the first broken record of the newest segment belongs to a flush that never returned, and is cut off
when the journal is opened. A broken record anywhere else is damage.

Knows neither threads nor loops: see `vagen.actor.spool`.
"""

from __future__ import annotations

import os
import struct
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, NamedTuple

import msgspec
import xxhash
from ulid import ULID

from vagen.common.errors import ConfigError, WireError
from vagen.common.files import flush as flush_file
from vagen.common.wire import ENVELOPE_BYTES, check_payload, decode_envelope

SEGMENT_BYTES = 64 << 20
"""Length at which a segment ends; the last flush may make it longer."""
SPARE_SEGMENTS = 2
"""Beside the newest and twice what is in flight."""
_HEAD = struct.Struct("<4sB3xIIQ")
_MAGIC = b"VAGJ"
_META, _PUT, _GONE = range(3)
_NUMBER = struct.Struct("<Q")
_MAX_BUFFERS = 512
"""Of one call to the kernel, which takes 1024."""


class Meta(msgspec.Struct, frozen=True, kw_only=True):
    """What a journal knows of itself."""

    actor_id: str
    run_id: str
    shard: tuple[int, int]
    last_seq: int


class Stored(NamedTuple):
    """Where a trajectory is."""

    segment: int
    offset: int
    """Of its envelope."""
    trajectory_id: bytes
    num_bytes: int
    """Of its payload."""


class _Record(NamedTuple):
    kind: int
    small: bytes
    """All of its body, of a PUT the envelope."""
    payload_bytes: int

    @property
    def num_bytes(self) -> int:
        return _HEAD.size + len(self.small) + self.payload_bytes


@dataclass(slots=True)
class _Segment:
    number: int
    num_bytes: int = 0
    """Once another one has followed."""
    in_flight: int = 0
    """Trajectories."""


class Journal:
    """The journal in one folder, which belongs to one process. Every method may raise `OSError`."""

    def __init__(self, folder: Path, run_id: str) -> None:
        """Open the journal or begin one. Raises `ConfigError` for damage, and for the journal of another run."""
        self._folder = folder
        self.actor_id = str(ULID())
        self.run_id = run_id
        self.shard = (0, 1)
        """Where what is in flight was sent."""
        self.last_seq = 0
        """The highest sequence number ever given."""
        self.stored: dict[int, Stored] = {}
        """By sequence number, of what is in flight."""
        self._segments: deque[_Segment] = deque()
        """Oldest first."""
        self._queued: list[bytes] = []
        self._end = 0
        """Of the newest segment, with what is queued."""
        self._must_sync = False
        for leftover in folder.glob("*.new"):
            leftover.unlink()
        paths = sorted(folder.glob("journal-*.log"))
        for path in paths:
            self._segments.append(_Segment(int(path.stem.partition("-")[2])))
            self._end = self._recover(path, is_newest=path == paths[-1])
            self._segments[-1].num_bytes = self._end
        if self.run_id != run_id:
            raise ConfigError(
                f"{folder}: belongs to run {self.run_id!r}, this is run {run_id!r}; sequences count one run, "
                "so pass another --data-dir"
            )
        if not paths:
            self._file = self._begin_segment(1)
            return
        self._file = os.open(paths[-1], os.O_RDWR | os.O_CLOEXEC)
        os.ftruncate(self._file, self._end)
        self._drop_segments()

    def put(self, seq: int, envelope: bytes, payload: bytes) -> None:
        """Queue a trajectory."""
        where = self._end + _HEAD.size
        self._queue(_PUT, envelope, payload)
        self._keep(seq, where, decode_envelope(envelope).trajectory_id, len(payload))
        self._must_sync = True

    def remove(self, seq: int) -> None:
        """Queue that a trajectory is acked or refused."""
        self._queue(_GONE, _NUMBER.pack(seq))
        self._forget(seq)

    def assign(self, shard: tuple[int, int]) -> None:
        """Queue which shard the trajectories go to."""
        self.shard = shard
        self._queue(_META, self._meta())
        self._must_sync = True

    def flush(self) -> None:
        """Write what is queued; durable when this returns. After an error nothing of it is, and nothing may follow."""
        is_full = self._end >= SEGMENT_BYTES
        # What is behind a segment must not be durable before it: only the newest may end in a broken record.
        self._must_sync |= is_full
        self._write_queued()
        if is_full:
            self._segments[-1].num_bytes = self._end
            os.close(self._file)
            self._file = self._begin_segment(self._segments[-1].number + 1)
        self._drop_segments()
        while is_full and self._is_too_long():
            self._move_oldest()

    def read(self, seq: int) -> tuple[bytes, bytes]:
        """Envelope and payload of a trajectory that was flushed."""
        stored = self.stored[seq]
        with self._path(stored.segment).open("rb", buffering=0) as file:
            file.seek(stored.offset)
            return file.read(ENVELOPE_BYTES), file.read(stored.num_bytes)

    def close(self) -> None:
        """Close the file."""
        os.close(self._file)

    def _write_queued(self) -> None:
        queued, self._queued = self._queued, []
        start = self._end - sum(map(len, queued))
        for first in range(0, len(queued), _MAX_BUFFERS):
            start = _write(self._file, queued[first : first + _MAX_BUFFERS], start)
        if self._must_sync:
            sync(self._file)
            self._must_sync = False

    def _is_too_long(self) -> bool:
        before = sum(segment.num_bytes for segment in self._segments) - self._segments[-1].num_bytes
        in_flight = sum(stored.num_bytes for stored in self.stored.values())
        return before > 2 * in_flight + SPARE_SEGMENTS * SEGMENT_BYTES

    def _move_oldest(self) -> None:
        """Write what is in flight of the oldest segment into the newest, and drop it."""
        oldest = self._segments[0].number
        for seq in [seq for seq, stored in self.stored.items() if stored.segment == oldest]:
            self.put(seq, *self.read(seq))
        self._write_queued()
        self._drop_segments()

    def _path(self, number: int) -> Path:
        return self._folder / f"journal-{number:08d}.log"

    def _meta(self) -> bytes:
        meta = Meta(actor_id=self.actor_id, run_id=self.run_id, shard=self.shard, last_seq=self.last_seq)
        return msgspec.json.encode(meta)

    def _queue(self, kind: int, small: bytes, payload: bytes = b"") -> None:
        self._queued.append(_pack(kind, small, len(payload)))
        self._end += len(self._queued[-1]) + len(payload)
        if payload:
            self._queued.append(payload)

    def _keep(self, seq: int, offset: int, trajectory_id: bytes, num_bytes: int) -> None:
        if seq in self.stored:  # it is moved
            self._forget(seq)
        newest = self._segments[-1]
        newest.in_flight += 1
        self.stored[seq] = Stored(newest.number, offset, trajectory_id, num_bytes)
        self.last_seq = max(self.last_seq, seq)

    def _forget(self, seq: int) -> None:
        stored = self.stored.pop(seq)
        for segment in self._segments:
            if segment.number == stored.segment:
                segment.in_flight -= 1

    def _begin_segment(self, number: int) -> int:
        """A file that holds its META whenever it has its name; both are durable when this returns."""
        path = self._path(number)
        new = path.with_suffix(".new")
        file = os.open(new, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        self._end = _write(file, [_pack(_META, self._meta(), 0)], 0)
        sync(file)
        new.rename(path)
        flush_file(self._folder)
        self._segments.append(_Segment(number))
        return file

    def _drop_segments(self) -> None:
        while len(self._segments) > 1 and self._segments[0].in_flight == 0:
            self._path(self._segments.popleft().number).unlink()

    def _recover(self, path: Path, is_newest: bool) -> int:
        """Take in the records of a segment; returns where the whole ones end."""
        end, size = 0, path.stat().st_size
        with path.open("rb") as file:
            while (record := _read_record(file, size - end, is_newest)) is not None:
                if end == 0 and record.kind != _META:
                    break
                self._take(record, end)
                end += record.num_bytes
                file.seek(end)
        if end == 0 or (end < size and not is_newest):
            raise ConfigError(f"{path}: not a journal that can be opened: no whole record at byte {end} of {size}")
        return end

    def _take(self, record: _Record, offset: int) -> None:
        if record.kind == _META:
            meta = msgspec.json.decode(record.small, type=Meta)
            self.actor_id, self.run_id, self.shard, self.last_seq = msgspec.structs.astuple(meta)
        elif record.kind == _GONE:
            (seq,) = _NUMBER.unpack(record.small)
            if seq in self.stored:
                self._forget(seq)
        else:
            envelope = decode_envelope(record.small)
            self._keep(envelope.actor_seq, offset + _HEAD.size, envelope.trajectory_id, record.payload_bytes)


def sync(file: int) -> None:
    """Make what was written durable."""
    os.fdatasync(file)


def _pack(kind: int, small: bytes, payload_bytes: int) -> bytes:
    return _HEAD.pack(_MAGIC, kind, len(small), payload_bytes, _checksum(kind, small, payload_bytes)) + small


def _checksum(kind: int, small: bytes, payload_bytes: int) -> int:
    """Of all of a record but its payload, whose own is in the envelope."""
    return xxhash.xxh3_64_intdigest(b"%d %d " % (kind, payload_bytes) + small)


def _read_record(file: BinaryIO, left: int, checks_payload: bool) -> _Record | None:
    """The record at the file's position, if it is whole; of `left` bytes."""
    if left < _HEAD.size:
        return None
    magic, kind, small_bytes, payload_bytes, checksum = _HEAD.unpack(file.read(_HEAD.size))
    if magic != _MAGIC or _HEAD.size + small_bytes + payload_bytes > left:
        return None
    small = file.read(small_bytes)
    if _checksum(kind, small, payload_bytes) != checksum:
        return None
    if kind == _PUT and checks_payload:
        # Of an older segment it was durable before the next one began; and every payload is checked on arrival.
        try:
            check_payload(decode_envelope(small), file.read(payload_bytes))
        except WireError:
            return None
    return _Record(kind, small, payload_bytes)


def _write(file: int, buffers: Sequence[bytes], offset: int) -> int:
    """Write all of it; returns where it ends. Raises `OSError`."""
    left: list[bytes | memoryview] = list(buffers)
    while left:
        written = os.pwritev(file, left, offset)
        offset += written
        while left and written >= len(left[0]):
            written -= len(left.pop(0))
        if left:
            left[0] = memoryview(left[0])[written:]
    return offset
