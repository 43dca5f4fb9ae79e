"""What is written is what is read, whatever kills the writer in between."""

from __future__ import annotations

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from vagen.buffer.archive.reader import open_archive
from vagen.buffer.archive.schema import ROW_ARRAYS, TRAJECTORIES
from vagen.buffer.archive.writer import ArchiveWriter
from vagen.common.errors import ArchiveError, TrajectoryError
from vagen.common.trajectory import Row, Trajectory, Turn


def test_trajectories_come_back_as_they_went_in(tmp_path, step_items, plain):
    items = [item for step in range(5) for item in step_items(step, 17)]
    with ArchiveWriter(tmp_path) as writer:
        assert writer.write_part(items) == len(items)
    archive = open_archive(tmp_path)
    assert [plain(record) for record in archive.iterate()] == [plain(item) for item in items]
    for record, item in zip(archive.iterate(), items, strict=True):
        for mine, theirs in zip(record.trajectory.rows, item.trajectory.rows, strict=True):
            for name in ROW_ARRAYS:
                a, b = getattr(mine, name), getattr(theirs, name)
                assert a.dtype == b.dtype and np.array_equal(a, b), name


def test_every_field_of_a_trajectory_has_a_column():
    own = {field.name for field in msgspec.structs.fields(Trajectory)} - {"images"}
    assert own <= set(TRAJECTORIES.names)
    nested = {"rows": Row, "turns": Turn}
    for column, kind in nested.items():
        struct = TRAJECTORIES.field(column).type.value_type
        assert {struct.field(i).name for i in range(struct.num_fields)} == set(kind.__struct_fields__)
    for column in ("sampling", "engine", "vision", "rewards", "bootstrap"):
        struct = TRAJECTORIES.field(column).type
        struct = getattr(struct, "value_type", struct)
        (field,) = [field for field in msgspec.structs.fields(Trajectory) if field.name == column]
        kinds = getattr(field.type, "__args__", (field.type,))
        expected = {name for kind in kinds if hasattr(kind, "__struct_fields__") for name in kind.__struct_fields__}
        assert {struct.field(i).name for i in range(struct.num_fields)} == expected, column


def test_parts_from_before_there_were_states_are_read_and_merged(tmp_path, step_items, archive_of):
    """As the writer made them then: without the field in turns and bootstrap prompts."""
    folder = archive_of(steps=1, count=6)
    (part,) = folder.glob("trajectories-*.parquet")
    table = pq.read_table(part)
    for column in ("turns", "bootstrap"):
        kind = table.schema.field(column).type
        fields = [field for field in getattr(kind, "value_type", kind) if field.name != "state"]
        old = pa.list_(pa.struct(fields)) if column == "turns" else pa.struct(fields)
        values = [_without_state(value) for value in table[column].to_pylist()]
        table = table.set_column(table.schema.get_field_index(column), column, pa.array(values, old))
    pq.write_table(table, part)
    for record in open_archive(folder).iterate():
        prompt = record.trajectory.bootstrap
        assert [turn.state for turn in record.trajectory.turns] == [""] * len(record.trajectory.turns)
        assert prompt is None or prompt.state == ""


def _without_state(value):
    if isinstance(value, list):
        return [_without_state(item) for item in value]
    return None if value is None else {key: item for key, item in value.items() if key != "state"}


def test_a_step_is_read_in_the_order_of_its_manifest(tmp_path, step_items, plain):
    items = {step: step_items(step, 5) for step in range(4)}
    with ArchiveWriter(tmp_path) as writer:
        writer.write_steps({0: reversed(items[0]), 1: items[1]})
        writer.write_step(3, items[3])
    archive = open_archive(tmp_path)
    assert archive.steps == (0, 1, 3) and archive.num_trajectories == 15
    for step in archive.steps:
        assert [plain(record) for record in archive.read_step(step)] == [plain(item) for item in items[step]]
    with pytest.raises(ArchiveError, match=r"no trajectory of step 2, steps are 0-3"):
        archive.read_step(2)
    picked = archive.read([14, 0, 14])
    assert [record.step for record in picked] == [3, 0, 3]
    assert picked[0].trajectory.trajectory_id == items[3][4].trajectory.trajectory_id


def test_an_image_is_stored_once_in_all_parts(archive_of):
    folder = archive_of(steps=4, count=6, shades=5)
    archive = open_archive(folder)
    names = {name for record in archive.iterate() for name in record.trajectory.images}
    assert archive.num_images == len(names) == 5
    # The first step shows every picture: later parts need no file of images.
    assert [path.name for path in sorted(folder.glob("images-*"))] == ["images-000000.parquet"]


def test_row_groups_bound_what_is_read_at_once(tmp_path, step_items):
    with ArchiveWriter(tmp_path) as writer:
        writer.write_part(item for step in range(10) for item in step_items(step, 10))
    sizes = [len(table) for table in open_archive(tmp_path).iterate_tables(["step"])]
    assert sizes == [32, 32, 32, 4]


def test_a_step_that_is_there_is_not_written_again(tmp_path, step_items):
    items = step_items(0)
    with ArchiveWriter(tmp_path) as writer:
        assert writer.write_step(0, items) == 4
        assert writer.write_step(0, items) == 0
    with ArchiveWriter(tmp_path) as writer:
        assert writer.steps == {0}
        assert writer.write_steps({0: items, 1: step_items(1)}) == 4
    assert open_archive(tmp_path).num_trajectories == 8
    assert len(list(tmp_path.glob("trajectories-*.parquet"))) == 2


def test_a_part_that_fails_leaves_nothing(archive_of, step_items):
    folder = archive_of(steps=1)
    before = sorted(folder.iterdir())
    good, bad = step_items(1, 40), step_items(1, 1, success=True, actor_id="")
    with ArchiveWriter(folder) as writer:
        with pytest.raises(TrajectoryError, match="actor_id"):
            writer.write_step(1, [*good, *bad])
        assert sorted(folder.iterdir()) == before
        assert writer.write_step(1, good) == 40
    assert open_archive(folder).steps == (0, 1)


def test_two_writers_of_one_folder(tmp_path):
    with ArchiveWriter(tmp_path), pytest.raises(ArchiveError, match="another process writes"):
        ArchiveWriter(tmp_path)
    ArchiveWriter(tmp_path).close()


def test_what_is_no_archive_is_named(tmp_path, archive_of):
    with pytest.raises(ArchiveError, match=r"nothing: no such folder"):
        open_archive(tmp_path / "nothing")
    with pytest.raises(ArchiveError, match="not an archive"):
        open_archive(tmp_path)
    folder = archive_of()
    torn = folder / "trajectories-000001.parquet"
    torn.write_bytes(torn.read_bytes()[:-100])
    with pytest.raises(ArchiveError, match=r"trajectories-000001.parquet: cannot be read"):
        open_archive(folder)


def test_a_missing_image_names_the_part_that_wants_it(archive_of):
    folder = archive_of()
    (folder / "images-000000.parquet").unlink()
    with pytest.raises(ArchiveError, match=r"trajectories-000000.parquet: image [0-9a-f]{32} is in no images"):
        list(open_archive(folder).iterate())
