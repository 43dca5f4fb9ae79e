"""One episode, from reset to end: environment, harness, engine and recorder joined into turns.

Needs no buffer and no learner: `vagen eval` plays the same episodes. What fails outside the policy leaves here as an
`InfrastructureError`; it never becomes a reward.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from ulid import ULID

from vagen.actor.client import EngineClient, Generation
from vagen.actor.config import ActorConfig, RewardPlacement
from vagen.actor.harness.base import Harness
from vagen.actor.messages import Message, Picture, Response, observation_message
from vagen.actor.recorder import Recorder
from vagen.actor.rendering import ChatRenderer, Prompt
from vagen.common.errors import EngineError, EnvironmentFailure, ObservationError
from vagen.common.trajectory import End, EngineIdentity, SamplingParams, Trajectory
from vagen.envs.base import Environment, Info, StepResult

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeTask:
    """What is to be played, and the names under which it is recorded."""

    seed: int
    task: str
    env_name: str
    run_id: str = "run"
    actor_id: str = "actor"
    task_index: int = 0
    attempt: int = 0
    group_id: str = "group"
    group_size: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeLimits:
    """What bounds an episode. Tokens count expanded image placeholders; `max_turns` 0 is no bound."""

    sampling: SamplingParams
    max_context: int
    max_turns: int = 0
    turn_timeout_s: float = 120.0
    episode_timeout_s: float = 1800.0
    engine_timeout_s: float = 120.0

    @classmethod
    def of(cls, config: ActorConfig) -> EpisodeLimits:
        """Those of the section `actor`."""
        return cls(
            sampling=config.sampling_params,
            max_context=config.max_context,
            max_turns=config.max_turns,
            turn_timeout_s=config.turn_timeout_s,
            episode_timeout_s=config.episode_timeout_s,
            engine_timeout_s=config.engine_timeout_s,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TranscriptTurn:
    """A turn for people: what was shown, what the model wrote, what came of it."""

    text: str
    pictures: tuple[Picture, ...]
    response: str
    actions: tuple[str, ...]
    format_ok: bool
    action_valid: bool
    reward: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Transcript:
    """An episode for people. `closing` shows the state after the last turn."""

    seed: int
    system_prompt: str
    turns: tuple[TranscriptTurn, ...]
    closing: Message
    end: End
    success: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeResult:
    """What one episode leaves. Seconds are sums over the episode."""

    trajectory: Trajectory
    """With `actor_seq` 1 until a spool journals it."""
    transcript: Transcript
    engine_s: float
    env_s: float


async def run_episode(
    task: EpisodeTask,
    env: Environment,
    harness: Harness,
    client: EngineClient,
    renderer: ChatRenderer,
    limits: EpisodeLimits,
    reward_placement: RewardPlacement = "turn_end",
) -> EpisodeResult:
    """Play one episode.

    Raises `EnvironmentFailure` or an `EngineError`; the environment is then only good for `close`.
    """
    return await _Episode(task, env, harness, client, renderer, limits, reward_placement).run()


class _Episode:
    def __init__(
        self,
        task: EpisodeTask,
        env: Environment,
        harness: Harness,
        client: EngineClient,
        renderer: ChatRenderer,
        limits: EpisodeLimits,
        reward_placement: RewardPlacement,
    ) -> None:
        self._task = task
        self._env = env
        self._harness = harness
        self._client = client
        self._renderer = renderer
        self._limits = limits
        self._recorder = Recorder(renderer, reward_placement)
        self._turns: list[TranscriptTurn] = []
        self._episode_id = str(ULID())
        self._engine: EngineIdentity | None = None
        self._engine_s = 0.0
        self._env_s = 0.0
        self._started_at = time.time()
        self._started = time.monotonic()

    async def run(self) -> EpisodeResult:
        try:
            return await self._run()
        except ObservationError as error:
            raise EnvironmentFailure(f"{self._task.env_name}, seed {self._task.seed}: {error}") from error

    async def _run(self) -> EpisodeResult:
        (observation, info), _ = await self._timed(self._env.reset(self._task.seed), "reset")
        message, state = await observation_message(observation), observation.state
        self._harness.start(self._env.system_prompt(), message)
        while True:
            prompt = self._renderer.render(self._harness.prompt())
            if self._is_over(prompt):
                return self._finish(End.TRUNCATED, prompt, message, info, state)
            generation = await self._respond(prompt)
            self._recorder.add_response(prompt, generation, state)
            text = self._renderer.decode(generation.token_ids)
            step, env_s = await self._timed(self._env.step(text), "step")
            self._recorder.add_outcome(step.parsed, step.reward, step.info.metrics, env_s)
            self._turns.append(_transcribe(message, text, step))
            info = step.info
            message, state = await observation_message(step.observation), step.observation.state
            if step.terminated:
                return self._finish(End.TERMINATED, None, message, info)
            self._harness.add_turn(Response(tuple(generation.token_ids)), message)
            if step.truncated:
                prompt = self._renderer.render(self._harness.prompt())
                return self._finish(End.TRUNCATED, prompt, message, info, state)

    def _is_over(self, prompt: Prompt) -> bool:
        """Whether a limit of ours ends the episode before this prompt is answered."""
        limits = self._limits
        length = self._renderer.expanded_length(prompt)
        # A response is never given less than its budget: the policy would be judged on what it could not finish.
        has_room = length + limits.sampling.max_new_tokens <= limits.max_context
        if not self._turns:
            if not has_room:
                raise EnvironmentFailure(
                    f"{self._task.env_name}: the first prompt takes {length} tokens, which leaves no room for "
                    f"max_new_tokens {limits.sampling.max_new_tokens} within max_context {limits.max_context}"
                )
            return False
        late = time.monotonic() - self._started > limits.episode_timeout_s
        return not has_room or late or 0 < limits.max_turns <= len(self._turns)

    async def _respond(self, prompt: Prompt) -> Generation:
        limits = self._limits
        generation = await self._client.generate(
            prompt,
            sampling=limits.sampling,
            max_new_tokens=limits.sampling.max_new_tokens,
            rid=f"{self._episode_id}-{len(self._turns)}",
            timeout_s=limits.engine_timeout_s,
        )
        if self._engine is None:
            self._engine = self._client.identity
        elif self._client.identity.incarnation != self._engine.incarnation:
            raise EngineError("the engine was restarted during the episode")
        self._engine_s += generation.engine_s
        return generation

    async def _timed(self, call: Awaitable[T], what: str) -> tuple[T, float]:
        started = time.monotonic()
        try:
            async with asyncio.timeout(self._limits.turn_timeout_s):
                result = await call
        except TimeoutError as error:
            raise EnvironmentFailure(
                f"{self._task.env_name}.{what}: no answer within {self._limits.turn_timeout_s:g} s"
            ) from error
        elapsed = time.monotonic() - started
        self._env_s += elapsed
        return result, elapsed

    def _finish(self, end: End, prompt: Prompt | None, closing: Message, info: Info, state: str = "") -> EpisodeResult:
        task = self._task
        assert self._engine is not None, "an episode has at least one turn"
        trajectory = Trajectory(
            trajectory_id=str(ULID()),
            run_id=task.run_id,
            actor_id=task.actor_id,
            actor_seq=1,
            episode_id=self._episode_id,
            attempt=task.attempt,
            task=task.task,
            task_index=task.task_index,
            seed=task.seed,
            group_id=task.group_id,
            group_size=task.group_size,
            env_name=task.env_name,
            harness_name=self._harness.name,
            splits_episode_across_rows=self._harness.splits_episode_across_rows,
            sampling=self._limits.sampling,
            engine=self._engine,
            vision=self._renderer.vision,
            rows=self._recorder.rows(),
            turns=self._recorder.turns(),
            rewards=self._recorder.rewards(),
            end=end,
            bootstrap=self._recorder.bootstrap(prompt, state) if prompt is not None else None,
            success=info.success,
            metrics=dict(info.metrics),
            images=self._recorder.images(prompt),
            started_at=self._started_at,
            finished_at=time.time(),
        )
        transcript = Transcript(
            seed=task.seed,
            system_prompt=self._env.system_prompt(),
            turns=tuple(self._turns),
            closing=closing,
            end=end,
            success=info.success,
        )
        return EpisodeResult(trajectory=trajectory, transcript=transcript, engine_s=self._engine_s, env_s=self._env_s)


def _transcribe(message: Message, response: str, step: StepResult) -> TranscriptTurn:
    return TranscriptTurn(
        text="".join(part if isinstance(part, str) else "" for part in message.parts),
        pictures=message.pictures,
        response=response,
        actions=tuple(step.parsed.actions),
        format_ok=step.parsed.format_ok,
        action_valid=step.parsed.action_valid,
        reward=dict(step.reward),
    )
