"""Alarms for the ways in which reinforcement learning collapses, raised from the learner's own journal lines.

Owns what counts as a collapse; logging, counting and acting on it are others'. Imports without torch.

An alarm is raised after `patience` steps in a row beyond its bound and cleared after `patience` steps in a row that are
back by a margin, so that one bad batch says nothing and a value that hovers at the bound does not flicker:

    reward_std           standard deviation of the batch's rewards < `min_reward_std`: no episode is better than another
    grad_norm            > `max_grad_norm_factor` x its running median
    entropy_low, _high   < `min_entropy_share`, > `max_entropy_factor` of its mean over the first `baseline_steps`
    length_low, _high    sampled tokens a turn < `min_length_share`, > `max_length_factor` of theirs
    format_rate          more than `max_format_drop` below the best running median
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import fmean, median
from typing import Annotated, Any, Protocol

import msgspec

from vagen.common.config import Section, require

__all__ = ["AlarmConfig", "AlarmEvent", "CollapseAlarms"]

PositiveInt = Annotated[int, msgspec.Meta(ge=1)]


class AlarmConfig(Section, frozen=True, kw_only=True):
    """Section `learner.alarms`. Alarms warn and are recorded; they never change training."""

    enabled: bool = True
    patience: PositiveInt = 3
    """Steps in a row that raise, and that clear."""
    baseline_steps: PositiveInt = 10
    """First steps of the run whose mean is the norm for entropy and length; no alarm of theirs before."""
    window: PositiveInt = 50
    """Steps of the running medians."""
    clear_margin: float = 0.2
    """Share of the way from the bound back to the norm at which a raised alarm clears."""
    min_reward_std: float = 1e-3
    max_grad_norm_factor: float = 10.0
    min_entropy_share: float = 0.2
    max_entropy_factor: float = 3.0
    min_length_share: float = 0.33
    max_length_factor: float = 3.0
    max_format_drop: float = 0.2

    def __post_init__(self) -> None:
        for name in ("clear_margin", "min_entropy_share", "min_length_share", "max_format_drop"):
            value = getattr(self, name)
            require(0.0 <= value < 1.0, f"learner.alarms.{name}", value, "float in [0, 1)")
        for name in ("max_grad_norm_factor", "max_entropy_factor", "max_length_factor"):
            value = getattr(self, name)
            require(1.0 < value < math.inf, f"learner.alarms.{name}", value, "float > 1")
        require(0.0 <= self.min_reward_std < math.inf, "learner.alarms.min_reward_std", self.min_reward_std, ">= 0")


@dataclass(frozen=True)
class AlarmEvent:
    """An alarm that was raised or cleared, with the value and the bound of that step."""

    name: str
    is_raised: bool
    value: float
    bound: float


class CollapseAlarms:
    """Fed with the journal's lines in order."""

    def __init__(self, config: AlarmConfig) -> None:
        self._watches = _watches(config) if config.enabled else []

    @property
    def active(self) -> list[str]:
        """Alarms raised and not cleared."""
        return [watch.name for watch in self._watches if watch.is_raised]

    def observe(self, line: Mapping[str, Any]) -> list[AlarmEvent]:
        """Take a step's line; returns what it raised and cleared."""
        lengths = line["num_trajectories"] * line["turns_mean"]
        values = {
            "reward_std": line["reward_std"],
            "grad_norm": line["grad_norm"],
            "entropy": line["entropy"],
            "length": line["policy_tokens"] / lengths if lengths else 0.0,
            "format_rate": line["format_rate"],
        }
        events = (watch.observe(values[watch.quantity]) for watch in self._watches)
        return [event for event in events if event is not None]


class _Norm(Protocol):
    """What a quantity normally is."""

    def value(self) -> float | None:
        """None until there is enough to say."""
        ...

    def add(self, value: float) -> None:
        """Take a value of a step that is not beyond the bound."""
        ...


class _Fixed:
    def __init__(self, value: float) -> None:
        self._value = value

    def value(self) -> float | None:
        return self._value

    def add(self, value: float) -> None:
        """Stays as it is."""


class _EarlyMean:
    def __init__(self, steps: int) -> None:
        self._steps = steps
        self._values: list[float] = []

    def value(self) -> float | None:
        return fmean(self._values) if len(self._values) == self._steps else None

    def add(self, value: float) -> None:
        if len(self._values) < self._steps:
            self._values.append(value)


class _RunningMedian:
    """Median of the last `window` values, once there are `at_least`; with `best`, the highest that it ever was."""

    def __init__(self, window: int, at_least: int, *, best: bool = False) -> None:
        self._values: deque[float] = deque(maxlen=max(window, at_least))
        self._at_least = at_least
        self._keeps_best = best
        self._best = -math.inf

    def value(self) -> float | None:
        if len(self._values) < self._at_least:
            return None
        return self._best if self._keeps_best else median(self._values)

    def add(self, value: float) -> None:
        self._values.append(value)
        if len(self._values) >= self._at_least:
            self._best = max(self._best, median(self._values))


class _Watch:
    """One bound on one quantity: `factor * norm + offset`, an upper or a lower one."""

    def __init__(
        self,
        name: str,
        quantity: str,
        norm: _Norm,
        config: AlarmConfig,
        *,
        upper: bool,
        factor: float,
        offset: float = 0.0,
    ) -> None:
        self.name = name
        self.quantity = quantity
        self.is_raised = False
        self._norm = norm
        self._patience = config.patience
        self._margin = config.clear_margin
        self._sign = 1.0 if upper else -1.0
        self._factor = factor
        self._offset = offset
        self._in_a_row = 0

    def observe(self, value: float) -> AlarmEvent | None:
        norm = self._norm.value()
        if norm is None:
            if math.isfinite(value):
                self._norm.add(value)
            return None
        bound = self._factor * norm + self._offset
        # What is not a number is beyond any bound, and back within none.
        is_beyond = not math.isfinite(value) or self._sign * (value - bound) > 0
        if not is_beyond:
            self._norm.add(value)
        clears_at = bound + self._margin * (norm - bound)
        is_back = math.isfinite(value) and self._sign * (value - clears_at) <= 0
        self._in_a_row = self._in_a_row + 1 if (is_back if self.is_raised else is_beyond) else 0
        if self._in_a_row < self._patience:
            return None
        self.is_raised = not self.is_raised
        self._in_a_row = 0
        return AlarmEvent(self.name, self.is_raised, value, bound)


def _watches(config: AlarmConfig) -> list[_Watch]:
    def early() -> _Norm:
        return _EarlyMean(config.baseline_steps)

    def running(best: bool = False) -> _Norm:
        return _RunningMedian(config.window, config.baseline_steps, best=best)

    return [
        # Twice the bound stands for the norm: a reward's spread has none, it falls as a task is learnt.
        _Watch("reward_std", "reward_std", _Fixed(2 * config.min_reward_std), config, upper=False, factor=0.5),
        _Watch("grad_norm", "grad_norm", running(), config, upper=True, factor=config.max_grad_norm_factor),
        _Watch("entropy_low", "entropy", early(), config, upper=False, factor=config.min_entropy_share),
        _Watch("entropy_high", "entropy", early(), config, upper=True, factor=config.max_entropy_factor),
        _Watch("length_low", "length", early(), config, upper=False, factor=config.min_length_share),
        _Watch("length_high", "length", early(), config, upper=True, factor=config.max_length_factor),
        _Watch(
            "format_rate",
            "format_rate",
            running(best=True),
            config,
            upper=False,
            factor=1.0,
            offset=-config.max_format_drop,
        ),
    ]
