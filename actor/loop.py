"""The actor's loop.

                         credits (a lease on each task)
      buffer ----------------------------------------------> start an episode per task, `concurrency` at once
        ^                                                        |
        |  trajectory, until acked                               v
      sender <-- spool (journal, fsynced) <-- validate <-- run_episode: env <-> harness <-> engine

    part               consumes              waits for                            is unblocked by
    _start_episodes    free slots            slot, admission, room, credit        episode's end, STATUS, ACK, GRANT
    _play (one a slot) a task                engine, environment                  answer or time-out
    Sender.run         spool, oldest first   connection, room in the window       handshake, ACK, REFUSE
    _follow_buffer     which engines are     answer of the buffer                 STATUS, GRANT
                       admitted
    _announce_engines  which engines answer  a probe                              EnginePool.run
    stop               SIGTERM, SIGINT       episodes, then acks, drain_s each    their end, or time

A slow episode blocks no other: episodes share nothing but the event loop. An environment that fails ends its own
episode, which is reported as failed and granted again; so does an engine when no other takes over in time. Anything
unforeseen ends the process with an error. What is unacked at the end stays in the spool.
"""

from __future__ import annotations

import asyncio
import logging
import time

from vagen.actor.config import ActorConfig, EnvSection, HarnessConfig
from vagen.actor.engines.episode import EpisodeClient
from vagen.actor.engines.pool import EnginePool
from vagen.actor.environments import EnvironmentPool
from vagen.actor.episode import EpisodeLimits, EpisodeResult, EpisodeTask, run_episode
from vagen.actor.harness import make_harness
from vagen.actor.rendering import ChatRenderer
from vagen.actor.sender import Presence, Sender
from vagen.actor.signals import Signal
from vagen.actor.spool import Shard, Spool
from vagen.common.config import RunConfig
from vagen.common.errors import InfrastructureError, TrajectoryError
from vagen.common.metrics import Metrics
from vagen.common.validation import validate_trajectory
from vagen.common.wire import Status, TaskGrant

logger = logging.getLogger(__name__)

_SUCCESS_DECAY = 0.98
_FIRST_PAUSE_S = 0.1
_MAX_PAUSE_S = 10.0
_WAIT_S = 1.0
"""Longest wait between two looks at why no episode starts; every cause also wakes the wait."""


def plan_task(
    grant: TaskGrant, *, run: RunConfig, config: ActorConfig, env_name: str, actor_id: str, shard: Shard = (0, 1)
) -> EpisodeTask:
    """The episode of a position in a shard's sequence: members of a group share the seed.

    Shard `k` of `n` plays groups `k`, `k + n`, `k + 2 n` .. of the run, so that all of a group is in one shard.
    """
    index, count = shard
    group = grant.task_index // config.group_size * count + index
    return EpisodeTask(
        seed=config.base_seed + group,
        task=env_name,
        env_name=env_name,
        run_id=run.name,
        actor_id=actor_id,
        task_index=grant.task_index,
        attempt=grant.attempt,
        group_id=f"{run.name}-{group}",
        group_size=config.group_size,
    )


