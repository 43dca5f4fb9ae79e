"""One training run with a staleness that is exact: a single process, a queue of `k` batches, the same bits every time.

    fill    batches 0 .. s + k have been sampled before step s trains, each under the weights of its moment
    train   step s takes batch s, which version max(0, s - k) sampled, and makes version s + 1 of it
    end     the last version plays the held-out levels

Update, estimators, losses, model and batching are the learner's, sampling is the local engine's, episodes are recorded
as an actor records them; processes, buffer and broadcast are left out, because their timing would decide the staleness.
At the start there is nothing old: the first `k` steps train on data of version 0, as an asynchronous run does.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import msgspec
import torch
import xxhash

from vagen.actor.config import ActorConfig, EnvSection, HarnessConfig
from vagen.actor.local_engine.config import EngineConfig
from vagen.actor.rendering import ChatRenderer
from vagen.common.config import RunConfig, Section, read_recipe, require, section
from vagen.common.errors import ConfigError
from vagen.common.trajectory import Trajectory
from vagen.learner.batching import RowPreparer, TrainingBatch, prepare_batch
from vagen.learner.config import LearnerConfig, ModelConfig, SFTConfig
from vagen.learner.model.actor_critic import VisionLanguageActorCritic
from vagen.learner.model.parallel import parallel_session
from vagen.learner.models import load_trained
from vagen.learner.update import PolicyUpdate, UpdateStats
from vagen.tools.bench.study_play import Episode, StudyPlayer
from vagen.tools.bench.study_sampler import StudySampler
from vagen.tools.evaluate import FIRST_SEED, held_out

__all__ = ["Evaluated", "RunResult", "RunSpec", "StepRecord", "StudyTrainer", "run_study"]

logger = logging.getLogger(__name__)

_FORMAT = 1
"""Part of every key: raised when the meaning of a run changes, so that no older result is taken for it."""
_RECIPE = "frozenlake"
_STUDY_OVERRIDES = ("learner.optimizer.lr=2.0e-4",)
_OPTIONS = ("reference", "schedule", "critic", "freeze_vision", "lora")
_DEFAULT = LearnerConfig()
_FIRST_TRAINING_SEED = 10_000_000
_SEEDS_PER_RUN = 1_000_000
_SLOTS = 128


class RunSpec(Section, frozen=True, kw_only=True):
    """What one run is a function of."""

    variant: str
    """A name for people; results are found by `key`."""
    overrides: tuple[str, ...] = ()
    """Of the recipe."""
    seed: int = 0
    staleness: int = 0
    """Versions between sampling and training of a batch."""
    steps: int = 64
    episodes: int = 48
    """Of one batch."""
    levels: int = 1000
    """Held-out levels that the last version plays."""
    curve_every: int = 16
    curve_levels: int = 200

    def __post_init__(self) -> None:
        for name, low in (("seed", 0), ("staleness", 0), ("steps", 1), ("episodes", 1), ("levels", 1)):
            require(getattr(self, name) >= low, f"study.{name}", getattr(self, name), f"int >= {low}")
        require(self.curve_every >= 1, "study.curve_every", self.curve_every, "int >= 1")
        require(self.curve_levels >= 0, "study.curve_levels", self.curve_levels, "int >= 0")

    def recipe(self) -> dict[str, Any]:
        """The shipped recipe at the study's size."""
        size = (f"run.seed={self.seed}", f"learner.total_steps={self.steps}", f"learner.batch_size={self.episodes}")
        return read_recipe(_RECIPE, [*size, *_STUDY_OVERRIDES, *self.overrides])

    @property
    def warm_key(self) -> str:
        """Of the warm start: what the supervised phase depends on."""
        return _keys(self)[0]

    @property
    def key(self) -> str:
        """Of the result: everything that decides it, defaults filled in; not the variant's name."""
        return _keys(self)[1]


