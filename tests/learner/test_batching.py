"""Rows, slots and packs: every policy token is scored once, in the order in which it was sampled."""

from __future__ import annotations

import io

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from vagen.common.errors import ObservationError, TrajectoryError
from vagen.common.trajectory import (
    BootstrapPrompt,
    End,
    ImageRef,
    RewardEntry,
    Row,
    SamplingParams,
    Turn,
    VisionTokens,
    content_hash,
)
from vagen.common.vision import ImageSpec
from vagen.learner.batching import PreparedRow, RowPreparer, partition, prepare_batch
from vagen.learner.packing import microbatches, pack_rows

IMAGE_TOKEN = 9
VISION = VisionTokens(image_token_id=IMAGE_TOKEN, forbidden_token_ids=(IMAGE_TOKEN,))


def png(shade: int) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (56, 56), (shade, 0, 0)).save(buffer, "PNG")
    return buffer.getvalue()


def row_of(turns: list[int], encoded: bytes, first: int) -> Row:
    """A row of [1, image, prompt] and then 2 tokens for each turn, a template token between turns."""
    ids, mask, versions, index = [1, *[IMAGE_TOKEN] * 4, 2], [0] * 6, [-1] * 6, [-1] * 6
    for turn in turns:
        ids += [first + 10 * turn, first + 10 * turn + 1, 3]
        mask += [1, 1, 0]
        versions += [turn + 1, turn + 1, -1]
        index += [turn, turn, -1]
    return Row(
        token_ids=np.array(ids, np.int32),
        policy_mask=np.array(mask, np.uint8),
        behaviour_logprobs=np.where(mask, -np.array(ids) / 100, 0).astype(np.float32),
        policy_versions=np.array(versions, np.int32),
        turn_index=np.array(index, np.int16),
        images=(ImageRef(content_hash=content_hash(encoded), grid_thw=(1, 4, 4), start=1, num_tokens=4),),
    )


def turn_of(index: int, row: int, start: int) -> Turn:
    return Turn(index=index, row=row, start=start, end=start + 2, format_ok=True, action_valid=True)


@pytest.fixture
def preparer() -> RowPreparer:
    return RowPreparer(ImageSpec(min_pixels=28 * 28), VISION, vocab_size=512)


@pytest.fixture
def trajectories(make_trajectory):
    red, dark = png(200), png(50)
    images = {content_hash(red): red, content_hash(dark): dark}
    split = make_trajectory(
        rows=(row_of([0], red, 100), row_of([1], dark, 100)),
        turns=(turn_of(0, 0, 6), turn_of(1, 1, 6)),
        rewards=(
            RewardEntry(component="format", row=0, token=7, value=0.5),
            RewardEntry(component="task", row=1, token=7, value=1.0),
            RewardEntry(component="format", row=1, token=7, value=0.25),
        ),
        images=images,
        group_id="g0",
    )
    whole = make_trajectory(
        rows=(row_of([0, 1], red, 200),),
        turns=(turn_of(0, 0, 6), turn_of(1, 0, 9)),
        rewards=(RewardEntry(component="task", row=0, token=10, value=2.0),),
        images={content_hash(red): red},
        end=End.TRUNCATED,
        bootstrap=BootstrapPrompt(
            token_ids=np.array([1, *[IMAGE_TOKEN] * 4, 2], np.int32), images=row_of([0], red, 0).images
        ),
        group_id="g1",
    )
    return [split, whole]


def test_flat_arrays_follow_the_order_of_sampling(trajectories, preparer):
    batch = prepare_batch(trajectories, [3, 0], {"g1": 0, "g0": 1}, preparer)
    assert batch.num_policy_tokens == 8
    assert batch.rewards.tolist() == [0, 0.5, 0, 1.25, 0, 0, 0, 2.0]
    assert batch.turn_ids.tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    assert batch.segment_ids.tolist() == [0] * 4 + [1] * 4
    assert batch.versions.tolist() == [1, 1, 2, 2, 1, 1, 2, 2]
    assert batch.behaviour_logprobs.tolist() == pytest.approx([-1, -1.01, -1.1, -1.11, -2, -2.01, -2.1, -2.11])
    assert (batch.staleness.tolist(), batch.group_ids.tolist(), batch.num_groups) == ([3, 0], [1, 0], 2)
    assert [row.slots.tolist() for row in batch.bootstrap_rows] == [[1]]
    assert batch.bootstrap_rows[0].score_positions.tolist() == [6]


