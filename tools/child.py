"""One child process of a demo: start, readiness, death, adoption by pid, signals, CPU time. Does not wait."""

from __future__ import annotations

import enum
import json
import logging
import os
import shlex
import signal
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import psutil

logger = logging.getLogger(__name__)

_LOG_TAIL_LINES = 8
_FAMILY_LOOK_S = 1.0
"""Finding a process's children reads the whole process table."""


class Stage(enum.Enum):
    """What is known of a process."""

    STARTING = "starting"
    SERVING = "serving"
    LOST = "lost"
    """Died; may be started again by hand."""
    FAILED = "failed"
    """Ended with an error and is not one that can come back: it names no `ready` file."""
    DONE = "done"
    """Ended with its work done, or was stopped."""


@dataclass(frozen=True, kw_only=True)
class ProcessSpec:
    """How to start one process."""

    name: str
    argv: tuple[str, ...]
    log: Path
    ready: Path | None = None
    """File in which the process names its pid once it serves; without one it counts as serving from the start."""
    ready_timeout_s: float = 0.0
    """How long it needs at least until it serves, where that is more than the recipe's patience."""
    env: Mapping[str, str] = field(default_factory=dict)
    """On top of the environment of this process."""
    is_complete: Callable[[], bool] = lambda: False
    """Whether a process that serves has done its work and may end by itself; asked when it has ended well, or when
    only its own parent knows how it ended."""

    @property
    def command(self) -> str:
        """A line for a shell that starts the process as it was started here."""
        words = [f"{key}={value}" for key, value in self.env.items()]
        return shlex.join(["env", *words, *self.argv] if words else self.argv)


@dataclass(frozen=True, kw_only=True)
class Death:
    """A process that ended on its own."""

    name: str
    cause: str
    log_tail: tuple[str, ...]
    command: str