@lru_cache(maxsize=4096)
def _keys(spec: RunSpec) -> tuple[str, str]:
    recipe = spec.recipe()
    learner, actor = section(recipe, "learner", LearnerConfig), section(recipe, "actor", ActorConfig)
    warm = [
        section(recipe, "model", ModelConfig),
        section(recipe, "env", EnvSection),
        section(recipe, "harness", HarnessConfig),
        section(recipe, "sft", SFTConfig),
        section(recipe, "run", RunConfig),
    ]
    training = (
        learner.ppo_epochs,
        learner.minibatch_rows,
        learner.max_tokens_per_microbatch,
        learner.optimizer,
        learner.advantage,
        learner.loss,
    )
    # Options that are off by default: results without them keep their keys.
    more = [(name, getattr(learner, name)) for name in _OPTIONS if getattr(learner, name) != getattr(_DEFAULT, name)]
    sampling = (actor.sampling_params, actor.max_context, actor.group_size)
    plan = msgspec.structs.replace(spec, variant="", overrides=())
    return _hash([*warm, learner.advantage.turn_discount]), _hash([_FORMAT, plan, *warm, *training, *sampling, *more])


class StepRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One learner step of a run."""

    step: int
    sampled_at: int
    """Version of every token of the batch."""
    success: float
    format_rate: float
    reward: float
    ess: float
    log_ratio: float
    """Mean absolute log importance ratio, proximal over behaviour."""
    behaviour_kl: float
    clip_share: float
    grad_norm: float
    entropy: float
    explained_variance: float


class Evaluated(msgspec.Struct, frozen=True, kw_only=True):
    """Held-out levels played by one version, sampled at the training temperature."""

    version: int
    solved: int
    levels: int
    format_rate: float

    @property
    def success(self) -> float:
        return self.solved / self.levels


class RunResult(msgspec.Struct, frozen=True, kw_only=True):
    """What a run leaves in the cache."""

    spec: RunSpec
    key: str
    final: Evaluated
    curve: tuple[Evaluated, ...]
    steps: tuple[StepRecord, ...]
    warm: str
    """Hash of the warm start: runs that are compared must share it."""
    weights: str
    """Hash of the final weights: equal for equal runs, bit by bit."""
    torch: str
    cpu_s: float
    wall_s: float


class StudyTrainer:
    """The parts of one run. Lives inside a `parallel_session`."""

    def __init__(self, spec: RunSpec, model_dir: Path) -> None:
        recipe = spec.recipe()
        self.spec = spec
        self.config = section(recipe, "learner", LearnerConfig)
        env, harness = section(recipe, "env", EnvSection), section(recipe, "harness", HarnessConfig)
        actor = section(recipe, "actor", ActorConfig)
        require(
            spec.episodes % actor.group_size == 0,
            "study.episodes",
            spec.episodes,
            f"a multiple of actor.group_size ({actor.group_size})",
        )
        self._group_size = actor.group_size
        renderer = ChatRenderer.load(model_dir)
        if renderer.vision is None:
            raise ConfigError(f"{model_dir}: the study needs a vision-language model")
        forbidden = renderer.vision.forbidden_token_ids
        trained = load_trained(model_dir, self.config)
        self.model = trained.policy.model
        self._update = PolicyUpdate(
            self.model,
            trained.policy,
            self.config,
            seed=spec.seed,
            forbidden_token_ids=torch.tensor(forbidden),
            reference=trained.reference,
            critic=trained.critic,
        )
        self._preparer = RowPreparer.load(model_dir, privileged=self.config.critic.privileged)
        engine = EngineConfig(max_running=_SLOTS, max_context=actor.max_context)
        self.sampler = StudySampler(model_dir, renderer, engine, forbidden)
        self._player = StudyPlayer(env, harness, actor, renderer, self.sampler, env.config)
        self._examiner = StudyPlayer(env, harness, actor, renderer, self.sampler, held_out(env))
        self._queue: deque[list[Trajectory]] = deque()
        self._num_sampled = 0
        self.version = 0
        self.sampler.load(self.model.engine_named_tensors(), 0)

    def step(self) -> tuple[TrainingBatch, UpdateStats]:
        """Sample what the queue lacks, train its oldest batch and take the new weights into the sampler."""
        step = self.version
        while self._num_sampled < min(step + self.spec.staleness + 1, self.spec.steps):
            self._queue.append(self._player.play(self._training_episodes(self._num_sampled)))
            self._num_sampled += 1
        trajectories = self._queue.popleft()
        groups = {name: index for index, name in enumerate(dict.fromkeys(t.group_id for t in trajectories))}
        staleness = [step - trajectory.oldest_version for trajectory in trajectories]
        batch = prepare_batch(trajectories, staleness, groups, self._preparer)
        stats = self._update.run(batch, step, step)
        self.version += 1
        self.sampler.load(self.model.engine_named_tensors(), self.version)
        return batch, stats

    def evaluate(self, levels: int) -> Evaluated:
        """Play the first held-out levels; equal levels and draws in every run."""
        solved = turns = well_formed = 0
        for first in range(0, levels, _SLOTS):
            seeds = range(FIRST_SEED + first, FIRST_SEED + min(first + _SLOTS, levels))
            for played in self._examiner.play([Episode(name=f"held-out:{seed}", seed=seed) for seed in seeds]):
                solved += played.success
                turns += len(played.turns)
                well_formed += sum(turn.format_ok for turn in played.turns)
        return Evaluated(version=self.version, solved=solved, levels=levels, format_rate=well_formed / turns)

    def _training_episodes(self, batch: int) -> list[Episode]:
        """The same levels and draws for every staleness; the episodes of a group share their level."""
        spec = self.spec
        base = _FIRST_TRAINING_SEED + spec.seed * _SEEDS_PER_RUN
        tasks = range(batch * spec.episodes, (batch + 1) * spec.episodes)
        return [
            Episode(
                name=f"training:{spec.seed}:{task}",
                seed=base + task // self._group_size,
                task_index=task,
                group=f"group-{task // self._group_size}",
            )
            for task in tasks
        ]


def run_study(spec: RunSpec, model_dir: Path, on_step: Callable[[StepRecord], None] = lambda record: None) -> RunResult:
    """Train and evaluate one run from the warm start in `model_dir`; a pure function of (`spec`, that model)."""
    torch.set_num_threads(1)
    cpu, wall = time.process_time(), time.perf_counter()
    seed = section(spec.recipe(), "run", RunConfig).seed
    with parallel_session(seed=seed + 1):
        trainer = StudyTrainer(spec, model_dir)
        warm = _weights_hash(trainer.model)
        curve = [trainer.evaluate(spec.curve_levels)] if spec.curve_levels else []
        records: list[StepRecord] = []
        for step in range(spec.steps):
            batch, stats = trainer.step()
            records.append(_record(step, batch, stats))
            on_step(records[-1])
            if spec.curve_levels and trainer.version % spec.curve_every == 0 and trainer.version < spec.steps:
                curve.append(trainer.evaluate(spec.curve_levels))
        final = trainer.evaluate(spec.levels)
        return RunResult(
            spec=spec,
            key=spec.key,
            final=final,
            curve=tuple(curve),
            steps=tuple(records),
            warm=warm,
            weights=_weights_hash(trainer.model),
            torch=str(torch.__version__),
            cpu_s=time.process_time() - cpu,
            wall_s=time.perf_counter() - wall,
        )


def _record(step: int, batch: TrainingBatch, stats: UpdateStats) -> StepRecord:
    turns = [turn for trajectory in batch.trajectories for turn in trajectory.turns]
    versions = batch.versions.unique()
    assert len(versions) == 1, "a batch of one version"
    mismatch = (stats.ratio.fresh, stats.ratio.stale)
    tokens = sum(part.num_tokens for part in mismatch)
    return StepRecord(
        step=step,
        sampled_at=int(versions),
        success=sum(trajectory.success for trajectory in batch.trajectories) / batch.num_segments,
        format_rate=sum(turn.format_ok for turn in turns) / len(turns),
        reward=sum(trajectory.total_reward for trajectory in batch.trajectories) / batch.num_segments,
        ess=stats.ratio.effective_sample_size,
        log_ratio=sum(part.num_tokens * part.mean_abs_log_ratio for part in mismatch) / tokens,
        behaviour_kl=stats.losses["behaviour_kl"],
        clip_share=stats.losses["clip_share"],
        grad_norm=stats.grad_norm,
        entropy=stats.entropy,
        explained_variance=stats.explained_variance,
    )


def _weights_hash(model: VisionLanguageActorCritic) -> str:
    digest = xxhash.xxh3_128()
    for _, tensor in model.engine_named_tensors():
        digest.update(tensor.numpy().tobytes())
    digest.update(model.value_head_state()["weight"].detach().numpy().tobytes())
    return digest.hexdigest()


def _hash(parts: object) -> str:
    return xxhash.xxh3_64_hexdigest(msgspec.json.encode(parts, order="deterministic"))
