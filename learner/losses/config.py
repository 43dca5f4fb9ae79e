"""Settings of the losses (`$.learner.loss` and `$.learner.reference`). Imports without torch."""

from __future__ import annotations

import math
from typing import Literal

from vagen.common.config import Section, require

_BEHAVIOUR_WEIGHTS_WITH_RATIO = ("token_tis", "sequence_tis", "icepop")
_BEHAVIOUR_WEIGHTS_OF_A_BATCH = ("sequence_tis", "m2po")


class LossConfig(Section, frozen=True, kw_only=True):
    """Objective x anchor x behaviour weight, plus regularisers and the critic's loss.

    The default is decoupled PPO (Hilton et al. 2022, arXiv 2110.00641) with the weight capped at 2 and a small KL
    to the behaviour policy. Behaviour-anchored PPO is `anchor: behaviour, behaviour_weight: none`.
    """

    objective: Literal["ppo_clip", "gspo", "cispo"] = "ppo_clip"
    anchor: Literal["proximal", "behaviour", "interpolated"] = "proximal"
    """Policy in the denominator of the clipped ratio. `interpolated` (A-3PO) needs no forward pass for it."""
    behaviour_weight: Literal["none", "token_tis", "sequence_tis", "token_reject", "icepop", "m2po"] = "token_tis"
    """How a token sampled by an older policy counts: see `weights.behaviour_weights`."""
    clip_low: float = 0.2
    clip_high: float = 0.28
    """Ratios are clipped to `[1 - clip_low, 1 + clip_high]`; `cispo` uses the upper bound alone."""
    dual_clip: float | None = None
    """Bound on the loss of a token of negative advantage, as a multiple of it (> 1); None: unbounded."""
    weight_cap: float = 2.0
    """Cap of `token_tis` and `sequence_tis`."""
    keep_range: tuple[float, float] | None = None
    """Ratios kept by `token_reject` (default 0.5 to 2) and `icepop` (default 0.5 to 5)."""
    m2po_threshold: float = 0.04
    """Mean squared log-ratio below which `m2po` stops dropping tokens."""
    behaviour_kl: float = 0.1
    """Weight of the KL to the behaviour policy."""
    entropy_bonus: float = 0.0
    weighting: Literal["token", "turn", "sequence"] = "token"
    """What counts equally: every token, every turn or every sequence."""
    ess_power: float = 1.0
    """The step size is multiplied by the effective sample size (a share) to this power: 0 off, 0.5 as in VCPO."""
    staleness_power: float = 1.0
    """The step size is multiplied by `(staleness_free / s) ** staleness_power` where the batch's mean staleness `s`, in
    learner steps, is above `staleness_free`: 0 off, 1 keeps the gain of a delayed loop below the same bound."""
    staleness_free: float = 4.0
    """Mean staleness up to which steps are full."""
    value_loss: Literal["mse", "smooth_l1", "two_hot"] = "smooth_l1"
    """`two_hot` gives the critic a categorical head (see `two_hot.py`), which starts from zero where the model
    directory's head is another."""
    value_bins: int = 51
    """Bins of `two_hot`; an odd number has one at the middle of the range."""
    value_range: tuple[float, float] = (-3.0, 3.0)
    """Lowest and highest value that `two_hot` can express; targets beyond are clamped and counted."""
    value_weight: float = 0.5
    value_clip: float | None = None
    """Furthest a value may move from its value at the batch's start before its loss stops falling; None: no bound."""

    def __post_init__(self) -> None:
        self._check_bounds()
        require(
            self.anchor != "behaviour" or self.behaviour_weight not in _BEHAVIOUR_WEIGHTS_WITH_RATIO,
            "learner.loss.behaviour_weight",
            self.behaviour_weight,
            "none, token_reject or m2po with anchor behaviour (its ratio already holds the importance weight)",
        )
        require(
            self.anchor != "interpolated" or self.behaviour_weight not in _BEHAVIOUR_WEIGHTS_OF_A_BATCH,
            "learner.loss.behaviour_weight",
            self.behaviour_weight,
            "a weight of single tokens with anchor interpolated (which is only known per micro-batch)",
        )
        require(
            self.value_loss != "two_hot" or self.value_clip is None,
            "learner.loss.value_clip",
            self.value_clip,
            "null with value_loss two_hot (a distribution has no distance to clip)",
        )

    def _check_bounds(self) -> None:
        bounds: tuple[tuple[str, float | None, float, float, str], ...] = (
            ("clip_low", self.clip_low, 0.0, 1.0, "float in (0, 1)"),
            ("clip_high", self.clip_high, 0.0, math.inf, "float > 0"),
            ("dual_clip", self.dual_clip, 1.0, math.inf, "null or float > 1"),
            ("weight_cap", self.weight_cap, 0.0, math.inf, "float > 0"),
            ("m2po_threshold", self.m2po_threshold, 0.0, math.inf, "float > 0"),
            ("value_clip", self.value_clip, 0.0, math.inf, "null or float > 0"),
        )
        for field, value, low, high, bound in bounds:
            require(value is None or low < value < high, f"learner.loss.{field}", value, bound)
        for field in ("behaviour_kl", "entropy_bonus", "value_weight"):
            value = getattr(self, field)
            require(0.0 <= value < math.inf, f"learner.loss.{field}", value, "float >= 0")
        require(0.0 <= self.ess_power <= 1.0, "learner.loss.ess_power", self.ess_power, "float in [0, 1]")
        power, free = self.staleness_power, self.staleness_free
        require(0.0 <= power <= 1.0, "learner.loss.staleness_power", power, "float in [0, 1]")
        require(0.0 < free < math.inf, "learner.loss.staleness_free", free, "float > 0")
        require(2 <= self.value_bins <= 4096, "learner.loss.value_bins", self.value_bins, "int in [2, 4096]")
        lowest, highest = self.value_range
        require(
            -math.inf < lowest < highest < math.inf,
            "learner.loss.value_range",
            self.value_range,
            "[low, high], finite, low < high",
        )
        if self.keep_range is not None:
            low, high = self.keep_range
            require(0.0 <= low < 1.0 < high, "learner.loss.keep_range", self.keep_range, "[low, high], low < 1 < high")

    @property
    def kept_ratios(self) -> tuple[float, float]:
        """Ratios that `token_reject` or `icepop` keeps, inclusive."""
        return self.keep_range or ((0.5, 5.0) if self.behaviour_weight == "icepop" else (0.5, 2.0))


