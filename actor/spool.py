"""The actor's journal and spool: what was produced and is not acked yet, on disk, safe against kill and power cut.

One SQLite file in the actor's data folder. A trajectory gets its sequence number and is written in one transaction,
fsynced before it is first sent; its row goes when the buffer has acked or refused it. The file also holds the actor's
persistent id and the highest number ever given, so that sequences go on after a restart. All SQL runs in one thread,
which commits whatever has queued up at once: concurrent episodes share an fsync.

Nothing is dropped here. A removal may be lost in a crash: the trajectory is then sent again, which the buffer answers
as a duplicate.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import os
import queue
import sqlite3
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec
from ulid import ULID

from vagen.common.errors import ConfigError
from vagen.common.files import make_directory
from vagen.common.trajectory import Trajectory
from vagen.common.wire import encode_trajectory

logger = logging.getLogger(__name__)

_SCHEMA = """
CREATE TABLE IF NOT EXISTS meta (key TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS spool (
    actor_seq INTEGER PRIMARY KEY AUTOINCREMENT,
    trajectory_id BLOB NOT NULL UNIQUE,
    envelope BLOB NOT NULL,
    payload BLOB NOT NULL
);
"""
Shard = tuple[int, int]
"""Which part of the run's buffer, and of how many."""

_MAX_BATCH = 64
_QUEUE_LENGTH = 4096
_PAGE_BYTES = 1 << 14
"""Payloads are large: with SQLite's 4 KiB every one is dozens of writes."""
_CHECKPOINT_BYTES = 64 << 20
"""Length of the write-ahead log at which it is copied back. Rows go soon after they came and their pages are written
anew, so that a long log has little to copy: a payload is written about once, with SQLite's 4 MB twice."""
_KEPT_BYTES = 32 << 20
"""Frames of what is in flight that stay in memory as well, to be sent without being read back."""
_CLOSE_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class Entry:
    """A journalled trajectory."""

    actor_seq: int
    trajectory_id: bytes
    num_bytes: int


@dataclass(frozen=True, slots=True)
class _Job:
    """Work for the SQL thread, and where its result goes."""

    run: Callable[[sqlite3.Connection], object]
    future: asyncio.Future[object] | None
    loop: asyncio.AbstractEventLoop


class Spool:
    """See the module. `open` it inside the event loop that uses it; methods belong to that loop."""

    def __init__(self, data_dir: Path, run_id: str, max_bytes: int) -> None:
        """Open or create the spool in `data_dir`, which belongs to one run and one process at a time.

        Raises `ConfigError` when another process holds the folder, or when it belongs to another run.
        """
        make_directory(data_dir, 0o700)
        self._lock = _lock(data_dir / "lock")
        self._path = data_dir / "spool.sqlite3"
        self.max_bytes = max_bytes
        try:
            meta, self.journalled, entries = _prepare(self._path, run_id)
        except BaseException:
            os.close(self._lock)
            raise
        self.actor_id = meta["actor_id"]
        index, _, count = meta.get("shard", "0/1").partition("/")
        self.shard: Shard = (int(index), int(count))
        """Where what is in flight was sent."""
        self._entries: dict[bytes, Entry] = {entry.trajectory_id: entry for entry in entries}
        self.num_bytes = sum(entry.num_bytes for entry in entries)
        self._kept: dict[int, tuple[bytes, bytes]] = {}
        self._kept_bytes = 0
        self._jobs: queue.Queue[_Job | None] = queue.Queue(_QUEUE_LENGTH)
        self._thread = threading.Thread(target=self._serve, name="spool", daemon=True)
        self._failure: BaseException | None = None
        self._thread.start()

    @property
    def in_flight(self) -> int:
        """Trajectories journalled and neither acked nor refused."""
        return len(self._entries)

    @property
    def is_full(self) -> bool:
        """Whether no new episode may start. Those that run already are journalled all the same."""
        return self.num_bytes >= self.max_bytes

    def entries(self) -> list[Entry]:
        """What is in flight, oldest first."""
        return sorted(self._entries.values(), key=lambda entry: entry.actor_seq)

    def assign(self, shard: Shard) -> None:
        """Send to this shard from now on.

        Raises `ConfigError` when something in flight went to another: whether it was stored, only that one knows.
        """
        if shard == self.shard:
            return
        if self._entries:
            raise ConfigError(
                f"--buffer: {len(self._entries)} trajectories in {self._path} were sent to shard {self.shard[0]} of "
                f"{self.shard[1]} and are unacked, this is shard {shard[0]} of {shard[1]}; start this actor with its "
                "former --buffer until they are acked"
            )
        self.shard = shard

        def remember(connection: sqlite3.Connection) -> None:
            connection.execute("INSERT OR REPLACE INTO meta VALUES ('shard', ?)", (f"{shard[0]}/{shard[1]}",))

        self._enqueue(remember, None)

    def holds(self, trajectory_id: bytes) -> bool:
        """Whether the trajectory is in flight."""
        return trajectory_id in self._entries

    async def journal(self, trajectory: Trajectory) -> Entry:
        """Give the trajectory its sequence number and make it durable; it may be sent once this returns.

        Do not cancel it: what was handed over becomes durable all the same. Raises `TrajectoryError` when it is
        larger than a payload may be.
        """

        def insert(connection: sqlite3.Connection) -> tuple[Entry, tuple[bytes, bytes]]:
            (last,) = connection.execute("SELECT coalesce(max(seq), 0) FROM sqlite_sequence").fetchone()
            numbered = msgspec.structs.replace(trajectory, actor_seq=last + 1)
            envelope, payload = encode_trajectory(numbered)
            key = ULID.from_str(trajectory.trajectory_id).bytes
            connection.execute("INSERT INTO spool VALUES (?, ?, ?, ?)", (last + 1, key, envelope, payload))
            return Entry(last + 1, key, len(payload)), (envelope, payload)

        result = await self._submit(insert)
        assert isinstance(result, tuple)
        entry, frames = result
        self._entries[entry.trajectory_id] = entry
        # The oldest are sent first: what comes when there is no room is read back when its turn has come.
        if self._kept_bytes + entry.num_bytes <= _KEPT_BYTES:
            self._kept[entry.actor_seq] = frames
            self._kept_bytes += entry.num_bytes
        self.num_bytes += entry.num_bytes
        self.journalled = max(self.journalled, entry.actor_seq)
        return entry

    async def load(self, actor_seq: int) -> tuple[bytes, bytes]:
        """Envelope and payload of an entry in flight."""
        kept = self._kept.get(actor_seq)
        if kept is not None:
            return kept

        def select(connection: sqlite3.Connection) -> tuple[bytes, bytes]:
            row = connection.execute("SELECT envelope, payload FROM spool WHERE actor_seq = ?", (actor_seq,)).fetchone()
            assert row is not None, f"sequence {actor_seq} is not in the spool"
            return row[0], row[1]

        frames = await self._submit(select)
        assert isinstance(frames, tuple)
        return frames

    def release(self, trajectory_id: bytes) -> Entry | None:
        """Forget an acked or refused trajectory; None when it is not in flight (an ack that came twice)."""
        entry = self._entries.pop(trajectory_id, None)
        if entry is None:
            return None
        self.num_bytes -= entry.num_bytes
        if self._kept.pop(entry.actor_seq, None) is not None:
            self._kept_bytes -= entry.num_bytes

        def delete(connection: sqlite3.Connection) -> None:
            connection.execute("DELETE FROM spool WHERE actor_seq = ?", (entry.actor_seq,))

        self._enqueue(delete, None)
        return entry

    async def close(self) -> None:
        """Finish what is queued and release the folder."""
        if self._thread.is_alive():
            await asyncio.to_thread(self._jobs.put, None, True, _CLOSE_TIMEOUT_S)
            await asyncio.to_thread(self._thread.join, _CLOSE_TIMEOUT_S)
        os.close(self._lock)

    async def _submit(self, run: Callable[[sqlite3.Connection], object]) -> object:
        future: asyncio.Future[object] = asyncio.get_running_loop().create_future()
        self._enqueue(run, future)
        return await future

    def _enqueue(self, run: Callable[[sqlite3.Connection], object], future: asyncio.Future[object] | None) -> None:
        if self._failure is not None:
            raise ConfigError(f"{self._path}: cannot be written: {self._failure}") from self._failure
        # Bounded by the episodes and the window, both far below the queue's length.
        self._jobs.put_nowait(_Job(run, future, asyncio.get_running_loop()))

    def _serve(self) -> None:
        """The SQL thread: one transaction for all that has queued up."""
        connection = _connect(self._path)
        with contextlib.closing(connection):
            while (first := self._jobs.get()) is not None:
                batch, ends = [first], False
                while len(batch) < _MAX_BATCH and not ends:
                    try:
                        job = self._jobs.get_nowait()
                    except queue.Empty:
                        break
                    ends = job is None
                    batch += [job] if job is not None else []
                self._commit(connection, batch)
                if ends:
                    return

    def _commit(self, connection: sqlite3.Connection, batch: list[_Job]) -> None:
        results: list[tuple[_Job, object]] = []
        try:
            connection.execute("BEGIN IMMEDIATE")
            for job in batch:
                results.append((job, _attempt(connection, job)))
            connection.execute("COMMIT")
        except sqlite3.Error as error:
            # A full or broken disk: nothing of this batch is durable, and nothing later may claim to be.
            logger.error("spool %s: %s", self._path, error)
            self._failure = error
            with contextlib.suppress(sqlite3.Error):
                connection.execute("ROLLBACK")
            results = [(job, ConfigError(f"{self._path}: cannot be written: {error}")) for job in batch]
        # One wake-up of the loop a batch; all jobs are of the loop that opened the spool.
        waiting = [(job.future, result) for job, result in results if job.future is not None]
        if waiting:
            with contextlib.suppress(RuntimeError):  # the loop has ended, nobody waits
                results[0][0].loop.call_soon_threadsafe(_resolve, waiting)


def _attempt(connection: sqlite3.Connection, job: _Job) -> object:
    """The job's result; an error of the job alone is its result and leaves the batch standing."""
    try:
        return job.run(connection)
    except sqlite3.Error:
        raise
    except Exception as error:
        return error


def _resolve(waiting: list[tuple[asyncio.Future[object], object]]) -> None:
    for future, result in waiting:
        if future.done():
            continue
        if isinstance(result, BaseException):
            future.set_exception(result)
        else:
            future.set_result(result)


def _connect(path: Path) -> sqlite3.Connection:
    connection = sqlite3.connect(path, isolation_level=None, timeout=5.0)
    connection.execute(f"PRAGMA page_size = {_PAGE_BYTES}")  # of a new file; one that exists keeps its own
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("PRAGMA synchronous = FULL")
    connection.execute("PRAGMA secure_delete = OFF")
    (page_bytes,) = connection.execute("PRAGMA page_size").fetchone()
    connection.execute(f"PRAGMA wal_autocheckpoint = {_CHECKPOINT_BYTES // page_bytes}")
    return connection


def _prepare(path: Path, run_id: str) -> tuple[dict[str, str], int, list[Entry]]:
    """What the file knows of itself, highest sequence given, and entries in flight."""
    try:
        with contextlib.closing(_connect(path)) as connection:
            connection.executescript(_SCHEMA)
            connection.execute("BEGIN IMMEDIATE")
            connection.execute("INSERT OR IGNORE INTO meta VALUES ('actor_id', ?)", (str(ULID()),))
            connection.execute("INSERT OR IGNORE INTO meta VALUES ('run_id', ?)", (run_id,))
            connection.execute("COMMIT")
            meta = dict(connection.execute("SELECT key, value FROM meta").fetchall())
            (last,) = connection.execute("SELECT coalesce(max(seq), 0) FROM sqlite_sequence").fetchone()
            rows = connection.execute("SELECT actor_seq, trajectory_id, length(payload) FROM spool").fetchall()
    except sqlite3.DatabaseError as error:
        raise ConfigError(f"{path}: not a spool that can be opened: {error}") from error
    if meta["run_id"] != run_id:
        raise ConfigError(
            f"{path}: belongs to run {meta['run_id']!r}, this is run {run_id!r}; sequences count one run, "
            "so pass another --data-dir"
        )
    return meta, last, [Entry(*row) for row in rows]


def _lock(path: Path) -> int:
    """Lock the folder for this process. The kernel releases it however the process ends."""
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(handle)
        raise ConfigError(
            f"{path.parent}: in use by another vagen-actor; give this one another --name or --data-dir"
        ) from error
    return handle
