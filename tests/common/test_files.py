"""A flushed file is found again after a power cut only if every name above it was flushed as well."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

_WRITE = """
import os, sys
from pathlib import Path
from vagen.common.files import flush, flush_tree, make_directory

folder = Path("base/a/b")
{make}
(folder / "file").write_text("content")
flush_tree(folder)
"""


def left_of(power_cut, tmp_path, make):
    (tmp_path / "base").mkdir()
    environment = {**os.environ, **power_cut.environment}
    subprocess.run([sys.executable, "-c", _WRITE.format(make=make)], cwd=tmp_path, env=environment, check=True)
    lost = power_cut.apply(tmp_path / "base")
    file = tmp_path / "base" / "a" / "b" / "file"
    return lost, file.read_text() if file.exists() else None


def test_a_new_directory_and_its_parents_outlast_a_power_cut(power_cut, tmp_path):
    assert left_of(power_cut, tmp_path, "make_directory(folder)") == (0, "content")


@pytest.mark.parametrize("make", ["folder.mkdir(parents=True)", "folder.mkdir(parents=True); flush(folder.parent)"])
def test_a_name_that_was_not_flushed_takes_what_is_below_it_along(power_cut, tmp_path, make):
    assert left_of(power_cut, tmp_path, make) == (len("content"), None)
