"""Context parallelism: how rows are cut over ranks, and attention over the parts against torch's over whole rows."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from megatron.core.models.common.embeddings.rope_utils import _apply_rotary_pos_emb_thd
from torch import Tensor

from tests.model import context_worker
from vagen.learner.model.attention import rotate, rotation
from vagen.learner.model.batch import PackedBatch
from vagen.learner.model.context_attention import ContextPlan, attend
from vagen.learner.model.context_images import first_images
from vagen.learner.model.context_shard import ContextShard, chunk_owner, padded_for_context

WORKER = Path(context_worker.__file__)
HEADS, GROUPS, WIDTH = 4, 2, 8
LENGTHS = (3, 61, 5, 41, 1, 60, 2, 33, 91)


def rows_of(*lengths: int, scored: tuple[int, ...] = ()) -> PackedBatch:
    """Rows of tokens 1, 2, ... at positions 10, 20, ... on every axis."""
    total = sum(lengths)
    bounds = torch.tensor([0, *lengths]).cumsum(0)
    return PackedBatch(
        token_ids=torch.arange(1, total + 1),
        position_ids=10 * torch.arange(1, total + 1).expand(3, total),
        cu_seqlens=bounds.int(),
        score_positions=torch.tensor(scored, dtype=torch.int64),
    )


def whole_rows(query: Tensor, key: Tensor, value: Tensor, batch: PackedBatch) -> Tensor:
    """torch's own attention of each row, [T, HEADS * WIDTH]."""
    parts = [x.split(batch.cu_seqlens.diff().tolist()) for x in (query, key, value)]
    rows = [
        F.scaled_dot_product_attention(*(x.transpose(0, 1)[None] for x in row), is_causal=True, enable_gqa=True)
        for row in zip(*parts, strict=True)
    ]
    return torch.cat([row[0].transpose(0, 1).flatten(1) for row in rows])


