"""The ingest's side of Redis: one durable transaction per batch of requests.

Payloads go in by `SET NX` and are decided on by a small script of the same MULTI/EXEC, so that one fsync covers a
batch and a crash leaves all of it or nothing. Everything a script decides is in `scripts/`.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec
from redis.exceptions import ResponseError

from vagen.buffer import admission
from vagen.buffer.config import BufferConfig
from vagen.buffer.connection import make_client, run_read_only, run_script
from vagen.buffer.keys import Key, Keys, Shard
from vagen.buffer.live_settings import LIVE_SETTINGS
from vagen.buffer.lua import source
from vagen.buffer.requests import Ask, BadPut, Beat, Failure, Malformed, Put, Request
from vagen.buffer.selection.units import attributes
from vagen.buffer.settings import SettingState, differences, read_settings
from vagen.buffer.transaction import Transaction
from vagen.common.errors import ConfigError
from vagen.common.trajectory import Trajectory
from vagen.common.wire import EngineStatus, Status, TaskGrant

logger = logging.getLogger(__name__)


class Outcome(NamedTuple):
    """What became of one request."""

    verdict: str
    """Of a put: stored, duplicate, stale, refused or full. Of others: ok, refused (one actor too many), failed (Redis
    refused the command)."""
    field: str = ""
    problem: str = ""
    tasks: tuple[TaskGrant, ...] = ()
    reason: str = ""
    """Why no task was granted."""


class Commit(NamedTuple):
    """A batch that was sent to Redis and whose outcomes are not read yet; `IngestStore.finish` it, once."""

    requests: Sequence[Request]
    reasons: Sequence[str]
    """Of each request why it was granted no task, if it asked."""
    num_scripts: int
    """Commands that came before those of the requests."""
    transaction: Transaction


class Committed(NamedTuple):
    """A batch after its EXEC."""

    outcomes: list[Outcome]
    """In the order of the requests."""
    status: Status


class _Offer(NamedTuple):
    """What one batch of requests may be granted."""

    credits: int
    reason: str
    engines: Sequence[EngineStatus] = ()


_NO_OFFER = _Offer(0, "")


class IngestStore:
    """Redis as the ingest sees it. Every method may raise one of `connection.TRANSIENT`."""

    def __init__(self, redis_url: str, run_name: str, config: BufferConfig, shard: int = 0) -> None:
        self._config = config
        self._shard = Shard(shard, config.shards)
        self._keys = Keys(run_name, self._shard)
        self._client = make_client(redis_url, keys=self._keys)
        self._settings: list[SettingState] = []
        self._held_bytes: int | None = None
        """Stored or promised to incomplete groups as of the last commit; unknown before the first, and while one may
        have taken effect or not."""
        self.capacity_bytes = config.capacity_bytes
        """In force as of the last `refresh_settings`."""

    def ping(self) -> None:
        """Return when Redis answers and has loaded its data."""
        self._client.ping()

    def check_durability(self) -> None:
        """Compare the server's persistence with `buffer.fsync`.

        Raises `ConfigError` when it promises less; a server that does not tell is trusted with a warning.
        """
        wanted = {"always": ("always",), "everysec": ("always", "everysec"), "none": ()}[self._config.fsync]
        try:
            settings = self._client.config_get("append*")
        except ResponseError as error:
            logger.warning("cannot read the persistence of Redis, buffer.fsync is taken on trust: %s", error)
            return
        found = settings["appendfsync"] if settings.get("appendonly") == "yes" else "off"
        if wanted and found not in wanted:
            raise ConfigError(
                f'$.buffer.fsync: expected a Redis with `appendonly yes`, `appendfsync {wanted[-1]}`, got "{found}"'
            )

    def announce(self) -> None:
        """Tell what the recipe says of the live settings and of what the learner looks at."""
        names = [name for name, setting in LIVE_SETTINGS.items() if setting.told_in is Key.CONFIG]
        told = {name: getattr(self._config, name) for name in (*names, "partial_groups")}
        told["priority_function"] = self._config.priority.function
        texts = {name: msgspec.json.encode(value) for name, value in told.items()}
        self._client.hset(self._keys[Key.CONFIG], mapping=texts)  # type: ignore[arg-type]

    def refresh_settings(self) -> list[SettingState]:
        """Read the live settings; returns those that have changed since the last time, at first those in force."""
        states = read_settings(self._client, self._keys)
        changed = differences(self._settings, states)
        self._settings = states
        self.capacity_bytes = next(s.value for s in states if s.name == "capacity_bytes") or self._config.capacity_bytes
        return changed

    def surely_fit(self, puts: Sequence[Put]) -> bool:
        """Whether all puts fit by what the last commit left, without asking Redis.

        Only commits fill the shard, so that whatever was freed since makes it the truer; capacity that was taken away
        since the last `refresh_settings` is for the commit to notice, which decides.
        """
        if self._held_bytes is None:
            return not puts
        most = sum(len(put.payload) * put.trajectory.group_size for put in puts)
        return self._held_bytes + most <= self.capacity_bytes

    def fitting(self, puts: Sequence[Put]) -> list[bool]:
        """Which of the puts fit below the capacity, by its policy, so that no other payload is sent at all."""
        if not puts:
            return []
        args: list[Any] = [self._config.capacity_bytes, self._config.when_full]
        for put in puts:
            args += (len(put.payload), put.trajectory.group_id, put.trajectory.group_size)
        return [bool(fits) for fits in run_read_only(self._client, self._keys, "admissible", *args)]

    def commit(self, requests: Sequence[Request], now: float) -> Committed:
        """Apply a batch in one durable transaction; the puts must be `fitting`."""
        return self.finish(self.begin(requests, now))

    def begin(self, requests: Sequence[Request], now: float) -> Commit:
        """As `commit`, but return once the batch is sent, so that the caller can work while Redis does."""
        offer = self._offer() if any(isinstance(request, Ask) for request in requests) else _NO_OFFER
        credits = offer.credits
        names = {_SCRIPTS[type(request)] for request in requests if type(request) in _SCRIPTS}
        pipe = self._client.pipeline(transaction=True)
        for name in sorted(names):
            pipe.script_load(source(name).text)
        reasons = []
        for request in requests:
            grant, reason = 0, offer.reason
            if isinstance(request, Ask):
                obstacle = admission.engine_obstacle(offer.engines, request.message.engines)
                grant = 0 if obstacle else min(request.message.want, credits)
                credits -= grant
                reason = reason or obstacle
            reasons.append(reason if grant == 0 else "")
            self._queue(pipe, request, grant, now)
        pipe.hmget(self._keys[Key.LEARNER], "step", "published")
        admission.queue_engines(pipe, self._keys)
        pipe.hmget(self._keys[Key.STAT], "bytes", "room")
        self._held_bytes = None
        return Commit(requests, reasons, len(names), Transaction(pipe))

    def finish(self, commit: Commit) -> Committed:
        """Wait until a batch is durable. Raises one of `connection.TRANSIENT` when nobody knows whether it is."""
        *replies, held = commit.transaction.replies()
        first = len(replies) - 1 - admission.ENGINE_REPLIES
        left = iter(replies[commit.num_scripts : first])
        outcomes = []
        for request, reason in zip(commit.requests, commit.reasons, strict=True):
            if isinstance(request, Put):
                next(left)
            outcomes.append(_parse(request, next(left), reason))
        assert next(left, None) is None
        self._held_bytes = sum(int(num_bytes or 0) for num_bytes in held)
        return Committed(outcomes, _parse_status(replies[first:], self._shard))

    def tick(self, now: float, *, leases_end: bool) -> tuple[int, int, int]:
        """Act on what is due: waiting groups and, if `leases_end`, leases of tasks and engines.

        Returns how many tasks were returned, groups released and engines gone.
        """
        drops_partial = int(self._config.partial_groups == "drop")
        args = (now, self._config.max_attempts, int(leases_end), self._config.group_timeout_s, drops_partial)
        returned, released, gone = run_script(self._client, self._keys, "tick", *args)
        return returned, released, gone

    def say_full(self, is_full: bool) -> None:
        """Tell the learner whether something waits because it does not fit."""
        self._client.hset(self._keys[Key.STAT], "full", int(is_full))

    def renew_all(self, now: float) -> None:
        """Extend every lease, after a time in which no heartbeat could be read."""
        run_script(
            self._client, self._keys, "renew", now + self._config.lease_s, now + self._config.heartbeat_timeout_s
        )

    def close(self) -> None:
        """Drop the connections."""
        self._client.close()

    def _offer(self) -> _Offer:
        pipe = self._client.pipeline(transaction=True)
        admission.queue_engines(pipe, self._keys)
        admission.queue_pacing(pipe, self._keys)
        replies = pipe.execute()
        count = admission.ENGINE_REPLIES
        credits, reason = admission.start_credits(admission.parse_pacing(replies[count:], self._config.max_running))
        return _Offer(credits, reason, admission.parse_engines(replies[:count]))

    def _queue(self, pipe: Any, request: Request, grant: int, now: float) -> None:
        config = self._config
        match request:
            case Put(_, trajectory, payload, _, draw):
                pipe.set(self._keys.of(Key.PAYLOAD, trajectory.trajectory_id), payload, nx=True)
                args = _commit_args(trajectory, len(payload), now, config)
                args += (attributes(trajectory), draw.weight, draw.exponential)
            case BadPut(_, trajectory_id, field, problem, origin):
                args = [trajectory_id, field, problem, now]
                args += origin or ()
            case Beat(_, message):
                leases = (now + config.lease_s, now + config.heartbeat_timeout_s)
                args = [message.actor_id, message.incarnation, message.journalled, message.in_flight, now, *leases]
                args += (int(message.closing), config.max_attempts, len(message.running_tasks), *message.running_tasks)
                for engine in message.engines:
                    args += (engine.url, engine.kind, engine.incarnation)
            case Ask(_, message):
                args = [message.actor_id, grant, now + config.lease_s, now]
            case Failure(_, message):
                args = [message.task_index, message.attempt, message.actor_id, config.max_attempts]
            case Malformed():
                pipe.hincrby(self._keys[Key.STAT], "malformed", 1)
                return
        pipe.evalsha(source(_SCRIPTS[type(request)]).sha, 1, self._keys.prefix, *args)


def _parse_status(replies: Sequence[Any], shard: Shard) -> Status:
    (step, published), *engines = replies
    return Status(
        learner_step=-1 if step is None else int(step),
        policy_version=-1 if published is None else int(published),
        engines=tuple(admission.parse_engines(engines)),
        shard=shard.index,
        num_shards=shard.count,
    )


_SCRIPTS: dict[type, str] = {Put: "commit", BadPut: "refuse", Beat: "heartbeat", Ask: "grant", Failure: "fail"}


def _commit_args(trajectory: Trajectory, num_bytes: int, now: float, config: BufferConfig) -> list[Any]:
    return [
        trajectory.trajectory_id,
        num_bytes,
        now,
        config.capacity_bytes,
        config.when_full,
        trajectory.actor_id,
        trajectory.actor_seq,
        trajectory.task_index,
        trajectory.attempt,
        int(trajectory.is_last),
        trajectory.group_id,
        trajectory.group_size,
        " ".join(str(version) for version in trajectory.versions),
    ]


def _parse(request: Request, reply: Any, reason: str) -> Outcome:
    if isinstance(reply, Exception):
        logger.error("Redis refused a %s: %s", type(request).__name__, reply)
        return Outcome("failed", problem=str(reply))
    if isinstance(request, (Put, BadPut)):
        verdict, field, problem = (part.decode() for part in reply)
        return Outcome(verdict, field, problem)
    if isinstance(request, Ask):
        tasks = [TaskGrant(task_index=i, attempt=a) for i, a in zip(reply[::2], reply[1::2], strict=True)]
        return Outcome("ok", tasks=tuple(tasks), reason=reason)
    if isinstance(request, Beat) and reply == 0:
        return Outcome("refused", reason="this run has had 10,000 actors, no new one is taken")
    return Outcome("ok")
