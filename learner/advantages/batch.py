"""The data of credit assignment: what goes in, what comes out, and where turns and segments begin and end.

`N` policy tokens of all segments one after another in the order in which they were sampled (observation and template
tokens are never among them), `K` turns, `S` segments. A segment is one fragment: a whole episode, unless cut.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from vagen.common.errors import TrajectoryError

Anchor: TypeAlias = Literal["end", "start"]
"""Token at which a turn's value is read."""


@dataclass(frozen=True)
class AdvantageInputs:
    """A batch of segments, flat. `checked` refuses one that contradicts itself."""

    rewards: Tensor
    """float32 `[N]`: paid at this token."""
    values: Tensor
    """float32 `[N]`: the critic's value of the state before this token; zeros without a critic."""
    behaviour_logprobs: Tensor
    """float32 `[N]`: under the policy that sampled the token."""
    proximal_logprobs: Tensor
    """float32 `[N]`: under the learner's weights when it took the batch."""
    turn_ids: Tensor
    """int64 `[N]`: non-decreasing, unique to a turn across the batch."""
    segment_ids: Tensor
    """int64 `[N]`: 0..S-1, non-decreasing, each present."""
    bootstrap_values: Tensor
    """float32 `[S]`: value of the state after the segment's last turn; 0 where the episode terminated."""
    group_ids: Tensor
    """int64 `[S]`: group of each segment, 0..num_groups-1, the same numbers on every rank."""
    num_groups: int | None = None
    """Groups of the global batch; required as soon as statistics are reduced over ranks."""
    task_ids: Tensor | None = None
    """int64 `[S]`: task of each segment, 0..num_tasks-1, the same numbers on every rank; for whitening per task."""
    num_tasks: int | None = None
    """Tasks of the run; required as soon as statistics per task are reduced over ranks."""

    def checked(self) -> Layout:
        """Check shapes, dtypes, order and finiteness; return the derived layout.

        Raises `TrajectoryError` that names the field. One device synchronisation.
        """
        num_tokens, num_segments = self.rewards.numel(), self.bootstrap_values.numel()
        for name, dtype, size in (
            ("rewards", torch.float32, num_tokens),
            ("values", torch.float32, num_tokens),
            ("behaviour_logprobs", torch.float32, num_tokens),
            ("proximal_logprobs", torch.float32, num_tokens),
            ("turn_ids", torch.int64, num_tokens),
            ("segment_ids", torch.int64, num_tokens),
            ("bootstrap_values", torch.float32, num_segments),
            ("group_ids", torch.int64, num_segments),
            ("task_ids", torch.int64, num_segments),
        ):
            tensor: Tensor | None = getattr(self, name)
            if tensor is None:
                continue
            if tensor.dtype != dtype or tuple(tensor.shape) != (size,):
                raise TrajectoryError(
                    name, f"expected {dtype} [{size}], got {tensor.dtype} {list(tensor.shape)} (N is set by rewards)"
                )
            if tensor.device != self.rewards.device:
                raise TrajectoryError(name, f"expected on {self.rewards.device}, got {tensor.device}")
        if num_tokens == 0:
            raise TrajectoryError("rewards", "expected at least one policy token, got none")
        self._check_contents(num_segments)
        return Layout.of(self.turn_ids, self.segment_ids)

    def _check_contents(self, num_segments: int) -> None:
        turns, segments = (self.turn_ids[:-1], self.turn_ids[1:]), (self.segment_ids[:-1], self.segment_ids[1:])
        numbered = [("group_ids", self.group_ids, self.num_groups)]
        numbered += [] if self.task_ids is None else [("task_ids", self.task_ids, self.num_tasks)]
        is_boundary = segments[0] != segments[1]
        problems: list[tuple[str, str, Tensor]] = [
            # both bounds are not a number if anything is
            (name, "expected finite numbers", ~torch.isfinite(torch.stack(getattr(self, name).aminmax())).all())
            for name in ("rewards", "values", "behaviour_logprobs", "proximal_logprobs", "bootstrap_values")
        ]
        problems += [
            ("turn_ids", "expected non-decreasing numbers", (turns[0] > turns[1]).any()),
            ("turn_ids", "expected turns within one segment", (is_boundary & (turns[0] == turns[1])).any()),
            (
                "segment_ids",
                f"expected 0..{num_segments - 1}, non-decreasing and each present",
                (segments[0] > segments[1]).any()
                | (is_boundary.sum() != num_segments - 1)
                | (self.segment_ids[0] != 0)
                | (self.segment_ids[-1] != num_segments - 1),
            ),
        ]
        problems += [
            (name, f"expected 0..num_{name.removesuffix('_ids')}s-1", ((ids < 0) | (ids >= _limit(count))).any())
            for name, ids, count in numbered
        ]
        found = torch.stack([is_bad for *_, is_bad in problems]).tolist()
        for (name, expected, _), is_bad in zip(problems, found, strict=True):
            if is_bad:
                raise TrajectoryError(name, f"{expected}, got something else")


