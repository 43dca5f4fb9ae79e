"""Batches for the tests of credit assignment, built episode by episode."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import pytest
import torch

from vagen.learner.advantages.batch import AdvantageInputs

DEVICES = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]


@dataclass(frozen=True)
class Episode:
    """Policy tokens of one segment; `turns` are the lengths of its turns, `log_ratio` proximal minus behaviour."""

    turns: Sequence[int]
    rewards: Sequence[float]
    values: Sequence[float] = ()
    log_ratio: Sequence[float] = ()
    bootstrap: float = 0.0
    group: int = 0
    task: int | None = None
    values_or_zeros: list[float] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "values_or_zeros", list(self.values) or [0.0] * len(self.rewards))
        assert sum(self.turns) == len(self.rewards) == len(self.values_or_zeros)


BatchMaker = Callable[..., AdvantageInputs]


@pytest.fixture(scope="session")
def batch() -> BatchMaker:
    """Make `AdvantageInputs` of episodes; turn ids have gaps, as those of a real batch may."""

    def make(
        *episodes: Episode, device: str = "cpu", num_groups: int | None = None, num_tasks: int | None = None
    ) -> AdvantageInputs:
        rewards, values, ratios, turn_ids, segment_ids = [], [], [], [], []
        turn = 3
        for segment, episode in enumerate(episodes):
            rewards += list(episode.rewards)
            values += episode.values_or_zeros
            ratios += list(episode.log_ratio) or [0.0] * len(episode.rewards)
            segment_ids += [segment] * len(episode.rewards)
            for length in episode.turns:
                turn_ids += [turn] * length
                turn += 2
        tasks = [episode.task for episode in episodes]
        behaviour = torch.linspace(-2.0, -0.5, len(rewards))
        return AdvantageInputs(
            rewards=torch.tensor(rewards, dtype=torch.float32, device=device),
            values=torch.tensor(values, dtype=torch.float32, device=device),
            behaviour_logprobs=behaviour.to(device),
            proximal_logprobs=(behaviour + torch.tensor(ratios, dtype=torch.float32)).to(device),
            turn_ids=torch.tensor(turn_ids, device=device),
            segment_ids=torch.tensor(segment_ids, device=device),
            bootstrap_values=torch.tensor([e.bootstrap for e in episodes], dtype=torch.float32, device=device),
            group_ids=torch.tensor([e.group for e in episodes], device=device),
            num_groups=num_groups,
            task_ids=torch.tensor(tasks, device=device) if None not in tasks else None,
            num_tasks=num_tasks,
        )

    return make


@pytest.fixture(scope="session")
def episode() -> type[Episode]:
    return Episode


@pytest.fixture(scope="session", params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    return str(request.param)
