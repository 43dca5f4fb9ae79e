"""Starts the worker processes of a benchmark, lets them go at once and reads what they say.

The other end is `vagen.tools.bench.peers.exchange`.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from vagen.common.errors import VagenError
from vagen.tools.bench.peers.exchange import Task

logger = logging.getLogger(__name__)

_STOP_S = 15.0
_ERROR_LINES = 3


class WorkerError(VagenError):
    """A worker of a benchmark ended early, or said nothing in time."""


@dataclass(frozen=True, kw_only=True)
class Program:
    """What the workers of one side are."""

    python: Path
    module: str
    env: Mapping[str, str] = field(default_factory=dict)
    """On top of the environment of this process."""


class Worker:
    """One process; as a context it is gone at the end, with all its children."""

    def __init__(self, program: Program, role: str, task: Task) -> None:
        self._name = f"{program.module.rpartition('.')[2]} {role}"
        self._errors = tempfile.TemporaryFile("w+", errors="replace")
        self._process = subprocess.Popen(
            [str(program.python), "-m", program.module, role, msgspec.json.encode(task).decode()],
            env={**os.environ, **program.env},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            bufsize=1,
            start_new_session=True,
        )
        self._lines: queue.Queue[str | None] = queue.Queue()
        threading.Thread(target=self._read, name=self._name, daemon=True).start()

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *exception: object) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        try:
            # A server ends by itself when its input does, and takes its own children with it.
            self._process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            logger.warning("%s does not end, killing it", self._name)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._errors.close()

    def wait_ready(self, timeout_s: float) -> str:
        """What it said when it was ready. Raises `WorkerError`."""
        return self._await("ready", timeout_s)

    def go(self) -> None:
        """Let it begin, or a server end."""
        assert self._process.stdin is not None
        self._process.stdin.write("\n")

    def wait_done(self, timeout_s: float) -> float:
        """The number it ended with. Raises `WorkerError`."""
        return float(self._await("done", timeout_s))

    def _await(self, word: str, timeout_s: float) -> str:
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                line = self._lines.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                raise WorkerError(f"{self._name}: not {word} within {timeout_s:g} s{self._last_words()}") from None
            if line is None:
                raise WorkerError(f"{self._name}: ended with status {self._process.wait()}{self._last_words()}")
            found, _, rest = line.strip().partition(" ")
            # Libraries print what they like on the same stream.
            if found == word:
                return rest

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line)
        self._lines.put(None)

    def _last_words(self) -> str:
        self._errors.seek(0)
        lines = [line.strip() for line in self._errors.read().splitlines() if line.strip()]
        return ": " + " | ".join(lines[-_ERROR_LINES:]) if lines else ""


def carry(program: Program, task: Task, producers: int, timeout_s: float) -> float:
    """Let producers and a consumer carry `task.count` trajectories; the seconds until the last one was decoded.

    Raises `WorkerError` when one of them fails, or is not ready or done within `timeout_s`.
    """
    shares = [task.count // producers + (index < task.count % producers) for index in range(producers)]
    with Worker(program, "consume", task) as consumer, contextlib.ExitStack() as stack:
        consumer.wait_ready(timeout_s)
        made = [
            stack.enter_context(Worker(program, "produce", msgspec.structs.replace(task, count=share, index=index)))
            for index, share in enumerate(shares)
        ]
        for worker in made:
            worker.wait_ready(timeout_s)
        started = time.monotonic()
        for worker in (consumer, *made):
            worker.go()
        for worker in made:
            worker.wait_done(timeout_s)
        return consumer.wait_done(timeout_s) - started


def carry_through(program: Program, task: Task, producers: int, timeout_s: float) -> float:
    """As `carry`, around a server of the same program."""
    with Worker(program, "serve", task) as server:
        address = server.wait_ready(timeout_s)
        return carry(program, msgspec.structs.replace(task, address=address), producers, timeout_s)
