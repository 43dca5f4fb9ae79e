"""One part while it is written: a stream of row groups of trajectories, and one of the images that are new in it."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from vagen.buffer.archive.codec import encode_images, encode_records
from vagen.buffer.archive.layout import IMAGES_NAME, TRAJECTORIES_NAME, part_path, partial_of
from vagen.buffer.archive.record import NO_STEP, ArchivedTrajectory
from vagen.buffer.archive.schema import IMAGES, TRAJECTORIES
from vagen.common.validation import validate_trajectory

__all__ = ["Part"]

_GROUP_TRAJECTORIES = 32
_GROUP_TOKENS = 1 << 20
"""Ends a row group early, so that long trajectories do not make it large."""
_GROUP_IMAGES = 64
_GROUP_IMAGE_BYTES = 16 << 20


class Part:
    """`add` trajectories, then `finish` or `discard`."""

    def __init__(self, folder: Path, number: int, known_images: set[str]) -> None:
        """`known_images` are those that earlier parts hold."""
        self.num_trajectories = 0
        self.steps: set[int] = set()
        self.new_images: set[str] = set()
        self._folder = folder
        self._known_images = known_images
        self._trajectories = _Stream(part_path(folder, TRAJECTORIES_NAME, number), TRAJECTORIES)
        self._images = _Stream(part_path(folder, IMAGES_NAME, number), IMAGES, raw_column="bytes")
        self._records: list[ArchivedTrajectory] = []
        self._encoded: dict[str, bytes] = {}

    def add(self, record: ArchivedTrajectory) -> None:
        """Take in one trajectory. Raises `TrajectoryError` when it is invalid, `OSError` when it cannot be written."""
        trajectory = record.trajectory
        validate_trajectory(trajectory, behaviour_known=trajectory.behaviour_known)
        self._records.append(record)
        self.num_trajectories += 1
        if record.step != NO_STEP:
            self.steps.add(record.step)
        for name, encoded in trajectory.images.items():
            if name not in self._known_images and name not in self.new_images:
                self.new_images.add(name)
                self._encoded[name] = encoded
        if len(self._records) >= _GROUP_TRAJECTORIES or self._num_tokens() >= _GROUP_TOKENS:
            self._flush_trajectories()
        if len(self._encoded) >= _GROUP_IMAGES or sum(map(len, self._encoded.values())) >= _GROUP_IMAGE_BYTES:
            self._flush_images()

    def finish(self) -> None:
        """Make the part appear, durably, images first. Without trajectories there is nothing to appear."""
        self._flush_trajectories()
        self._flush_images()
        for stream in (self._images, self._trajectories):
            stream.finish()
        if self.num_trajectories:
            flush(self._folder)

    def discard(self) -> None:
        """Remove what was written so far."""
        for stream in (self._images, self._trajectories):
            stream.discard()

    def _num_tokens(self) -> int:
        return sum(record.trajectory.num_tokens for record in self._records)

    def _flush_trajectories(self) -> None:
        if self._records:
            self._trajectories.write(encode_records(self._records))
            self._records = []

    def _flush_images(self) -> None:
        if self._encoded:
            self._images.write(encode_images(self._encoded))
            self._encoded = {}


class _Stream:
    """A Parquet file that appears when it is finished; each `write` is a row group."""

    def __init__(self, path: Path, schema: pa.Schema, raw_column: str | None = None) -> None:
        """`raw_column` holds bytes that are compressed already."""
        self._path = path
        self._schema = schema
        self._raw_column = raw_column
        self._writer: pq.ParquetWriter | None = None

    def write(self, table: pa.Table) -> None:
        if self._writer is None:
            names = [name for name in self._schema.names if name != self._raw_column]
            raw = {} if self._raw_column is None else {self._raw_column: "none"}
            self._writer = pq.ParquetWriter(
                partial_of(self._path),
                self._schema,
                compression="zstd" if self._raw_column is None else dict.fromkeys(names, "zstd") | raw,
                use_dictionary=True if self._raw_column is None else names,
            )
        self._writer.write_table(table, row_group_size=max(1, len(table)))

    def finish(self) -> None:
        if self._writer is None:
            return
        self._writer.close()
        flush(partial_of(self._path))
        partial_of(self._path).rename(self._path)
        self._writer = None

    def discard(self) -> None:
        if self._writer is not None:
            # Closing writes a footer, for which a full disk has no room either.
            with contextlib.suppress(OSError):
                self._writer.close()
            self._writer = None
        partial_of(self._path).unlink(missing_ok=True)


def flush(path: Path) -> None:
    """Make a file, or the names in a folder, durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
