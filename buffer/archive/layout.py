"""Names of the files of an archive."""

from __future__ import annotations

import re
from pathlib import Path

__all__ = ["IMAGES_NAME", "TRAJECTORIES_NAME", "is_archive", "number_of", "partial_of", "part_path", "parts"]

TRAJECTORIES_NAME = "trajectories"
IMAGES_NAME = "images"

_PART = re.compile(r"[a-z]+-(\d{6,})\.parquet")


def part_path(folder: Path, name: str, number: int) -> Path:
    """Where part `number` of a kind lies."""
    return folder / f"{name}-{number:06d}.parquet"


def partial_of(path: Path) -> Path:
    """Where it is while it is being written: hidden from globs."""
    return path.with_name(f".{path.name}.partial")


def number_of(path: Path) -> int:
    """The number in the name of a part."""
    match = _PART.fullmatch(path.name)
    assert match is not None, path
    return int(match[1])


def parts(folder: Path, name: str) -> list[Path]:
    """The complete parts of a kind, in the order in which they were written."""
    return sorted((path for path in folder.glob(f"{name}-*.parquet") if _PART.fullmatch(path.name)), key=number_of)


def is_archive(folder: Path) -> bool:
    """Whether there is at least one complete part."""
    return bool(parts(folder, TRAJECTORIES_NAME))
