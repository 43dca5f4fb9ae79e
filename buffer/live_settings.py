"""The list of live settings: what may change while a run goes on, and the checks of each.

Knows no Redis; where values are kept and who tells them is `vagen.buffer.settings`'s.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from vagen.buffer.config import BufferConfig
from vagen.buffer.keys import Key
from vagen.buffer.selection.config import SelectionConfig
from vagen.buffer.selection.filters import make_filters
from vagen.common.config import Section, convert, require

__all__ = ["LIVE_SETTINGS", "LiveSetting", "RunFacts"]


class LearnerPart(Section, frozen=True, kw_only=True):
    """What of section `learner` the buffer applies."""

    max_staleness: int = 0

    def __post_init__(self) -> None:
        require(
            0 <= self.max_staleness < 1 << 31, "learner.max_staleness", self.max_staleness, "int >= 0, below 2147483648"
        )


class RunFacts(NamedTuple):
    """What a value must fit to, as learner and ingest have told it; nothing where neither has started."""

    learner: Mapping[str, int] = {}
    """Numbers that the learner has registered."""
    ranks: bool = True
    """Whether the ingest has a priority function."""


class LiveSetting(NamedTuple):
    """One setting that may change while a run goes on."""

    name: str
    section: str
    """Of the recipe."""
    kind: type[Section]
    """Its class checks type and bounds of the value."""
    told_in: Key
    """Hash where the recipe's value is told."""
    fit: Callable[[Any, RunFacts], None] | None = None
    """Raises `ConfigError` for a value with which this run cannot go on."""

    def check(self, value: object, facts: RunFacts) -> Any:
        """The value with its type. Raises `ConfigError` naming path, value and bound."""
        checked = getattr(convert({self.name: value}, self.kind, f"$.{self.section}"), self.name)
        if self.fit is not None:
            self.fit(checked, facts)
        return checked


def _fit_staleness(value: int, facts: RunFacts) -> None:
    least = facts.learner.get("publish_every", 1) - 1
    bound = f"int >= {least} = learner.publish_every - 1, the age of the data of the last such step"
    require(value >= least, "learner.max_staleness", value, bound)


def _fit_capacity(value: int, facts: RunFacts) -> None:
    least = facts.learner.get("required_capacity_bytes", 0)
    bound = f"int >= {least} = what the registered learner needs to checkpoint and prefetch"
    require(value >= least, "buffer.capacity_bytes", value, bound)


def _fit_order(value: str, facts: RunFacts) -> None:
    bound = "an order other than priority, the buffer that serves this run has no $.buffer.priority.function"
    require(value != "priority" or facts.ranks, "learner.selection.order", value, bound)


def _fit_filters(value: Any, facts: RunFacts) -> None:
    make_filters(value, facts.learner.get("group_size"))


LIVE_SETTINGS: Mapping[str, LiveSetting] = {
    setting.name: setting
    for setting in (
        LiveSetting("max_staleness", "learner", LearnerPart, Key.LEARNER, _fit_staleness),
        LiveSetting("order", "learner.selection", SelectionConfig, Key.LEARNER, _fit_order),
        LiveSetting("filters", "learner.selection", SelectionConfig, Key.LEARNER, _fit_filters),
        LiveSetting("capacity_bytes", "buffer", BufferConfig, Key.CONFIG, _fit_capacity),
        LiveSetting("when_full", "buffer", BufferConfig, Key.CONFIG),
        LiveSetting("max_running", "buffer", BufferConfig, Key.CONFIG),
        LiveSetting("group_timeout_s", "buffer", BufferConfig, Key.CONFIG),
    )
}
"""All of them by name. A script reads one with `setting(name, recipe's value)`."""
