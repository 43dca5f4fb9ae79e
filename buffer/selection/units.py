"""What a selection chooses from: trajectories and the whole units they come in, without payloads."""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from vagen.common.trajectory import Trajectory


class Candidate(msgspec.Struct, frozen=True, kw_only=True):
    """One trajectory that may be trained on."""

    trajectory_id: str
    group_id: str
    task: str
    total_reward: float
    success: bool
    num_turns: int
    num_policy_tokens: int
    staleness: int
    """In learner steps, at the step that would train it."""
    oldest_step: int
    num_bytes: int
    num_tokens: int = 0
    """All tokens of its rows; 0 where it was stored before that was kept."""


class Unit(msgspec.Struct, frozen=True, kw_only=True):
    """A trajectory of its own or a group, taken or left as a whole."""

    name: str
    """Its name in the buffer."""
    members: tuple[Candidate, ...]
    weight: float = 0.0
    """Relative probability of being drawn, in arbitrary units; 0 where the buffer has no priority function."""
    was_dropped: bool = False
    """An earlier look at the same step dropped all of it; filters are shown it for what it says of the others."""

    def __len__(self) -> int:
        return len(self.members)

    @property
    def rewards(self) -> list[float]:
        """Total rewards of the members."""
        return [member.total_reward for member in self.members]

    @property
    def success_rate(self) -> float:
        """Share of members that succeeded."""
        return sum(member.success for member in self.members) / len(self.members)


class Proposal(NamedTuple):
    """Candidates for a step, in the order asked for."""

    units: list[Unit]
    replayed: list[Candidate]
    """Trained before, to be drawn again."""
    num_units: int
    """Units that are ready."""
    total_weight: float
    """Their weight."""


def attributes(trajectory: Trajectory) -> str:
    """What the buffer keeps of a trajectory beside its payload, as text; the group's name follows it."""
    task = trajectory.task
    return (
        f"{trajectory.total_reward!r}:{int(trajectory.success)}:{len(trajectory.turns)}:"
        f"{trajectory.num_policy_tokens}/{trajectory.num_tokens}:{len(task.encode())}:{task}"
    )


def read_candidate(trajectory_id: bytes, described: bytes, step: int) -> Candidate:
    """A candidate for `step` from its id and what the buffer keeps of it."""
    born, num_bytes, reward, success, turns, tokens, length, names = described.split(b":", 7)
    num_policy_tokens, _, num_tokens = tokens.partition(b"/")
    return Candidate(
        trajectory_id=trajectory_id.decode(),
        group_id=names[int(length) :].decode(),
        task=names[: int(length)].decode(),
        total_reward=float(reward),
        success=success == b"1",
        num_turns=int(turns),
        num_policy_tokens=int(num_policy_tokens),
        staleness=max(0, step - int(born)),
        oldest_step=int(born),
        num_bytes=int(num_bytes),
        num_tokens=int(num_tokens or 0),
    )
