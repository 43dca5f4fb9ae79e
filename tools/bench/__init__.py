"""Benchmarks by name: `vagen bench NAME`.

Owns the registry and the form of the result. A benchmark is a function of its options that returns figures; it lives
in the module of its name, which is imported when it is asked for, and imports what is heavy when it runs.
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
from typing import Any, TypeAlias, TypeVar

import msgspec

from vagen.common.errors import ConfigError

Figures: TypeAlias = dict[str, "Figure"]
Benchmark: TypeAlias = "Callable[[Mapping[str, str]], Figures | Report]"

S = TypeVar("S", bound=msgspec.Struct)

NAMES = ("ablation", "advantages", "archive", "broadcast", "buffer", "engine", "learner", "pipeline", "staleness")
"""Of all benchmarks."""
_BENCHMARKS: dict[str, Benchmark] = {}


@dataclass(frozen=True, kw_only=True)
class Figure:
    """One measured number."""

    value: float
    unit: str
    interval: tuple[float, float] | None = None
    """95 %, where the number is an estimate."""
    spread: tuple[float, float] | None = None
    """Least and greatest, where the number is the median of runs."""

    def plain(self) -> dict[str, Any]:
        """For JSON; without `interval` and `spread` where there are none."""
        fields: dict[str, Any] = {"value": self.value, "unit": self.unit}
        ranges = {"interval": self.interval, "spread": self.spread}
        return fields | {name: list(bounds) for name, bounds in ranges.items() if bounds is not None}

    def __str__(self) -> str:
        bounds = "" if self.interval is None else f"  [{self.interval[0]:.4g}, {self.interval[1]:.4g}]"
        bounds += "" if self.spread is None else f"  {self.spread[0]:.4g} to {self.spread[1]:.4g}"
        return f"{self.value:>12.4g} {self.unit}{bounds}"


@dataclass(frozen=True, kw_only=True)
class Report:
    """Figures that need words beside them."""

    figures: Figures
    notes: tuple[str, ...] = ()
    """What a reader must know to take the figures right, one sentence or fact each."""


def benchmark(name: str) -> Callable[[Benchmark], Benchmark]:
    """Register the decorated function; the first line of its docstring is what the list shows."""

    def register(function: Benchmark) -> Benchmark:
        assert name not in _BENCHMARKS, f"benchmark {name} is registered twice"
        _BENCHMARKS[name] = function
        return function

    return register


def describe() -> str:
    """The list of benchmarks for people."""
    return "\n".join(f"{name:<12} {(_load(name).__doc__ or '').splitlines()[0]}" for name in NAMES)


def run_benchmark(name: str, options: Sequence[str], words: Sequence[str] = (), *, as_json: bool) -> str:
    """Run one and return its figures, as a table or as one JSON object.

    Its options are `options` (`key=value`) and those found in `words` (`--key value`, or `--key` for true).
    Raises `ConfigError` for an unknown name or a malformed option.
    """
    if name not in NAMES:
        raise ConfigError(f"bench {name}: unknown; known are {', '.join(NAMES)}")
    pairs = [option.partition("=") for option in options]
    for option, (key, equals, _) in zip(options, pairs, strict=True):
        if not key or not equals:
            raise ConfigError(f"--option {option}: expected key=value")
    answer = _load(name)({key: value for key, _, value in pairs} | parse_words(words))
    report = answer if isinstance(answer, Report) else Report(figures=answer)
    if not as_json:
        width = max(map(len, report.figures), default=0)
        lines = [f"{key:<{width}}  {figure}" for key, figure in report.figures.items()]
        return "\n".join([*lines, *report.notes])
    typed = ["vagen", "bench", name, "--json", *(word for option in options for word in ("--option", option)), *words]
    return json.dumps(
        {
            "figures": {key: figure.plain() for key, figure in report.figures.items()},
            **({"notes": list(report.notes)} if report.notes else {}),
            "machine": machine(),
            "command": shlex.join(typed),
        }
    )


def parse_words(words: Sequence[str]) -> dict[str, str]:
    """`--key value`, `--key=value` and `--flag` (true) as options; dashes inside a key become underscores.

    Raises `ConfigError` for a word that belongs to no option.
    """
    options: dict[str, str] = {}
    left = list(words)
    while left:
        key, equals, value = left.pop(0).partition("=")
        if not key.startswith("--") or len(key) < 3:
            raise ConfigError(f"bench: expected --key value, got {key!r}")
        if not equals:
            value = left.pop(0) if left and not left[0].startswith("--") else "true"
        options[key[2:].replace("-", "_")] = value
    return options


def parse_options(options: Mapping[str, str], kind: type[S]) -> S:
    """The options of a benchmark as `kind`, whose fields are the options it knows.

    Raises `ConfigError` for one that is unknown or malformed.
    """
    for key in options:
        if key not in kind.__struct_fields__:
            raise ConfigError(f"--{key.replace('_', '-')}: unknown; known are {', '.join(kind.__struct_fields__)}")
    try:
        return msgspec.convert(dict(options), kind, strict=False)
    except msgspec.ValidationError as error:
        raise ConfigError(f"bench: {error}") from None


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


def _load(name: str) -> Benchmark:
    importlib.import_module(f"{__name__}.{name}")
    return _BENCHMARKS[name]
