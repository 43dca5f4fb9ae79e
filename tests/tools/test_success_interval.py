"""Wilson's interval against numbers that others printed."""

from __future__ import annotations

import pytest

from vagen.common.errors import ConfigError
from vagen.tools.statistics import wilson_interval


@pytest.mark.parametrize(
    ("successes", "trials", "interval"),
    [
        # Newcombe (1998), Statistics in Medicine 17, table I, method 3.
        (81, 263, (0.2553, 0.3662)),
        (15, 148, (0.0624, 0.1605)),
        (0, 20, (0.0000, 0.1611)),
        (1, 29, (0.0061, 0.1718)),
    ],
)
def test_published_intervals(successes, trials, interval):
    assert wilson_interval(successes, trials) == pytest.approx(interval, abs=5e-5)


def test_interval_mirrors_and_stays_inside():
    low, high = wilson_interval(1, 29)
    assert wilson_interval(28, 29) == pytest.approx((1 - high, 1 - low))
    for trials in range(1, 60):
        assert wilson_interval(0, trials)[0] == 0.0
        assert wilson_interval(trials, trials)[1] == 1.0
    assert wilson_interval(0, 0) == (0.0, 1.0)


@pytest.mark.parametrize(("successes", "trials"), [(-1, 3), (4, 3)])
def test_impossible_counts_are_refused(successes, trials):
    with pytest.raises(ConfigError, match="successes: expected int in"):
        wilson_interval(successes, trials)
