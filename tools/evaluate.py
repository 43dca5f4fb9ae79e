"""Success on held-out levels: plays validation episodes against a running engine, without buffer and learner.

Owns which levels are held out (the environment's validation split, seeds from `FIRST_SEED` on), the figures and what is
kept of the episodes. The episode itself is the actor's. An evaluation has all of its levels or it fails: leaving out
those that could not be played would bias the rate.
"""

from __future__ import annotations

import asyncio
import base64
import dataclasses
import logging
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from vagen.actor.child_engine import child_engine
from vagen.actor.client import EngineClient, HttpEngineClient
from vagen.actor.config import ActorConfig, EnvSection, HarnessConfig
from vagen.actor.engines.openai import OpenAIClient
from vagen.actor.environments import EnvironmentPool
from vagen.actor.episode import EpisodeLimits, EpisodeResult, EpisodeTask, run_episode
from vagen.actor.episode import Transcript as EpisodeTranscript
from vagen.actor.harness import make_harness
from vagen.actor.messages import Picture
from vagen.actor.rendering import ChatRenderer
from vagen.common.config import require
from vagen.common.errors import InfrastructureError, VagenError
from vagen.common.trajectory import SamplingParams
from vagen.tools.runs import Evaluation, Transcript, TranscriptTurn
from vagen.tools.statistics import wilson_interval

logger = logging.getLogger(__name__)

FIRST_SEED = 1_000_000
"""Seeds are labels; that the levels are not trained on is the environment's split by content."""
MAX_ATTEMPTS = 4
"""Per level, before an infrastructure failure ends the evaluation."""

Progress = Callable[[int, int], None]
"""Called after each level with levels played and levels solved."""


@dataclass(frozen=True, kw_only=True)
class EvaluationPlan:
    """What to evaluate, and how."""

    engine_url: str
    """`local` starts a local engine of `model_dir` for the evaluation, with `recipe_arguments` on its command line."""
    model_dir: Path
    env: EnvSection
    harness: HarnessConfig
    actor: ActorConfig
    levels: int = 1000
    greedy: bool = False
    transcripts: int = 0
    first_seed: int = FIRST_SEED
    api: str = "sglang"
    """What the engine speaks: `sglang`, tokens in and out; or `openai`, chat completions, as vLLM does."""
    recipe_arguments: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        require(self.levels >= 1, "levels", self.levels, "int >= 1")
        require(self.api in ("sglang", "openai"), "api", self.api, "sglang or openai")
        require(self.transcripts >= 0, "transcripts", self.transcripts, "int >= 0")

    @property
    def limits(self) -> EpisodeLimits:
        """The actor's; greedy sampling is for evaluations only, its logprobs may not be trained on."""
        limits = EpisodeLimits.of(self.actor)
        if not self.greedy:
            return limits
        greedy = SamplingParams(temperature=0.0, max_new_tokens=limits.sampling.max_new_tokens)
        return dataclasses.replace(limits, sampling=greedy)


@dataclass
class _Tally:
    """What has been played so far."""

    played: int = 0
    solved: int = 0
    turns: int = 0
    well_formed: int = 0
    oldest_version: int = np.iinfo(np.int32).max
    newest_version: int = -1
    transcripts: dict[int, EpisodeTranscript] = field(default_factory=dict)

    def add(self, seed: int, result: EpisodeResult, keep: bool) -> None:
        trajectory = result.trajectory
        self.played += 1
        self.solved += trajectory.success
        self.turns += len(trajectory.turns)
        self.well_formed += sum(turn.format_ok for turn in trajectory.turns)
        self.oldest_version = min(self.oldest_version, trajectory.oldest_version)
        self.newest_version = max(self.newest_version, trajectory.newest_version)
        if keep:
            self.transcripts[seed] = result.transcript


def evaluate(plan: EvaluationPlan, progress: Progress = lambda played, solved: None) -> Evaluation:
    """Play all levels of the plan.

    Raises `ConfigError` for settings that do not fit together, and an `InfrastructureError` when the engine cannot be
    reached or a level fails `MAX_ATTEMPTS` times for a reason outside the policy.
    """
    try:
        return asyncio.run(_with_engine(plan, progress))
    except BaseExceptionGroup as group:
        known, other = group.split(VagenError)
        if known is None or other is not None:
            raise
        raise _first(known) from None


