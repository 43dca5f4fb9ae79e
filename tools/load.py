"""`vagen buffer load`: puts an archive into a live buffer, as an actor would.

    archive -> skip ids the buffer knows -> rename run, task and versions -> validate -> spool -> PUT -> ack or refusal

Goes through the ingest's socket and the actor's own spool and sender, so that what is loaded is checked, made durable
and accounted for like everything else; a load that was killed goes on with the same command and `data_dir`.

A loaded trajectory takes no task of the run: its task index lies beyond any that is ever granted. Its policy versions
are numbers of the run it came from; `--same-run` keeps them, `--as-step N` gives each version of the archive a number
of its own that stands for learner step N.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from ulid import ULID

from vagen.actor.sender import Presence, Sender
from vagen.actor.spool import Spool
from vagen.buffer.archive.record import ArchivedTrajectory
from vagen.buffer.connection import make_client
from vagen.buffer.keys import Key, Keys, Shard
from vagen.buffer.learner_store import LearnerStore
from vagen.common.curve import ActorKeys
from vagen.common.errors import BufferUnavailableError, ConfigError, TrajectoryError
from vagen.common.metrics import Metrics
from vagen.common.trajectory import Row, Trajectory
from vagen.common.validation import validate_trajectory
from vagen.common.wire import Refusal

__all__ = ["LoadPlan", "LoadReport", "load_archive"]

_FIRST_TASK = 1 << 52
"""Task indices of loaded trajectories begin here: the buffer grants from 0 and never comes so far."""
_WINDOW = 16
_SPOOL_BYTES = 256 << 20
_CHUNK = 32
_HEARTBEAT_S = 1.0


@dataclass(frozen=True, kw_only=True)
class LoadPlan:
    """Where to, and what the archive's policy versions mean there."""

    endpoint: str
    redis_url: str
    run_name: str
    data_dir: Path
    """Of the spool, which remembers what is in flight; belongs to the run."""
    same_run: bool = False
    as_step: int | None = None
    keys: ActorKeys | None = None
    """For a buffer that takes encrypted connections only."""
    timeout_s: float = 30.0
    """How long the buffer may take nothing."""

    def __post_init__(self) -> None:
        if self.same_run == (self.as_step is not None):
            raise ConfigError(
                "the archive's policy versions are numbers of the run it came from: expected either --same-run (keep "
                "them, this is that run) or --as-step N (each counts as weights of learner step N)"
            )


class LoadReport(msgspec.Struct, frozen=True, kw_only=True):
    """What became of each trajectory."""

    stored: int
    known: int
    """Ids that the buffer has seen before, or that came twice."""
    refused: dict[str, int]
    """Field and problem -> how many."""


def load_archive(
    records: Iterable[ArchivedTrajectory], plan: LoadPlan, on_progress: Callable[[int], None]
) -> LoadReport:
    """Put trajectories into a live buffer; `on_progress` is told how many have been dealt with.

    Raises `BufferUnavailableError` when the buffer does not answer, and `ConfigError` for a version step that is
    ahead of the learner.
    """
    return asyncio.run(_Load(plan, on_progress).run(records))


