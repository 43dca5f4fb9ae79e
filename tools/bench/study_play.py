"""Whole batches of episodes played in this process, turn by turn and side by side, and recorded as an actor would.

Owns the lockstep of environments and sampler and the deterministic names and seeds of episodes. Messages, prompts and
trajectories are the actor's own: harness, renderer and recorder are `vagen.actor`'s.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import xxhash
from ulid import ULID

from vagen.actor.client import Generation
from vagen.actor.config import ActorConfig, EnvSection, HarnessConfig
from vagen.actor.harness import make_harness
from vagen.actor.messages import Response, observation_message
from vagen.actor.recorder import Recorder
from vagen.actor.rendering import ChatRenderer, Prompt
from vagen.common.errors import ConfigError
from vagen.common.trajectory import End, EngineIdentity, SamplingParams, Trajectory
from vagen.envs.base import EnvironmentCore, Info
from vagen.envs.levels import stable_hash
from vagen.envs.registry import make_core
from vagen.tools.bench.study_sampler import StudySampler

__all__ = ["Episode", "StudyPlayer"]


@dataclass(frozen=True, kw_only=True)
class Episode:
    """What is to be played. Draws depend on `name` alone, whatever is played beside it."""

    name: str
    seed: int
    task_index: int = 0
    group: str = "alone"


class StudyPlayer:
    """Plays episodes of one environment configuration."""

    def __init__(
        self,
        env: EnvSection,
        harness: HarnessConfig,
        actor: ActorConfig,
        renderer: ChatRenderer,
        sampler: StudySampler,
        env_config: Mapping[str, Any],
    ) -> None:
        """`env_config` is that of `env`, or its held-out side."""
        self._env = env
        self._env_config = env_config
        self._harness = harness
        self._actor = actor
        self._renderer = renderer
        self._sampler = sampler
        self._cores: list[EnvironmentCore] = []

    def play(self, episodes: Sequence[Episode]) -> list[Trajectory]:
        """One trajectory an episode, in order, all sampled under the sampler's weights of now."""
        while len(self._cores) < len(episodes):
            self._cores.append(make_core(self._env.name, self._env_config))
        return asyncio.run(self._play(episodes))

    async def _play(self, episodes: Sequence[Episode]) -> list[Trajectory]:
        sampling = self._actor.sampling_params
        running = [
            _Running(episode, core, self._harness, self._renderer)
            for episode, core in zip(episodes, self._cores, strict=False)
        ]
        for one in running:
            await one.start()
        live = running
        while live:
            prompts = [one.prompt for one in live]
            self._check_room(prompts, sampling)
            answers = self._sampler.generate(prompts, [one.draw_seed for one in live], sampling)
            for one, answer in zip(live, answers, strict=True):
                await one.take(answer)
            live = [one for one in live if one.end is None]
        return [one.trajectory(self._env.name, sampling, self._actor.group_size) for one in running]

    def _check_room(self, prompts: Sequence[Prompt], sampling: SamplingParams) -> None:
        longest = max(map(self._renderer.expanded_length, prompts)) + sampling.max_new_tokens
        if longest > self._actor.max_context:
            raise ConfigError(f"$.actor.max_context: expected int >= {longest} for the study, which truncates nothing")


class _Running:
    """One episode that runs."""

    def __init__(self, episode: Episode, core: EnvironmentCore, harness: HarnessConfig, renderer: ChatRenderer) -> None:
        self._episode = episode
        self._core = core
        self._harness = make_harness(harness)
        self._renderer = renderer
        self._recorder = Recorder(renderer)
        self._info = Info()
        self._num_turns = 0
        self._state = ""
        self.prompt: Prompt
        self.end: End | None = None

    @property
    def draw_seed(self) -> int:
        """Of the next response."""
        return stable_hash(f"{self._episode.name}:{self._num_turns}") >> 1

    async def start(self) -> None:
        observation, self._info = self._core.reset(self._episode.seed)
        self._state = observation.state
        self._harness.start(self._core.system_prompt(), await observation_message(observation))
        self.prompt = self._renderer.render(self._harness.prompt())

    async def take(self, generation: Generation) -> None:
        """Play one response."""
        self._recorder.add_response(self.prompt, generation, self._state)
        step = self._core.step(self._renderer.decode(generation.token_ids))
        self._recorder.add_outcome(step.parsed, step.reward, step.info.metrics, 0.0)
        self._info = step.info
        self._num_turns += 1
        self._state = step.observation.state
        if step.terminated:
            self.end = End.TERMINATED
            return
        self._harness.add_turn(Response(tuple(generation.token_ids)), await observation_message(step.observation))
        self.prompt = self._renderer.render(self._harness.prompt())
        if step.truncated:
            self.end = End.TRUNCATED

    def trajectory(self, env_name: str, sampling: SamplingParams, group_size: int) -> Trajectory:
        """The record; names and times are functions of the episode, so that equal runs leave equal records."""
        assert self.end is not None, "play to the end first"
        episode, renderer = self._episode, self._renderer
        name = str(ULID.from_bytes(xxhash.xxh3_128_digest(episode.name.encode())))
        prompt = self.prompt if self.end is End.TRUNCATED else None
        return Trajectory(
            trajectory_id=name,
            run_id="study",
            actor_id="study",
            actor_seq=1,
            episode_id=name,
            task=env_name,
            task_index=episode.task_index,
            seed=episode.seed,
            group_id=episode.group,
            group_size=group_size,
            env_name=env_name,
            harness_name=self._harness.name,
            splits_episode_across_rows=self._harness.splits_episode_across_rows,
            sampling=sampling,
            engine=EngineIdentity(
                kind="local",
                incarnation="study",
                model_hash=renderer.model_hash,
                tokenizer_hash=renderer.tokenizer_hash,
            ),
            vision=renderer.vision,
            rows=self._recorder.rows(),
            turns=self._recorder.turns(),
            rewards=self._recorder.rewards(),
            end=self.end,
            bootstrap=None if prompt is None else self._recorder.bootstrap(prompt, self._state),
            success=self._info.success,
            metrics=dict(self._info.metrics),
            images=self._recorder.images(prompt),
        )
