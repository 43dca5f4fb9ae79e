"""Assembles `vagen-buffer serve`: socket, Redis, metrics and the loop, and takes them down in order.

Owns the files that tell others of the service: `<run-dir>/buffer/ready.json` exists while traffic is accepted.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import msgspec
import zmq

from vagen.buffer.accounting import REASONS, read_accounting, read_ready_staleness, read_status
from vagen.buffer.address import public_url
from vagen.buffer.config import FSYNC_RISK, BufferConfig, BufferSecurity
from vagen.buffer.connection import first_contact, make_client
from vagen.buffer.gate import Gate
from vagen.buffer.keys import Keys, Shard
from vagen.buffer.loop import Ingest, bind_again, bind_router
from vagen.buffer.quarantine import Quarantine
from vagen.buffer.reshard import check_layout
from vagen.buffer.server import EmbeddedValkey
from vagen.buffer.settings import overrides
from vagen.buffer.store import IngestStore
from vagen.common.config import RunConfig, require
from vagen.common.curve import load_key_pair
from vagen.common.errors import ConfigError
from vagen.common.logging import setup_logging
from vagen.common.memory import collect_rarely, keep_freed_memory
from vagen.common.metrics import Metrics

logger = logging.getLogger(__name__)


class Ready(msgspec.Struct, frozen=True, kw_only=True):
    """Contents of `ready.json`."""

    pid: int
    run_name: str
    endpoint: str
    redis_url: str
    """Without its password."""
    metrics_port: int | None
    shards: int = 1


def buffer_dir(run_dir: Path, shard: int = 0) -> Path:
    """The folder of one shard's service below a run folder."""
    return run_dir / ("buffer" if shard == 0 else f"buffer-{shard}")


def ready_path(run_dir: Path, shard: int = 0) -> Path:
    """Where a service of this run folder says that it is ready."""
    return buffer_dir(run_dir, shard) / "ready.json"


def quarantine_dir(run_dir: Path, shard: int = 0) -> Path:
    """Where the service of one shard keeps refused payloads."""
    return buffer_dir(run_dir, shard) / "quarantine"


def read_ready(run_dir: Path, shard: int = 0) -> Ready:
    """What the service of a run folder said when it became ready.

    Raises `ConfigError` when there is none.
    """
    path = ready_path(run_dir, shard)
    try:
        return msgspec.json.decode(path.read_bytes(), type=Ready)
    except FileNotFoundError:
        raise ConfigError(
            f"{path}: no such file; start `vagen-buffer serve --run-dir {run_dir} --shard {shard}`"
        ) from None
    except msgspec.ValidationError as error:
        raise ConfigError(f"{path}: {error}") from error


def serve(run: RunConfig, config: BufferConfig, run_dir: Path, shard: int = 0) -> None:
    """Serve one shard until SIGTERM or SIGINT.

    Raises `ConfigError` or `BufferUnavailableError` when it cannot start.
    """
    require(0 <= shard < config.shards, "buffer --shard", shard, f"0 <= int < buffer.shards ({config.shards})")
    folder = buffer_dir(run_dir, shard)
    keys = Keys(run.name, Shard(shard, config.shards))
    keep_freed_memory()
    collect_rarely()
    setup_logging(run.log_level, folder / "buffer.log")
    stop_signal: list[int] = []

    def stop(number: int, _: FrameType | None) -> None:
        stop_signal.append(number)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stop)
    if config.security.insecure and config.security.key_file is None:
        logger.warning("$.buffer.security.insecure: %s takes unencrypted messages from anybody", config.endpoint)
    with contextlib.ExitStack() as stack:
        context: zmq.Context = zmq.Context()
        stack.callback(context.term)
        metrics = Metrics("vagen_buffer", run.name)
        gate = _open_gate(context, config.security, metrics)
        if gate is not None:
            stack.callback(gate.close)
        socket = bind_router(context, config.endpoint, gate)
        stack.callback(socket.close)
        endpoint = socket.get_string(zmq.LAST_ENDPOINT)
        redis_url, revive = _start_redis(config, keys, folder, stack)
        store = _open_store(redis_url, run, config, shard)
        stack.callback(store.close)
        port = None if config.metrics_port is None else metrics.serve(config.metrics_port)
        quarantine = None
        if config.quarantine_bytes > 0:
            quarantine = Quarantine(quarantine_dir(run_dir, shard), config.quarantine_bytes, metrics)
            stack.callback(quarantine.close)
        ingest = Ingest(
            socket,
            store,
            metrics,
            run_name=run.name,
            config=config,
            gate=gate,
            stopping=lambda: bool(stop_signal),
            quarantine=quarantine.offer if quarantine else lambda *refusal: None,
            revive=revive,
            report=_Reporter(redis_url, keys, metrics, quarantine).report,
            reopen=lambda: bind_again(context, endpoint, gate),
        )
        stack.callback(ingest.close)
        public = public_url(redis_url)
        ready = Ready(
            pid=os.getpid(),
            run_name=run.name,
            endpoint=endpoint,
            redis_url=public,
            metrics_port=port,
            shards=config.shards,
        )
        _write_atomically(folder / "ready.json", ready)
        stack.callback((folder / "ready.json").unlink, missing_ok=True)
        logger.info(
            "run %s, shard %d of %d: serving at %s, Redis at %s", run.name, shard, config.shards, endpoint, public
        )
        ingest.run()
        logger.info("stopping on signal %d", stop_signal[0])


