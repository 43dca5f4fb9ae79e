"""What a step's global batch was like, from the parts of it that data-parallel ranks have.

Owns which numbers are kept of trajectories, and the names of those fields in the journal.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from vagen.learner.batching import TrainingBatch
from vagen.learner.model.collectives import gather_objects_over_data_parallel

__all__ = ["BatchSummary"]


@dataclass(frozen=True, kw_only=True)
class BatchSummary:
    """One value for each trajectory, unless said otherwise."""

    successes: list[bool]
    rewards: list[float]
    rewards_by_component: Counter[str]
    """Sums over all trajectories."""
    num_turns: list[int]
    num_format_ok: int
    """Turns."""
    policy_tokens: int
    context_tokens: int
    staleness: list[int]
    num_mixed_version: int

    @classmethod
    def of(cls, batch: TrainingBatch) -> BatchSummary:
        """That of this rank's part."""
        trajectories = batch.trajectories
        components: Counter[str] = Counter()
        for trajectory in trajectories:
            components.update(dict(trajectory.reward_by_component))
        return cls(
            successes=[bool(t.success) for t in trajectories],
            rewards=[float(t.total_reward) for t in trajectories],
            rewards_by_component=components,
            num_turns=[len(t.turns) for t in trajectories],
            num_format_ok=sum(turn.format_ok for trajectory in trajectories for turn in trajectory.turns),
            policy_tokens=batch.num_policy_tokens,
            context_tokens=batch.num_context_tokens,
            staleness=batch.staleness.tolist(),
            num_mixed_version=sum(t.oldest_version != t.newest_version for t in trajectories),
        )

    @classmethod
    def of_all_ranks(cls, batch: TrainingBatch) -> BatchSummary:
        """That of the global batch; collective over the data-parallel ranks."""
        return cls.merged(gather_objects_over_data_parallel(cls.of(batch)))

    @classmethod
    def merged(cls, parts: Sequence[BatchSummary]) -> BatchSummary:
        """The summary of several parts' trajectories."""
        components: Counter[str] = Counter()
        for part in parts:
            # Not the sum of counters, which drops what is not positive.
            components.update(part.rewards_by_component)
        return cls(
            successes=[value for part in parts for value in part.successes],
            rewards=[value for part in parts for value in part.rewards],
            rewards_by_component=components,
            num_turns=[value for part in parts for value in part.num_turns],
            num_format_ok=sum(part.num_format_ok for part in parts),
            policy_tokens=sum(part.policy_tokens for part in parts),
            context_tokens=sum(part.context_tokens for part in parts),
            staleness=[value for part in parts for value in part.staleness],
            num_mixed_version=sum(part.num_mixed_version for part in parts),
        )

    def fields(self) -> dict[str, Any]:
        """As the journal has them."""
        count = len(self.rewards)
        return {
            "num_trajectories": count,
            "success": float(np.mean(self.successes)),
            "reward_mean": sum(self.rewards_by_component.values()) / count,
            "reward_std": float(np.std(self.rewards)),
            "reward_by_component": {name: total / count for name, total in sorted(self.rewards_by_component.items())},
            "turns_mean": float(np.mean(self.num_turns)),
            "format_rate": self.num_format_ok / sum(self.num_turns),
            "policy_tokens": self.policy_tokens,
            "context_tokens": self.context_tokens,
            "staleness": {str(key): value for key, value in sorted(Counter(self.staleness).items())},
            "mixed_version_trajectories": self.num_mixed_version,
        }