class ReferenceConfig(Section, frozen=True, kw_only=True):
    """KL to a frozen copy of the model that the run started from, or of a later one (`refresh_every`).

    Off unless a coefficient is positive.
    """

    model_dir: Literal["start"] | None = None
    """`start`: the model directory that the learner is started with, also after a resume until the first refresh."""
    kl_in_loss: float = 0.0
    """Weight of the mean `estimator` over policy tokens in the loss."""
    kl_in_reward: float = 0.0
    """Each policy token's reward is reduced by this times `log pi_prox - log pi_ref`."""
    estimator: Literal["k1", "k2", "k3"] = "k3"
    """Of the KL in the loss and in the diagnostics. `k1` is for diagnostics alone."""
    refresh_every: int = 0
    """Learner steps after which the present policy becomes the reference, again and again; 0: never."""

    def __post_init__(self) -> None:
        for field in ("kl_in_loss", "kl_in_reward"):
            value = getattr(self, field)
            require(0.0 <= value < math.inf, f"learner.reference.{field}", value, "float >= 0")
        require(
            not self.is_used or self.model_dir is not None,
            "learner.reference.model_dir",
            self.model_dir,
            "start with a positive kl_in_loss or kl_in_reward",
        )
        require(self.refresh_every >= 0, "learner.reference.refresh_every", self.refresh_every, "int >= 0")
        require(
            self.kl_in_loss == 0.0 or self.estimator != "k1",
            "learner.reference.estimator",
            self.estimator,
            "k2 or k3 with a positive kl_in_loss (on data of the policy itself the gradient of k1 has mean 0)",
        )

    @property
    def is_used(self) -> bool:
        """Whether a reference model is needed at all."""
        return self.kl_in_loss > 0.0 or self.kl_in_reward > 0.0
