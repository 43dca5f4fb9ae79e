"""Benchmarks by name: `vagen bench NAME`.

Owns the registry and the form of the result. A benchmark is a function of its options that returns figures; it lives
in a module of this package that `_MODULES` names, and is imported when it is asked for.
"""

from __future__ import annotations

import importlib
import json
import os
import platform
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from vagen.common.errors import ConfigError

Figures: TypeAlias = dict[str, "Figure"]
Benchmark: TypeAlias = Callable[[Mapping[str, str]], Figures]

_MODULES = ("vagen.tools.bench.pipeline",)
_BENCHMARKS: dict[str, Benchmark] = {}


@dataclass(frozen=True, kw_only=True)
class Figure:
    """One measured number."""

    value: float
    unit: str


def benchmark(name: str) -> Callable[[Benchmark], Benchmark]:
    """Register the decorated function; the first line of its docstring is what the list shows."""

    def register(function: Benchmark) -> Benchmark:
        assert name not in _BENCHMARKS, f"benchmark {name} is registered twice"
        _BENCHMARKS[name] = function
        return function

    return register


def describe() -> str:
    """The list of benchmarks for people."""
    known = _load()
    return "\n".join(f"{name:<12} {(known[name].__doc__ or '').splitlines()[0]}" for name in sorted(known))


def run_benchmark(name: str, options: Sequence[str], *, as_json: bool) -> str:
    """Run one and return its figures, as a table or as one JSON object.

    Raises `ConfigError` for an unknown name or a malformed option.
    """
    known = _load()
    if name not in known:
        raise ConfigError(f"bench {name}: unknown; known are {', '.join(sorted(known))}")
    pairs = [option.partition("=") for option in options]
    for option, (key, equals, _) in zip(options, pairs, strict=True):
        if not key or not equals:
            raise ConfigError(f"--option {option}: expected key=value")
    figures = known[name]({key: value for key, _, value in pairs})
    if not as_json:
        width = max(map(len, figures), default=0)
        return "\n".join(f"{key:<{width}}  {figure.value:>12.4g} {figure.unit}" for key, figure in figures.items())
    words = ["vagen", "bench", name, "--json", *(word for option in options for word in ("--option", option))]
    return json.dumps(
        {
            "figures": {key: {"value": figure.value, "unit": figure.unit} for key, figure in figures.items()},
            "machine": machine(),
            "command": shlex.join(words),
        }
    )


def machine() -> dict[str, Any]:
    """Where a figure was measured."""
    import psutil

    from vagen.tools.summary import versions

    found = versions()
    return {
        "cpu": _cpu_name(),
        "cores": os.cpu_count(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "system": platform.platform(),
        "python": found["python"],
        "torch": found["torch"],
        "transformers": found["transformers"],
        "vagen": found["vagen-async"],
    }


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    if info.is_file():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _load() -> Mapping[str, Benchmark]:
    for module in _MODULES:
        importlib.import_module(module)
    return _BENCHMARKS
