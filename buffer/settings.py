"""Live settings: what may be changed while a run goes on.

Owns the list of them, their checks, and their place in Redis: a live value overrides the recipe's, for the ingest as
for the scripts, until it is dropped, also over a restart. The recipe's own values are told by those who read the
recipe: the ingest's in `Key.CONFIG`, the learner's in `Key.LEARNER`, each as JSON under the setting's name.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import msgspec
import redis

from vagen.buffer.config import BufferConfig
from vagen.buffer.connection import run_script
from vagen.buffer.keys import Key, Keys
from vagen.common.config import Section, convert, parse_value, require
from vagen.common.errors import ConfigError

MAX_NAMED_BY = 100
"""Characters kept of who changed a setting."""


class LearnerPart(Section, frozen=True, kw_only=True):
    """What of section `learner` the buffer applies."""

    max_staleness: int = 0

    def __post_init__(self) -> None:
        require(
            0 <= self.max_staleness < 1 << 31, "learner.max_staleness", self.max_staleness, "int >= 0, below 2147483648"
        )


class LiveSetting(NamedTuple):
    """One setting that may change while a run goes on."""

    name: str
    section: str
    """Of the recipe."""
    kind: type[Section]
    """Its class checks type and bounds of the value."""
    told_in: Key
    """Hash where the recipe's value is told."""
    least: Callable[[Mapping[str, int]], tuple[int, str]] | None = None
    """Least value with which the registered learner cannot starve, and why; from the learner's numbers."""

    def check(self, value: object, learner: Mapping[str, int]) -> Any:
        """The value with its type. Raises `ConfigError` naming path, value and bound."""
        path = f"{self.section}.{self.name}"
        checked = getattr(convert({self.name: value}, self.kind, f"$.{self.section}"), self.name)
        if self.least is not None and learner:
            least, why = self.least(learner)
            require(checked >= least, path, checked, f"int >= {least} = {why}")
        return checked


def _least_staleness(learner: Mapping[str, int]) -> tuple[int, str]:
    return learner.get("publish_every", 1) - 1, "learner.publish_every - 1, the age of the data of the last such step"


def _least_capacity(learner: Mapping[str, int]) -> tuple[int, str]:
    return learner.get("required_capacity_bytes", 0), "what the registered learner needs to checkpoint and prefetch"


LIVE_SETTINGS: Mapping[str, LiveSetting] = {
    setting.name: setting
    for setting in (
        LiveSetting("max_staleness", "learner", LearnerPart, Key.LEARNER, _least_staleness),
        LiveSetting("capacity_bytes", "buffer", BufferConfig, Key.CONFIG, _least_capacity),
        LiveSetting("when_full", "buffer", BufferConfig, Key.CONFIG),
        LiveSetting("max_running", "buffer", BufferConfig, Key.CONFIG),
        LiveSetting("group_timeout_s", "buffer", BufferConfig, Key.CONFIG),
    )
}
"""All of them by name. A script reads one with `setting(name, recipe's value)`."""


class SettingState(msgspec.Struct, frozen=True, kw_only=True):
    """One setting as it is in force."""

    name: str
    value: Any
    """None while nobody has told the recipe's value."""
    source: Literal["recipe", "live"]
    recipe: Any
    changed_at: float | None = None
    """Unix time in seconds of the live value."""
    changed_by: str | None = None


class SettingChange(msgspec.Struct, frozen=True, kw_only=True):
    """One entry of the log of changes; a value of None is the recipe's."""

    number: int
    """Counts all changes of the run from 1."""
    name: str
    old: Any
    new: Any
    at: float
    by: str


