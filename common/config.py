"""Strict, typed configuration: yaml files and `--set a.b=c`, validated once, before anything starts.

A recipe is one yaml file whose top-level keys are the sections of `SECTIONS`. Each section is a frozen, keyword-only
`msgspec.Struct` that lives beside the code it configures; this module only reads, merges and validates. Unknown keys
are refused everywhere, and every error names the path, the value and the bound:
`$.learner.batch_size: expected int >= 1, got 0`.
"""

from __future__ import annotations

import importlib
import importlib.resources
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import yaml

from vagen.common.errors import ConfigError

SECTIONS = ("run", "model", "env", "harness", "actor", "engine", "buffer", "learner", "sft", "demo")
"""Top-level keys of a recipe; each process validates those it uses, `vagen demo` validates all."""

S = TypeVar("S", bound=msgspec.Struct)

_MSGSPEC_PATH = re.compile(r"^(?P<problem>.*?)(?: - at `(?P<path>\$.*)`)?$", re.DOTALL)


class _Loader(yaml.SafeLoader):
    """YAML as people write numbers: `1e-3` is a float (YAML 1.2), not the string that YAML 1.1 makes of it."""


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?(\d+(\.\d*)?|\.\d+)[eE][-+]?\d+$"), list("-+.0123456789")
)


class Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of every configuration class: frozen, keyword-only, unknown keys refused.

    A subclass checks what types cannot say in `__post_init__` with `require`.
    """


class RunConfig(Section, frozen=True, kw_only=True):
    """Section `run`: what all processes of one training run agree on."""

    name: str = "run"
    """Names the run: prefix of its keys in Redis and label of its metrics."""
    seed: int = 0
    log_level: str = "INFO"

    def __post_init__(self) -> None:
        require(
            re.fullmatch(r"[A-Za-z0-9._-]{1,64}", self.name) is not None, "run.name", self.name, "1-64 of A-Za-z0-9._-"
        )
        require(self.seed >= 0, "run.seed", self.seed, "int >= 0")
        levels = ("DEBUG", "INFO", "WARNING", "ERROR")
        require(self.log_level.upper() in levels, "run.log_level", self.log_level, f"one of {', '.join(levels)}")


def require(holds: bool, path: str, value: object, bound: str) -> None:
    """Raise `ConfigError` naming path, value and bound unless `holds`."""
    if not holds:
        raise ConfigError(f"$.{path}: expected {bound}, got {_show(value)}")


def read_recipe(source: str | Path, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """Read a recipe by path, or by the name of one shipped in `vagen.configs`, and apply `a.b=c` overrides.

    Values of overrides are parsed as yaml. Raises `ConfigError` for a missing file, bad yaml, an unknown
    section or a malformed override.
    """
    path = _find(source)
    try:
        raw = yaml.load(path.read_text(), _Loader) or {}
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: not valid yaml: {error}") from error
    if not isinstance(raw, dict):
        raise ConfigError(f"{path}: expected a mapping of sections, got {_show(raw)}")
    for override in overrides:
        _apply(raw, override)
    for key, value in raw.items():
        if key not in SECTIONS:
            raise ConfigError(f"$.{key}: unknown section; known are {', '.join(SECTIONS)}")
        if not isinstance(value, dict):
            raise ConfigError(f"$.{key}: expected a mapping, got {_show(value)}")
    return raw


def section(recipe: Mapping[str, Any], name: str, kind: type[S]) -> S:
    """The validated section `name` (its defaults where the recipe is silent)."""
    return convert(recipe.get(name, {}), kind, f"$.{name}")


def convert(raw: object, kind: type[S], path: str = "$") -> S:
    """Validate plain data as `kind`; errors carry `path`, the value found there and what was expected."""
    try:
        return msgspec.convert(raw, kind)
    except msgspec.ValidationError as error:
        cause = error.__cause__
        if isinstance(cause, ConfigError):
            raise cause from None
        match = _MSGSPEC_PATH.match(str(error))
        assert match is not None
        inner = match["path"] or "$"
        raise ConfigError(_explain(match["problem"], path + inner[1:], _look_up(raw, inner))) from None


def parse_value(text: str, where: str) -> object:
    """The value that a person wrote on a command line, by the rules of recipes.

    Raises `ConfigError`, which begins with `where`, for what is not yaml.
    """
    try:
        return yaml.load(text, _Loader)
    except yaml.YAMLError as error:
        raise ConfigError(f"{where}: value is not valid yaml: {error}") from error


def import_object(name: str, path: str) -> Any:
    """What stands at the import path `package.module:name`, the value of the setting at `path`.

    Raises `ConfigError` where there is nothing, or where the module fails.
    """
    module, _, attribute = name.partition(":")
    importlib.invalidate_caches()  # the module may have been written while this process ran
    try:
        return getattr(importlib.import_module(module), attribute)
    except Exception as error:  # somebody's module, which may raise anything
        raise ConfigError(f"$.{path}: cannot import {name!r}: {error}") from error


def to_plain(config: msgspec.Struct) -> dict[str, Any]:
    """The section as plain data, for writing into a run's folder."""
    plain = msgspec.to_builtins(config)
    assert isinstance(plain, dict)
    return plain


def _find(source: str | Path) -> Path:
    path = Path(source)
    if path.is_file():
        return path
    shipped = importlib.resources.files("vagen.configs")
    named = Path(str(shipped.joinpath(f"{source}.yaml")))
    if named.is_file():
        return named
    names = sorted(Path(item.name).stem for item in shipped.iterdir() if item.name.endswith(".yaml"))
    raise ConfigError(f"{source}: no such file, and no recipe of that name; shipped recipes are {', '.join(names)}")


def _apply(raw: dict[str, Any], override: str) -> None:
    key, equals, text = override.partition("=")
    parts = key.split(".")
    if not equals or not all(parts) or len(parts) < 2:
        raise ConfigError(f"--set {override}: expected section.key=value")
    value = parse_value(text, f"--set {override}")
    node = raw
    for depth, part in enumerate(parts[:-1]):
        child = node.setdefault(part, {})
        if not isinstance(child, dict):
            raise ConfigError(f"--set {override}: $.{'.'.join(parts[: depth + 1])} is not a mapping but {_show(child)}")
        node = child
    node[parts[-1]] = value


def _explain(problem: str, path: str, value: object) -> str:
    unknown = re.match(r"Object contains unknown field `(.+)`", problem)
    if unknown:
        return f"{path}.{unknown[1]}: unknown key"
    missing = re.match(r"Object missing required field `(.+)`", problem)
    if missing:
        return f"{path}.{missing[1]}: required key is missing"
    expected = re.match(r"Expected `(.+?)`(?:, got `.+`| (.+))?$", problem)
    if expected:
        bound = expected[1] + (f" {expected[2]}" if expected[2] else "")
        return f"{path}: expected {bound}, got {_show(value)}"
    return f"{path}: {problem}, got {_show(value)}"


def _look_up(raw: object, path: str) -> object:
    value = raw
    for name, index in re.findall(r"\.([^.\[]+)|\[(\d+|\.\.\.)\]", path):
        if name and isinstance(value, Mapping):
            value = value.get(name)
        elif index.isdigit() and isinstance(value, Sequence):
            value = value[int(index)]
    return value


def _show(value: object) -> str:
    return json.dumps(value, default=str)