class ChildProcess:
    """One process: started here, or adopted by pid after a person started it again."""

    def __init__(self, spec: ProcessSpec) -> None:
        self.spec = spec
        self.stage = Stage.STARTING
        self.exit_code: int | None = None
        """None while it runs, and of an adopted one, whose parent alone can know."""
        self.lost_at = 0.0
        self.starts = 0
        self._popen: subprocess.Popen[bytes] | None = None
        self._adopted: psutil.Process | None = None
        self._family: set[psutil.Process] = set()
        self._looked_at = float("-inf")
        self._cpu_before = 0.0
        self._cpu_now = 0.0

    @property
    def pid(self) -> int | None:
        if self._adopted is not None:
            return self._adopted.pid
        return None if self._popen is None else self._popen.pid

    @property
    def alive(self) -> bool:
        return self.stage in (Stage.STARTING, Stage.SERVING)

    @property
    def cpu_seconds(self) -> float:
        """User and system time over all starts; exact for an ended child of ours, else as of the last look."""
        return self._cpu_before + self._cpu_now

    def start(self) -> None:
        """Start it in a session of its own, so that a Ctrl-C reaches only this process, which stops it in order."""
        spec = self.spec
        spec.log.parent.mkdir(parents=True, exist_ok=True)
        if spec.ready is not None:
            spec.ready.unlink(missing_ok=True)
        with spec.log.open("ab") as log:
            self._popen = subprocess.Popen(
                spec.argv,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, **spec.env},
                start_new_session=True,
            )
        self._adopted = None
        self._begin()
        logger.info("%s: started, pid %d", spec.name, self._popen.pid)
        if spec.ready is None:
            self.stage = Stage.SERVING

    def adopt(self, pid: int) -> bool:
        """Watch a process that a person started; False when it is gone already."""
        try:
            adopted = psutil.Process(pid)
        except psutil.NoSuchProcess:
            return False
        self._adopted, self._popen = adopted, None
        self._begin()
        self.stage = Stage.SERVING
        return True

    def poll(self) -> Death | None:
        """Look once: readiness, death. Returns the death when it was not seen before."""
        if not self.alive:
            return None
        ended = self._reap() if self._adopted is None else self._gone()
        if not ended:
            serves = self.stage is Stage.STARTING and ready_pid(self.spec.ready) is not None
            if serves:
                self.stage = Stage.SERVING
            if serves or time.monotonic() - self._looked_at >= _FAMILY_LOOK_S:
                self._look_at_family()
            return None
        ended_well = self.exit_code in (0, None)
        if self.spec.ready is None:
            self.stage = Stage.DONE if ended_well else Stage.FAILED
            return None
        if ended_well and self.spec.is_complete():
            self.stage = Stage.DONE
            return None
        self.stage = Stage.LOST
        self.lost_at = time.monotonic()
        return Death(
            name=self.spec.name,
            cause=describe_exit(self.exit_code),
            log_tail=tail(self.spec.log),
            command=self.spec.command,
        )

    def look_for_return(self) -> bool:
        """Adopt a new living process named by `ready.json`, if there is one."""
        pid = ready_pid(self.spec.ready)
        return self.stage is Stage.LOST and pid is not None and pid != self.pid and self.adopt(pid)

    def signal(self, number: int) -> None:
        """Send a signal; a process that is gone is no error."""
        try:
            if self._popen is not None and self._popen.returncode is None:
                os.kill(self._popen.pid, number)
            elif self._adopted is not None:
                self._adopted.send_signal(number)
        except (ProcessLookupError, psutil.NoSuchProcess):
            logger.debug("%s: already gone", self.spec.name)

    def orphans(self) -> list[psutil.Process]:
        """Living processes that were its children, of any depth, when it was last looked at."""
        return [process for process in self._family if _is_alive(process)]

    def _begin(self) -> None:
        self.starts += 1
        self.exit_code = None
        self._cpu_before += self._cpu_now
        self._cpu_now = 0.0
        self.stage = Stage.STARTING

    def _reap(self) -> bool:
        """Whether the child has ended; `wait4` instead of Popen's own wait for the exact CPU time."""
        assert self._popen is not None
        if self._popen.returncode is None:
            pid, status, usage = os.wait4(self._popen.pid, os.WNOHANG)
            if pid == 0:
                return False
            # Children that live on are in the last look and not in the usage.
            self._cpu_now = max(self._cpu_now, usage.ru_utime + usage.ru_stime)
            self._popen.returncode = os.waitstatus_to_exitcode(status)
        self.exit_code = self._popen.returncode
        return True

    def _gone(self) -> bool:
        assert self._adopted is not None
        return not _is_alive(self._adopted)

    def _look_at_family(self) -> None:
        """Note children and CPU time: its own, of children that ended and of those that run."""
        self._looked_at = time.monotonic()
        assert self.pid is not None
        try:
            leader = psutil.Process(self.pid)
            children = leader.children(recursive=True)
            self._family.update(children)
            own = leader.cpu_times()
            total = own.user + own.system + own.children_user + own.children_system
            for child in children:
                times = child.cpu_times()
                total += times.user + times.system
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            return
        self._cpu_now = max(self._cpu_now, total)


def ready_pid(ready: Path | None) -> int | None:
    """The pid that `ready.json` names, when that process lives."""
    if ready is None or not ready.is_file():
        return None
    try:
        pid = json.loads(ready.read_text()).get("pid")
    except json.JSONDecodeError:
        return None  # is being written
    return pid if isinstance(pid, int) and psutil.pid_exists(pid) else None


def tail(log: Path, lines: int = _LOG_TAIL_LINES) -> tuple[str, ...]:
    """The last lines of a log."""
    if not log.is_file():
        return ()
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - 8192))
        return tuple(file.read().decode(errors="replace").splitlines()[-lines:])


def describe_exit(exit_code: int | None) -> str:
    if exit_code is None:
        return "is gone (exit code unknown: it was started by hand)"
    if exit_code < 0:
        return f"was killed by {signal.Signals(-exit_code).name}"
    return f"ended with exit code {exit_code}"


def _is_alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
