"""Settings of selection: `$.learner.selection` of a recipe, and `$.buffer.priority`."""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal

import msgspec

from vagen.common.config import Section, require

Order = Literal["freshest", "oldest", "uniform", "priority"]
Share = Annotated[float, msgspec.Meta(ge=0, lt=1)]


class PriorityConfig(Section, frozen=True, kw_only=True):
    """How often a trajectory is drawn by `learner.selection.order: priority`; fixed when it is stored."""

    function: str | None = None
    """A named priority, or `package.module:function` of your own, from a trajectory to a float; none: no priorities."""
    alpha: float = 1.0
    """A trajectory is drawn in proportion to its priority to this power; 0 is uniform."""
    epsilon: float = 1e-3
    """Priorities below count as this one, so that nothing is never drawn."""

    def __post_init__(self) -> None:
        require(0.0 <= self.alpha <= 10.0, "buffer.priority.alpha", self.alpha, "float in [0, 10]")
        require(1e-6 <= self.epsilon <= 1e6, "buffer.priority.epsilon", self.epsilon, "float in [1e-6, 1e6]")


class FilterConfig(Section, frozen=True, kw_only=True):
    """One filter."""

    name: str
    """A named filter, or `package.module:name` of your own."""
    options: dict[str, Any] = {}
    """Settings of that filter."""


class ReplayConfig(Section, frozen=True, kw_only=True):
    """Successes that are kept after their step and trained on again."""

    share: Share = 0.0
    """At most this share of a batch is drawn from what is kept; 0 keeps nothing."""
    max_bytes: Annotated[int, msgspec.Meta(gt=0)] = 256 << 20
    """Payload bytes kept, apart from `buffer.capacity_bytes`; the oldest are forgotten first."""
    max_staleness: Annotated[int, msgspec.Meta(ge=0)] = 16
    """In learner steps, at the step that trains it again; never exceeded."""


class SelectionConfig(Section, frozen=True, kw_only=True):
    """Section `learner.selection`: which of the ready trajectories a step takes."""

    order: Order = "freshest"
    """`uniform` draws whole units without replacement, `priority` in proportion to `buffer.priority`."""
    beta: float = 0.4
    """With `priority`: a unit drawn with probability p of N counts `(N p)^-beta` in the loss, over the batch's largest;
    0 leaves the bias of the drawing, 1 removes it."""
    filters: tuple[FilterConfig, ...] = ()
    """Applied in order to the candidates of a step; what one drops the next does not see, and others take its place."""
    replay: ReplayConfig = ReplayConfig()

    def __post_init__(self) -> None:
        require(
            0.0 <= self.beta <= 1.0 and not math.isnan(self.beta),
            "learner.selection.beta",
            self.beta,
            "float in [0, 1]",
        )
