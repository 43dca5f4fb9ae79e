"""From trajectories to rows and flat tensors: which token is scored where.

Owns the order of policy tokens (the order in which they were sampled, trajectory after trajectory) and the mapping
between that flat order and the rows. Does not own how rows fill microbatches (`packing`), the model, advantages or
losses.

Legend: B trajectories, S = B segments, N policy tokens of the batch, T tokens of a row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from vagen.common.errors import ConfigError, TrajectoryError
from vagen.common.towers import AnyImageSpec, image_spec
from vagen.common.trajectory import ImageRef, Row, Trajectory, VisionTokens
from vagen.common.vision import Grid
from vagen.common.vocabulary import read_model_json, vision_tokens
from vagen.learner.images import ImageStore
from vagen.learner.privileged import StateText

__all__ = ["PreparedRow", "RowPreparer", "TrainingBatch", "partition", "prepare_batch"]


@dataclass(frozen=True, kw_only=True)
class PreparedRow:
    """One row, ready for the model.

    token_ids int64 [T]; position_ids int64 [3, T]; score_positions int64 [n] of its scored tokens; slots int64 [n], the
    place of each in the batch's flat order (of policy tokens, or of segments for a bootstrap row); images: keys into
    the `ImageStore`, in order of their placeholders.
    """

    token_ids: np.ndarray
    position_ids: np.ndarray
    score_positions: np.ndarray
    slots: np.ndarray
    images: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.token_ids)


@dataclass(frozen=True, kw_only=True)
class TrainingBatch:
    """One step's data of this data-parallel rank.

    behaviour_logprobs, rewards float32 [N]; turn_ids, segment_ids, versions int64 [N]; staleness int64 [B] (per
    trajectory, as recorded at claim); group_ids int64 [B], the same numbers on every rank.
    """

    rows: list[PreparedRow]
    bootstrap_rows: list[PreparedRow]
    images: ImageStore
    behaviour_logprobs: torch.Tensor
    rewards: torch.Tensor
    turn_ids: torch.Tensor
    segment_ids: torch.Tensor
    versions: torch.Tensor
    staleness: torch.Tensor
    group_ids: torch.Tensor
    num_groups: int
    """Groups of the global batch."""
    positions: torch.Tensor
    """int64 [B]: the trajectories' places in the global batch, ascending."""
    num_global_segments: int
    """Trajectories of the global batch."""
    temperature: float
    weights: torch.Tensor | None = None
    """float32 [B]: what each trajectory counts in the loss beside its share; None where all count 1."""
    privileged_rows: list[PreparedRow] | None = None
    privileged_bootstrap_rows: list[PreparedRow] | None = None
    """The same rows as a privileged critic reads them: see `privileged.StateText`."""
    trajectories: list[Trajectory]

    @property
    def valued_rows(self) -> list[PreparedRow]:
        """What the critic reads, row by row."""
        return self.rows if self.privileged_rows is None else self.privileged_rows

    @property
    def valued_bootstrap_rows(self) -> list[PreparedRow]:
        """What the critic reads of the bootstrap prompts."""
        return self.bootstrap_rows if self.privileged_bootstrap_rows is None else self.privileged_bootstrap_rows

    @property
    def num_policy_tokens(self) -> int:
        """N."""
        return len(self.rewards)

    @property
    def num_segments(self) -> int:
        """S."""
        return len(self.trajectories)

    @property
    def num_context_tokens(self) -> int:
        """Tokens of all rows that the policy did not sample."""
        return sum(map(len, self.rows)) - self.num_policy_tokens