def _open_gate(context: zmq.Context, security: BufferSecurity, metrics: Metrics) -> Gate | None:
    if security.key_file is None or security.allowed_dir is None:
        return None
    keys = load_key_pair(security.key_file, "$.buffer.security.key_file")
    return Gate(context, keys, Path(security.allowed_dir), metrics)


def _start_redis(
    config: BufferConfig, keys: Keys, folder: Path, stack: contextlib.ExitStack
) -> tuple[str, Callable[[], object]]:
    """The URL of Redis and what revives it; an embedded one stops with the stack."""
    address = config.redis_address
    if address is not None:
        first_contact(make_client(address, keys=keys), address)
        return address, lambda: None
    valkey = EmbeddedValkey(folder / "valkey", config.fsync)
    valkey.start(config.start_timeout_s)
    stack.callback(valkey.stop)
    return valkey.url, valkey.revive


def _open_store(redis_url: str, run: RunConfig, config: BufferConfig, shard: int) -> IngestStore:
    store = IngestStore(redis_url, run.name, config, shard)
    store.check_durability()
    check_layout(redis_url, run.name, config.shards)
    store.announce()
    for line in overrides(store.refresh_settings()):
        logger.warning("%s", line)
    log = logger.info if config.fsync == "always" else logger.warning
    log("buffer.fsync %s: %s", config.fsync, FSYNC_RISK[config.fsync])
    return store


class _Reporter:
    """Sets the gauges from a snapshot of Redis."""

    def __init__(self, redis_url: str, keys: Keys, metrics: Metrics, quarantine: Quarantine | None) -> None:
        self._quarantine = quarantine
        self._client = make_client(redis_url, keys=keys)
        self._keys = keys
        self._metrics = metrics

    def report(self) -> None:
        """Raises one of `connection.TRANSIENT` while Redis is away."""
        status = read_status(self._client, self._keys)
        accounting = read_accounting(self._client, self._keys)
        for name, value in (
            ("ready", status.ready),
            ("awaiting", status.awaiting_group),
            ("claimed", status.claimed),
            ("running", status.running),
            ("bytes", status.num_bytes),
            ("claimed_bytes", status.claimed_bytes),
            ("room_bytes", status.room_bytes),
            ("capacity_bytes", status.capacity_bytes),
            ("evicted", accounting.evicted),
            ("quarantine_bytes", self._quarantine.num_bytes if self._quarantine else 0),
        ):
            self._metrics.gauge(f"vagen_buffer_{name}", value)
        staleness = read_ready_staleness(self._client, self._keys)
        for statistic, steps in staleness.statistics().items():
            self._metrics.gauge("vagen_buffer_ready_staleness", steps, statistic=statistic)
        for term in ("produced", *REASONS):
            self._metrics.gauge("vagen_buffer_accounting", getattr(accounting, term), term=term)
        for reason, count in accounting.filtered_by_reason.items():
            self._metrics.gauge("vagen_buffer_filtered", count, reason=reason)


def _write_atomically(path: Path, ready: Ready) -> None:
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(msgspec.to_builtins(ready), indent=1) + "\n")
    os.replace(temporary, path)
