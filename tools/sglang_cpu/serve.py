"""Starts SGLang on this machine's CPU from the environment that `make sglang-cpu` made, and waits until it serves.

Owns flags, environment variables and the life of the process: it is announced in a ready file once it answers, goes on
by itself when its learner is lost, and all processes that SGLang spawned end with the launcher.
"""

from __future__ import annotations

import http.client
import json
import logging
import os
import signal
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import psutil

from vagen.common.errors import ConfigError, EngineUnavailableError
from vagen.tools.engine_watchdog import EngineWatchdog

__all__ = ["SGLangOptions", "run_sglang", "sglang_python"]

logger = logging.getLogger(__name__)

_POLL_S = 0.25
_STOP_S = 10.0
_CALL_S = 10.0
_ENVIRONMENT: Mapping[str, str] = {
    "SGLANG_USE_CPU_ENGINE": "1",
    # A second thread under contention makes small models ten times slower.
    "OMP_NUM_THREADS": "1",
    "TORCHDYNAMO_DISABLE": "1",
    "TORCH_COMPILE_DISABLE": "1",
    # Neither a weight update nor /flush_cache empties the cache of image embeddings.
    "SGLANG_VLM_CACHE_SIZE_MB": "0",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
_FLAGS = (
    *("--device", "cpu", "--attention-backend", "torch_native", "--mm-attention-backend", "sdpa"),
    # The learner's image processor is the one of PIL.
    "--disable-fast-image-processor",
    *("--dtype", "float32", "--disable-overlap-schedule", "--mem-fraction-static", "0.1"),
    *("--weight-version", "0", "--enable-metrics", "--skip-server-warmup"),
    *("--log-level", "warning", "--decode-log-interval", "8", "--sleep-on-idle"),
)


@dataclass(frozen=True, kw_only=True)
class SGLangOptions:
    """How SGLang is started."""

    model_dir: Path
    host: str = "127.0.0.1"
    port: int
    tp_size: int = 1
    api_key: str | None = None
    admin_api_key: str | None = None
    max_running: int = 64
    max_total_tokens: int = 32768
    """Of the KV cache, over all requests."""
    start_timeout_s: float = 300.0
    pause_timeout_s: float = 60.0
    """See `EngineWatchdog`."""
    ready_file: Path | None = None
    venv: Path | None = None
    """Default: see `sglang_python`."""

    @property
    def url(self) -> str:
        """Base URL."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}"

    def command(self) -> list[str]:
        """The command line, keys included."""
        words = [str(sglang_python(self.venv)), "-m", "sglang.launch_server", "--model-path", str(self.model_dir)]
        words += ["--host", self.host, "--port", str(self.port), *_FLAGS, "--tp-size", str(self.tp_size)]
        words += ["--max-running-requests", str(self.max_running), "--max-total-tokens", str(self.max_total_tokens)]
        for flag, key in (("--api-key", self.api_key), ("--admin-api-key", self.admin_api_key)):
            words += [flag, key] if key is not None else []
        return words


def sglang_python(venv: Path | None = None) -> Path:
    """The interpreter of SGLang's environment: of `venv`, $VAGEN_SGLANG_VENV, or `.sglang` here or in the checkout.

    Raises ConfigError where none was built.
    """
    named = venv or os.environ.get("VAGEN_SGLANG_VENV")
    candidates = [Path(named)] if named else [Path(".sglang"), Path(__file__).resolve().parents[2] / ".sglang"]
    for candidate in candidates:
        if (candidate / ".installed").is_file():
            # Not resolved: the link's own place makes it the interpreter of the environment.
            return candidate.absolute() / "bin" / "python"
    raise ConfigError(f"SGLang is not installed in {candidates[0]}: run `make sglang-cpu` (a few minutes, 2 GB)")


def run_sglang(options: SGLangOptions) -> None:
    """Serve until SIGTERM or SIGINT; the ready file is `{"pid": .., "url": ..}` with this process's pid.

    Raises ConfigError where SGLang is not installed, EngineUnavailableError when it ends, does not come up, or sticks.
    """
    command = options.command()
    stopped: list[int] = []

    def stop(number: int, frame: FrameType | None) -> None:
        stopped.append(number)

    previous = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGINT)}
    child = subprocess.Popen(command, env=_environment(options), start_new_session=True)
    try:
        _wait_until_ready(child, options, stopped)
        _serve(child, options, stopped)
    finally:
        if options.ready_file is not None:
            options.ready_file.unlink(missing_ok=True)
        _stop(child)
        for number, handler in previous.items():
            signal.signal(number, handler)


def _serve(child: subprocess.Popen[bytes], options: SGLangOptions, stopped: list[int]) -> None:
    """Until a signal. Raises EngineUnavailableError when SGLang ends or is stuck."""
    watchdog = EngineWatchdog(
        url=options.url,
        api_key=options.api_key,
        admin_api_key=options.admin_api_key,
        pause_timeout_s=options.pause_timeout_s,
    )
    unwatch = threading.Event()
    threads = ThreadPoolExecutor(1, thread_name_prefix="watchdog")
    watching = threads.submit(watchdog.watch, unwatch)
    # Not joined: what it waits for ends with SGLang.
    threads.shutdown(wait=False)
    try:
        while not stopped and not watching.done():
            if child.poll() is not None:
                raise EngineUnavailableError(f"SGLang ended with exit status {child.returncode}")
            time.sleep(_POLL_S)
    finally:
        unwatch.set()
    if watching.done():
        watching.result()


def _environment(options: SGLangOptions) -> dict[str, str]:
    """Ours, unless the caller's says otherwise."""
    stubs = Path(__file__).with_name("stubs")
    kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    # An entry for each rank is asked for; nothing is bound without kernels for this CPU.
    cores = "|".join(["0"] * options.tp_size)
    return {**_ENVIRONMENT, "SGLANG_CPU_OMP_THREADS_BIND": cores, **kept, "PYTHONPATH": str(stubs)}


def _wait_until_ready(child: subprocess.Popen[bytes], options: SGLangOptions, stopped: list[int]) -> None:
    start = time.monotonic()
    while not _answers(options):
        if stopped:
            return
        if child.poll() is not None:
            raise EngineUnavailableError(f"SGLang ended with exit status {child.returncode} before it served")
        if time.monotonic() - start > options.start_timeout_s:
            raise EngineUnavailableError(f"SGLang does not serve after {options.start_timeout_s:g} s")
        time.sleep(_POLL_S)
    logger.info("SGLang serves %s on %s after %.1f s", options.model_dir, options.url, time.monotonic() - start)
    if options.ready_file is not None:
        options.ready_file.parent.mkdir(parents=True, exist_ok=True)
        partial = options.ready_file.with_name(options.ready_file.name + ".partial")
        partial.write_text(json.dumps({"pid": os.getpid(), "url": options.url}) + "\n")
        partial.replace(options.ready_file)


def _answers(options: SGLangOptions) -> bool:
    """Whether it has generated a token: before, its first answers are slow."""
    body = {"input_ids": [0], "sampling_params": {"max_new_tokens": 1}}
    headers = {"Content-Type": "application/json"}
    if options.api_key is not None:
        headers["Authorization"] = f"Bearer {options.api_key}"
    try:
        with urllib.request.urlopen(f"{options.url}/ready", timeout=_CALL_S):
            pass
        request = urllib.request.Request(f"{options.url}/generate", json.dumps(body).encode(), headers)
        with urllib.request.urlopen(request, timeout=_CALL_S) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, http.client.HTTPException, TimeoutError, ConnectionError) as error:
        logger.debug("%s: %s", options.url, error)
        return False


def _stop(child: subprocess.Popen[bytes]) -> None:
    """End SGLang and what it spawned: it leaves its schedulers behind when it is killed."""
    family: list[psutil.Process] = []
    try:
        family = psutil.Process(child.pid).children(recursive=True)
    except psutil.NoSuchProcess:
        logger.debug("SGLang is gone already")
    child.terminate()
    try:
        child.wait(_STOP_S)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()
    for process in psutil.wait_procs(family, 1.0)[1]:
        process.kill()