class RowPreparer:
    """Makes `PreparedRow`s for one model: knows its image geometry and its vocabulary.

    `spec` and `vision` are None for a text model, `states` without a privileged critic.
    """

    def __init__(
        self, spec: AnyImageSpec | None, vision: VisionTokens | None, vocab_size: int, states: StateText | None = None
    ) -> None:
        self.vision = vision
        self.states = states
        self._spec = spec
        self._vocab_size = vocab_size

    @classmethod
    def load(cls, model_dir: Path, *, privileged: bool = False) -> RowPreparer:
        """Read what a model directory says; `privileged` is for a critic that reads the state's text.

        Raises `ConfigError` for a file that is missing or malformed.
        """
        vision = vision_tokens(model_dir)
        config = read_model_json(model_dir / "config.json")
        vocab_size = (config.get("text_config") or config).get("vocab_size")
        if not isinstance(vocab_size, int):
            raise ConfigError(f"{model_dir / 'config.json'}: vocab_size must be an int, got {vocab_size!r}")
        states = StateText.load(model_dir, vision) if privileged else None
        return cls(image_spec(model_dir) if vision else None, vision, vocab_size, states)

    @property
    def forbidden_token_ids(self) -> torch.Tensor:
        """int64: what the policy never samples."""
        return torch.tensor(self.vision.forbidden_token_ids if self.vision else (), dtype=torch.int64)

    def new_store(self) -> ImageStore:
        """An empty store for the images of one batch."""
        return ImageStore(self._spec)

    def policy_row(self, row: Row, slots: np.ndarray, encoded: dict[str, bytes], store: ImageStore) -> PreparedRow:
        """A row whose policy tokens are scored. `slots` int64 [n], one for each of them."""
        scored = np.flatnonzero(row.policy_mask)
        if scored[0] == 0:
            raise TrajectoryError("rows.policy_mask", "the first token of a row has no prompt before it")
        return self._row(row.token_ids, row.images, scored, slots, encoded, store)

    def bootstrap_row(
        self,
        token_ids: np.ndarray,
        images: Sequence[ImageRef],
        segment: int,
        encoded: dict[str, bytes],
        store: ImageStore,
    ) -> PreparedRow:
        """A prompt whose state, before the token that would come next, is valued; that token's id does not matter."""
        ids = np.append(token_ids, 0)
        return self._row(ids, images, np.array([len(ids) - 1]), np.array([segment]), encoded, store)

    def _row(
        self,
        token_ids: np.ndarray,
        images: Sequence[ImageRef],
        scored: np.ndarray,
        slots: np.ndarray,
        encoded: dict[str, bytes],
        store: ImageStore,
    ) -> PreparedRow:
        if int(token_ids.max()) >= self._vocab_size:
            raise TrajectoryError(
                "rows.token_ids", f"token {int(token_ids.max())} in a vocabulary of {self._vocab_size}"
            )
        grids = [store.add(image.content_hash, encoded[image.content_hash]) for image in images]
        for image, grid in zip(images, grids, strict=True):
            if image.grid_thw != grid:
                raise TrajectoryError("rows.images", f"grid {image.grid_thw} sent, {grid} by the learner's processor")
        return PreparedRow(
            token_ids=token_ids.astype(np.int64),
            position_ids=self._positions(token_ids, grids),
            score_positions=scored,
            slots=slots,
            images=tuple(image.content_hash for image in images),
        )

    def _positions(self, token_ids: np.ndarray, grids: Sequence[Grid]) -> np.ndarray:
        """int64 [3, T]."""
        if self.vision is None or self._spec is None:
            return np.broadcast_to(np.arange(len(token_ids)), (3, len(token_ids)))
        return self._spec.positions(token_ids, grids, self.vision.image_token_id)


def prepare_batch(
    trajectories: Sequence[Trajectory],
    staleness: Sequence[int],
    groups: Mapping[str, int],
    preparer: RowPreparer,
    weights: Sequence[float] | None = None,
    positions: Sequence[int] | None = None,
    num_global_segments: int | None = None,
) -> TrainingBatch:
    """Lay out trajectories as rows and flat arrays of policy tokens.

    `staleness` is that of each trajectory, `groups` numbers the groups of the global batch from 0. `weights` is what
    each trajectory counts in the loss, 1 each by default. A rank that has a part of the global batch gives the
    `positions` of its trajectories in it.
    Raises `TrajectoryError` for what does not fit the model (grids, vocabulary, one temperature for the batch).
    """
    temperatures = {trajectory.sampling.temperature for trajectory in trajectories}
    if len(temperatures) != 1:
        raise TrajectoryError("sampling.temperature", f"expected one for the batch, got {sorted(temperatures)}")
    tokens, rows = _FlatTokens(), _BatchRows(preparer)
    for segment, trajectory in enumerate(trajectories):
        rows.add(trajectory, segment, tokens.add(trajectory, segment))
    return TrainingBatch(
        rows=rows.policy,
        bootstrap_rows=rows.bootstrap,
        privileged_rows=rows.privileged,
        privileged_bootstrap_rows=rows.privileged_bootstrap,
        images=rows.store,
        **tokens.tensors(),
        staleness=torch.tensor(list(staleness)),
        group_ids=torch.tensor([groups[t.group_id] for t in trajectories]),
        num_groups=len(groups),
        positions=torch.tensor(list(range(len(trajectories)) if positions is None else positions)),
        num_global_segments=len(trajectories) if num_global_segments is None else num_global_segments,
        temperature=temperatures.pop(),
        weights=None if weights is None else torch.tensor(list(weights), dtype=torch.float32),
        trajectories=list(trajectories),
    )


