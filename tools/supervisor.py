"""The processes of a demo together: waits, death, return by hand, interrupts, orderly stop.

    start -> (ready.json names a living pid) -> serving -> its work is done -------> done
                                                  |  ^
                                                  v  |  ready.json names a new living pid
                                                 lost -- nobody for restart_grace_s -> ProcessLostError

Owns the processes and what is known of them. Decides nothing about the run: `vagen.tools.demo` does. A process that
died is never started again from here; a person does that with the printed command, and it is then watched by its pid.
"""

from __future__ import annotations

import logging
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import psutil

from vagen.common.errors import VagenError
from vagen.tools.child import ChildProcess, Death, ProcessSpec, Stage, describe_exit, ready_pid, tail

logger = logging.getLogger(__name__)

_TICK_S = 0.1


class ProcessLostError(VagenError, RuntimeError):
    """A process died or did not come up, and nobody started it again in time."""


class InterruptedByUserError(VagenError, RuntimeError):
    """Ctrl-C, SIGTERM or a closed terminal."""


class Supervisor:
    """The processes of one demo, watched from one thread; every wait is bounded and ends on an interrupt."""

    def __init__(
        self,
        *,
        restart_grace_s: float,
        stop_timeout_s: float,
        on_death: Callable[[Death], None] = lambda death: None,
        on_return: Callable[[str, int], None] = lambda name, pid: None,
        on_tick: Callable[[], None] = lambda: None,
    ) -> None:
        self._restart_grace_s = restart_grace_s
        self._stop_timeout_s = stop_timeout_s
        self._on_death = on_death
        self._on_return = on_return
        self._on_tick = on_tick
        self._interrupts = 0
        self.processes: dict[str, ChildProcess] = {}

    @contextmanager
    def signals(self) -> Iterator[None]:
        """Turn Ctrl-C, SIGTERM and a closed terminal into `InterruptedByUserError` at the next look."""
        numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        previous = {number: signal.signal(number, self._interrupt) for number in numbers}
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)

    def start(self, spec: ProcessSpec) -> ChildProcess:
        """Start a process; an ended one of the same name keeps its CPU time."""
        process = self.processes.get(spec.name)
        if process is None:
            process = self.processes[spec.name] = ChildProcess(spec)
        assert process.starts == 0 or not process.alive, f"{spec.name} runs already"
        process.spec = spec
        process.start()
        return process

    def check(self) -> None:
        """Look at every process once.

        Raises `InterruptedByUserError`, and `ProcessLostError` when one has been gone for too long.
        """
        if self._interrupts:
            raise InterruptedByUserError("interrupted")
        for process in self.processes.values():
            has_served = process.stage is Stage.SERVING
            death = process.poll()
            if death is not None and has_served:
                self._on_death(death)
            if process.stage is not Stage.LOST:
                continue
            if process.look_for_return():
                assert process.pid is not None
                self._on_return(process.spec.name, process.pid)
            elif time.monotonic() - process.lost_at > self._restart_grace_s:
                raise ProcessLostError(
                    f"{process.spec.name} {describe_exit(process.exit_code)} and was not started again "
                    f"within {self._restart_grace_s:g} s"
                )
        self._on_tick()

    def wait(self, until: Callable[[], bool], timeout_s: float, what: str) -> None:
        """Check all processes until `until()` holds. Raises `ProcessLostError` at the time-out, naming `what`."""
        deadline = time.monotonic() + timeout_s
        while True:
            self.check()
            if until():
                return
            if time.monotonic() > deadline:
                raise ProcessLostError(f"{what}: not within {timeout_s:g} s")
            time.sleep(_TICK_S)

    def wait_ready(self, name: str, timeout_s: float) -> None:
        """Wait until a process serves, or has done its work already; its death before that is final.

        Raises `ProcessLostError` with its last lines.
        """
        process = self.processes[name]
        self.wait(lambda: process.stage is not Stage.STARTING, timeout_s, f"{name} serves")
        if process.stage not in (Stage.SERVING, Stage.DONE):
            last = "\n  ".join(tail(process.spec.log))
            raise ProcessLostError(
                f"{name} {describe_exit(process.exit_code)} before it served; its last lines:\n  {last}"
            )

    def run(self, spec: ProcessSpec, timeout_s: float) -> None:
        """Run a process to its end.

        Raises `ProcessLostError` with its last lines unless it ends with exit code 0.
        """
        process = self.start(spec)
        self.wait(lambda: not process.alive, timeout_s, f"{spec.name} ends")
        if process.stage is not Stage.DONE:
            raise ProcessLostError(f"{spec.name} {describe_exit(process.exit_code)}{_last_words(process)}")

    def stop(self, *names: str) -> None:
        """Stop processes together: SIGTERM, then SIGKILL at the time-out or at a further interrupt."""
        processes = [self.processes[name] for name in names if name in self.processes]
        interrupts = self._interrupts
        deadline = time.monotonic() + self._stop_timeout_s
        for process in processes:
            process.poll()
            if process.alive:
                process.signal(signal.SIGTERM)
        is_killed = False
        while left := [process for process in processes if process.alive]:
            time.sleep(_TICK_S / 2)
            for process in left:
                process.poll()
            if not is_killed and (time.monotonic() > deadline or self._interrupts > interrupts):
                is_killed = True
                for process in left:
                    logger.warning("%s: does not stop, killed", process.spec.name)
                    process.signal(signal.SIGKILL)
        for process in processes:
            process.stage = Stage.DONE
            self._stop_orphans(process, deadline)

    def stop_all(self) -> None:
        """Stop every process."""
        self.stop(*self.processes)

    def _stop_orphans(self, process: ChildProcess, deadline: float) -> None:
        """Stop what a killed process left running, the embedded Valkey of a buffer for example."""
        orphans = process.orphans()
        for orphan in orphans:
            logger.warning("%s left pid %d running: stopped", process.spec.name, orphan.pid)
            orphan.terminate()
        _, stubborn = psutil.wait_procs(orphans, max(1.0, deadline - time.monotonic()))
        for orphan in stubborn:
            orphan.kill()

    def cpu_seconds(self) -> dict[str, float]:
        """User and system seconds by process."""
        return {name: process.cpu_seconds for name, process in self.processes.items()}

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        self._interrupts += 1


def stop_leftover(ready: Path, root: Path, timeout_s: float) -> None:
    """Stop a process that an earlier demo in the folder `root` left running, as when that demo was killed."""
    pid = ready_pid(ready)
    if pid is None:
        return
    try:
        process = psutil.Process(pid)
        # The number may belong to another program by now.
        if not any(str(root) in word for word in process.cmdline()):
            return
        logger.warning("pid %d is left from an earlier start in %s: stopped", pid, root)
        process.terminate()
        try:
            process.wait(timeout_s)
        except psutil.TimeoutExpired:
            process.kill()
            process.wait(timeout_s)
    except psutil.NoSuchProcess:
        logger.debug("pid %d: gone already", pid)


def _last_words(process: ChildProcess) -> str:
    return "; its last lines:\n  " + "\n  ".join(tail(process.spec.log))
