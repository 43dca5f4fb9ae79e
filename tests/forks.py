"""Processes forked from one that has imported what takes long: real processes that start within milliseconds."""

from __future__ import annotations

import multiprocessing
import os
import runpy
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from vagen.tools.launch import free_port

# One thread a process, which has to be said before torch is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")
_FORKS = multiprocessing.get_context("forkserver")
_FORKS.set_forkserver_preload(
    [
        "vagen.actor.local_engine.main",
        "vagen.learner.broadcast",
        "vagen.learner.model.checkpoint_io",
        "vagen.learner.update",
    ]
)


class ForkedScript:
    """A script with its arguments, output in `log`; as `subprocess.Popen`."""

    def __init__(
        self, script: Path, arguments: Sequence[str], log: Path, environment: Mapping[str, str] | None = None
    ) -> None:
        given = {
            "script": str(script),
            "arguments": list(arguments),
            "log": str(log),
            "environment": dict(environment or {}),
        }
        launch = (str(Path(__file__).with_name("forked.py")), given, "__main__")
        # Daemons end with this process, whatever becomes of their test.
        self._process = _FORKS.Process(target=runpy.run_path, args=launch, daemon=True)
        self._process.start()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def poll(self) -> int | None:
        return self._process.exitcode

    def kill(self) -> None:
        self._process.kill()

    def wait(self, timeout_s: float | None = None) -> int:
        self._process.join(timeout_s)
        assert self._process.exitcode is not None, f"not ended within {timeout_s} s"
        return self._process.exitcode


def run_ranks(num_ranks: int, script: Path, arguments: Sequence[str], folder: Path, timeout_s: float) -> None:
    """Runs a script on so many ranks, with the variables that torchrun sets; their output is in `folder`.

    Fails with what a rank said when it ends with an error or the time is up.
    """
    shared = {"WORLD_SIZE": str(num_ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    logs = [folder / f"rank{rank}.log" for rank in range(num_ranks)]
    ranks = [
        ForkedScript(script, arguments, log, shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)})
        for rank, log in enumerate(logs)
    ]
    deadline = time.monotonic() + timeout_s
    try:
        while any(rank.poll() is None for rank in ranks):
            failed = [log for rank, log in zip(ranks, logs, strict=True) if rank.poll() not in (None, 0)]
            late = logs if time.monotonic() > deadline else []
            assert not failed and not late, "\n".join(log.read_text()[-10000:] for log in failed or late)
            time.sleep(0.02)
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait(10)
    codes = [rank.poll() for rank in ranks]
    assert codes == [0] * num_ranks, "\n".join(log.read_text()[-10000:] for log in logs)
