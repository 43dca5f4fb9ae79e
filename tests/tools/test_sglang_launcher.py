"""`vagen sglang` with a stand-in for SGLang's process: readiness, environment, and that nothing of it is left."""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from vagen.common.errors import ConfigError
from vagen.tools.demo import DemoOptions, prepare
from vagen.tools.launch import console_script, free_port
from vagen.tools.sglang_cpu.serve import SGLangOptions, sglang_python

SERVER = """
import http.server, json, os, subprocess, sys
child = subprocess.Popen(["sleep", "600"], start_new_session=True)
told = {"argv": sys.argv, "env": dict(os.environ), "child": child.pid}
open(os.environ["TOLD"], "w").write(json.dumps(told))
class Handler(http.server.BaseHTTPRequestHandler):
    asked = 0
    def answer(self, status):
        self.send_response(status)
        self.end_headers()
    def do_GET(self):
        Handler.asked += 1
        self.answer(200 if self.path == "/ready" and Handler.asked > 2 else 503)
    def do_POST(self):
        accepted = self.path == "/generate" and self.headers["Authorization"] == "Bearer key"
        self.answer(200 if accepted else 500)
port = int(sys.argv[sys.argv.index("--port") + 1])
http.server.HTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


@pytest.fixture
def venv(tmp_path):
    """A folder that looks like that of `make sglang-cpu`; its interpreter runs `script`."""

    def make(script):
        folder = tmp_path / "venv"
        (folder / "bin").mkdir(parents=True)
        (folder / ".installed").touch()
        server = tmp_path / "server.py"
        server.write_text(script)
        python = folder / "bin" / "python"
        python.write_text(f'#!/bin/sh\nexec {sys.executable} -S {server} "$@"\n')
        python.chmod(python.stat().st_mode | stat.S_IXUSR)
        return folder

    return make


def start(folder, tmp_path, *more, **environment):
    ready = tmp_path / "ready.json"
    words = ["sglang", "--model", "some/model", "--port", str(free_port()), "--tp-size", "2", "--venv", str(folder)]
    process = subprocess.Popen(
        [console_script("vagen"), *words, "--ready-file", str(ready), "--api-key", "key", *more],
        env=os.environ | {"TOLD": str(tmp_path / "told.json")} | environment,
        stderr=subprocess.PIPE,
        text=True,
    )
    return process, ready


def is_alive(pid):
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_it_is_announced_once_it_generates_and_ends_whole(venv, tmp_path):
    process, ready = start(venv(SERVER), tmp_path, SGLANG_VLM_CACHE_SIZE_MB="7")
    deadline = time.monotonic() + 60
    while not ready.exists():
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
    told = json.loads((tmp_path / "told.json").read_text())
    assert json.loads(ready.read_text()) == {
        "pid": process.pid,
        "url": f"http://127.0.0.1:{told['argv'][told['argv'].index('--port') + 1]}",
    }
    assert {"--device", "cpu", "--tp-size", "2", "--api-key", "--weight-version"} <= set(told["argv"])
    environment = told["env"]
    assert (Path(environment["PYTHONPATH"]) / "sitecustomize.py").is_file()
    assert environment["SGLANG_USE_CPU_ENGINE"] == "1" and environment["SGLANG_CPU_OMP_THREADS_BIND"] == "0|0"
    assert environment["SGLANG_VLM_CACHE_SIZE_MB"] == "7", "what the caller says wins"
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 0, process.stderr.read()
    assert not ready.exists() and not is_alive(told["child"])


def test_what_is_stuck_ends_whole(venv, tmp_path):
    process, ready = start(venv(SERVER), tmp_path, "--pause-timeout", "4")
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 1 and "/end_weight_update: 500" in errors
    assert not ready.exists() and not is_alive(json.loads((tmp_path / "told.json").read_text())["child"])


def test_what_ends_before_it_serves_is_said(venv, tmp_path):
    process, ready = start(venv("raise SystemExit(3)"), tmp_path)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 1 and "error: SGLang ended with exit status 3 before it served" in errors
    assert not ready.exists()


def test_without_an_installation_it_says_what_to_run(tmp_path, monkeypatch):
    with pytest.raises(ConfigError, match="run `make sglang-cpu`"):
        sglang_python(tmp_path)
    monkeypatch.setenv("VAGEN_SGLANG_VENV", str(tmp_path))
    with pytest.raises(ConfigError, match="run `make sglang-cpu`"):
        SGLangOptions(model_dir=tmp_path, port=1).command()
    with (
        pytest.raises(ConfigError, match="run `make sglang-cpu`"),
        prepare(DemoOptions(run_dir=tmp_path / "run", engine="sglang")),
    ):
        pass
    with pytest.raises(ConfigError, match="--engine: expected local or sglang, got 'vllm'"):
        DemoOptions(engine="vllm")
