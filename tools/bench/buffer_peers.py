"""The other systems of `vagen bench buffer`: where their Pythons are and how one run of each is made."""

from __future__ import annotations

import secrets
import tempfile
from dataclasses import dataclass
from pathlib import Path

from vagen.tools.bench.buffer_sides import Setting
from vagen.tools.bench.peers.exchange import Task
from vagen.tools.bench.workers import Program, carry_through

_RUN_S = 300.0
_PACKAGE = "vagen.tools.bench.peers"


@dataclass(frozen=True, kw_only=True)
class Peer:
    """One way of one system to carry trajectories."""

    name: str
    environment: str
    """Folder of its Python below that of the peers."""
    module: str
    about: str
    """For people: what carried."""

    def missing(self, root: Path) -> str | None:
        """Why it cannot run, or none."""
        folder = root / self.environment
        failure = folder / "failed"
        if failure.exists():
            return f"could not be installed: {failure.read_text().strip()}"
        if not (folder / "installed").exists():
            return f"{folder} is not there; `make bench-peers` makes it"
        return None

    def run(self, setting: Setting, root: Path) -> float:
        """Trajectories a second. Raises `WorkerError`."""
        program = Program(
            python=(root / self.environment / "bin" / "python").absolute(),
            module=f"{_PACKAGE}.{self.module}",
            env={
                "RAY_AUTH_MODE": "token",
                "RAY_AUTH_TOKEN": secrets.token_hex(32),
                "RAY_USAGE_STATS_ENABLED": "0",
                "TF_CPP_MIN_LOG_LEVEL": "3",
            },
        )
        # Ray makes Unix sockets below it, whose paths must be short.
        with tempfile.TemporaryDirectory(dir=setting.memory, prefix="p", ignore_cleanup_errors=True) as folder:
            task = Task(pool=str(setting.pool), folder=folder, count=setting.count)
            return setting.count / carry_through(program, task, setting.producers, _RUN_S)


PEERS = (
    Peer(name="reverb", environment="reverb", module="reverb_table", about="dm-reverb, one FIFO table"),
    Peer(name="ray_queue", environment="ray", module="ray_queue", about="ray.util.queue"),
    Peer(name="ray_store", environment="ray", module="ray_store", about="Ray's object store, an actor of references"),
    Peer(
        name="transferqueue",
        environment="transferqueue",
        module="transfer_queue_store",
        about="TransferQueue, one storage unit, one field",
    ),
)
