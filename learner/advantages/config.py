"""Settings of credit assignment (`$.learner.advantage`). Imports without torch."""

from __future__ import annotations

import math
from typing import Literal

from vagen.common.config import Section, require


class AdvantageConfig(Section, frozen=True, kw_only=True):
    """Which estimator turns rewards into advantages, and how data of older policies is corrected.

    The defaults are those of the staleness experiments: bi-level GAE, corrected at both levels with the geometric
    turn ratio.
    """

    name: str = "bi_level_gae"
    """A registered estimator, or `package.module:function` of one of your own."""
    turn_discount: float = 0.95
    turn_lambda: float = 0.95
    token_discount: float = 1.0
    token_lambda: float = 1.0
    importance_correction: Literal["none", "vtrace"] = "vtrace"
    """`none`: the published estimator, as if every token had been sampled by the proximal policy."""
    rho_bar: float = 2.0
    """Cap of the ratio that weighs a TD error. It decides which policy the values converge to; `inf`: no cap."""
    c_bar: float = 1.0
    """Cap of the ratio that carries later TD errors back. Variance against speed; above 1 traces can grow."""
    turn_ratio: Literal["geometric", "product"] = "geometric"
    """Ratio of a span of tokens. `product` is unbiased without caps; `geometric` is biased, of far less variance."""
    turn_anchor: Literal["end", "start"] = "end"
    """Token at which a turn's value is read by `bi_level_gae` and `turn_wise_gae`: its last (published) or first."""
    whiten: bool = True
    """Standardise over all policy tokens of the global batch. Estimators that compare within a group never are:
    shifting them would give a group of equal rewards a non-zero advantage."""
    whiten_per: Literal["batch", "task"] = "batch"
    """Whose moments `whiten` uses. `task`: those of the token's own task, so that in a mixture of environments the one
    with the largest rewards does not set the scale of all."""

    def __post_init__(self) -> None:
        require(bool(self.name), "learner.advantage.name", self.name, "a registered estimator or package.module:name")
        for field in ("turn_discount", "turn_lambda", "token_discount", "token_lambda"):
            value = getattr(self, field)
            require(0.0 <= value <= 1.0, f"learner.advantage.{field}", value, "float in [0, 1]")
        require(self.rho_bar > 0.0, "learner.advantage.rho_bar", self.rho_bar, "float > 0")
        require(self.c_bar >= 0.0 and not math.isnan(self.c_bar), "learner.advantage.c_bar", self.c_bar, "float >= 0")
