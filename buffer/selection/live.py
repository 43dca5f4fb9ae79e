"""Claims by the selection settings that are in force: the recipe's, or those that were set live.

They are looked at once before each claim, so that one claim applies one set of them. A set that cannot be applied here
(a filter whose module this machine lacks) is told in the buffer's settings and the former one stays.
"""

from __future__ import annotations

import logging
from typing import Any, Protocol

import msgspec
from msgspec import structs

from vagen.buffer.live_settings import LIVE_SETTINGS, RunFacts
from vagen.buffer.manifest import Manifest
from vagen.buffer.selection.config import SelectionConfig
from vagen.buffer.settings import SettingState
from vagen.common.errors import ConfigError

__all__ = ["Chooser", "LiveSelector", "SettingsStore"]

logger = logging.getLogger(__name__)

_NAMES = ("order", "filters")


class Chooser(Protocol):
    """A selector, of one shard or of all."""

    def use(self, config: SelectionConfig) -> None:
        """Choose by other settings from the next claim on, or raise `ConfigError` and change nothing."""

    def claim(self, step: int, num_trajectories: int, timeout_s: float) -> Manifest | None:
        """The sealed batch of a step, or None when it is not there in time."""


class SettingsStore(Protocol):
    """Where the live settings are."""

    def settings(self) -> list[SettingState]:
        """As they are set now."""

    def note_problem(self, name: str, value: object, problem: str | None) -> None:
        """Tell why a live value is not applied; None: what is set is applied."""


class LiveSelector:
    """Claims batches for the one rank that decides, by the order and the filters in force."""

    def __init__(self, chooser: Chooser, store: SettingsStore, config: SelectionConfig) -> None:
        """`config` is the recipe's, by which `chooser` chooses until something else is set."""
        self._chooser = chooser
        self._store = store
        self._recipe = self._in_force = config
        self._seen: Any = None

    def claim(self, step: int, num_trajectories: int, timeout_s: float) -> Manifest | None:
        """As `Selector.claim`, by the settings as they are when it is called."""
        self._take_up(step)
        return self._chooser.claim(step, num_trajectories, timeout_s)

    def _take_up(self, step: int) -> None:
        """Apply what has been set since the last look; a value that is set again is tried again."""
        states = {state.name: state for state in self._store.settings() if state.name in _NAMES}
        seen = {state.name: (state.source, state.changed_at) for state in states.values()}
        if seen == self._seen:
            return
        wanted, problems = self._in_force, dict[str, str | None]()
        for name in _NAMES:
            wanted, problems[name] = self._with(wanted, states[name])
        if wanted != self._in_force:
            self._chooser.use(wanted)
            self._in_force = wanted
            shown = ", ".join(f"{name} = {_show(wanted, name)}" for name in _NAMES)
            logger.info("from step %d on batches are chosen by %s", step, shown)
        for name, problem in problems.items():
            self._store.note_problem(name, states[name].value, problem)
            if problem is not None:
                logger.warning("step %d: live setting %s is %s", step, name, problem)
        self._seen = seen

    def _with(self, config: SelectionConfig, state: SettingState) -> tuple[SelectionConfig, str | None]:
        """The settings with one as it is set, or as they are and what is wrong with it."""
        if state.source == "recipe":
            return structs.replace(config, **{state.name: getattr(self._recipe, state.name)}), None
        try:
            value = LIVE_SETTINGS[state.name].check(state.value, RunFacts())
        except ConfigError as error:
            return config, f"not in force, the learner keeps {_show(config, state.name)}: {error}"
        return structs.replace(config, **{state.name: value}), None


def _show(config: SelectionConfig, name: str) -> str:
    return msgspec.json.encode(getattr(config, name)).decode()
