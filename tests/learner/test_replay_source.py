"""Batches of a saved buffer: its own steps as they were, or whole groups drawn by a seed."""

from __future__ import annotations

import logging
from contextlib import closing

import msgspec
import numpy as np
import pytest

from vagen.buffer.archive.reader import open_archive
from vagen.common.errors import ArchiveError, ConfigError
from vagen.common.vision import ImageSpec
from vagen.common.vocabulary import vision_tokens
from vagen.common.wire import encode_trajectory
from vagen.learner.batching import RowPreparer, partition
from vagen.learner.feeder import BatchFeeder
from vagen.learner.replay import ArchiveSource, Draws, ReplayOptions


def make_source(path, draws=None, first_draw=0, max_staleness=4, publish_every=1):
    return ArchiveSource(
        open_archive(path), draws, first_draw=first_draw, max_staleness=max_staleness, publish_every=publish_every
    )


def make_draws(path, seed=0, batch_size=6, epochs=1):
    return Draws(open_archive(path), seed=seed, batch_size=batch_size, epochs=epochs)


def change_fields(**fields):
    return lambda record: msgspec.structs.replace(record, **{name: of(record) for name, of in fields.items()})


def change_trajectory(**fields):
    return lambda record: msgspec.structs.replace(
        record, trajectory=msgspec.structs.replace(record.trajectory, **fields)
    )


def forget_what_sampled(record):
    rows = [
        msgspec.structs.replace(
            row,
            behaviour_logprobs=np.where(row.policy_mask, np.nan, 0).astype(np.float32),
            policy_versions=np.full_like(row.policy_versions, -1),
        )
        for row in record.trajectory.rows
    ]
    return change_trajectory(rows=tuple(rows))(record)


def drawn(path, **options):
    draws = make_draws(path, **options)
    return [(draws[index][0], draws[index][1].tolist()) for index in range(len(draws))]


def test_an_archived_step_is_taken_in_its_order_with_its_versions_and_staleness(make_archive):
    # Positions are reversed: the order of the file is not that of the batch.
    path = make_archive(change=change_fields(position=lambda record: 5 - record.position))
    source = make_source(path)
    manifest = source.take(3, 0)
    recorded = open_archive(path).read_step(3)
    assert manifest.ids == [record.trajectory.trajectory_id for record in recorded]
    assert [entry.staleness for entry in manifest.entries] == [2, 2, 1, 1, 0, 0]
    assert [entry.oldest_step for entry in manifest.entries] == [1, 1, 2, 2, 3, 3]
    assert [t.trajectory_id for t in source.read(manifest.entries[2:4])] == manifest.ids[2:4]
    assert source.take(3, 0) == manifest


def test_ranks_share_an_archived_step_as_they_shared_the_live_one(make_archive, model_dir):
    path = make_archive()
    preparer = RowPreparer(ImageSpec.load(model_dir), vision_tokens(model_dir), 10_000)
    # What the live split depends on is the number of tokens, as the buffer counts them.
    records = open_archive(path).read_step(2)
    sizes = [record.trajectory.num_tokens for record in records]
    payloads = [len(encode_trajectory(record.trajectory)[1]) for record in records]
    assert partition(sizes, 2) != partition(payloads, 2)
    assert make_source(path).take(2, 0).sizes == sizes
    for rank, mine in enumerate(partition(sizes, 2)):
        with closing(BatchFeeder(make_source(path), preparer, dp_rank=rank, dp_size=2)) as feeder:
            feeder.request(2)
            feed = feeder.wait(60.0)
        expected = [records[index].trajectory.trajectory_id for index in mine]
        assert [trajectory.trajectory_id for trajectory in feed.batch.trajectories] == expected
        assert feed.batch.num_groups == 3, "of the whole step"


@pytest.mark.parametrize(("step", "publish_every", "version"), [(3, 1, 4), (3, 2, 3), (3, 5, -1)])
def test_the_weights_of_an_archived_step_are_the_version_published_last(make_archive, step, publish_every, version):
    source = make_source(make_archive(), publish_every=publish_every)
    assert source.version_before(source.take(step, 0)) == version


def test_every_group_is_drawn_whole_and_once_an_epoch(make_archive):
    path = make_archive(num_steps=3)
    groups = open_archive(path).table(["group_id"])["group_id"].to_pylist()
    batches = drawn(path, epochs=2)
    assert [epoch for epoch, _ in batches] == [0, 0, 0, 1, 1, 1]
    for epoch in (0, 1):
        assert sorted(index for e, members in batches if e == epoch for index in members) == list(range(18))
    for _, members in batches:
        assert {groups.count(groups[index]) for index in members} == {2}
        assert all([groups[i] for i in members].count(groups[index]) == 2 for index in members)
    assert batches[0][1] != batches[3][1], "each epoch in an order of its own"