async def _with_engine(plan: EvaluationPlan, progress: Progress) -> Evaluation:
    if plan.engine_url != "local":
        return await _evaluate(plan, progress)
    with tempfile.TemporaryDirectory(prefix="vagen-eval-") as folder:
        async with child_engine(plan.model_dir, Path(folder), plan.recipe_arguments) as url:
            return await _evaluate(dataclasses.replace(plan, engine_url=url), progress)


async def _evaluate(plan: EvaluationPlan, progress: Progress) -> Evaluation:
    started = time.monotonic()
    renderer = ChatRenderer.load(plan.model_dir)
    kind = OpenAIClient if plan.api == "openai" else HttpEngineClient
    client = kind(plan.engine_url, renderer, api_key=plan.actor.engine_api_key, retries=plan.actor.engine_retries)
    pool = EnvironmentPool(plan.env.name, held_out(plan.env), plan.actor.env_workers)
    tally = _Tally()
    seeds = iter(range(plan.first_seed, plan.first_seed + plan.levels))
    num_workers = min(plan.actor.concurrency, plan.levels)
    try:
        await client.connect(plan.actor.connect_timeout_s)
        async with asyncio.TaskGroup() as workers:
            for _ in range(num_workers):
                workers.create_task(_worker(plan, seeds, client, renderer, pool, tally, progress))
    finally:
        await pool.close()
        await client.close()
    return Evaluation(
        success=tally.solved / tally.played,
        interval=wilson_interval(tally.solved, tally.played),
        levels=tally.played,
        turns_mean=tally.turns / tally.played,
        format_rate=tally.well_formed / tally.turns,
        seconds=time.monotonic() - started,
        policy_versions=(tally.oldest_version, tally.newest_version),
        transcripts=tuple(_for_people(tally.transcripts[seed]) for seed in sorted(tally.transcripts)),
        time=time.time(),
    )


async def _worker(
    plan: EvaluationPlan,
    seeds: Iterator[int],
    client: HttpEngineClient | OpenAIClient,
    renderer: ChatRenderer,
    pool: EnvironmentPool,
    tally: _Tally,
    progress: Progress,
) -> None:
    """Plays levels until none is left."""
    for seed in seeds:
        for attempt in range(1, MAX_ATTEMPTS + 1):
            try:
                result = await _play(plan, seed, client, renderer, pool)
            except InfrastructureError as error:
                logger.warning("level %d, attempt %d of %d: %s", seed, attempt, MAX_ATTEMPTS, error)
                if attempt == MAX_ATTEMPTS:
                    raise
                await client.connect(plan.actor.connect_timeout_s)
            else:
                tally.add(seed, result, keep=seed < plan.first_seed + plan.transcripts)
                progress(tally.played, tally.solved)
                break


async def _play(
    plan: EvaluationPlan, seed: int, client: EngineClient, renderer: ChatRenderer, pool: EnvironmentPool
) -> EpisodeResult:
    task = EpisodeTask(seed=seed, task=plan.env.name, env_name=plan.env.name)
    env = pool.take()
    is_good = False
    try:
        result = await run_episode(task, env, make_harness(plan.harness), client, renderer, plan.limits)
        is_good = True
    finally:
        if is_good:
            pool.give_back(env)
        else:
            await pool.discard(env)
    return result


def held_out(env: EnvSection) -> dict[str, Any]:
    """The environment's settings with the validation split."""
    return {**env.config, "split": "validation"}


def _for_people(transcript: EpisodeTranscript) -> Transcript:
    return Transcript(
        seed=transcript.seed,
        success=transcript.success,
        turns=tuple(
            TranscriptTurn(
                image_png_b64=_picture(turn.pictures),
                response=turn.response,
                reward=sum(turn.reward.values()),
                actions=turn.actions,
            )
            for turn in transcript.turns
        ),
        closing_png_b64=_picture(transcript.closing.pictures),
    )


def _picture(pictures: tuple[Picture, ...]) -> str | None:
    return base64.b64encode(pictures[-1].encoded).decode("ascii") if pictures else None


def _first(group: BaseExceptionGroup[VagenError]) -> VagenError:
    """Any one of them: a lost engine fails many episodes in the same way."""
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    assert isinstance(error, VagenError)
    return error
