"""Several corrections on one saved buffer, without training: what each would make of data of every staleness.

Owns which trajectories are taken, which model and which recipes; what is measured is `vagen.tools.replay_measure`'s.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path

import msgspec
import numpy as np
import torch

from vagen.buffer.archive.reader import Archive, open_archive
from vagen.buffer.archive.record import NO_STEP
from vagen.common.config import RunConfig, read_recipe, require, section
from vagen.common.errors import ConfigError
from vagen.learner.batching import RowPreparer, TrainingBatch, prepare_batch
from vagen.learner.config import LearnerConfig
from vagen.learner.export import exported_step
from vagen.learner.model.actor_critic import VisionLanguageActorCritic
from vagen.learner.model.checkpoint_io import load_checkpoint
from vagen.learner.model.optimizer import Trainer
from vagen.learner.model.parallel import parallel_session
from vagen.learner.models import Trained, load_trained
from vagen.learner.replay import refuse_unknown_behaviour
from vagen.tools.replay_measure import Bench, Bucket, Measured

__all__ = ["CompareOptions", "Comparison", "Correction", "CorrectionResult", "compare", "select"]

OnProgress = Callable[[str, int, int], None]

DEFAULT_BOUNDS = (0, 1, 2, 4, 8, 16, 32)

_SHARED_SETTINGS = ("loss.value_loss", "loss.value_bins", "loss.value_range", "critic.trunk", "critic.privileged")
"""Of `learner`: they decide the critic, which all corrections have in common."""


@dataclass(frozen=True, kw_only=True)
class Correction:
    """A name and its overrides of the recipe."""

    name: str
    overrides: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class CompareOptions:
    """What is compared on what."""

    path: Path
    model_dir: Path
    corrections: Sequence[Correction]
    config: str
    """Recipe: a path or a shipped name."""
    overrides: Sequence[str] = ()
    """Of the recipe, for all corrections."""
    checkpoint: Path | None = None
    """A learner's checkpoint whose weights replace those of `model_dir`."""
    at_step: int | None = None
    """Learner step of the model; None: the checkpoint's or the export's, and without either staleness as recorded."""
    per_bucket: int = 96
    """Trajectories of each bucket at least, where the archive has as many."""
    bounds: tuple[int, ...] = DEFAULT_BOUNDS
    """Lowest staleness of each bucket, ascending."""

    def __post_init__(self) -> None:
        require(self.per_bucket >= 1, "compare.per_bucket", self.per_bucket, "int >= 1")
        is_ascending = all(low < high for low, high in zip(self.bounds, self.bounds[1:], strict=False))
        require(
            bool(self.bounds) and self.bounds[0] >= 0 and is_ascending,
            "compare.buckets",
            list(self.bounds),
            "ascending integers >= 0",
        )
        names = [correction.name for correction in self.corrections]
        require(
            bool(names) and len(set(names)) == len(names), "compare.corrections", names, "distinct names, at least one"
        )


class CorrectionResult(msgspec.Struct, frozen=True, kw_only=True):
    """One correction on all buckets, in their order."""

    name: str
    overrides: tuple[str, ...]
    buckets: tuple[Measured, ...]


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """All that was measured."""

    archive: str
    model: str
    at_step: int | None
    staleness: str
    """`against_model` or `recorded`."""
    left_out: int
    """Trajectories that are in no bucket (newer than the model, or without a known step), or whose group has one."""
    buckets: tuple[Bucket, ...]
    corrections: tuple[CorrectionResult, ...]


@dataclass(frozen=True, kw_only=True)
class Selection:
    """Trajectories to measure on, by number in the archive, and the staleness of each."""

    indices: np.ndarray
    staleness: np.ndarray
    left_out: int


def select(archive: Archive, at_step: int | None, bounds: Sequence[int], per_bucket: int, seed: int) -> Selection:
    """Whole groups, drawn by the seed until every bucket has `per_bucket` trajectories or the archive no more.

    Raises `ConfigError` when nothing can be measured.
    """
    table = archive.table(["run_id", "group_id", "oldest_step", "staleness"])
    oldest, recorded = table["oldest_step"].to_numpy(), table["staleness"].to_numpy()
    if at_step is None:
        staleness = recorded
    else:
        staleness = np.where(oldest == NO_STEP, -1, at_step - oldest)
    groups: dict[tuple[str, str], list[int]] = defaultdict(list)
    for index, name in enumerate(zip(table["run_id"].to_pylist(), table["group_id"].to_pylist(), strict=True)):
        groups[name].append(index)
    usable = [members for members in groups.values() if (staleness[members] >= bounds[0]).all()]
    if not usable:
        hint = "give --at-step" if at_step is None else f"none is at least as old as the model, of step {at_step}"
        raise ConfigError(f"{archive.path}: no trajectory has a staleness of {bounds[0]} or more; {hint}")
    bucket = np.searchsorted(bounds, staleness, side="right") - 1
    counts = np.zeros(len(bounds), dtype=np.int64)
    taken: list[int] = []
    for number in np.random.default_rng(seed).permutation(len(usable)):
        members = usable[number]
        if (counts[bucket[members]] < per_bucket).any():
            taken += members
            np.add.at(counts, bucket[members], 1)
    indices = np.sort(np.array(taken))
    return Selection(
        indices=indices,
        staleness=staleness[indices],
        left_out=archive.num_trajectories - sum(map(len, usable)),
    )