def test_draws_depend_on_the_seed_alone_and_further_epochs_follow_the_earlier(make_archive):
    path = make_archive()
    assert drawn(path, seed=3) == drawn(path, seed=3)
    assert drawn(path, seed=3) != drawn(path, seed=4)
    assert drawn(path, seed=3, epochs=3)[:4] == drawn(path, seed=3)


def test_a_batch_is_full_with_the_group_that_reaches_its_size(make_archive):
    batches = drawn(make_archive(num_steps=3), batch_size=5)
    assert [len(members) for _, members in batches] == [6, 6, 6]
    assert [len(members) for _, members in drawn(make_archive(num_steps=3, name="b"), batch_size=8)] == [8, 8]


def test_a_trajectory_counts_in_the_loss_what_it_counted_live(make_archive):
    path = make_archive(change=change_fields(weight=lambda record: 1 / (1 + record.position)))
    assert [entry.weight for entry in make_source(path).take(1, 0).entries] == [1, 1 / 2, 1 / 3, 1 / 4, 1 / 5, 1 / 6]
    weights = {record.trajectory.trajectory_id: record.weight for record in open_archive(path).iterate()}
    drawn_entries = make_source(path, make_draws(path)).take(0, 0).entries
    assert [entry.weight for entry in drawn_entries] == [weights[entry.trajectory_id] for entry in drawn_entries]


def test_a_drawn_trajectory_is_as_stale_as_the_steps_that_lie_between(make_archive):
    path = make_archive()
    source = make_source(path, make_draws(path), first_draw=10)
    manifest = source.take(11, 0)
    assert [entry.staleness for entry in manifest.entries] == [11 - entry.oldest_step for entry in manifest.entries]
    early = make_source(path, make_draws(path), first_draw=0).take(0, 0)
    assert any(entry.oldest_step > 0 for entry in early.entries)
    assert [entry.staleness for entry in early.entries] == [entry.oldest_step for entry in early.entries]


def test_nothing_is_evicted_and_what_is_too_stale_is_counted_and_reported_once(make_archive, caplog):
    source = make_source(make_archive(), max_staleness=0)
    with caplog.at_level(logging.WARNING):
        notes = [source.notes(source.take(step, 0)) for step in range(4)]
    assert [note["beyond_max_staleness"] for note in notes] == [0, 4, 4, 4]
    assert all(len(source.take(step, 0).entries) == 6 for step in range(4))
    assert len(caplog.records) == 1


def test_the_archives_own_order_is_the_default_where_it_has_one(make_archive):
    path = make_archive()
    untrained = make_archive(name="untrained", change=change_fields(step=lambda record: -1))
    assert ReplayOptions(path=path).resolve(open_archive(path)) == "archive"
    assert ReplayOptions(path=untrained).resolve(open_archive(untrained)) == "shuffled"
    with pytest.raises(ConfigError, match=r"\$\.replay\.epochs: expected 1 in the archive's order"):
        ReplayOptions(path=path, epochs=2).resolve(open_archive(path))


def test_a_replay_ends_with_the_data_the_steps_or_a_gap(make_archive, caplog):
    path = make_archive(num_steps=6)
    assert make_source(path).last_step(0, 100) == 6
    assert make_source(path).last_step(2, 4) == 4
    assert make_source(path).last_step(6, 100) == 6, "nothing is left"
    assert make_source(path, make_draws(path, epochs=2), first_draw=5).last_step(9, 100) == 17
    gap = make_archive(num_steps=6, name="gap", change=change_fields(step=lambda r: r.step + 4 * (r.step > 2)))
    assert make_source(gap).last_step(0, 100) == 3
    assert "step 3 is missing" in caplog.text
    with pytest.raises(ConfigError, match=r"go on from learner step 4, got 0-2, 7-9; --replay-order shuffled"):
        make_source(gap).last_step(4, 100)


def test_trajectories_that_do_not_say_what_sampled_them_are_refused(make_archive):
    path = make_archive(change=lambda record: forget_what_sampled(record) if record.step == 1 else record)
    with pytest.raises(ArchiveError, match="6 of 24 trajectories do not say .* `vagen sft --archive` may use"):
        make_source(path)


def test_a_draw_without_a_learner_step_of_its_oldest_version_is_refused(make_archive):
    path = make_archive(change=change_fields(oldest_step=lambda record: -1))
    with pytest.raises(ArchiveError, match="its staleness is unknown"):
        make_source(path, make_draws(path)).take(0, 0)


def test_an_archive_smaller_than_a_batch_is_refused(make_archive):
    with pytest.raises(ConfigError, match=r"\$\.learner\.batch_size: expected int <= 24"):
        make_draws(make_archive(), batch_size=25)
