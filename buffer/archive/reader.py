"""Reads an archive: by learner step, by place, or from one end to the other; memory is bounded by a row group.

Owns the index (which trajectory lies where, which image lies where), not what the rows mean: see `codec`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from vagen.buffer.archive.codec import decode_records, image_names
from vagen.buffer.archive.layout import IMAGES_NAME, TRAJECTORIES_NAME, parts
from vagen.buffer.archive.record import NO_STEP, ArchivedTrajectory
from vagen.buffer.archive.schema import FORMAT, FORMAT_KEY, IMAGES, TRAJECTORIES
from vagen.common.errors import ArchiveError

__all__ = ["Archive", "open_archive", "read_column"]

_CACHED_IMAGE_BYTES = 64 << 20

T = TypeVar("T")


def open_archive(path: str | Path) -> Archive:
    """The archive in a folder, as it is at this moment; parts that a writer adds later are not seen.

    Raises `ArchiveError` where there is none, or where a file of it cannot be read.
    """
    folder = Path(path)
    if not folder.is_dir():
        raise ArchiveError(f"{folder}: no such folder")
    if not parts(folder, TRAJECTORIES_NAME):
        raise ArchiveError(f"{folder}: not an archive, it has no {TRAJECTORIES_NAME}-*.parquet")
    return Archive(folder)


def read_column(folder: Path, name: str, column: str) -> pa.ChunkedArray:
    """One column of all parts of a kind, in order; empty for a folder without parts."""
    schema = TRAJECTORIES if name == TRAJECTORIES_NAME else IMAGES
    empty = pa.chunked_array([], schema.field(column).type)
    tables = [_File(path, schema).read(columns=[column])[column] for path in parts(folder, name)]
    return pa.chunked_array([chunk for table in tables for chunk in table.chunks], empty.type)


class Archive:
    """Made by `open_archive`. Trajectories are numbered from 0 in the order in which they were written."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._files = [_File(part, TRAJECTORIES) for part in parts(path, TRAJECTORIES_NAME)]
        self._groups = [(file, group) for file in self._files for group in range(file.num_groups)]
        counts = [file.group_rows(group) for file, group in self._groups]
        self._starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
        self._images = _Images(path)
        table = self.table(["step", "position"])
        self._steps = table["step"].to_numpy()
        self._positions = table["position"].to_numpy()

    @property
    def num_trajectories(self) -> int:
        """Trajectories in all parts."""
        return int(self._starts[-1])

    @property
    def steps(self) -> tuple[int, ...]:
        """Learner steps that trained at least one of them, ascending."""
        return tuple(int(step) for step in np.unique(self._steps) if step != NO_STEP)

    @property
    def num_images(self) -> int:
        """Distinct images."""
        return len(self._images)

    def read_step(self, step: int) -> list[ArchivedTrajectory]:
        """The trajectories of one learner step in the order of its manifest; `NO_STEP` are those that none trained.

        Raises `ArchiveError` for a step that is not in the archive.
        """
        found = np.flatnonzero(self._steps == step)
        if not len(found):
            held = f"{self.steps[0]}-{self.steps[-1]}" if self.steps else "none"
            raise ArchiveError(f"{self.path}: no trajectory of step {step}, steps are {held}")
        return self.read(found[np.argsort(self._positions[found], kind="stable")])

    def read(self, indices: Sequence[int] | np.ndarray) -> list[ArchivedTrajectory]:
        """Trajectories by number, in the order asked for. Raises `IndexError` for a number out of range."""
        wanted = np.asarray(indices, dtype=np.int64)
        if len(wanted) and not 0 <= int(wanted.min()) <= int(wanted.max()) < self.num_trajectories:
            raise IndexError(
                f"{self.path}: {self.num_trajectories} trajectories, asked for {wanted.min()}-{wanted.max()}"
            )
        groups = np.searchsorted(self._starts, wanted, side="right") - 1
        found: dict[int, ArchivedTrajectory] = {}
        for group in np.unique(groups):
            inside = np.unique(wanted[groups == group])
            records = self._decode(int(group), inside - self._starts[group])
            found.update(zip(inside.tolist(), records, strict=True))
        return [found[index] for index in wanted.tolist()]

    def iterate(self, keep: np.ndarray | None = None) -> Iterator[ArchivedTrajectory]:
        """All trajectories as they were written, in order; `keep` bool `[num_trajectories]` leaves some out."""
        for group in range(len(self._groups)):
            start, end = self._starts[group : group + 2]
            inside = np.arange(end - start) if keep is None else np.flatnonzero(keep[start:end])
            if len(inside):
                yield from self._decode(group, inside)

    def table(self, columns: Sequence[str]) -> pa.Table:
        """Columns of all trajectories, in order; no others are read."""
        return pa.concat_tables([file.read(columns=list(columns)) for file in self._files])

    def iterate_tables(self, columns: Sequence[str]) -> Iterator[pa.Table]:
        """The same by row group."""
        for file, group in self._groups:
            yield file.read_group(group, columns=list(columns))

    def _decode(self, group: int, inside: np.ndarray) -> list[ArchivedTrajectory]:
        """Trajectories of one row group, by their place in it."""
        file, number = self._groups[group]
        table = file.read_group(number)
        if len(inside) < len(table):
            table = table.take(pa.array(inside))
        images = self._images.fetch(image_names(table), file.path)
        return decode_records(table, images)