def attention_inputs(batch: PackedBatch) -> list[Tensor]:
    """Query, key, value and a weight of the output, float64."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(HEADS, WIDTH), (GROUPS, WIDTH), (GROUPS, WIDTH), (HEADS * WIDTH,)]
    total = len(batch.token_ids)
    return [torch.randn(total, *shape, generator=generator, dtype=torch.float64) for shape in shapes]


def test_rows_are_padded_to_chunks() -> None:
    padded = padded_for_context(rows_of(3, 4, 5, scored=(2, 4, 11)), 2)
    assert padded.token_ids.tolist() == [1, 2, 3, 0, 4, 5, 6, 7, 8, 9, 10, 11, 12, 0, 0, 0]
    assert padded.position_ids[2].tolist() == [10 * token for token in padded.token_ids.tolist()]
    assert padded.cu_seqlens.tolist() == [0, 4, 8, 16]
    assert padded.token_ids[padded.score_positions].tolist() == [3, 5, 12]
    # Each of two ranks then holds a number of tokens that three sequence-parallel ones can share.
    assert padded_for_context(padded, 2, 3).cu_seqlens.tolist() == [0, 4, 8, 16, 24]
    assert padded_for_context(rows_of(8, 4), 2).cu_seqlens.tolist() == [0, 8, 12]


def test_a_rank_holds_an_early_and_a_late_chunk_of_each_row() -> None:
    batch = rows_of(8, 4, scored=(1, 3, 7, 11))
    first, second = (ContextShard.build(batch, 2, rank) for rank in range(2))
    assert first.tokens.tolist() == [0, 1, 6, 7, 8, 11]
    assert second.tokens.tolist() == [2, 3, 4, 5, 9, 10]
    assert second.places.tolist() == [-1, -1, 0, 1, 2, 3, -1, -1, -1, 4, 5, -1]
    # Tokens 0, 2, 6 and 10 come before the scored ones.
    assert (first.scored.tolist(), first.rows.tolist()) == ([0, 2], [0, 2])
    assert (second.scored.tolist(), second.rows.tolist()) == ([1, 3], [0, 5])
    assert first.order.tolist() == second.order.tolist() == [0, 2, 1, 3]


def test_pictures_are_shared_out_evenly() -> None:
    assert first_images([4, 4, 4, 4], 2) == [0, 2, 4]
    assert first_images([96, 4, 4, 96], 4) == [0, 1, 2, 3, 4]
    assert first_images([400, 4, 4], 2) == [0, 1, 3]
    assert first_images([7], 3) == [0, 0, 1, 1]


@pytest.mark.parametrize("size", [2, 3, 4])
def test_parts_of_rows_attend_as_whole_rows(size: int) -> None:
    batch = padded_for_context(rows_of(*LENGTHS), size)
    query, key, value, weight = attention_inputs(batch)
    inputs = [x.requires_grad_() for x in (query, key, value)]
    expected = whole_rows(query, key, value, batch)

    def over_ranks(owner_of_keys: Callable[[int], int]) -> Tensor:
        shards = [ContextShard.build(batch, size, rank) for rank in range(size)]
        places = [shards[owner_of_keys(rank)].tokens for rank in range(size)]
        gathered = torch.cat([torch.cat([key, value], 1)[tokens] for tokens in places])
        output = torch.zeros_like(expected)
        for shard in shards:
            plan = ContextPlan.build(batch.cu_seqlens.diff().tolist(), size, shard.rank, torch.device("cpu"))
            output = output.index_copy(0, shard.tokens, attend(query[shard.tokens], gathered, plan))
        return output

    output = over_ranks(lambda rank: rank)
    torch.testing.assert_close(output, expected)
    wanted = torch.autograd.grad((expected * weight).sum(), inputs)
    for got, want in zip(torch.autograd.grad((output * weight).sum(), inputs), wanted, strict=True):
        torch.testing.assert_close(got, want)
    wrong = over_ranks(lambda rank: size - 1 - rank)
    assert (wrong - expected).abs().max() > 0.1, "keys in another order of ranks are another attention"


def test_ranks_do_nearly_the_same_work() -> None:
    batch = padded_for_context(rows_of(*[800] * 20, 640), 4)
    pairs = []
    for rank in range(4):
        plan = ContextPlan.build(batch.cu_seqlens.diff().tolist(), 4, rank, torch.device("cpu"))
        pairs.append(sum(x.num_chunks * x.num_queries * x.num_keys for x in plan.buckets))
    assert max(pairs) == min(pairs)
    assert [int(x) for x in chunk_owner(torch.arange(8), 4)] == [0, 1, 2, 3, 3, 2, 1, 0]


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_megatron_rotates_a_part_as_we_do(rank: int) -> None:
    """With Transformer Engine megatron rotates what a rank holds by the angles of the whole pack."""
    batch = padded_for_context(rows_of(7, 12, 1, 30), 3)
    tokens = ContextShard.build(batch, 3, rank).tokens
    total = len(batch.token_ids)
    half = torch.rand(total, 1, 1, WIDTH // 2, generator=torch.Generator().manual_seed(1))
    angles = torch.cat([half, half], -1)
    part = attention_inputs(batch)[0].float()[tokens]
    group: Any = SimpleNamespace(size=lambda: 3, rank=lambda: rank)
    megatrons = _apply_rotary_pos_emb_thd(part, batch.cu_seqlens, angles, cp_group=group)
    torch.testing.assert_close(rotate(part[:, None], *rotation(angles[tokens], torch.float32))[:, 0], megatrons)


@pytest.mark.slow
def test_ranks_attend_as_one_process(torchrun: Callable[..., None], tmp_path: Path) -> None:
    batches = {size: padded_for_context(rows_of(*LENGTHS), size) for size in (2, 4)}
    inputs = {size: attention_inputs(batch) for size, batch in batches.items()}
    torch.save({"batches": batches, "inputs": inputs}, tmp_path / "content.pt")
    torchrun(4, WORKER, tmp_path)
    for size, batch in batches.items():
        parts = [torch.load(tmp_path / f"cp{size}-rank{rank}.pt") for rank in range(4)]
        for dtype in (torch.float32, torch.float64):
            query, key, value, weight = (x.to(dtype).requires_grad_() for x in inputs[size])
            expected = whole_rows(query, key, value, batch)
            wanted = torch.autograd.grad((expected * weight).sum(), [query, key, value])
            for first in range(0, 4, size):
                ranks = [part[str(dtype)] for part in parts[first : first + size]]
                tokens = torch.cat([rank["tokens"] for rank in ranks])
                assert sorted(tokens.tolist()) == list(range(len(batch.token_ids)))
                torch.testing.assert_close(torch.cat([rank["output"] for rank in ranks]), expected[tokens])
                for got, want in zip(zip(*(rank["gradients"] for rank in ranks), strict=True), wanted, strict=True):
                    torch.testing.assert_close(torch.cat(got), want[tokens], rtol=1e-5, atol=1e-5)