class _Load:
    def __init__(self, plan: LoadPlan, on_progress: Callable[[int], None]) -> None:
        self._plan = plan
        self._on_progress = on_progress
        self._store = LearnerStore.connect(plan.redis_url, plan.run_name, timeout_s=plan.timeout_s)
        self._client = make_client(plan.redis_url)
        self._incarnation = f"load-{ULID()}"
        self._numbers: dict[tuple[str, int], int] = {}
        self._refused: Counter[str] = Counter()
        self._resumed: set[bytes] = set()
        self._sent: set[bytes] = set()
        self._refused_by_buffer: set[bytes] = set()
        self._known = 0

    async def run(self, records: Iterable[ArchivedTrajectory]) -> LoadReport:
        plan = self._plan
        self._check_step()
        spool = Spool(plan.data_dir, plan.run_name, _SPOOL_BYTES)
        sender = Sender(
            plan.endpoint,
            spool,
            Presence(),
            Metrics("vagen_actor", plan.run_name),
            run_id=plan.run_name,
            window=_WINDOW,
            heartbeat_s=_HEARTBEAT_S,
            keys=plan.keys,
            on_refused=self._count_refusal,
        )
        self._resumed = {entry.trajectory_id for entry in spool.entries()}
        sender.open()
        serving = asyncio.create_task(sender.run())
        try:
            status = await sender.wait_for_buffer(plan.timeout_s)
            keys = Keys(plan.run_name, Shard(status.shard, status.num_shards))
            await self._put_all(records, keys, spool, sender)
            await self._wait_until(lambda: not spool.in_flight, spool, sender)
        finally:
            serving.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await serving
            await sender.close()
            await spool.close()
            self._store.close()
            self._client.close()
        return LoadReport(
            stored=len(self._sent - self._refused_by_buffer),
            known=self._known,
            refused=dict(self._refused.most_common()),
        )

    async def _put_all(self, records: Iterable[ArchivedTrajectory], keys: Keys, spool: Spool, sender: Sender) -> None:
        dealt_with = 0
        left = iter(records)
        while chunk := list(itertools.islice(left, _CHUNK)):
            for record in self._not_known(chunk, keys):
                try:
                    trajectory = self._renamed(record, sender.actor_id)
                    validate_trajectory(trajectory)
                except TrajectoryError as error:
                    self._refused[f"{error.field}: {error.problem}"] += 1
                    continue
                await self._wait_until(lambda: spool.in_flight < 2 * _WINDOW, spool, sender)
                await sender.put(trajectory)
                self._sent.add(ULID.from_str(trajectory.trajectory_id).bytes)
            dealt_with += len(chunk)
            self._on_progress(dealt_with)

    def _not_known(self, chunk: list[ArchivedTrajectory], keys: Keys) -> list[ArchivedTrajectory]:
        """Those that the buffer has not decided on: it would count a second decision on one side only."""
        pipe: Any = self._client.pipeline(transaction=False)
        for record in chunk:
            name = record.trajectory.trajectory_id
            pipe.hexists(keys[Key.LIVE], name)
            pipe.zscore(keys[Key.SEEN], name)
            pipe.hget(keys[Key.REFUSED], name)
        answers = pipe.execute()
        fresh: dict[str, ArchivedTrajectory] = {}
        for number, record in enumerate(chunk):
            name = record.trajectory.trajectory_id
            live, seen, refusal = answers[3 * number : 3 * number + 3]
            key = ULID.from_str(name).bytes
            if key in self._resumed - self._sent:
                # An earlier load was killed with it in its spool.
                self._sent.add(key)
            elif refusal is not None:
                self._refused[": ".join(refusal.decode().split("\n", 1))] += 1
            elif live or seen is not None or name in fresh or key in self._sent:
                self._known += 1
            else:
                fresh[name] = record
        return list(fresh.values())

    def _renamed(self, record: ArchivedTrajectory, actor_id: str) -> Trajectory:
        """The trajectory as one of this run."""
        trajectory = record.trajectory
        if trajectory.behaviour_known:
            numbers = self._version_numbers(record)
            trajectory = msgspec.structs.replace(
                trajectory, rows=tuple(_with_versions(row, numbers) for row in trajectory.rows)
            )
        return msgspec.structs.replace(
            trajectory,
            run_id=self._plan.run_name,
            actor_id=actor_id,
            task_index=_FIRST_TASK + trajectory.task_index % _FIRST_TASK,
        )

    def _version_numbers(self, record: ArchivedTrajectory) -> dict[int, int]:
        """What each policy version of the record is called in this run."""
        versions = record.trajectory.versions
        if self._plan.as_step is not None:
            return {version: self._number(record.trajectory.run_id, version) for version in versions}
        here = self._store.version_steps(versions)
        for version, step in record.version_steps.items():
            if here.get(version, step) != step:
                problem = f"version {version} is of learner step {here[version]} here, of {step} in the archive"
                raise TrajectoryError("policy_versions", f"{problem}: this is another run, pass --as-step")
        return {version: version for version in versions}

    def _number(self, run_id: str, version: int) -> int:
        if (run_id, version) not in self._numbers:
            assert self._plan.as_step is not None
            number = self._store.next_version()
            self._store.record_version(number, self._incarnation, self._plan.as_step, checksum="")
            self._numbers[run_id, version] = number
        return self._numbers[run_id, version]

    def _check_step(self) -> None:
        step = self._plan.as_step
        reached = max(self._store.status().learner_step, 0)
        if step is not None and not 0 <= step <= reached:
            raise ConfigError(f"--as-step: expected 0 <= int <= {reached}, the learner's step, got {step}")

    def _count_refusal(self, refusal: Refusal) -> None:
        self._refused[f"{refusal.field}: {refusal.problem}"] += 1
        self._refused_by_buffer.add(refusal.trajectory_id)

    async def _wait_until(self, holds: Callable[[], bool], spool: Spool, sender: Sender) -> None:
        deadline = time.monotonic() + self._plan.timeout_s
        left = spool.in_flight
        while not holds():
            await sender.changed.wait(_HEARTBEAT_S)
            if spool.in_flight < left:
                left, deadline = spool.in_flight, time.monotonic() + self._plan.timeout_s
            if time.monotonic() > deadline:
                raise BufferUnavailableError(
                    f"the buffer at {self._plan.endpoint} has taken nothing for {self._plan.timeout_s:g} s: is it full?"
                    f" {spool.in_flight} trajectories wait in {self._plan.data_dir}, the same command goes on with them"
                )


def _with_versions(row: Row, numbers: dict[int, int]) -> Row:
    versions = row.policy_versions.copy()
    for old, new in numbers.items():
        versions[row.policy_versions == old] = new
    return msgspec.structs.replace(row, policy_versions=versions)
