"""Importance weights of a batch that several shards drew: those of the whole, whatever each shard gives to it."""

from __future__ import annotations

import itertools

import pytest

from vagen.buffer.manifest import Drawing, Manifest, ManifestEntry
from vagen.buffer.selection.config import PriorityConfig, SelectionConfig
from vagen.buffer.settings import change_settings
from vagen.buffer.sharded_store import make_selector, merge

SHARDS = [{"a": 1.0, "b": 3.0}, {"c": 2.0, "d": 2.0, "e": 8.0}]
"""Weight of each unit of two shards."""
SHARES = (2, 1)
"""Units that each gives to a batch: not in proportion to what it has."""
VALUES = {"a": 5.0, "b": -1.0, "c": 2.0, "d": 0.5, "e": 7.0}


def part(weights, drawn, beta, filtered_share=0.0):
    """What a shard seals that drew these units."""
    raw = [(len(weights) * weights[name] / sum(weights.values())) ** -beta for name in drawn]
    entries = [
        ManifestEntry(trajectory_id=n, num_bytes=1, oldest_step=0, staleness=0, group_id="", weight=w / max(raw))
        for n, w in zip(drawn, raw, strict=True)
    ]
    num_drawn = len(drawn) / (1 - filtered_share)
    drawing = Drawing(beta=beta, num_units=len(weights), num_drawn=num_drawn, largest=max(raw))
    return Manifest(step=0, entries=tuple(entries), sealed_at=0.0, drawing=drawing)


def batches():
    """Every batch of independent draws, and its probability."""
    for drawn in itertools.product(*(itertools.product(s, repeat=m) for s, m in zip(SHARDS, SHARES, strict=True))):
        probability = 1.0
        for names, shard in zip(drawn, SHARDS, strict=True):
            for name in names:
                probability *= shard[name] / sum(shard.values())
        yield drawn, probability


def test_weights_of_beta_1_undo_the_drawing_of_all_shards():
    """The expectation over all batches of the mean of weight times value is the plain mean of all units.

    Weights are over the largest of the batch; times that of one known entry they are `1 / (N p)` again.
    """
    expected = 0.0
    for drawn, probability in batches():
        batch = merge([(i, part(s, names, 1.0)) for i, (s, names) in enumerate(zip(SHARDS, drawn, strict=True))])
        assert max(entry.weight for entry in batch.entries) == 1.0
        first = drawn[0][0]
        exact = 1 / (5 * (2 / 3) * SHARDS[0][first] / 4.0)
        scale = exact / batch.entries[0].weight
        mean = sum(scale * e.weight * VALUES[e.trajectory_id] for e in batch.entries) / len(batch.entries)
        expected += probability * mean
    assert expected == pytest.approx(sum(VALUES.values()) / len(VALUES))


def test_filters_that_drop_alike_in_all_shards_change_no_weight():
    plain, filtered = (
        merge([(0, part(SHARDS[0], "ab", 0.5, share)), (1, part(SHARDS[1], "e", 0.5, share))]) for share in (0.0, 0.5)
    )
    assert [e.weight for e in filtered.entries] == pytest.approx([e.weight for e in plain.entries])


def test_what_was_drawn_more_often_to_pass_a_filter_counts_less():
    batch = merge([(0, part({"a": 1.0}, "a", 1.0)), (1, part({"b": 1.0}, "b", 1.0, filtered_share=0.5))])
    assert [entry.weight for entry in batch.entries] == pytest.approx([1.0, 0.5])


def test_a_part_that_was_not_drawn_keeps_its_weights():
    plain = part(SHARDS[0], "ab", 0.0)
    batch = merge([(0, Manifest(step=0, entries=plain.entries, sealed_at=0.0)), (1, part(SHARDS[1], "c", 1.0))])
    assert [entry.weight for entry in batch.entries] == pytest.approx([0.5, 0.5, 1.0])


def test_a_sealed_part_says_how_it_was_drawn(bench):
    bench = bench(priority=PriorityConfig(function="total_reward"))
    bench.learn(batch_size=4)
    selector = bench.selector(["all_same"], order="priority", beta=0.5)
    for _ in range(2):
        bench.store_group("11")
    assert selector.claim(0, 4, 0) is None
    for _ in range(2):
        bench.store_group("01")
    drawing = selector.claim(0, 4, 0).drawing
    assert drawing == Drawing(beta=0.5, num_units=4, num_drawn=4.0, largest=1.0), "two were drawn and dropped before"


def test_other_orders_draw_nothing(bench):
    bench = bench()
    bench.learn()
    bench.store_one()
    assert bench.selector(order="uniform").claim(0, 1, 0).drawing is None


def test_shards_set_to_priority_live_seal_one_batch_of_its_weights(two_shards):
    """Shard 0 gives 2 of its 2 units, of rewards 1 and 3, shard 1 gives 2 of 2, of rewards 4 and 8."""
    parts = two_shards(priority=PriorityConfig(function="total_reward"))
    selector = make_selector(parts.learner, SelectionConfig(beta=1.0))
    for place in parts.places:
        change_settings(*place, {"order": "priority"}, "somebody")
    stored = {}
    for bench, rewards in zip(parts.benches, ((1.0, 3.0), (4.0, 8.0)), strict=True):
        stored |= {bench.store_scored(True, reward=reward): reward for reward in rewards}
    batch = selector.claim(0, 4, 0)
    found = {stored[entry.trajectory_id]: entry.weight for entry in batch.entries}
    # 1 / (N p): p = (1 / 2) (1 / 4) and so on, the largest is that of reward 1: 2.
    assert found == pytest.approx({1.0: 1.0, 3.0: 1 / 3, 4.0: 3 / 4, 8.0: 3 / 8})
    assert parts.learner.wait_sealed(0, 0) == batch, "what other ranks see"
