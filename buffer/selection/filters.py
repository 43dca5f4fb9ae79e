"""Filters: which candidates of a step are not worth training on.

A filter is a pure function from units to the ids to drop. It is called with every unit seen for the step so far, also
those that were dropped before, so that what it decides by rank does not depend on the pace at which data arrives.
Most compare the episodes of a group and need groups of two or more.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Annotated, ClassVar

import msgspec

from vagen.buffer.selection.config import FilterConfig
from vagen.buffer.selection.units import Unit
from vagen.common.config import Section, convert, import_object, require
from vagen.common.errors import ConfigError

__all__ = ["FILTERS", "FunctionFilter", "UnitFilter", "make_filter", "make_filters"]

Fraction = Annotated[float, msgspec.Meta(gt=0, le=1)]
Rate = Annotated[float, msgspec.Meta(ge=0, le=1)]
FilterFunction = Callable[[Sequence[Unit]], Collection[str]]


class UnitFilter(Section, frozen=True, kw_only=True):
    """Base of the filters: its fields are the filter's options."""

    needs_groups: ClassVar[bool] = False
    """A unit of one trajectory says nothing: refused where groups have one member."""

    def __call__(self, units: Sequence[Unit]) -> Collection[str]:
        """Ids of the trajectories to drop."""
        raise NotImplementedError

    def pool(self, wanted: int) -> int:
        """How many candidates it should see at once for `wanted` trajectories to be left."""
        return wanted


class RewardVariance(UnitFilter, frozen=True, kw_only=True):
    """Drops groups whose rewards hardly differ: they have no advantage over each other."""

    needs_groups: ClassVar[bool] = True
    min_variance: Annotated[float, msgspec.Meta(ge=0)] = 1e-6
    """Population variance of the total reward; groups below are dropped."""

    def __call__(self, units: Sequence[Unit]) -> Collection[str]:
        return _ids(unit for unit in units if statistics.pvariance(unit.rewards) < self.min_variance)


class RewardVarianceTopP(UnitFilter, frozen=True, kw_only=True):
    """Keeps the groups of largest reward variance until they hold the share `p` of all variance (VAGEN's filter of that
    name); all of them while no group has any. Advantages are not rescaled: the refill keeps the size of the batch.
    """

    needs_groups: ClassVar[bool] = True
    p: Fraction = 0.9

    def __call__(self, units: Sequence[Unit]) -> Collection[str]:
        variances = [statistics.pvariance(unit.rewards) for unit in units]
        bound, reached, dropped = self.p * sum(variances), 0.0, []
        if bound == 0:
            return ()
        left = [index for index, unit in enumerate(units) if not unit.was_dropped]
        for index in sorted(left, key=lambda index: (-variances[index], units[index].name)):
            if reached >= bound:
                dropped.append(units[index])
            reached += variances[index]
        return _ids(dropped)


class StarPOS(UnitFilter, frozen=True, kw_only=True):
    """StarPO-S: keeps the `share` of the groups whose rewards differ most, the policy being most uncertain there.

    RAGEN, arXiv 2504.20073, section 3.3, and `_filter_rollout` of its trainer: the top `int(share * groups)` by the
    standard deviation of the total reward within the group, here at least one.
    """

    needs_groups: ClassVar[bool] = True
    share: Fraction = 0.25

    def __call__(self, units: Sequence[Unit]) -> Collection[str]:
        deviations = {unit.name: statistics.pstdev(unit.rewards) for unit in units if not unit.was_dropped}
        ranked = sorted((unit for unit in units if not unit.was_dropped), key=lambda u: (-deviations[u.name], u.name))
        return _ids(ranked[max(1, int(self.share * len(units))) :])

    def pool(self, wanted: int) -> int:
        return math.ceil(wanted / self.share)


class AllSame(UnitFilter, frozen=True, kw_only=True):
    """Drops groups of successes only or of failures only: dynamic sampling (DAPO, arXiv 2503.14476, section 3.2)."""

    needs_groups: ClassVar[bool] = True

    def __call__(self, units: Sequence[Unit]) -> Collection[str]:
        return _ids(unit for unit in units if unit.success_rate in (0.0, 1.0))


class Difficulty(UnitFilter, frozen=True, kw_only=True):
    """Keeps groups whose success rate lies in `[low, high]`: tasks that are neither solved nor hopeless."""

    needs_groups: ClassVar[bool] = True
    low: Rate = 0.1
    high: Rate = 0.9

    def __post_init__(self) -> None:
        require(self.low <= self.high, "learner.selection.filters.low", self.low, f"float <= high ({self.high})")

    def __call__(self, units: Sequence[Unit]) -> Collection[str]:
        return _ids(unit for unit in units if not self.low <= unit.success_rate <= self.high)


class FunctionFilter(UnitFilter, frozen=True, kw_only=True):
    """A user's function from units to ids to drop."""

    function: FilterFunction

    def __call__(self, units: Sequence[Unit]) -> Collection[str]:
        return self.function(units)


FILTERS: dict[str, type[UnitFilter]] = {
    "reward_variance": RewardVariance,
    "reward_variance_top_p": RewardVarianceTopP,
    "starpo_s": StarPOS,
    "all_same": AllSame,
    "difficulty": Difficulty,
}


def make_filter(config: FilterConfig, path: str = "learner.selection.filters") -> UnitFilter:
    """The filter that a recipe names: one of `FILTERS`, or at `package.module:name` a `UnitFilter` or a function.

    Raises `ConfigError` for an unknown name, options that do not fit, or something else at the import path.
    """
    if ":" not in config.name:
        if config.name not in FILTERS:
            raise ConfigError(
                f"$.{path}.name: expected one of {', '.join(sorted(FILTERS))}, or package.module:name, "
                f'got "{config.name}"'
            )
        return convert(config.options, FILTERS[config.name], f"$.{path}.options")
    found = import_object(config.name, f"{path}.name")
    if isinstance(found, type) and issubclass(found, UnitFilter):
        return convert(config.options, found, f"$.{path}.options")
    if not callable(found):
        raise ConfigError(
            f"$.{path}.name: expected a UnitFilter or a function from units to ids, {config.name!r} is none"
        )
    require(not config.options, f"{path}.options", config.options, "none for a function; a UnitFilter has options")
    return FunctionFilter(function=found)


def make_filters(
    entries: Sequence[FilterConfig], group_size: int | None = None, path: str = "learner.selection.filters"
) -> list[tuple[str, UnitFilter]]:
    """All filters with their names; `group_size` is that of the actors, where it is known.

    Raises `ConfigError` as `make_filter`, and for one that compares within groups where a group has one member.
    """
    chosen = []
    for index, entry in enumerate(entries):
        made = make_filter(entry, f"{path}[{index}]")
        require(
            not made.needs_groups or group_size is None or group_size >= 2,
            f"{path}[{index}].name",
            entry.name,
            f"a filter of single trajectories with actor.group_size {group_size}",
        )
        chosen.append((entry.name, made))
    return chosen


def _ids(units: Iterable[Unit]) -> list[str]:
    return [member.trajectory_id for unit in units for member in unit.members]