class _BatchRows:
    """The rows of the trajectories so far, and the images that they share.

    `privileged` and `privileged_bootstrap` are the same as a privileged critic reads them, None where there is none.
    """

    def __init__(self, preparer: RowPreparer) -> None:
        self.policy: list[PreparedRow] = []
        self.bootstrap: list[PreparedRow] = []
        self.privileged: list[PreparedRow] | None = None if preparer.states is None else []
        self.privileged_bootstrap: list[PreparedRow] | None = None if preparer.states is None else []
        self.store = preparer.new_store()
        self._preparer = preparer

    def add(self, trajectory: Trajectory, segment: int, slots: Sequence[np.ndarray]) -> None:
        """Take the next trajectory; `slots` int64 are the places of each row's policy tokens in the flat order."""
        states, encoded = self._preparer.states, trajectory.images
        for number, (row, row_slots) in enumerate(zip(trajectory.rows, slots, strict=True)):
            if not len(row_slots):
                continue
            self.policy.append(self._preparer.policy_row(row, row_slots, encoded, self.store))
            if states is not None and self.privileged is not None:
                told = states.row(row, [turn for turn in trajectory.turns if turn.row == number])
                self.privileged.append(self._preparer.policy_row(told, row_slots, encoded, self.store))
        prompt = trajectory.bootstrap
        if prompt is None:
            return
        images = prompt.images
        self.bootstrap.append(self._preparer.bootstrap_row(prompt.token_ids, images, segment, encoded, self.store))
        if states is not None and self.privileged_bootstrap is not None:
            ids = states.prompt(prompt)
            self.privileged_bootstrap.append(self._preparer.bootstrap_row(ids, images, segment, encoded, self.store))


class _FlatTokens:
    """The policy tokens of the trajectories so far, in the batch's flat order."""

    def __init__(self) -> None:
        self._logprobs: list[np.ndarray] = []
        self._rewards: list[np.ndarray] = []
        self._turn_ids: list[np.ndarray] = []
        self._segment_ids: list[np.ndarray] = []
        self._versions: list[np.ndarray] = []
        self._num_tokens = self._num_turns = 0

    def add(self, trajectory: Trajectory, segment: int) -> list[np.ndarray]:
        """Append a trajectory's; returns for each of its rows the int64 slots of its policy tokens."""
        order = _TokenOrder(trajectory)
        self._logprobs.append(order.gather([row.behaviour_logprobs for row in trajectory.rows]))
        self._versions.append(order.gather([row.policy_versions for row in trajectory.rows]))
        turns = order.gather([row.turn_index for row in trajectory.rows]).astype(np.int64)
        self._turn_ids.append(turns - turns[0] + self._num_turns)
        self._segment_ids.append(np.full(order.num_tokens, segment))
        self._rewards.append(order.rewards(trajectory))
        slots = [row_slots + self._num_tokens for row_slots in order.slots]
        self._num_tokens += order.num_tokens
        self._num_turns = int(self._turn_ids[-1][-1]) + 1
        return slots

    def tensors(self) -> dict[str, torch.Tensor]:
        """Those of `TrainingBatch` that have an entry for each token."""
        return {
            "behaviour_logprobs": torch.from_numpy(np.concatenate(self._logprobs)),
            "rewards": torch.from_numpy(np.concatenate(self._rewards)),
            "turn_ids": torch.from_numpy(np.concatenate(self._turn_ids)),
            "segment_ids": torch.from_numpy(np.concatenate(self._segment_ids)),
            "versions": torch.from_numpy(np.concatenate(self._versions).astype(np.int64)),
        }


class _TokenOrder:
    """The policy tokens of one trajectory in the order in which they were sampled: by turn, then by position."""

    def __init__(self, trajectory: Trajectory) -> None:
        counts = [int(row.policy_mask.sum()) for row in trajectory.rows]
        turns = np.concatenate([row.turn_index[row.policy_mask != 0] for row in trajectory.rows])
        self._masks = [row.policy_mask != 0 for row in trajectory.rows]
        self._order = np.argsort(turns, kind="stable")
        self.num_tokens = len(turns)
        rank = np.empty(self.num_tokens, dtype=np.int64)
        rank[self._order] = np.arange(self.num_tokens)
        self.slots = np.split(rank, np.cumsum(counts)[:-1])

    def gather(self, per_row: Sequence[np.ndarray]) -> np.ndarray:
        """Values at policy tokens, in sampling order."""
        flat = np.concatenate([values[mask] for values, mask in zip(per_row, self._masks, strict=True)])
        return flat[self._order]

    def rewards(self, trajectory: Trajectory) -> np.ndarray:
        """Rewards float32 [n] of all components at the tokens at which they were paid."""
        per_row = [np.zeros(len(row.token_ids), dtype=np.float32) for row in trajectory.rows]
        for entry in trajectory.rewards:
            per_row[entry.row][entry.token] += entry.value
        return self.gather(per_row)


def partition(sizes: Sequence[int], num_parts: int) -> list[list[int]]:
    """Split trajectories of these `sizes` over `num_parts` data-parallel ranks so that the sums balance.

    Greedy longest-processing-time; a pure function of its arguments, so that every rank computes the same. Indices in
    each part ascend. Every part gets at least one trajectory when there are enough.
    """
    order = sorted(range(len(sizes)), key=lambda index: (-sizes[index], index))
    parts: list[list[int]] = [[] for _ in range(num_parts)]
    load = [0] * num_parts
    for index in order:
        lightest = min(range(num_parts), key=lambda part: (load[part], len(parts[part]), part))
        parts[lightest].append(index)
        load[lightest] += sizes[index]
    return [sorted(part) for part in parts]
