"""Live settings as a run has them: their place in Redis, their changes, what is in force in which shard.

A live value overrides the recipe's, for ingest, learner and scripts, until it is dropped, also over a restart. The
recipe's own values are told by those who read the recipe: the ingest's in `Key.CONFIG`, the learner's in `Key.LEARNER`,
each as JSON under the setting's name. Which settings there are is `vagen.buffer.live_settings`'s.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec
import redis
from msgspec import structs

from vagen.buffer.connection import run_script
from vagen.buffer.keys import Key, Keys
from vagen.buffer.live_settings import LIVE_SETTINGS, RunFacts
from vagen.common.config import parse_value
from vagen.common.errors import ConfigError

MAX_NAMED_BY = 100
"""Characters kept of who changed a setting."""


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
    problem: str | None = None
    """Why the learner does not apply the live value, and what it keeps instead."""
    by_shard: list[Any] | None = None
    """The value in each shard, where they differ."""


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
    priority: Any = client.hget(keys[Key.CONFIG], "priority_function")
    facts = RunFacts(_numbers(client.hgetall(keys[Key.LEARNER])), ranks=_decode(priority or b'""') is not None)
    return {name: None if value is None else LIVE_SETTINGS[name].check(value, facts) for name, value in changes.items()}


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
    for key in (Key.CONFIG, Key.LEARNER, Key.SETTINGS_PROBLEMS):
        pipe.hgetall(keys[key])
    live, info, config, learner, problems = pipe.execute()
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
                problem=_problem(problems.get(field), live.get(field)),
            )
        )
    return states


def note_problem(client: redis.Redis, keys: Keys, name: str, value: object, problem: str | None) -> None:
    """Tell why the learner does not apply a live value; None: it applies what is set."""
    if problem is None:
        client.hdel(keys[Key.SETTINGS_PROBLEMS], name)
    else:
        text = msgspec.json.encode({"value": value, "problem": problem})
        client.hset(keys[Key.SETTINGS_PROBLEMS], name, text)  # type: ignore[arg-type]


def combine_settings(parts: Sequence[Sequence[SettingState]]) -> list[SettingState]:
    """The settings of several shards as one: those of the first, marked where another shard has something else.

    A shard where the recipe's value is not told yet does not count.
    """
    combined = []
    for states in zip(*parts, strict=True):
        told = [state for state in states if state.value is not None]
        first = told[0] if told and states[0].value is None else states[0]
        differs = any((state.value, state.source) != (first.value, first.source) for state in told)
        values = [state.value for state in states] if differs else None
        combined.append(structs.replace(first, by_shard=values))
    return combined


def read_changes(client: redis.Redis, keys: Keys) -> list[SettingChange]:
    """The recent changes, newest first; the log keeps the last 1000."""
    entries: Any = client.lrange(keys[Key.SETTINGS_LOG], 0, -1)
    return [msgspec.json.decode(entry, type=SettingChange) for entry in entries]


def differences(before: Sequence[SettingState], now: Sequence[SettingState]) -> list[SettingState]:
    """Settings whose value, source or fitness is not what it was."""
    known = {state.name: _essence(state) for state in before}
    return [state for state in now if known.get(state.name) != _essence(state)]


def news(before: Sequence[SettingState], now: Sequence[SettingState]) -> dict[str, dict[str, Any]]:
    """What has changed, as the learner's journal says it; without a `before` the live values.

    By name: value and source, `problem` where the learner does not apply it, `by_shard` where shards differ.
    """
    changed = differences(before, now)
    return {
        state.name: {
            "value": state.value,
            "source": state.source,
            **({"problem": state.problem} if state.problem else {}),
            **({"by_shard": state.by_shard} if state.by_shard else {}),
        }
        for state in changed
        if before or state.source == "live" or state.by_shard
    }


def warnings(states: Sequence[SettingState]) -> list[str]:
    """A line about each value that is not in force as it is set: refused by the learner, or not in every shard."""
    lines = [f"{state.name}: {state.problem}" for state in states if state.problem]
    for state in states:
        if state.by_shard:
            values = ", ".join(f"{index} has {_show(value)}" for index, value in enumerate(state.by_shard))
            lines.append(f"{state.name}: shards differ, {values}; `vagen buffer set {state.name}=...` sets all")
    return lines


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
    return f"{state.name} = {_show(state.value)} ({by})" + (f"; {state.problem}" if state.problem else "")


def _essence(state: SettingState) -> tuple[object, ...]:
    return state.value, state.source, state.problem, state.by_shard


def _problem(noted: bytes | None, live: bytes | None) -> str | None:
    """What was noted of another value than the live one says nothing."""
    note = _decode(noted)
    return str(note["problem"]) if note is not None and live is not None and note["value"] == _decode(live) else None


def _show(value: object) -> str:
    return "not told yet" if value is None else msgspec.json.encode(value).decode()


def _decode(text: bytes | None) -> Any:
    return None if text is None else msgspec.json.decode(text)


def _numbers(fields: Any) -> dict[str, int]:
    return {name.decode(): int(text) for name, text in fields.items() if text.lstrip(b"-").isdigit()}
