"""The journal's files: what of them counts after a crash, and when they go."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
import pytest
from ulid import ULID

from vagen.actor.journal import Journal
from vagen.common.errors import ConfigError
from vagen.common.wire import encode_trajectory


@pytest.fixture
def make_frames(make_trajectory):
    """Envelope and payload of a trajectory by its sequence number."""

    def make(number: int) -> tuple[bytes, bytes]:
        changed = msgspec.structs.replace(make_trajectory(), trajectory_id=str(ULID()), actor_seq=number)
        return encode_trajectory(changed)

    return make


@pytest.fixture
def small_segments(monkeypatch: pytest.MonkeyPatch, make_frames) -> None:
    """Two trajectories fill a segment."""
    monkeypatch.setattr("vagen.actor.journal.SEGMENT_BYTES", 2 * len(make_frames(1)[1]))


def put(journal: Journal, make_frames, *numbers: int) -> dict[int, tuple[bytes, bytes]]:
    frames = {number: make_frames(number) for number in numbers}
    for number, (envelope, payload) in frames.items():
        journal.put(number, envelope, payload)
    journal.flush()
    return frames


def segments(folder: Path) -> list[int]:
    return sorted(int(path.stem[8:]) for path in folder.glob("journal-*.log"))


def test_a_segment_goes_with_all_before_it(tmp_path, make_frames, small_segments):
    journal = Journal(tmp_path, "run")
    for first in (1, 3, 5):
        put(journal, make_frames, first, first + 1)
    assert segments(tmp_path) == [1, 2, 3, 4]
    for number in (2, 3, 4):
        journal.remove(number)
    journal.flush()
    assert segments(tmp_path) == [1, 2, 3, 4], "1 is in flight, and what is gone behind it must stay gone"
    journal.close()

    journal = Journal(tmp_path, "run")
    assert sorted(journal.stored) == [1, 5, 6]
    for number in (1, 5, 6):
        journal.remove(number)
    journal.flush()
    assert segments(tmp_path) == [4]
    journal.close()

    journal = Journal(tmp_path, "run")
    assert (journal.stored, journal.last_seq) == ({}, 6)
    journal.close()


def test_one_that_is_never_acked_does_not_keep_all_that_came_after_it(tmp_path, make_frames, small_segments):
    journal = Journal(tmp_path, "run")
    kept = put(journal, make_frames, 1)
    for number in range(2, 60):
        put(journal, make_frames, number)
        journal.remove(number)
        if number == 30:
            kept |= put(journal, make_frames, 100)
    journal.flush()
    assert len(segments(tmp_path)) <= 5
    assert {number: journal.read(number) for number in journal.stored} == kept
    journal.close()

    journal = Journal(tmp_path, "run")
    assert {number: journal.read(number) for number in journal.stored} == kept
    assert journal.last_seq == 100
    for number in kept:
        journal.remove(number)
    journal.flush()
    assert len(segments(tmp_path)) == 1
    journal.close()


def test_a_crash_while_one_is_moved_leaves_it_once(tmp_path, make_frames, small_segments, monkeypatch):
    drop_segments = Journal._drop_segments

    def crash_once_it_is_moved(journal):
        if journal.stored[1].segment > 1:
            raise OSError("power cut")
        drop_segments(journal)

    journal = Journal(tmp_path, "run")
    kept = put(journal, make_frames, 1)
    with monkeypatch.context() as patch, pytest.raises(OSError, match="power cut"):
        patch.setattr(Journal, "_drop_segments", crash_once_it_is_moved)
        for number in range(2, 60):
            put(journal, make_frames, number)
            journal.remove(number)
    journal.close()
    assert segments(tmp_path)[0] == 1, "it is in the oldest and in the newest"

    journal = Journal(tmp_path, "run")
    assert journal.read(1) == kept[1]
    for number in list(journal.stored):
        journal.remove(number)
    journal.flush()
    assert len(segments(tmp_path)) == 1
    journal.close()


def test_identity_and_shard_go_on_in_the_next_segment(tmp_path, make_frames, small_segments):
    journal = Journal(tmp_path, "run")
    journal.assign((2, 3))
    put(journal, make_frames, 1, 2)
    journal.remove(1)
    journal.remove(2)
    journal.flush()
    actor_id = journal.actor_id
    journal.close()
    assert segments(tmp_path) == [2]

    journal = Journal(tmp_path, "run")
    assert (journal.actor_id, journal.shard, journal.last_seq) == (actor_id, (2, 3), 2)
    journal.close()


def test_a_crash_at_any_byte_of_a_flush_leaves_what_was_flushed_before(tmp_path, make_frames):
    journal = Journal(tmp_path, "run")
    path = tmp_path / "journal-00000001.log"
    before = put(journal, make_frames, 1, 2)
    whole = path.stat().st_size
    put(journal, make_frames, 3)
    journal.close()
    content = path.read_bytes()
    for length in (
        *range(whole, whole + 120),
        *range(whole + 120, len(content), 97),
        len(content) - 1,
    ):
        # Whether the file is short, or as long as it was to be and zero behind.
        for left in {content[:length], content[:length].ljust(len(content), b"\0")} - {content}:
            path.write_bytes(left)
            journal = Journal(tmp_path, "run")
            assert {number: journal.read(number) for number in journal.stored} == before
            assert journal.last_seq == 2
            journal.close()
    journal = Journal(tmp_path, "run")
    after = put(journal, make_frames, 3)
    journal.close()
    journal = Journal(tmp_path, "run")
    assert {number: journal.read(number) for number in journal.stored} == {
        **before,
        **after,
    }
    journal.close()


def test_damage_before_the_newest_segment_is_named(tmp_path, make_frames, small_segments):
    journal = Journal(tmp_path, "run")
    put(journal, make_frames, 1, 2)
    put(journal, make_frames, 3)
    journal.close()
    path = tmp_path / "journal-00000001.log"
    os.truncate(path, path.stat().st_size - 1)
    with pytest.raises(ConfigError, match="journal-00000001.log: .* no whole record at byte"):
        Journal(tmp_path, "run")


def test_a_segment_that_was_never_named_is_no_segment(tmp_path, make_frames):
    journal = Journal(tmp_path, "run")
    put(journal, make_frames, 1)
    journal.close()
    (tmp_path / "journal-00000002.new").write_bytes(b"VAG")
    journal = Journal(tmp_path, "run")
    assert (sorted(journal.stored), segments(tmp_path)) == ([1], [1])
    journal.close()


def test_what_lay_behind_a_broken_record_does_not_come_back(tmp_path, make_frames):
    journal = Journal(tmp_path, "run")
    path = tmp_path / "journal-00000001.log"
    put(journal, make_frames, 1)
    whole = path.stat().st_size
    put(journal, make_frames, 2, 3)
    journal.close()
    content = bytearray(path.read_bytes())
    content[whole : whole + 8] = bytes(8)  # of one flush, the end reached the disk before the beginning
    path.write_bytes(content)
    journal = Journal(tmp_path, "run")
    assert sorted(journal.stored) == [1]
    put(journal, make_frames, 2)
    journal.close()
    journal = Journal(tmp_path, "run")
    assert sorted(journal.stored) == [1, 2], "3 follows it byte by byte, and was never durable"
    journal.close()