def compare(options: CompareOptions, on_progress: OnProgress) -> Comparison:
    """Measure every correction on every bucket; a function of (archive, model, recipe and its seed).

    `on_progress` is given what is done next, how much is done, and of how much. Raises `ConfigError` and
    `ArchiveError` for what cannot be compared.
    """
    archive = open_archive(options.path)
    refuse_unknown_behaviour(archive)
    recipes = {c.name: read_recipe(options.config, [*options.overrides, *c.overrides]) for c in options.corrections}
    configs = {name: section(recipe, "learner", LearnerConfig) for name, recipe in recipes.items()}
    _check_models_agree(configs)
    first = next(iter(configs.values()))
    _require_a_critic(options, first)
    seed = section(next(iter(recipes.values())), "run", RunConfig).seed
    torch.set_num_threads(first.num_threads)
    preparer = RowPreparer.load(options.model_dir, privileged=first.critic.privileged)
    forbidden = preparer.forbidden_token_ids
    with parallel_session(seed=seed + 1):
        with_reference = next((c for c in configs.values() if c.reference.is_used), first)
        trained = load_trained(options.model_dir, msgspec.structs.replace(first, reference=with_reference.reference))
        at_step = _load(options, trained, with_reference)
        chosen = select(archive, at_step, options.bounds, options.per_bucket, seed)
        batch = _prepare(archive, chosen, preparer)
        segments = _segments_by_bucket(chosen.staleness, options.bounds)
        on_progress("scoring", 0, 1 + len(configs) * len(segments))
        bench = Bench.of(trained, batch, forbidden, seed, first.max_tokens_per_microbatch)
        buckets = [bench.bucket(_range(options.bounds, number), members) for number, members in segments.items()]
        results = _measure(bench, options.corrections, configs, list(segments.values()), on_progress)
    return Comparison(
        archive=str(options.path),
        model=str(options.checkpoint or options.model_dir),
        at_step=at_step,
        staleness="recorded" if at_step is None else "against_model",
        left_out=chosen.left_out,
        buckets=tuple(buckets),
        corrections=tuple(results),
    )


def _measure(
    bench: Bench,
    corrections: Sequence[Correction],
    configs: Mapping[str, LearnerConfig],
    parts: Sequence[np.ndarray],
    on_progress: OnProgress,
) -> list[CorrectionResult]:
    results = []
    done, total = 1, 1 + len(corrections) * len(parts)
    for correction in corrections:
        measure = bench.correction(configs[correction.name])
        measured = []
        for members in parts:
            on_progress(correction.name, done, total)
            measured.append(measure(members))
            done += 1
        results.append(
            CorrectionResult(name=correction.name, overrides=tuple(correction.overrides), buckets=tuple(measured))
        )
    on_progress("done", done, total)
    return results


def _require_a_critic(options: CompareOptions, config: LearnerConfig) -> None:
    """An exported model has the policy alone: values of a critic that was trained apart are in the checkpoint."""
    is_apart = config.critic.trunk == "separate"
    if is_apart and options.checkpoint is None and exported_step(options.model_dir) is not None:
        raise ConfigError(
            f"$.learner.critic.trunk: separate, and {options.model_dir} is an exported policy without its critic; give "
            "--checkpoint, the folder RUN/learner/checkpoints/step-N that has both, and --model as the run began"
        )


def _load(options: CompareOptions, trained: Trained, config: LearnerConfig) -> int | None:
    """Take in the checkpoint's weights, and say which learner step the model is of."""
    step = exported_step(options.model_dir)
    if options.checkpoint is not None:
        beside: dict[str, Trainer | VisionLanguageActorCritic] = {}
        if trained.critic is not None:
            beside["critic"] = trained.critic
        if trained.reference is not None and config.reference.refresh_every:
            beside["reference"] = trained.reference
        step = load_checkpoint(options.checkpoint, trained.policy.model, trained.policy, beside)["step"]
    return step if options.at_step is None else options.at_step


def _check_models_agree(configs: Mapping[str, LearnerConfig]) -> None:
    (first_name, first), *others = configs.items()
    for name, config in others:
        for field in _SHARED_SETTINGS:
            read = attrgetter(field)
            value, expected = read(config), read(first)
            require(
                value == expected,
                f"learner.{field}",
                value,
                f"{expected} for {name} as for {first_name}: the critic is the model's, which all have in common",
            )


def _prepare(archive: Archive, chosen: Selection, preparer: RowPreparer) -> TrainingBatch:
    trajectories = [record.trajectory for record in archive.read(chosen.indices)]
    groups = {name: index for index, name in enumerate(dict.fromkeys(t.group_id for t in trajectories))}
    return prepare_batch(trajectories, chosen.staleness.tolist(), groups, preparer)


def _segments_by_bucket(staleness: np.ndarray, bounds: Sequence[int]) -> dict[int, np.ndarray]:
    """Number of each bucket that is not empty -> its trajectories in the batch."""
    bucket = np.searchsorted(bounds, staleness, side="right") - 1
    return {int(number): np.flatnonzero(bucket == number) for number in np.unique(bucket)}


def _range(bounds: Sequence[int], number: int) -> tuple[int, int | None]:
    """Lowest and highest staleness of a bucket."""
    return bounds[number], bounds[number + 1] - 1 if number + 1 < len(bounds) else None
