"""The command lines of a demo's processes, and the environment in which they run well on a few cores.

Owns which console script gets which option. Everything a process needs is in the run's folder, so that a person can
start it again with the same line.
"""

from __future__ import annotations

import json
import shutil
import socket
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vagen.common.errors import ConfigError
from vagen.tools.child import ProcessSpec
from vagen.tools.runs import RunDir

_SGLANG_READY_S = 400.0
ENVIRONMENT: Mapping[str, str] = {
    # Two threads that contend for a core were up to 14 times slower than one.
    "OMP_NUM_THREADS": "1",
    "OMP_WAIT_POLICY": "PASSIVE",
    # Large temporary tensors stay in the heap instead of being mapped and returned each time.
    "MALLOC_MMAP_THRESHOLD_": "1073741824",
    "MALLOC_TRIM_THRESHOLD_": "4294967296",
}


@dataclass(frozen=True)
class Launcher:
    """Makes the specifications of the processes of one run."""

    run: RunDir

    def warm_start(self) -> ProcessSpec:
        return self._spec("sft", "vagen", "sft", "--config", self.run.recipe, "--out", self.run.model)

    def buffer(self) -> ProcessSpec:
        return self._serving("buffer", "vagen-buffer", "serve", "--config", self.run.recipe, "--run-dir", self.run.root)

    def engine(self, port: int) -> ProcessSpec:
        return self._serving(
            "engine",
            "vagen-actor",
            "engine",
            *("--config", self.run.recipe, "--model", self.run.model, "--port", str(port)),
            *("--ready-file", self.run.ready("engine")),
        )

    def sglang(self, port: int, max_running: int, keys: Mapping[str, str | None]) -> ProcessSpec:
        """SGLang in place of the local engine; `keys` by environment variable."""
        return self._serving(
            "engine",
            "vagen",
            "sglang",
            *("--model", self.run.model, "--port", str(port), "--max-running", str(max_running)),
            *("--ready-file", self.run.ready("engine")),
            env={**ENVIRONMENT, **{name: key for name, key in keys.items() if key is not None}},
            ready_timeout_s=_SGLANG_READY_S,
        )

    def actor(self) -> ProcessSpec:
        return self._serving(
            "actor",
            "vagen-actor",
            "run",
            *("--config", self.run.recipe, "--model", self.run.model, "--run-dir", self.run.root, "--name", "actor"),
            *("--engine", self.announced("engine", "url"), "--buffer", self.announced("buffer", "endpoint")),
        )

    def learner(self, is_complete: Callable[[], bool]) -> ProcessSpec:
        return self._serving(
            "learner",
            "vagen-learner",
            "run",
            *("--config", self.run.recipe, "--model", self.run.model, "--run-dir", self.run.root),
            *("--redis", self.announced("buffer", "redis_url")),
            is_complete=is_complete,
        )

    def evaluation(self, out: Path, levels: int, transcripts: int) -> ProcessSpec:
        return self._spec(
            "eval",
            "vagen",
            "eval",
            *("--config", self.run.recipe, "--model", self.run.model, "--engine", self.announced("engine", "url")),
            *("--levels", str(levels), "--transcripts", str(transcripts), "--out", out),
        )

    def announced(self, process: str, key: str) -> str:
        """What a process says of itself in its `ready.json`. Raises `ConfigError` when it does not say."""
        path = self.run.ready(process)
        try:
            value = json.loads(path.read_text())[key]
        except (FileNotFoundError, KeyError) as error:
            raise ConfigError(f"{path}: expected an entry {key!r} from the {process} that serves") from error
        return str(value)

    def _serving(self, name: str, script: str, *words: str | Path, **more: Any) -> ProcessSpec:
        return self._spec(name, script, *words, ready=self.run.ready(name), **more)

    def _spec(self, name: str, script: str, *words: str | Path, **more: Any) -> ProcessSpec:
        return ProcessSpec(
            name=name,
            argv=(console_script(script), *map(str, words)),
            log=self.run.log(name),
            **{"env": ENVIRONMENT, **more},
        )


def console_script(name: str) -> str:
    """The script beside the running interpreter, else the one on the path. Raises `ConfigError` when there is none."""
    beside = Path(sys.executable).with_name(name)
    found = str(beside) if beside.is_file() else shutil.which(name)
    if found is None:
        raise ConfigError(f"{name}: not installed beside {sys.executable}; `pip install vagen-async` provides it")
    return found


def assign_ports(raw: dict[str, Any]) -> None:
    """Fix engine port and buffer endpoint in a recipe that leaves them open or names a taken one.

    A process that is started again must be found where it was.
    """
    engine = raw.setdefault("engine", {})
    if not engine.get("port") or not _is_free(engine["port"]):
        engine["port"] = free_port()
    buffer = raw.setdefault("buffer", {})
    scheme, _, address = buffer.get("endpoint", "tcp://127.0.0.1:*").partition("://")
    host, _, port = address.rpartition(":")
    if scheme == "tcp" and (not port.isdigit() or not _is_free(int(port))):
        buffer["endpoint"] = f"tcp://{host}:{free_port()}"


def free_port() -> int:
    """A port of the loopback interface that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        return probe.connect_ex(("127.0.0.1", port)) != 0
