"""Files that must survive a power cut: what is flushed to disk, and the names by which it is found again."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["flush", "flush_tree", "make_directory"]


def flush(path: Path) -> None:
    """Flush a file's content, or a directory's names, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def flush_tree(directory: Path) -> None:
    """Flush everything in a directory, and its own names last."""
    for item in directory.rglob("*"):
        flush(item)
    flush(directory)


def make_directory(path: Path, mode: int = 0o777) -> None:
    """Make a directory and its parents, as far as they are missing, and flush each new name.

    A flushed file is lost all the same when the name of a directory above it is not flushed. `mode` is that of `path`
    alone.
    """
    path = path.absolute()
    if path.is_dir():
        return
    if not path.parent.is_dir():
        make_directory(path.parent)
    path.mkdir(mode=mode, exist_ok=True)
    flush(path.parent)
