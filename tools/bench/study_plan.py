"""Which runs the studies are made of: corrections by name, the staleness of each, seeds, and the order of making them.

Owns no numbers of results. A run that two studies share is one run.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import msgspec

from vagen.common.config import Section, require
from vagen.tools.bench.study import RunSpec

__all__ = [
    "CORRECTIONS",
    "DEFAULT",
    "ESTIMATORS",
    "PAIRED_SEEDS",
    "PAIRED_STALENESS",
    "STALENESS",
    "UNCORRECTED",
    "StudyOptions",
    "Variant",
    "ablation_runs",
    "grid_runs",
]

PositiveInt = Annotated[int, msgspec.Meta(ge=1)]

STALENESS = (4, 8, 16, 32)
PAIRED_STALENESS = 8
"""Where the correction of advantages is compared on more seeds."""
PAIRED_SEEDS = 6


@dataclass(frozen=True, kw_only=True)
class Variant:
    """One way of training. `title` and `about` are for tables."""

    name: str
    title: str
    overrides: tuple[str, ...] = ()

    def run(self, options: StudyOptions, seed: int, staleness: int) -> RunSpec:
        """The run of this variant."""
        return RunSpec(
            variant=self.name,
            overrides=self.overrides,
            seed=seed,
            staleness=staleness,
            steps=options.steps,
            episodes=options.episodes,
            levels=options.levels,
        )


class StudyOptions(Section, frozen=True, kw_only=True):
    """Options of `vagen bench staleness` and `vagen bench ablation`."""

    seeds: PositiveInt = 3
    full: bool = False
    """All corrections, and the paired comparison on more seeds."""
    only: str = ""
    """Names of corrections, separated by commas: with `full`, these alone."""
    out: str = "runs/study"
    """Folder of the cache."""
    workers: PositiveInt = 2
    """Processes, of one thread each."""
    cached: bool = False
    """Report what is in the cache and train nothing."""
    docs: str = ""
    """A markdown file whose generated parts are replaced."""
    steps: PositiveInt = 64
    episodes: PositiveInt = 48
    levels: PositiveInt = 1000

    def __post_init__(self) -> None:
        unknown = set(filter(None, self.only.split(","))) - {variant.name for variant in CORRECTIONS}
        known = f"names out of {', '.join(variant.name for variant in CORRECTIONS)}"
        require(not unknown, "study.only", self.only, known)

    @property
    def root(self) -> Path:
        return Path(self.out)

    @property
    def corrections(self) -> tuple[Variant, ...]:
        """Those that are compared."""
        names = self.only.split(",")
        return tuple(variant for variant in CORRECTIONS if not self.only or variant.name in names)


_PUBLISHED = "learner.advantage.importance_correction=none"
_NO_KL = "learner.loss.behaviour_kl=0.0"
_NO_WEIGHT = "learner.loss.behaviour_weight=none"
_UNDAMPED = "learner.loss.staleness_power=0.0"
_FULL_STEPS = ("learner.loss.ess_power=0.0", _UNDAMPED)

DEFAULT = Variant(
    name="default",
    title="default: weight cap 2, KL .1, steps scaled by ESS and staleness, corrected advantages (geometric)",
)
UNCORRECTED = Variant(name="uncorrected", title="default with published advantages", overrides=(_PUBLISHED,))
PLAIN_PPO = Variant(
    name="plain_ppo",
    title="plain PPO against the behaviour policy, published advantages",
    overrides=("learner.loss.anchor=behaviour", _NO_WEIGHT, _NO_KL, *_FULL_STEPS, _PUBLISHED),
)
CORRECTIONS = (
    DEFAULT,
    UNCORRECTED,
    PLAIN_PPO,
    Variant(name="full_steps", title="default with full steps", overrides=_FULL_STEPS),
    Variant(name="strong_kl", title="full steps, KL .3", overrides=(*_FULL_STEPS, "learner.loss.behaviour_kl=0.3")),
    Variant(
        name="low_lr", title="full steps, learning rate 1e-4", overrides=(*_FULL_STEPS, "learner.optimizer.lr=1e-4")
    ),
    Variant(name="undamped", title="default with steps scaled by ESS alone", overrides=(_UNDAMPED,)),
    Variant(
        name="root_damping",
        title="default with steps scaled by ESS and the root of staleness",
        overrides=("learner.loss.staleness_power=0.5",),
    ),
    Variant(
        name="none",
        title="no correction: proximal anchor, no weight, no KL, full steps, published advantages",
        overrides=(_NO_WEIGHT, _NO_KL, *_FULL_STEPS, _PUBLISHED),
    ),
    Variant(
        name="decoupled",
        title="decoupled, cap 2, no KL, full steps, published advantages",
        overrides=(_NO_KL, *_FULL_STEPS, _PUBLISHED),
    ),
    Variant(
        name="corrected_no_kl", title="cap 2, no KL, full steps, corrected advantages", overrides=(_NO_KL, *_FULL_STEPS)
    ),
    Variant(
        name="behaviour_kl",
        title="plain PPO against the behaviour policy, KL .1, full steps, corrected advantages",
        overrides=("learner.loss.anchor=behaviour", _NO_WEIGHT, *_FULL_STEPS),
    ),
    Variant(
        name="product", title="default with the product turn ratio", overrides=("learner.advantage.turn_ratio=product",)
    ),
    Variant(
        name="token_reject",
        title="token rejection outside [1/2, 2], KL .1, full steps, corrected advantages",
        overrides=("learner.loss.behaviour_weight=token_reject", *_FULL_STEPS),
    ),
    Variant(
        name="icepop",
        title="IcePop [0.5, 5], no KL, full steps, published advantages",
        overrides=("learner.loss.behaviour_weight=icepop", _NO_KL, *_FULL_STEPS, _PUBLISHED),
    ),
    Variant(
        name="m2po",
        title="M2PO (threshold .04), no KL, full steps, published advantages",
        overrides=(
            "learner.loss.anchor=behaviour",
            "learner.loss.behaviour_weight=m2po",
            _NO_KL,
            *_FULL_STEPS,
            _PUBLISHED,
        ),
    ),
)

ESTIMATORS = (
    Variant(name="bi_level_gae", title="`bi_level_gae`"),
    Variant(name="masked_gae", title="`masked_gae`", overrides=("learner.advantage.name=masked_gae",)),
    Variant(name="turn_level_gae", title="`turn_level_gae`", overrides=("learner.advantage.name=turn_level_gae",)),
    Variant(
        name="trajectory_grpo",
        title="`trajectory_grpo`, groups of 8",
        overrides=("learner.advantage.name=trajectory_grpo", "actor.group_size=8"),
    ),
)


def grid_runs(options: StudyOptions) -> list[RunSpec]:
    """The runs of the staleness study, most important first."""
    seeds = range(options.seeds)
    runs = [DEFAULT.run(options, seed, staleness) for seed in seeds for staleness in (0, *STALENESS)]
    if options.full:
        chosen = options.corrections
        if UNCORRECTED in chosen:
            runs += _paired_runs(options)
        runs += [variant.run(options, seed, k) for k in (8, 16, 4, 32) for variant in chosen for seed in seeds]
        runs += [variant.run(options, seed, 0) for variant in chosen if variant is PLAIN_PPO for seed in seeds]
    return _distinct(runs)


def _paired_runs(options: StudyOptions) -> list[RunSpec]:
    """With and without the correction of advantages, seed by seed."""
    seeds = range(max(PAIRED_SEEDS, options.seeds))
    return [variant.run(options, seed, PAIRED_STALENESS) for seed in seeds for variant in (DEFAULT, UNCORRECTED)]


def ablation_runs(options: StudyOptions) -> list[RunSpec]:
    """Every estimator on fresh data."""
    return [variant.run(options, seed, 0) for seed in range(options.seeds) for variant in ESTIMATORS]


def _distinct(runs: Iterable[RunSpec]) -> list[RunSpec]:
    distinct: dict[str, RunSpec] = {}
    for run in runs:
        distinct.setdefault(run.key, run)
    return list(distinct.values())