class ActorLoop:
    """Plays granted tasks until told to stop."""

    def __init__(
        self,
        *,
        run: RunConfig,
        config: ActorConfig,
        env: EnvSection,
        harness: HarnessConfig,
        renderer: ChatRenderer,
        engines: EnginePool,
        spool: Spool,
        sender: Sender,
        presence: Presence,
        metrics: Metrics,
    ) -> None:
        self._run = run
        self._config = config
        self._env = env
        self._harness = harness
        self._renderer = renderer
        self._engines = engines
        self._learnt: Status | None = None
        self._spool = spool
        self._sender = sender
        self._presence = presence
        self._metrics = metrics
        self._limits = EpisodeLimits.of(config)
        self._envs = EnvironmentPool(env.name, env.config, config.env_workers)
        self._episodes: set[asyncio.Task[None]] = set()
        self._slot_freed = Signal()
        self._success: float | None = None
        self._failures = 0

    async def run(self, stop: asyncio.Event) -> None:
        """Serve until `stop`, then drain. `engines` and `sender` are connected already, `sender.run` runs.

        Raises what no episode may swallow: a broken disk, a bug.
        """
        try:
            async with asyncio.TaskGroup() as group:
                watches = [
                    group.create_task(work(), name=work.__name__)
                    for work in (self._engines.run, self._follow_buffer, self._announce_engines)
                ]
                starting = group.create_task(self._start_episodes(group), name="start_episodes")
                await stop.wait()
                starting.cancel()
                await self._drain()
                for watch in watches:
                    watch.cancel()
        finally:
            await self._envs.close()

    async def _start_episodes(self, group: asyncio.TaskGroup) -> None:
        while True:
            free = self._config.concurrency - len(self._episodes)
            obstacle = self._obstacle(free)
            since = time.monotonic()
            if obstacle is None:
                tasks = await self._sender.request(free, self._engines.startable)
                for task in tasks:
                    self._start(group, task)
                if not tasks:
                    await self._sender.changed.wait(self._config.credit_retry_s)
                obstacle = "credit"
            elif obstacle == "slot":
                await self._slot_freed.wait(_WAIT_S)
            else:
                await self._sender.changed.wait(_WAIT_S)
            if obstacle != "slot":
                waited = free * (time.monotonic() - since)
                self._metrics.count("vagen_actor_wait_seconds_total", waited, what=obstacle)

    def _obstacle(self, free: int) -> str | None:
        """Why no episode may start now."""
        if free <= 0:
            return "slot"
        if self._spool.is_full:
            return "window"
        return None if self._is_admitted() else "admission"

    def _is_admitted(self) -> bool:
        """Whether any engine holds weights that the learner has checked and that are not too old to begin with."""
        self._learn()
        return bool(self._engines.startable)

    def _learn(self) -> None:
        """Tell the engines' pool what the buffer said last."""
        status = self._sender.status
        if status is not None and status is not self._learnt:
            self._learnt = status
            self._engines.admit(status.engines)

    def _start(self, group: asyncio.TaskGroup, grant: TaskGrant) -> None:
        key = (grant.task_index, grant.attempt)
        self._presence.running.add(key)
        episode = group.create_task(self._play(grant), name=f"episode {grant.task_index}.{grant.attempt}")
        self._episodes.add(episode)
        self._metrics.gauge("vagen_actor_running_episodes", len(self._episodes))

        def ended(task: asyncio.Task[None]) -> None:
            self._episodes.discard(task)
            self._presence.running.discard(key)
            self._metrics.gauge("vagen_actor_running_episodes", len(self._episodes))
            self._slot_freed.notify()

        episode.add_done_callback(ended)

    async def _play(self, grant: TaskGrant) -> None:
        task = plan_task(
            grant,
            run=self._run,
            config=self._config,
            env_name=self._env.name,
            actor_id=self._spool.actor_id,
            shard=self._spool.shard,
        )
        env = self._envs.take()
        is_good = False
        started = time.monotonic()
        harness, client = make_harness(self._harness), EpisodeClient(self._engines)
        try:
            result = await run_episode(
                task, env, harness, client, self._renderer, self._limits, self._config.reward_placement
            )
            is_good = True
            self._failures = 0
            validate_trajectory(result.trajectory)
            await self._sender.put(result.trajectory)
            self._count(result, time.monotonic() - started)
        except (InfrastructureError, TrajectoryError) as error:
            await self._fail(grant, task, error)
        except asyncio.CancelledError:
            self._metrics.count("vagen_actor_episodes_total", outcome="cancelled")
            raise
        finally:
            client.close()
            if is_good:
                self._envs.give_back(env)
            else:
                await self._envs.discard(env)

    async def _fail(self, grant: TaskGrant, task: EpisodeTask, error: InfrastructureError | TrajectoryError) -> None:
        name = type(error).__name__
        logger.warning("task %d, attempt %d failed: %s: %s", task.task_index, task.attempt, name, error)
        self._metrics.count("vagen_actor_episodes_total", outcome=name)
        # First off the heartbeats: one that still lists the task would take it back from whoever is to retry it.
        self._presence.running.discard((grant.task_index, grant.attempt))
        await self._sender.report_failure(grant, f"{name}: {error}")
        # The slot stays taken: a task that fails at once would otherwise be granted and fail in a busy loop.
        await asyncio.sleep(min(_FIRST_PAUSE_S * 2 ** min(self._failures, 10), _MAX_PAUSE_S))
        self._failures += 1

    def _count(self, result: EpisodeResult, seconds: float) -> None:
        metrics, trajectory = self._metrics, result.trajectory
        metrics.count("vagen_actor_episodes_total", outcome=trajectory.end.value)
        metrics.count("vagen_actor_turns_total", len(trajectory.turns))
        metrics.count("vagen_actor_tokens_total", trajectory.num_policy_tokens)
        metrics.count("vagen_actor_wait_seconds_total", result.engine_s, what="engine")
        metrics.count("vagen_actor_wait_seconds_total", result.env_s, what="env")
        metrics.observe("vagen_actor_episode_seconds", seconds)
        last = float(trajectory.success)
        self._success = last if self._success is None else _SUCCESS_DECAY * self._success + (1 - _SUCCESS_DECAY) * last
        metrics.gauge("vagen_actor_success", self._success)

    async def _follow_buffer(self) -> None:
        while True:
            self._learn()
            await self._sender.changed.wait(_WAIT_S)

    async def _announce_engines(self) -> None:
        """Heartbeats name the engines that answer; a restarted one waits for its weights before it takes traffic."""
        while True:
            self._presence.engines = self._engines.announcements
            await self._engines.changed.wait(_WAIT_S)

    async def _drain(self) -> None:
        """Give running episodes time to end, then what they made time to be acked."""
        logger.info(
            "stopping: %d episodes running, %d trajectories in flight", len(self._episodes), self._spool.in_flight
        )
        if self._episodes:
            await asyncio.wait(self._episodes, timeout=self._config.drain_s)
        for episode in list(self._episodes):
            episode.cancel()
        if self._episodes:
            await asyncio.wait(self._episodes, timeout=self._config.drain_s)
        if not await self._sender.flush(self._config.drain_s):
            logger.warning("%d trajectories unacked: they stay in the spool", self._spool.in_flight)
