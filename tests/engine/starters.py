"""Start engine processes on a model folder, the local engine and real SGLang, and end them."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from transformers import PreTrainedModel

from tests.engine.engine_handle import EngineHandle
from tests.engine.tiny_models import forbidden_of
from tests.forks import ForkedScript
from vagen.common.errors import ConfigError
from vagen.tools.launch import free_port
from vagen.tools.sglang_cpu.serve import sglang_python

API_KEY, ADMIN_KEY = "generate-key", "admin-key"
BROADCAST_TIMEOUT_S = 4.0
SGLANG_PAUSE_TIMEOUT_S = 12.0
FOLDER = Path(__file__).parent


class EngineStarter:
    """Starts engine processes and ends them."""

    def __init__(self, model_dir: Path, reference: PreTrainedModel, folder: Path) -> None:
        self._model_dir = model_dir
        self._reference = reference
        self._folder = folder
        self._handles: list[EngineHandle] = []

    def __call__(self, count: int = 1, **config: Any) -> list[EngineHandle]:
        """So many engines, started at the same time."""
        first = len(list(self._folder.glob("*.log")))
        started = [self._start(f"{first + i}", config) for i in range(count)]
        for handle, ready, log in started:
            deadline = time.monotonic() + 120
            while not ready.exists():
                assert handle.process.poll() is None and time.monotonic() < deadline, log.read_text()
                time.sleep(0.02)
            told = json.loads(ready.read_text())
            assert told["pid"] == handle.process.pid
            handle.url = told["url"]
        return [handle for handle, _, _ in started]

    def again(self, handle: EngineHandle) -> EngineHandle:
        """An engine that has ended, started anew under its URL."""
        (started,) = self(**handle.config | {"port": urlsplit(handle.url).port})
        return started

    def _start(self, name: str, config: dict[str, Any]) -> tuple[EngineHandle, Path, Path]:
        ready, log = self._folder / f"{name}.json", self._folder / f"{name}.log"
        log.touch()
        defaults = {"max_context": 4096, "max_new_tokens_limit": 4000, "broadcast_timeout_s": BROADCAST_TIMEOUT_S}
        words = [str(self._model_dir), str(ready), json.dumps(defaults | config)]
        handle = EngineHandle(
            url="",
            api_key=config.get("api_key"),
            admin_key=config.get("admin_api_key"),
            reference=self._reference,
            process=ForkedScript(FOLDER / "engine_worker.py", words, log),
            model_dir=self._model_dir,
            config=config,
            fault=ready.with_suffix(".fault"),
            forbidden=forbidden_of(self._reference),
        )
        self._handles.append(handle)
        return handle, ready, log

    def stop_all(self) -> None:
        """Kill what still runs."""
        for handle in self._handles:
            handle.process.kill()
            handle.process.wait()
            handle.threads.shutdown(wait=False)


class SGLangStarter:
    """Starts real SGLang from the environment of `make sglang-cpu`, each kind once, and ends it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._handles: dict[tuple[Any, ...], EngineHandle] = {}
        self._spares: dict[tuple[Any, ...], EngineHandle] = {}
        self._started: list[EngineHandle] = []

    def __call__(self, model_dir: Path, reference: PreTrainedModel, *words: str) -> EngineHandle:
        """The engine, once it serves; `words` are options of `vagen sglang`. Skips the test where there is none."""
        try:
            sglang_python()
        except ConfigError as error:
            pytest.skip(str(error))
        key = (model_dir, *words)
        if key not in self._handles:
            self.prepare(model_dir, reference, *words)
            self._handles[key] = self._wait(self._spares.pop(key))
        return self._handles[key]

    def prepare(self, model_dir: Path, reference: PreTrainedModel, *words: str) -> None:
        """Begin to start one more engine of a kind, unless one is under way: for when the one there is has ended."""
        key = (model_dir, *words)
        if key not in self._spares:
            self._spares[key] = self._start(model_dir, reference, words)

    def forget(self, handle: EngineHandle) -> None:
        """An engine has ended: whoever needs one next gets another."""
        self._handles = {key: known for key, known in self._handles.items() if known is not handle}

    def _start(self, model_dir: Path, reference: PreTrainedModel, words: Sequence[str]) -> EngineHandle:
        place = self._folder / str(len(self._started))
        port, ready, log = free_port(), place.with_suffix(".json"), place.with_suffix(".log")
        command = [sys.executable, "-m", "vagen.tools.cli", "sglang", "--model", str(model_dir)]
        command += ["--port", str(port), "--ready-file", str(ready), "--pause-timeout", str(SGLANG_PAUSE_TIMEOUT_S)]
        command += ["--api-key", API_KEY, "--admin-api-key", ADMIN_KEY, *words]
        with log.open("wb") as file:
            process = subprocess.Popen(command, stdout=file, stderr=file)
        handle = EngineHandle(
            url=f"http://127.0.0.1:{port}",
            api_key=API_KEY,
            admin_key=ADMIN_KEY,
            reference=reference,
            process=process,
            model_dir=model_dir,
            ready=ready,
            forbidden=forbidden_of(reference),
        )
        self._started.append(handle)
        return handle

    @staticmethod
    def _wait(handle: EngineHandle) -> EngineHandle:
        while not handle.ready.exists():
            # The launcher gives up by itself when SGLang does not come up in time.
            assert handle.process.poll() is None, handle.ready.with_suffix(".log").read_text()[-5000:]
            time.sleep(0.1)
        assert json.loads(handle.ready.read_text())["url"] == handle.url
        return handle

    def stop_all(self) -> None:
        """End what still runs; SGLang needs to be asked, or its schedulers stay."""
        for handle in self._started:
            handle.process.terminate()
        for handle in self._started:
            handle.process.wait(60)
            handle.threads.shutdown(wait=False)
