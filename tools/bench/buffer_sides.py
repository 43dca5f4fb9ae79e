"""What `vagen bench buffer` measures of ours and of the limits that the machine sets: one run of each at a time."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from vagen.buffer.connection import make_client
from vagen.buffer.server import EmbeddedValkey
from vagen.buffer.service import read_ready, ready_path
from vagen.tools.bench.buffer_pool import RUN
from vagen.tools.bench.peers.exchange import Task
from vagen.tools.bench.workers import Program, WorkerError, carry

_START_S = 60.0
_RUN_S = 300.0
_PIPELINE = 32
_WORKERS = Program(python=Path(sys.executable), module="vagen.tools.bench.buffer_worker")


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What all sides of one invocation have in common."""

    pool: Path
    """The encoded trajectories."""
    disk: Path
    """A folder of the file system whose durability is measured."""
    memory: Path
    """A folder in memory, where the machine has one."""
    count: int
    """Trajectories a run."""
    producers: int


@contextlib.contextmanager
def memory_valkey(setting: Setting) -> Iterator[EmbeddedValkey]:
    """An embedded Valkey that writes nothing."""
    with tempfile.TemporaryDirectory(dir=setting.memory, prefix="valkey-") as folder:
        server = EmbeddedValkey(Path(folder), "none")
        server.start()
        try:
            client = make_client(server.url)
            client.config_set("appendonly", "no")
            client.close()
            yield server
        finally:
            server.stop()


def run_memory(setting: Setting) -> float:
    """Trajectories a second from producers to decoded arrays, Valkey without AOF, spools in memory."""
    with memory_valkey(setting) as server, tempfile.TemporaryDirectory(dir=setting.memory) as folder:
        return _through_buffer(setting, Path(folder), Path(folder), {"redis_url": server.url, "fsync": "none"})[0]


def run_durable(setting: Setting, spools: Path) -> tuple[float, float]:
    """The same with what `vagen-buffer serve` does by default, spools in `spools`; and its mean batch."""
    with (
        tempfile.TemporaryDirectory(dir=setting.disk, prefix="durable-") as folder,
        tempfile.TemporaryDirectory(dir=spools, prefix="spools-") as spool_folder,
    ):
        return _through_buffer(setting, Path(folder), Path(spool_folder), {"fsync": "always"})


def run_fsync(setting: Setting, batch: float) -> float:
    """Trajectories a second when the same bytes are only written, and fdatasynced every `batch` of them."""
    payloads = _payloads(setting)
    with tempfile.NamedTemporaryFile(dir=setting.disk, buffering=0) as file:
        started = time.perf_counter()
        synced = 0.0
        for number in range(1, setting.count + 1):
            file.write(payloads[number % len(payloads)])
            if number >= synced + batch or number == setting.count:
                os.fdatasync(file.fileno())
                synced += batch
        return setting.count / (time.perf_counter() - started)


def run_redis(setting: Setting) -> float:
    """Trajectories a second through Valkey without AOF by one client that only pipelines SET, then GET."""
    payloads = _payloads(setting)
    with memory_valkey(setting) as server:
        client: Any = make_client(server.url)
        started = time.perf_counter()
        for start in range(0, setting.count, _PIPELINE):
            names = range(start, min(start + _PIPELINE, setting.count))
            pipe = client.pipeline(transaction=False)
            for name in names:
                pipe.set(f"p:{name}", payloads[name % len(payloads)])
            pipe.execute()
        for start in range(0, setting.count, _PIPELINE):
            pipe = client.pipeline(transaction=False)
            for name in range(start, min(start + _PIPELINE, setting.count)):
                pipe.get(f"p:{name}")
            assert None not in pipe.execute()
        seconds = time.perf_counter() - started
        client.close()
    return setting.count / seconds


def _payloads(setting: Setting) -> list[bytes]:
    return [path.read_bytes() for path in sorted(setting.pool.glob("*.msgpack"))]


def _through_buffer(setting: Setting, folder: Path, spools: Path, buffer: dict[str, object]) -> tuple[float, float]:
    """Trajectories a second, and how many the ingest committed at a time."""
    with _ingest(folder, buffer):
        task = Task(pool=str(setting.pool), folder=str(folder), count=setting.count, address=str(spools))
        seconds = carry(_WORKERS, task, setting.producers, _RUN_S)
        client: Any = make_client(read_ready(folder).redis_url)
        calls = client.info("commandstats")
        client.close()
    return setting.count / seconds, calls["cmdstat_set"]["calls"] / calls["cmdstat_exec"]["calls"]


@contextlib.contextmanager
def _ingest(folder: Path, buffer: dict[str, object]) -> Iterator[None]:
    """`vagen-buffer serve` as a process of its own."""
    recipe = folder / "recipe.yaml"
    settings = {"endpoint": "tcp://127.0.0.1:*", "metrics_port": None, "capacity_bytes": 1 << 34, **buffer}
    recipe.write_text(yaml.safe_dump({"run": {"name": RUN, "log_level": "WARNING"}, "buffer": settings}))
    command = [sys.executable, "-c", "from vagen.buffer.cli import app; app()", "serve"]
    process = subprocess.Popen(
        [*command, "--config", str(recipe), "--run-dir", str(folder)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        deadline = time.monotonic() + _START_S
        while not ready_path(folder).exists():
            if process.poll() is not None or time.monotonic() > deadline:
                raise WorkerError(f"vagen-buffer did not start, see {folder / 'buffer' / 'buffer.log'}")
            time.sleep(0.02)
        yield
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(_START_S)
