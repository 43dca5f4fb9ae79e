"""The data types of one trajectory: what an actor reports of an episode, or of a part of it.

Owns the types and nothing else: `vagen.common.validation` says what may be trained on, `vagen.common.wire` how it
travels.
Legend of shapes: `T` tokens of a row, `K` turns. Arrays are one-dimensional numpy arrays.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping

import msgspec
import numpy as np
import xxhash

SCHEMA_VERSION = 1


class Record(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, eq=False):
    """Base of everything inside a trajectory."""


class End(enum.Enum):
    """How a trajectory's last turn left the episode."""

    TERMINATED = "terminated"
    """The environment ended it: the value of the next state is 0."""
    TRUNCATED = "truncated"
    """A limit ended it: the value of the next state is the critic's of the bootstrap prompt."""
    CUT = "cut"
    """The episode goes on in the next fragment; bootstrapped as if truncated."""


class ImageRef(Record, frozen=True, kw_only=True):
    """One image in a row of tokens."""

    content_hash: str
    """`content_hash` of the encoded bytes, the key into `Trajectory.images`."""
    grid_thw: tuple[int, int, int]
    """Patches along time, height and width, before merging."""
    start: int
    """Position of the image's first placeholder in the row."""
    num_tokens: int
    """Placeholders the image takes: t * h * w / merge_size ** 2."""


class Row(Record, frozen=True, kw_only=True):
    """One contiguous token sequence, exactly as the engine saw and sampled it, image placeholders expanded."""

    token_ids: np.ndarray
    """int32 `[T]`."""
    policy_mask: np.ndarray
    """uint8 `[T]`, 1 where the policy sampled the token."""
    behaviour_logprobs: np.ndarray
    """float32 `[T]`, at the sampling temperature over the full vocabulary; 0 where masked. NaN at every policy token of
    a trajectory whose behaviour policy is unknown."""
    policy_versions: np.ndarray
    """int32 `[T]`, the version that sampled the token; -1 where masked, or where the behaviour policy is unknown."""
    turn_index: np.ndarray
    """int16 `[T]`, the turn that the token answers; -1 where masked."""
    images: tuple[ImageRef, ...] = ()
    """In the order of their placeholders."""


class Turn(Record, frozen=True, kw_only=True):
    """One observation and the response to it."""

    index: int
    """0-based within the episode (a fragment starts where the previous one stopped)."""
    row: int
    start: int
    """First position of the response in its row."""
    end: int
    """One past the last position of the response."""
    format_ok: bool
    action_valid: bool
    actions: tuple[str, ...] = ()
    finish_reason: str = "stop"
    """`stop` or `length`, as the engine said."""
    engine_s: float = 0.0
    env_s: float = 0.0
    metrics: dict[str, float] = {}
    judge: dict[str, str] = {}
    """Text and verdict of a judge, empty when none was asked."""
    state: str = ""
    """What the environment says of its state before the response: for a privileged critic, never shown to the policy.
    Empty where it says nothing."""


class RewardEntry(Record, frozen=True, kw_only=True):
    """A reward of one component, paid at one policy token."""

    component: str
    row: int
    token: int
    """Position in the row."""
    value: float


class BootstrapPrompt(Record, frozen=True, kw_only=True):
    """The prompt that would have come next; the learner's critic values it unless the episode terminated."""

    token_ids: np.ndarray
    """int32 `[T]`, image placeholders expanded."""
    images: tuple[ImageRef, ...] = ()
    state: str = ""
    """As a turn's."""


class SamplingParams(Record, frozen=True, kw_only=True):
    """How the policy's tokens were sampled."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    max_new_tokens: int = 256


class VisionTokens(Record, frozen=True, kw_only=True):
    """The model's vision vocabulary: what a row's placeholders are, and what the policy must never sample."""

    image_token_id: int
    forbidden_token_ids: tuple[int, ...]
    """All tokens that only a template may place, the image token among them."""
    merge_size: int = 2


class EngineIdentity(Record, frozen=True, kw_only=True):
    """Which engine sampled."""

    kind: str
    """`local` or `sglang`."""
    incarnation: str
    """Changes with every start of the engine process."""
    model_hash: str
    tokenizer_hash: str


class Trajectory(Record, frozen=True, kw_only=True):
    """What one actor reports of one episode, or of one fragment of it: the unit of buffer, manifest and accounting."""

    trajectory_id: str
    """ULID: the idempotency key."""
    run_id: str
    actor_id: str
    actor_seq: int
    """Position in the actor's journal, from 1."""
    episode_id: str
    """ULID, the same for all fragments of an episode."""
    fragment_index: int = 0
    is_last: bool = True
    attempt: int = 0
    schema_version: int = SCHEMA_VERSION

    task: str
    """What is to be solved, as the environment names it."""
    task_index: int
    """Position in the sequence of tasks of the buffer's shard that granted it."""
    seed: int
    group_id: str
    group_size: int = 1
    role: str = "agent"
    """Which of several agents this is the record of."""
    env_name: str
    harness_name: str
    splits_episode_across_rows: bool
    sampling: SamplingParams
    engine: EngineIdentity
    vision: VisionTokens | None = None

    rows: tuple[Row, ...]
    turns: tuple[Turn, ...]
    rewards: tuple[RewardEntry, ...]
    end: End
    bootstrap: BootstrapPrompt | None = None
    success: bool
    metrics: dict[str, float] = {}
    images: dict[str, bytes] = {}
    """Encoded bytes, exactly as the engine saw them, once each by content hash."""
    started_at: float = 0.0
    """Unix time in seconds."""
    finished_at: float = 0.0

    @property
    def oldest_version(self) -> int:
        """The version of the oldest policy token; staleness is measured from it."""
        return min(int(row.policy_versions[row.policy_mask != 0].min()) for row in self.rows if row.policy_mask.any())

    @property
    def newest_version(self) -> int:
        """The version of the newest policy token."""
        return max(int(row.policy_versions.max()) for row in self.rows)

    @property
    def versions(self) -> list[int]:
        """Versions that sampled at least one token, ascending."""
        found: set[int] = set()
        for row in self.rows:
            sampled = row.policy_versions.take(np.flatnonzero(row.policy_mask))
            # Most often there is one, and to see that is cheaper than to sort.
            is_one = len(sampled) > 0 and sampled.min() == sampled.max()
            found.update((sampled[:1] if is_one else np.unique(sampled)).tolist())
        return sorted(found)

    @property
    def behaviour_known(self) -> bool:
        """Whether it is known with which probability the policy tokens were sampled."""
        return not any(np.isnan(row.behaviour_logprobs).any() for row in self.rows)

    @property
    def num_policy_tokens(self) -> int:
        """Tokens that the policy sampled, over all rows."""
        return sum(int(np.count_nonzero(row.policy_mask)) for row in self.rows)

    @property
    def num_tokens(self) -> int:
        """All tokens of all rows, the expanded image placeholders among them."""
        return sum(len(row.token_ids) for row in self.rows)

    @property
    def reward_by_component(self) -> Mapping[str, float]:
        """Total reward of each component."""
        totals: dict[str, float] = {}
        for entry in self.rewards:
            totals[entry.component] = totals.get(entry.component, 0.0) + entry.value
        return totals

    @property
    def total_reward(self) -> float:
        """Sum of all reward entries."""
        return sum(entry.value for entry in self.rewards)


def content_hash(encoded: bytes) -> str:
    """Content hash of an encoded image: xxh3-128, 32 hexadecimal digits."""
    return xxhash.xxh3_128_hexdigest(encoded)
