"""The actor's spool: what was produced and is not acked yet, on disk, safe against kill and power cut.

A trajectory gets its sequence number and is in the journal, fsynced, before it is first sent; it goes when the buffer
has acked or refused it. The journal (`vagen.actor.journal`) also holds the actor's persistent id and the highest number
ever given, so that sequences go on after a restart. It belongs to one thread, which writes whatever has queued up at
once: concurrent episodes share an fsync.

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
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec
from ulid import ULID

from vagen.actor.journal import Journal
from vagen.common.errors import ConfigError
from vagen.common.files import make_directory
from vagen.common.trajectory import Trajectory
from vagen.common.wire import encode_trajectory

logger = logging.getLogger(__name__)

Shard = tuple[int, int]
"""Which part of the run's buffer, and of how many."""

_MAX_BATCH = 64
_QUEUE_LENGTH = 4096
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
    """Work for the thread of the journal, and where its result goes."""

    run: Callable[[Journal], object]
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
        self._folder = data_dir
        self.max_bytes = max_bytes
        try:
            self._journal = _open(data_dir, run_id)
        except BaseException:
            os.close(self._lock)
            raise
        self.actor_id = self._journal.actor_id
        self.journalled = self._journal.last_seq
        self.shard: Shard = self._journal.shard
        """Where what is in flight was sent."""
        stored = self._journal.stored.items()
        entries = [Entry(seq, found.trajectory_id, found.num_bytes) for seq, found in stored]
        self._entries: dict[bytes, Entry] = {entry.trajectory_id: entry for entry in entries}
        self.num_bytes = sum(entry.num_bytes for entry in entries)
        self._kept: dict[int, tuple[bytes, bytes]] = {}
        self._kept_bytes = 0
        self._jobs: queue.Queue[_Job | None] = queue.Queue(_QUEUE_LENGTH)
        self._thread = threading.Thread(target=self._serve, name="spool", daemon=True)
        self._failure: OSError | None = None
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
                f"--buffer: {len(self._entries)} trajectories in {self._folder} were sent to shard {self.shard[0]} of "
                f"{self.shard[1]} and are unacked, this is shard {shard[0]} of {shard[1]}; start this actor with its "
                "former --buffer until they are acked"
            )
        self.shard = shard
        self._enqueue(lambda journal: journal.assign(shard), None)

    def holds(self, trajectory_id: bytes) -> bool:
        """Whether the trajectory is in flight."""
        return trajectory_id in self._entries

    async def journal(self, trajectory: Trajectory) -> Entry:
        """Give the trajectory its sequence number and make it durable; it may be sent once this returns.

        Do not cancel it: what was handed over becomes durable all the same. Raises `TrajectoryError` when it is
        larger than a payload may be.
        """

        def insert(journal: Journal) -> tuple[Entry, tuple[bytes, bytes]]:
            seq = journal.last_seq + 1
            envelope, payload = encode_trajectory(msgspec.structs.replace(trajectory, actor_seq=seq))
            journal.put(seq, envelope, payload)
            return Entry(seq, ULID.from_str(trajectory.trajectory_id).bytes, len(payload)), (envelope, payload)

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

        frames = await self._submit(lambda journal: journal.read(actor_seq))
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
        self._enqueue(lambda journal: journal.remove(entry.actor_seq), None)
        return entry

    async def close(self) -> None:
        """Finish what is queued and release the folder."""
        if self._thread.is_alive():
            await asyncio.to_thread(self._jobs.put, None, True, _CLOSE_TIMEOUT_S)
            await asyncio.to_thread(self._thread.join, _CLOSE_TIMEOUT_S)
        os.close(self._lock)

    async def _submit(self, run: Callable[[Journal], object]) -> object:
        future: asyncio.Future[object] = asyncio.get_running_loop().create_future()
        self._enqueue(run, future)
        return await future

    def _enqueue(self, run: Callable[[Journal], object], future: asyncio.Future[object] | None) -> None:
        if self._failure is not None:
            raise ConfigError(f"{self._folder}: cannot be written: {self._failure}") from self._failure
        # Bounded by the episodes and the window, both far below the queue's length.
        self._jobs.put_nowait(_Job(run, future, asyncio.get_running_loop()))

    def _serve(self) -> None:
        """The thread of the journal: one flush for all that has queued up."""
        with contextlib.closing(self._journal):
            while (first := self._jobs.get()) is not None:
                batch, ends = [first], False
                while len(batch) < _MAX_BATCH and not ends:
                    try:
                        job = self._jobs.get_nowait()
                    except queue.Empty:
                        break
                    ends = job is None
                    batch += [job] if job is not None else []
                self._commit(batch)
                if ends:
                    return

    def _commit(self, batch: list[_Job]) -> None:
        try:
            if self._failure is not None:
                raise self._failure
            results = [(job, _attempt(self._journal, job)) for job in batch]
            self._journal.flush()
        except OSError as error:
            # A full or broken disk: nothing of this batch is durable, and nothing later may claim to be.
            logger.error("spool %s: %s", self._folder, error)
            self._failure = error
            results = [(job, ConfigError(f"{self._folder}: cannot be written: {error}")) for job in batch]
        # One wake-up of the loop a batch; all jobs are of the loop that opened the spool.
        waiting = [(job.future, result) for job, result in results if job.future is not None]
        if waiting:
            with contextlib.suppress(RuntimeError):  # the loop has ended, nobody waits
                results[0][0].loop.call_soon_threadsafe(_resolve, waiting)


def _attempt(journal: Journal, job: _Job) -> object:
    """The job's result; an error of the job alone is its result and leaves the batch standing."""
    try:
        return job.run(journal)
    except OSError:
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


def _open(folder: Path, run_id: str) -> Journal:
    try:
        return Journal(folder, run_id)
    except OSError as error:
        raise ConfigError(f"{folder}: not a spool that can be opened: {error}") from error


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
