"""From runs to figures: means over seeds, ratios to the on-policy run of the same seed, and their intervals.

Knows nothing of how a run is made or shown.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from vagen.common.errors import ConfigError
from vagen.tools.bench import Figure
from vagen.tools.bench.study import RunResult
from vagen.tools.bench.study_plan import DEFAULT, PAIRED_STALENESS, STALENESS, UNCORRECTED, Variant
from vagen.tools.statistics import t_interval

__all__ = ["Results", "Sample"]


@dataclass(frozen=True)
class Sample:
    """One number a seed."""

    values: tuple[float, ...]

    @property
    def mean(self) -> float:
        return math.fsum(self.values) / len(self.values)

    @property
    def interval(self) -> tuple[float, float]:
        """95 % of the mean, over seeds; unbounded for one seed."""
        return t_interval(self.values)

    def figure(self, unit: str) -> Figure:
        """For a benchmark's answer; one seed has no interval."""
        return Figure(value=self.mean, unit=unit, interval=self.interval if len(self.values) > 1 else None)


class Results:
    """Runs by variant, staleness and seed."""

    def __init__(self, results: Iterable[RunResult], variants: Sequence[Variant]) -> None:
        """`variants` name the results: equal runs may have been made under another name.

        Raises `ConfigError` where runs of one seed began with different weights, as after a change of the warm start.
        """
        by_overrides = {variant.overrides: variant.name for variant in variants}
        self._runs: dict[tuple[str, int], dict[int, RunResult]] = defaultdict(dict)
        self.all = tuple(results)
        warm: dict[int, str] = {}
        for result in self.all:
            if warm.setdefault(result.spec.seed, result.warm) != result.warm:
                raise ConfigError(
                    f"{result.key}.json: seed {result.spec.seed} began with other weights than the other runs of that "
                    "seed; remove the results made before the warm start changed"
                )
            name = by_overrides.get(result.spec.overrides)
            if name is not None:
                self._runs[name, result.spec.staleness][result.spec.seed] = result

    def runs(self, variant: Variant, staleness: int) -> list[RunResult]:
        """By seed, ascending."""
        found = self._runs.get((variant.name, staleness), {})
        return [found[seed] for seed in sorted(found)]

    def headline_runs(self, staleness: int) -> list[RunResult]:
        """The default's runs of the seeds that also ran on-policy, by seed."""
        base = self._runs.get((DEFAULT.name, 0), {})
        return [run for run in self.runs(DEFAULT, staleness) if run.spec.seed in base]

    def success(self, variant: Variant, staleness: int) -> Sample | None:
        """Held-out success of the last version; None without runs."""
        return _success(self.runs(variant, staleness))

    def headline_success(self, staleness: int) -> Sample | None:
        """The same of `headline_runs`."""
        return _success(self.headline_runs(staleness))

    def ratio(self, staleness: int) -> Sample | None:
        """The default's success over that of the on-policy run of the same seed, of the seeds that have both."""
        base = self._runs.get((DEFAULT.name, 0), {})
        runs = self.headline_runs(staleness)
        return Sample(tuple(run.final.success / base[run.spec.seed].final.success for run in runs)) if runs else None

    def correction_gain(self) -> Sample | None:
        """Success with less success without corrected advantages, seed by seed."""
        without = {run.spec.seed: run.final.success for run in self.runs(UNCORRECTED, PAIRED_STALENESS)}
        pairs = [
            run.final.success - without[run.spec.seed]
            for run in self.runs(DEFAULT, PAIRED_STALENESS)
            if run.spec.seed in without
        ]
        return Sample(tuple(pairs)) if pairs else None

    def staleness_figures(self) -> dict[str, Figure]:
        """The headline: success of the default at each staleness, and the share of on-policy success kept."""
        figures: dict[str, Figure] = {}
        on_policy = self.headline_success(0)
        if on_policy is not None:
            figures["success_on_policy"] = on_policy.figure("share of levels")
        for staleness in STALENESS:
            success, ratio = self.headline_success(staleness), self.ratio(staleness)
            if success is None or ratio is None:
                continue
            figures[f"success_at_{staleness}"] = success.figure("share of levels")
            figures[f"success_at_{staleness}_vs_on_policy"] = ratio.figure("ratio")
        return figures

    def grid_figures(self, variants: Sequence[Variant]) -> dict[str, Figure]:
        """Success of every other variant, and the gain of the correction."""
        figures: dict[str, Figure] = {}
        for variant in variants:
            for staleness in (0, *STALENESS):
                success = self.success(variant, staleness)
                if success is not None and variant is not DEFAULT:
                    figures[f"{variant.name}_success_at_{staleness}"] = success.figure("share of levels")
        gain = self.correction_gain()
        if gain is not None:
            figures[f"advantage_correction_gain_at_{PAIRED_STALENESS}"] = gain.figure("success, paired difference")
        return figures


def _success(runs: Sequence[RunResult]) -> Sample | None:
    return Sample(tuple(run.final.success for run in runs)) if runs else None