class _File:
    """One Parquet file of ours; opened for each read, so that an archive of many parts holds no descriptors."""

    def __init__(self, path: Path, schema: pa.Schema) -> None:
        self.path = path
        self._metadata = self._reading(lambda: pq.read_metadata(path))
        found = (self._metadata.metadata or {}).get(FORMAT_KEY)
        if found != str(FORMAT).encode():
            text = "none" if found is None else found.decode(errors="replace")
            raise ArchiveError(f"{path}: expected archive format {FORMAT}, got {text}")
        missing = set(schema.names) - set(self._metadata.schema.to_arrow_schema().names)
        if missing:
            raise ArchiveError(f"{path}: lacks the columns {', '.join(sorted(missing))}")

    @property
    def num_groups(self) -> int:
        return int(self._metadata.num_row_groups)

    def group_rows(self, group: int) -> int:
        return int(self._metadata.row_group(group).num_rows)

    def read(self, columns: list[str] | None = None) -> pa.Table:
        return self._with_file(lambda file: file.read(columns=columns))

    def read_group(self, group: int, columns: list[str] | None = None) -> pa.Table:
        return self._with_file(lambda file: file.read_row_group(group, columns=columns))

    def _with_file(self, read: Callable[[pq.ParquetFile], pa.Table]) -> pa.Table:
        def call() -> pa.Table:
            with pq.ParquetFile(self.path, metadata=self._metadata) as file:
                return read(file)

        return self._reading(call)

    def _reading(self, call: Callable[[], T]) -> T:
        try:
            return call()
        except (pa.ArrowException, OSError) as error:
            raise ArchiveError(f"{self.path}: cannot be read: {str(error).splitlines()[0]}") from error


class _Images:
    """Finds images by content hash and keeps those read last, within a bound of bytes."""

    def __init__(self, path: Path) -> None:
        self._places: dict[str, tuple[_File, int, int]] = {}
        self._cache: OrderedDict[str, bytes] = OrderedDict()
        self._cached_bytes = 0
        for part in parts(path, IMAGES_NAME):
            file = _File(part, IMAGES)
            for group in range(file.num_groups):
                names = file.read_group(group, columns=["content_hash"])["content_hash"].to_pylist()
                self._places.update((name, (file, group, row)) for row, name in enumerate(names))

    def __len__(self) -> int:
        return len(self._places)

    def fetch(self, names: Iterable[str], wanted_by: Path) -> Mapping[str, bytes]:
        """Encoded bytes of the images. Raises `ArchiveError` for one that no part holds."""
        found: dict[str, bytes] = {}
        to_read: dict[tuple[_File, int], list[tuple[str, int]]] = {}
        for name in names:
            if name in self._cache:
                self._cache.move_to_end(name)
                found[name] = self._cache[name]
                continue
            place = self._places.get(name)
            if place is None:
                raise ArchiveError(f"{wanted_by}: image {name} is in no {IMAGES_NAME}-*.parquet beside it")
            to_read.setdefault(place[:2], []).append((name, place[2]))
        for (file, group), members in to_read.items():
            encoded: Any = file.read_group(group, columns=["bytes"])["bytes"]
            for name, row in members:
                found[name] = encoded[row].as_py()
                self._remember(name, found[name])
        return found

    def _remember(self, name: str, encoded: bytes) -> None:
        self._cache[name] = encoded
        self._cached_bytes += len(encoded)
        while self._cached_bytes > _CACHED_IMAGE_BYTES:
            self._cached_bytes -= len(self._cache.popitem(last=False)[1])
