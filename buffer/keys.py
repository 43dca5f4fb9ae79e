"""Every key in Redis: `vagen:{<tag>}:` and one of the names below.

The braces are the hash tag of Redis Cluster: all keys of a shard live in one slot, so a script may touch any of them.
The tag of a run with one shard is its name; those of several shards are chosen so that their slots spread evenly.
"""

from __future__ import annotations

import enum
import functools
import itertools
from dataclasses import dataclass

from redis.crc import key_slot

NUM_SLOTS = 16384
"""Of a Redis Cluster."""
MAX_SHARDS = 1024


@dataclass(frozen=True)
class Shard:
    """One of `count` independent parts of a run's buffer."""

    index: int = 0
    count: int = 1

    def tag(self, run_name: str) -> str:
        """The hash tag of this shard; its slot lies in the shard's equal share of all slots."""
        return run_name if self.count == 1 else _spread_tag(run_name, self.index, self.count)


@functools.cache
def _spread_tag(run_name: str, index: int, count: int) -> str:
    low, high = (NUM_SLOTS * i // count for i in (index, index + 1))
    tags = (f"{run_name}/{index}.{count}.{salt}" for salt in itertools.count())
    return next(tag for tag in tags if low <= key_slot(tag.encode()) < high)


class Key(enum.Enum):
    """Names of keys; those that end in `:` take a suffix. Scripts write `K.<name>` in lower case."""

    PAYLOAD = "p:"
    """String by trajectory id: the payload, as it came."""
    LIVE = "live"
    """Hash of trajectory ids that have a payload:
    `<oldest step>:<bytes>:<reward>:<success>:<turns>:<policy tokens>:<bytes of the task's name>:<task><group>`."""
    SEEN = "seen"
    """Sorted set of stored ids by oldest step, for dedupe; trimmed below the learner's floor."""
    SEQ_LOW = "seq:low"
    """Hash by actor: every sequence number up to this one is decided."""
    SEQ_ABOVE = "seq:above:"
    """Sorted set by actor: sequence numbers decided above the low one."""
    REFUSED = "refused"
    """Hash of refused ids: field, newline, problem."""
    REFUSED_AT = "refused:at"
    """Sorted set of refused ids by time, to forget the oldest."""
    REFUSED_FIELDS = "refused:fields"
    """Hash: number of refusals by field, without indices."""
    READY = "ready"
    """Sorted set of units by the step of their oldest member: a trajectory id, or `g:` and a group id."""
    PICKS = "picks"
    """Sorted set of ready units by exponential key, where the ingest has a priority function: lowest is drawn first."""
    WEIGHTS = "weights"
    """Hash of the units of `PICKS`: priority to the power alpha, in millionths."""
    ARRIVED = "arrived"
    """Sorted set of the units of `READY` by the arrival of their first member, counted over all stored."""
    GROUP = "g:"
    """Hash by group id: member ids with their oldest step, `last` (episodes complete), `room` (bytes promised),
    `arrived` (when the first member came, counted over all stored), `weight` (sum of the members') and `draw` (for its
    exponential key)."""
    WAITING = "waiting"
    """Sorted set of incomplete groups by the time at which their first member came."""
    STAT = "stat"
    """Hash of counters: the terms of the accounting identity, and bytes."""
    FILTERED_REASONS = "filtered:reasons"
    """Hash: number of filtered trajectories by the filter that dropped them."""
    REPLAY = "replay"
    """Sorted set of trained trajectories kept for replay and not claimed, by oldest step."""
    REPLAY_LIVE = "replay:live"
    """Hash of the ids kept for replay, claimed ones among them; values as in `LIVE`."""
    REPLAY_PAYLOAD = "r:"
    """String by id: the payload of a trajectory kept for replay."""
    MANIFEST = "b:"
    """String by step: the sealed manifest as JSON."""
    PLANS = "plans"
    """Hash by step, in the first shard: JSON of how many trajectories each shard gives to the step."""
    LAYOUT = "layout"
    """String, outside all shards: how many there are."""
    CLAIMS = "claims"
    """Hash by step: trajectories of manifests that are claimed and not done."""
    UNTRAINED = "untrained"
    """Hash by step: those of `CLAIMS` that no optimizer step has used yet."""
    WAKE = "wake"
    """List of at most one token: enough is ready for the learner that waits."""
    LEARNER = "learner"
    """Hash: what the learner registered, its step, floor and published version."""
    PACE = "pace"
    """Hash, times in seconds: `asked` (the step that the learner asked for last), `asked_at` (when first, by the
    server's clock), `waiting` (it is not sealed yet), `step_s` (the learner's own time of a step), `episode_s` (mean
    time from grant to end of an episode), `fresh_share` (of the last batch), `filtered_before` (counted up to its seal)
    and `filtered_last` (of them since the seal before)."""
    VERSION = "version"
    """Counter of policy versions; never goes back."""
    VERSION_STEPS = "version:steps"
    """Hash by policy version: its learner step."""
    VERSION_INFO = "version:info"
    """Hash by policy version: JSON of incarnation, step and checksum."""
    TASK_NEXT = "tasks:next"
    """Counter of task indices; never goes back."""
    TASKS = "tasks"
    """Hash of granted, unfinished tasks: `<attempt>:<fragments>:<actor>`."""
    TASK_LEASES = "tasks:leases"
    """Sorted set of running tasks by the time at which their lease ends."""
    TASK_STARTS = "tasks:starts"
    """Hash of granted, unfinished tasks: when their last attempt was granted, by the ingest's clock."""
    TASK_RETRY = "tasks:retry"
    """Sorted set of returned tasks by index: granted again before new ones."""
    ACTORS = "actors"
    """Hash by actor: JSON of its last heartbeat."""
    ENGINES = "engines"
    """Hash by url: JSON of kind and incarnation."""
    ENGINE_LEASES = "engines:leases"
    """Sorted set of urls by the time at which the announcement ends."""
    ADMITTED = "admitted"
    """Hash by url: JSON of incarnation, version and its learner step of an engine that may take traffic."""
    CONFIG = "config"
    """Hash: what the ingest's recipe says of each live setting, as JSON."""
    SETTINGS = "settings"
    """Hash of live settings: JSON of each value that overrides the recipe's."""
    SETTINGS_INFO = "settings:info"
    """Hash by live setting: JSON of when it was set and by whom."""
    SETTINGS_PROBLEMS = "settings:problems"
    """Hash by live setting: JSON of a value and why the learner does not apply it."""
    SETTINGS_LOG = "settings:log"
    """List of the last 1000 changes of settings, newest first, as JSON."""


class Keys:
    """Builds the keys of one shard of a run."""

    def __init__(self, run_name: str, shard: Shard = Shard()) -> None:
        self.prefix = f"vagen:{{{shard.tag(run_name)}}}:"

    def __getitem__(self, key: Key) -> str:
        return self.prefix + key.value

    def of(self, key: Key, suffix: str | int) -> str:
        """The key of one trajectory, group, step or actor."""
        return f"{self.prefix}{key.value}{suffix}"
