"""Fixtures that several areas share."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import builders
from tests.forks import run_ranks
from tests.power_cut import PowerCut, build_shim
from vagen.buffer.server import EmbeddedValkey
from vagen.common.trajectory import Trajectory


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Generator[None, Any, Any]:
    """What a laptop lacks is skipped there; in continuous integration everything must run."""
    report = yield
    if report.skipped and os.environ.get("CI"):
        report.outcome = "failed"
        report.longrepr = f"skipped, which CI does not allow: {report.longrepr}"
    return report


@pytest.fixture(scope="session")
def make_trajectory() -> Callable[..., Trajectory]:
    """See `builders.py`."""
    return builders.make_trajectory


@pytest.fixture(scope="session")
def power_cut_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_shim(tmp_path_factory.mktemp("shim"))


@pytest.fixture
def power_cut(power_cut_library: Path, tmp_path: Path) -> PowerCut:
    """Cuts the files of processes that were started with its `environment`; see `power_cut.py`."""
    return PowerCut(power_cut_library, tmp_path / "sync.log")


class RedisServer(EmbeddedValkey):
    """The same over a binary of Redis."""

    def _binary(self) -> str:
        found = shutil.which("redis-server")
        if found is None:
            pytest.skip("this machine has no redis-server")
        return found


@pytest.fixture
def redis_server(tmp_path: Path) -> Iterator[RedisServer]:
    """A running redis-server of its own, where the machine has one."""
    server = RedisServer(tmp_path / "redis")
    server.start()
    yield server
    server.stop()


@pytest.fixture
def valkey(tmp_path: Path) -> Iterator[EmbeddedValkey]:
    """A running embedded Valkey of its own."""
    server = EmbeddedValkey(tmp_path / "valkey")
    server.start()
    yield server
    server.stop()


@pytest.fixture(scope="session")
def torchrun(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., None]:
    """Runs a command on this many ranks: `torchrun(2, "-m", "vagen.learner", ...)` as a person would,
    `torchrun(2, "worker.py", ...)` from forked processes. Fails with the end of what they said."""

    def run(num_ranks: int, *command: object, timeout_s: float = 240.0) -> None:
        if not str(command[0]).startswith("-"):
            script, *arguments = map(str, command)
            run_ranks(num_ranks, Path(script), arguments, tmp_path_factory.mktemp("ranks"), timeout_s)
            return
        torchrun_sets = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
        environment = {k: v for k, v in os.environ.items() if k not in torchrun_sets} | {"OMP_NUM_THREADS": "1"}
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_ranks}"]
        # A session of its own, so that a hang takes the ranks with it.
        process = subprocess.Popen(
            [*launcher, *map(str, command)], env=environment, stderr=subprocess.PIPE, start_new_session=True
        )
        try:
            _, errors = process.communicate(timeout=timeout_s)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
        assert process.returncode == 0, errors.decode()[-20000:]

    return run