def _limit(count: int | None) -> int:
    return torch.iinfo(torch.int64).max if count is None else count


@dataclass(frozen=True)
class AdvantageOutputs:
    """Per policy token, `[N]`."""

    advantages: Tensor
    """float32."""
    value_targets: Tensor
    """float32: what the critic should say; meaningless where `value_mask` is false."""
    value_mask: Tensor
    """bool: whether this token has a critic target at all."""


@dataclass(frozen=True)
class Layout:
    """Where turns and segments begin and end: positions among the tokens unless said otherwise, int64."""

    starts: Tensor
    """`[K]`: first token of each turn."""
    ends: Tensor
    """`[K]`: last token of each turn."""
    segment_ends: Tensor
    """`[S]`: last token of each segment."""
    last_turns: Tensor
    """`[S]`: last turn of each segment, among the turns."""
    turn_of_token: Tensor
    """`[N]`: 0..K-1."""
    segment_of_token: Tensor
    """`[N]`: 0..S-1."""

    @classmethod
    def of(cls, turn_ids: Tensor, segment_ids: Tensor) -> Layout:
        is_new_turn = turn_ids[1:] != turn_ids[:-1]
        final = turn_ids.new_tensor([turn_ids.numel() - 1])
        turn_ends = is_new_turn.nonzero().squeeze(-1)
        segment_ends = torch.cat([(segment_ids[1:] != segment_ids[:-1]).nonzero().squeeze(-1), final])
        turn_of_token = torch.zeros_like(turn_ids)
        torch.cumsum(is_new_turn, 0, out=turn_of_token[1:])
        return cls(
            starts=torch.cat([final.new_zeros(1), turn_ends + 1]),
            ends=torch.cat([turn_ends, final]),
            segment_ends=segment_ends,
            last_turns=turn_of_token[segment_ends],
            turn_of_token=turn_of_token,
            segment_of_token=segment_ids,
        )

    @property
    def segment_of_turn(self) -> Tensor:
        """`[K]`: 0..S-1."""
        return self.segment_of_token[self.ends]

    def anchors(self, anchor: Anchor) -> Tensor:
        """The token of each turn at which its value is read, `[K]`."""
        return self.ends if anchor == "end" else self.starts

    def sum_over_turns(self, terms: Tensor) -> Tensor:
        """Sum of `terms` `[N]` over each turn, float64 `[K]`."""
        zeros = terms.new_zeros(self.ends.numel(), dtype=torch.float64)
        return zeros.index_add_(0, self.turn_of_token, terms.double())

    def sum_over_segments(self, terms: Tensor) -> Tensor:
        """Sum of `terms` `[N]` over each segment, float64 `[S]`."""
        zeros = terms.new_zeros(self.segment_ends.numel(), dtype=torch.float64)
        return zeros.index_add_(0, self.segment_of_token, terms.double())
