"""kill -9 while an archive is written: the parts before are whole, and the next writer goes on after them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from vagen.buffer.archive.reader import open_archive
from vagen.buffer.archive.writer import ArchiveWriter

COPY = """
import itertools, os, pathlib, signal, sys
from vagen.buffer.archive.reader import open_archive
from vagen.buffer.archive.writer import ArchiveWriter

source, target, doom = open_archive(sys.argv[1]), pathlib.Path(sys.argv[2]), sys.argv[3]
die = lambda: os.kill(os.getpid(), signal.SIGKILL)
renames, rename = itertools.count(), pathlib.Path.rename

def counted(self, other):
    number = next(renames)
    if doom == f"before rename {number}":
        die()
    rename(self, other)
    if doom == f"after rename {number}":
        die()

pathlib.Path.rename = counted

def items(step):
    for number, item in enumerate(source.read_step(step)):
        if doom == f"step {step} item {number}":
            die()
        yield item

with ArchiveWriter(target) as writer:
    for step in source.steps:
        writer.write_step(step, items(step))
"""


def copy(source: Path, target: Path, doom: str = "") -> int:
    argv = [sys.executable, "-c", COPY, str(source), str(target), doom]
    return subprocess.run(argv, check=False, timeout=120, env=os.environ).returncode


@pytest.mark.parametrize(
    ("doom", "whole"),
    [
        ("step 0 item 0", 0),
        ("step 1 item 39", 1),
        ("before rename 0", 0),
        ("after rename 0", 0),
        ("after rename 1", 1),
        ("after rename 2", 1),
        ("before rename 3", 1),
        ("after rename 3", 2),
    ],
)
def test_a_kill_leaves_whole_parts_and_a_restart_each_step_once(archive_of, tmp_path, plain, doom, whole):
    # Every step has pictures of its own, so that each part is two files and two renames.
    source = archive_of(steps=3, count=40, name="source", shades=60000)
    target = tmp_path / "target"
    assert copy(source, target, doom) == -signal.SIGKILL
    if whole:
        assert open_archive(target).steps == tuple(range(whole))
        assert open_archive(target).num_trajectories == 40 * whole == len(list(open_archive(target).iterate()))
    assert copy(source, target) == 0
    copied, original = open_archive(target), open_archive(source)
    assert [plain(record) for record in copied.iterate()] == [plain(record) for record in original.iterate()]
    assert sorted(path.name for path in target.iterdir()) == sorted(path.name for path in source.iterdir())


def test_a_part_is_on_the_disk_before_its_name_is(tmp_path, step_items, monkeypatch):
    calls: list[tuple[str, str]] = []
    fsync, rename = os.fsync, Path.rename

    def recorded_fsync(descriptor: int) -> None:
        (path,) = (p for p in (tmp_path, *tmp_path.iterdir()) if p.stat().st_ino == os.fstat(descriptor).st_ino)
        calls.append(("fsync", path.name))
        fsync(descriptor)

    def recorded_rename(self: Path, target: Path) -> Path:
        calls.append(("rename", target.name))
        return rename(self, target)

    monkeypatch.setattr(os, "fsync", recorded_fsync)
    monkeypatch.setattr(Path, "rename", recorded_rename)
    with ArchiveWriter(tmp_path) as writer:
        writer.write_step(0, step_items(0))
    images, trajectories = "images-000000.parquet", "trajectories-000000.parquet"
    assert calls == [
        ("fsync", f".{images}.partial"),
        ("rename", images),
        ("fsync", f".{trajectories}.partial"),
        ("rename", trajectories),
        ("fsync", tmp_path.name),
    ]


def test_pictures_of_a_part_that_never_came_are_not_counted_on(archive_of, tmp_path, plain):
    source, target = archive_of(steps=2, count=4, name="source", shades=60000), tmp_path / "target"
    assert copy(source, target, "after rename 0") == -signal.SIGKILL
    # Other data than what was being written: some of its pictures, and new ones, which take the number of its file.
    archive = open_archive(source)
    items = [msgspec.structs.replace(item, step=7) for item in (archive.read_step(0)[0], archive.read_step(1)[0])]
    with ArchiveWriter(target) as writer:
        writer.write_step(7, items)
    assert [plain(record) for record in open_archive(target).iterate()] == [plain(item) for item in items]
    assert open_archive(target).num_images == len({name for item in items for name in item.trajectory.images})
