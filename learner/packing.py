"""Rows packed into microbatches of a bounded number of tokens, in an order that every rank computes alike.

Legend: n scored tokens of a pack.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from vagen.learner.batching import PreparedRow
from vagen.learner.images import ImageStore
from vagen.learner.model.batch import PackedBatch


def pack_rows(rows: Sequence[PreparedRow], max_tokens: int) -> list[list[int]]:
    """Indices of `rows` in microbatches of at most `max_tokens` tokens each (a longer row is alone in its own).

    First-fit over rows in descending length; deterministic.
    """
    order = sorted(range(len(rows)), key=lambda index: (-len(rows[index]), index))
    bins: list[list[int]] = []
    room: list[int] = []
    for index in order:
        size = len(rows[index])
        for number, free in enumerate(room):
            if size <= free:
                bins[number].append(index)
                room[number] -= size
                break
        else:
            bins.append([index])
            room.append(max_tokens - size)
    return bins


@dataclass(frozen=True)
class RowMicrobatches:
    """Rows in packs that are made when they are asked for; with each comes the flat slots int64 [n] of its tokens."""

    rows: Sequence[PreparedRow]
    images: ImageStore
    members: list[list[int]]
    """Rows of each pack."""

    def __len__(self) -> int:
        return len(self.members)

    def __iter__(self) -> Iterator[tuple[PackedBatch, torch.Tensor]]:
        for members in self.members:
            packed = [self.rows[index] for index in members]
            yield _pack(packed, self.images), torch.from_numpy(np.concatenate([row.slots for row in packed]))


def microbatches(rows: Sequence[PreparedRow], images: ImageStore, max_tokens: int) -> RowMicrobatches:
    """Rows packed as `pack_rows` says."""
    return RowMicrobatches(rows, images, pack_rows(rows, max_tokens))


def _pack(rows: Sequence[PreparedRow], images: ImageStore) -> PackedBatch:
    starts = np.cumsum([0, *(len(row) for row in rows)])
    scored = [row.score_positions + start for row, start in zip(rows, starts[:-1], strict=True)]
    return PackedBatch(
        token_ids=torch.from_numpy(np.concatenate([row.token_ids for row in rows])),
        position_ids=torch.from_numpy(np.concatenate([row.position_ids for row in rows], axis=1)),
        cu_seqlens=torch.from_numpy(starts.astype(np.int32)),
        score_positions=torch.from_numpy(np.concatenate(scored).astype(np.int64)),
        images=images.batch([name for row in rows for name in row.images]),
    )