def test_rows_listed_out_of_turn_order_are_brought_into_it(trajectories, preparer):
    split = trajectories[0]
    turned = msgspec.structs.replace(
        split,
        rows=split.rows[::-1],
        turns=tuple(msgspec.structs.replace(turn, row=1 - turn.row) for turn in split.turns),
        rewards=tuple(msgspec.structs.replace(entry, row=1 - entry.row) for entry in split.rewards),
    )
    plain, other = (prepare_batch([t], [0], {"g0": 0}, preparer) for t in (split, turned))
    assert other.rewards.tolist() == plain.rewards.tolist()
    assert other.turn_ids.tolist() == plain.turn_ids.tolist()
    assert other.behaviour_logprobs.tolist() == plain.behaviour_logprobs.tolist()


def test_microbatches_score_every_slot_once_with_its_own_token(trajectories, preparer):
    batch = prepare_batch(trajectories, [0, 0], {"g0": 0, "g1": 1}, preparer)
    for max_tokens in (1, 12, 1000):
        seen = torch.zeros(8, dtype=torch.int64)
        for packed, slots in microbatches(batch.rows, batch.images, max_tokens):
            packed.check()
            tokens = packed.token_ids[packed.score_positions]
            assert torch.equal(tokens, (-100 * batch.behaviour_logprobs[slots]).round().long())
            seen[slots] += 1
        assert seen.tolist() == [1] * 8


def test_an_image_that_stands_in_several_rows_is_encoded_once(trajectories, preparer):
    batch = prepare_batch(trajectories, [0, 0], {"g0": 0, "g1": 1}, preparer)
    ((packed, _),) = microbatches(batch.rows, batch.images, 1000)
    assert packed.images is not None and packed.images.index is not None
    assert len(packed.images.grids) == 2
    assert sorted(packed.images.index.tolist()) == [0, 0, 1]


def test_what_does_not_fit_the_model_is_refused(trajectories, preparer):
    hot = msgspec.structs.replace(trajectories[1], sampling=SamplingParams(temperature=0.5))
    with pytest.raises(TrajectoryError, match="temperature"):
        prepare_batch([trajectories[0], hot], [0, 0], {"g0": 0, "g1": 1}, preparer)
    with pytest.raises(TrajectoryError, match="vocabulary of 120"):
        prepare_batch(trajectories, [0, 0], {"g0": 0, "g1": 1}, RowPreparer(ImageSpec(min_pixels=784), VISION, 120))
    bigger = RowPreparer(ImageSpec(min_pixels=112 * 112), VISION, 512)
    with pytest.raises(TrajectoryError, match="grid"):
        prepare_batch(trajectories, [0, 0], {"g0": 0, "g1": 1}, bigger)


@given(st.lists(st.integers(1, 50), min_size=1, max_size=60), st.integers(10, 100))
def test_packs_hold_every_row_within_the_bound(lengths, bound):
    nothing = np.zeros(0, np.int64)
    rows = [
        PreparedRow(token_ids=np.zeros(n), position_ids=nothing, score_positions=nothing, slots=nothing, images=())
        for n in lengths
    ]
    packs = pack_rows(rows, bound)
    assert sorted(index for pack in packs for index in pack) == list(range(len(lengths)))
    for pack in packs:
        assert len(pack) == 1 or sum(lengths[index] for index in pack) <= bound


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=80), st.integers(1, 8))
def test_partition_is_whole_disjoint_and_balanced(sizes, parts):
    split = partition(sizes, parts)
    assert sorted(index for part in split for index in part) == list(range(len(sizes)))
    loads = [sum(sizes[index] for index in part) for part in split]
    assert max(loads) - min(loads) <= max(sizes)
    assert split == partition(sizes, parts)


def test_rows_of_a_text_model_count_up_and_hold_no_image(trajectories):
    preparer = RowPreparer(None, None, vocab_size=512)
    store = preparer.new_store()
    row = trajectories[0].rows[0]
    slots = np.arange(int(row.policy_mask.sum()))
    text = msgspec.structs.replace(row, images=())
    prepared = preparer.policy_row(text, slots, {}, store)
    np.testing.assert_array_equal(prepared.position_ids, [np.arange(len(row.token_ids))] * 3)
    assert prepared.images == () and store.batch(prepared.images) is None
    assert preparer.forbidden_token_ids.shape == (0,) and preparer.forbidden_token_ids.dtype == torch.int64
    with pytest.raises(ObservationError, match="without vision"):
        preparer.policy_row(row, slots, trajectories[0].images, store)
