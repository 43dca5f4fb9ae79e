"""Interval of a success rate; no model, no files."""

from __future__ import annotations

import math

from vagen.common.config import require

Z_95 = 1.959963984540054
"""Standard normal quantile of .975."""


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
