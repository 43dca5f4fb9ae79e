"""Intervals of success rates and of means over seeds; no model, no files."""

from __future__ import annotations

import math
from collections.abc import Sequence

from vagen.common.config import require

Z_95 = 1.959963984540054
"""Standard normal quantile of .975."""

_T_95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131)
"""Student's t quantiles of .975 for 1, 2, ... degrees of freedom; beyond them the normal one is used."""


def wilson_interval(successes: int, trials: int, z: float = Z_95) -> tuple[float, float]:
    """Wilson score interval of a proportion, without continuity correction; `[0, 1]` for no trials.

    Wilson (1927), in the form of Newcombe (1998), method 3. Raises `ConfigError` unless 0 <= successes <= trials.
    """
    require(0 <= successes <= trials, "successes", successes, f"int in [0, {trials}]")
    if trials == 0:
        return 0.0, 1.0
    p = successes / trials
    z2 = z * z
    middle = p + z2 / (2 * trials)
    half = z * math.sqrt(p * (1 - p) / trials + z2 / (4 * trials * trials))
    scale = 1 + z2 / trials
    # Exact at the ends, where rounding would put the bound on the wrong side of the rate.
    low = 0.0 if successes == 0 else (middle - half) / scale
    high = 1.0 if successes == trials else (middle + half) / scale
    return low, high


def t_interval(samples: Sequence[float]) -> tuple[float, float]:
    """95 % interval of the mean of independent samples, Student's t; `(-inf, inf)` for fewer than two.

    Raises `ConfigError` for no sample.
    """
    require(len(samples) >= 1, "samples", len(samples), "at least one")
    if len(samples) < 2:
        return -math.inf, math.inf
    mean = math.fsum(samples) / len(samples)
    variance = math.fsum((sample - mean) ** 2 for sample in samples) / (len(samples) - 1)
    freedom = len(samples) - 1
    quantile = _T_95[freedom - 1] if freedom <= len(_T_95) else Z_95
    half = quantile * math.sqrt(variance / len(samples))
    return mean - half, mean + half
