"""Environments by name.

Owns the table of names and the validation of an environment's configuration. The simulators themselves are imported
when the first one is made, so that configurations can be checked at start without them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec

from vagen.common.config import convert
from vagen.common.errors import ConfigError
from vagen.envs.base import Environment, EnvironmentCore
from vagen.envs.frozen_lake.config import FrozenLakeConfig
from vagen.envs.threaded import ThreadedEnvironment

ConfigT = TypeVar("ConfigT", bound=msgspec.Struct)

# Where a recipe keeps the settings of its environment.
_CONFIG_PATH = "$.env.config"


@dataclass(frozen=True, slots=True)
class _Entry:
    config_type: type[msgspec.Struct]
    factory: Callable[[Any, Executor], Environment]
    core_factory: Callable[[Any], EnvironmentCore] | None


_ENTRIES: dict[str, _Entry] = {}


def register(
    name: str,
    config_type: type[ConfigT],
    factory: Callable[[ConfigT, Executor], Environment],
    core_factory: Callable[[ConfigT], EnvironmentCore] | None = None,
) -> None:
    """Adds an environment; `factory` makes one instance from a validated configuration and the shared pool.

    `core_factory` makes the bare simulator where it runs in this process. Raises `ConfigError` for a name that is
    taken.
    """
    if name in _ENTRIES:
        raise ConfigError(f"environment {name!r} is registered already")
    _ENTRIES[name] = _Entry(config_type, factory, core_factory)


def register_core(name: str, config_type: type[ConfigT], core_factory: Callable[[ConfigT], EnvironmentCore]) -> None:
    """Adds an environment whose simulator runs in the pool's threads. Raises `ConfigError` like `register`."""

    def threaded(config: ConfigT, executor: Executor) -> Environment:
        return ThreadedEnvironment(core_factory(config), executor)

    register(name, config_type, threaded, core_factory)


def known_environments() -> tuple[str, ...]:
    return tuple(sorted(_ENTRIES))


def parse_environment_config(name: str, config: Mapping[str, Any]) -> msgspec.Struct:
    """The typed configuration of an environment, without making one.

    Raises `ConfigError` for an unknown name (listing the known ones), an unknown key or a value out of bounds.
    """
    return convert(dict(config), _entry(name).config_type, _CONFIG_PATH)


def make_core(name: str, config: Mapping[str, Any]) -> EnvironmentCore:
    """The synchronous core of an environment, for scripts. Raises `ConfigError` for one that has none."""
    entry = _entry(name)
    if entry.core_factory is None:
        raise ConfigError(f"environment {name!r} runs elsewhere and cannot be scripted")
    return entry.core_factory(parse_environment_config(name, config))


def make_environment(name: str, config: Mapping[str, Any], executor: Executor) -> Environment:
    """One environment, for one episode at a time. Raises `ConfigError` like `parse_environment_config`."""
    return _entry(name).factory(parse_environment_config(name, config), executor)


def _entry(name: str) -> _Entry:
    entry = _ENTRIES.get(name)
    if entry is None:
        raise ConfigError(f"environment {name!r} is unknown: expected one of {', '.join(known_environments())}")
    return entry


def _frozen_lake(config: FrozenLakeConfig) -> EnvironmentCore:
    from vagen.envs.frozen_lake.core import FrozenLakeCore

    return FrozenLakeCore(config)


register_core("frozen_lake", FrozenLakeConfig, _frozen_lake)
