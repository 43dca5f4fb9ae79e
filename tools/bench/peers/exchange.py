"""What the processes of a buffer benchmark say to the one that measures, and the trajectories that they carry.

A worker is a process `python -m MODULE ROLE TASK`, with the task as JSON. It prints `ready` and what others must know
of it once it could begin, waits for a line on its standard input, works, and prints `done` and a number. Its errors go
to its standard error. Roles: `serve` works until the line comes; `produce` carries its share of the trajectories;
`consume` takes in all of them, decodes each, and says at what time it had the last one, on the clock that all
processes of a machine share.

Imports without anything but the codec: it runs in the Python of a peer too.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import msgspec
import numpy as np
from ulid import ULID

from vagen.common.memory import collect_rarely, keep_freed_memory
from vagen.common.trajectory import Trajectory
from vagen.common.wire import decode_trajectory, encode_trajectory

_HEAD_BYTES = 8
_PADDED_TO = 1 << 14


class Task(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker is to do."""

    pool: str
    """Folder of encoded trajectories, which a producer repeats under new ids."""
    folder: str
    """For the worker's own files; shared by the workers of a run."""
    count: int
    """Trajectories that this worker produces or consumes, over the run for `serve`."""
    index: int = 0
    """Of this producer."""
    address: str = ""
    """What the server said when it was ready."""


Role = Callable[[Task], object]


def run_worker(roles: Mapping[str, Role]) -> None:
    """Run the role that the command line names; every side profits alike from kept memory."""
    keep_freed_memory()
    collect_rarely()
    name, task = sys.argv[1:]
    roles[name](msgspec.json.decode(task, type=Task))


def ready(text: str = "") -> None:
    """Say that the work could begin and return when it shall."""
    print("ready", text, flush=True)
    sys.stdin.readline()


def done(number: float = 0.0) -> None:
    """Say that the work is over, and return when this process is not needed any more."""
    print("done", number, flush=True)
    sys.stdin.read()


def produced(task: Task) -> Iterator[Trajectory]:
    """The trajectories of a producer, each with an id and a sequence number of its own."""
    pool = [decode_trajectory(path.read_bytes()) for path in sorted(Path(task.pool).glob("*.msgpack"))]
    for number in range(task.count):
        yield msgspec.structs.replace(
            pool[number % len(pool)],
            trajectory_id=str(ULID()),
            group_id=str(ULID()),
            actor_id=f"producer-{task.index}",
            actor_seq=number + 1,
        )


class Arrivals:
    """The consumer's end: decodes what arrives and knows when it was the last."""

    def __init__(self, expected: int) -> None:
        self._expected = expected
        self._seen: set[str] = set()
        self._num_tokens = 0

    @property
    def missing(self) -> int:
        """Trajectories yet to come."""
        return self._expected - len(self._seen)

    def decode(self, payload: bytes | memoryview) -> None:
        """Take in one payload; its arrays are read, so that a lazy transport has to deliver them."""
        trajectory = decode_trajectory(payload)
        self._num_tokens += sum(int(row.policy_mask.sum()) for row in trajectory.rows)
        self._seen.add(trajectory.trajectory_id)

    def finish(self) -> None:
        """Say when the last one was there. Raises when some came twice, or none held a token."""
        now = time.monotonic()
        assert self.missing == 0 and self._num_tokens > 0, f"{self.missing} of {self._expected} are missing"
        done(now)


def encoded(trajectory: Trajectory) -> bytes:
    """The payload that a peer carries: the same codec on both ends, whatever is in between."""
    return encode_trajectory(trajectory)[1]


def padded(trajectory: Trajectory) -> np.ndarray:
    """The payload as uint8 `[L]`, its length in front, for peers that take one shape: `L` is a multiple of 16 KiB."""
    payload = encoded(trajectory)
    array = np.empty(-(-(len(payload) + _HEAD_BYTES) // _PADDED_TO) * _PADDED_TO, np.uint8)
    array[:_HEAD_BYTES] = np.frombuffer(len(payload).to_bytes(_HEAD_BYTES, "little"), np.uint8)
    array[_HEAD_BYTES : _HEAD_BYTES + len(payload)] = np.frombuffer(payload, np.uint8)
    return array


def stripped(array: np.ndarray) -> memoryview:
    """The payload in what `padded` made; contiguous, of any shape."""
    view = array.reshape(-1).data
    return view[_HEAD_BYTES : _HEAD_BYTES + int.from_bytes(view[:_HEAD_BYTES], "little")]