def parse_changes(assignments: Sequence[str], reset: Sequence[str] = ()) -> dict[str, object]:
    """Values by name of `name=value` words; None where the recipe's value shall hold again.

    Raises `ConfigError` for a malformed word, an unknown name and a name that comes twice.
    """
    changes: dict[str, object] = {}
    words = [(word, *word.partition("=")) for word in assignments] + [(name, name, "=", "recipe") for name in reset]
    for word, name, equals, text in words:
        if not equals:
            raise ConfigError(f"{word}: expected NAME=VALUE")
        if name not in LIVE_SETTINGS:
            raise ConfigError(f"{name}: no live setting; known are {', '.join(LIVE_SETTINGS)}")
        if name in changes:
            raise ConfigError(f"{name}: given twice")
        changes[name] = None if text == "recipe" else parse_value(text, word)
    return changes


def check_changes(client: redis.Redis, keys: Keys, changes: Mapping[str, object]) -> dict[str, Any]:
    """The changes with the types of their settings.

    Raises `ConfigError` for a value out of its bounds or below what the registered learner needs.
    """
    learner = _numbers(client.hgetall(keys[Key.LEARNER]))
    return {
        name: None if value is None else LIVE_SETTINGS[name].check(value, learner) for name, value in changes.items()
    }


def change_settings(client: redis.Redis, keys: Keys, changes: Mapping[str, object], by: str) -> list[SettingState]:
    """Check all changes, then make all of them at once; returns the settings as they are in force then.

    Raises `ConfigError` for a value out of its bounds.
    """
    args: list[object] = [time.time(), by[:MAX_NAMED_BY]]
    for name, value in check_changes(client, keys, changes).items():
        args += (name, "" if value is None else msgspec.json.encode(value).decode())
    run_script(client, keys, "set", *args)
    return read_settings(client, keys)


def read_settings(client: redis.Redis, keys: Keys) -> list[SettingState]:
    """All settings as they are in force now."""
    pipe: Any = client.pipeline(transaction=True)
    pipe.hgetall(keys[Key.SETTINGS])
    pipe.hgetall(keys[Key.SETTINGS_INFO])
    for key in (Key.CONFIG, Key.LEARNER):
        pipe.hgetall(keys[key])
    live, info, config, learner = pipe.execute()
    told = {Key.CONFIG: config, Key.LEARNER: learner}
    states = []
    for name, setting in LIVE_SETTINGS.items():
        field = name.encode()
        recipe = _decode(told[setting.told_in].get(field))
        change = msgspec.json.decode(info[field]) if field in live else {"at": None, "by": None}
        states.append(
            SettingState(
                name=name,
                value=_decode(live[field]) if field in live else recipe,
                source="live" if field in live else "recipe",
                recipe=recipe,
                changed_at=change["at"],
                changed_by=change["by"],
            )
        )
    return states


def read_changes(client: redis.Redis, keys: Keys) -> list[SettingChange]:
    """The recent changes, newest first; the log keeps the last 1000."""
    entries: Any = client.lrange(keys[Key.SETTINGS_LOG], 0, -1)
    return [msgspec.json.decode(entry, type=SettingChange) for entry in entries]


def differences(before: Sequence[SettingState], now: Sequence[SettingState]) -> list[SettingState]:
    """Settings whose value or source is not what it was."""
    known = {state.name: (state.value, state.source) for state in before}
    return [state for state in now if known.get(state.name) != (state.value, state.source)]


def overrides(states: Sequence[SettingState]) -> list[str]:
    """A line about each live value that is in force, for the start of a log."""
    return [
        f"live setting {state.name} = {_show(state.value)}, set by {state.changed_by}, overrides the recipe's "
        f"{_show(state.recipe)}; `vagen buffer set {state.name}=recipe` drops it"
        for state in states
        if state.source == "live"
    ]


def describe(state: SettingState) -> str:
    """The setting in one line."""
    by = f"live, by {state.changed_by}" if state.source == "live" else "the recipe's"
    return f"{state.name} = {_show(state.value)} ({by})"


def _show(value: object) -> str:
    return "not told yet" if value is None else msgspec.json.encode(value).decode()


def _decode(text: bytes | None) -> Any:
    return None if text is None else msgspec.json.decode(text)


def _numbers(fields: Any) -> dict[str, int]:
    return {name.decode(): int(text) for name, text in fields.items() if text.lstrip(b"-").isdigit()}
