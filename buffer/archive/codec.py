"""Between trajectories and Arrow: lossless both ways, token arrays without a Python object per token."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
from PIL import Image

from vagen.buffer.archive.record import ArchivedTrajectory
from vagen.buffer.archive.schema import IMAGES, ROW_ARRAYS, TRAJECTORIES
from vagen.common.trajectory import BootstrapPrompt, ImageRef, Row, Trajectory

__all__ = ["encode_images", "encode_records", "image_names", "decode_records"]


def encode_records(records: Sequence[ArchivedTrajectory]) -> pa.Table:
    """Records as rows of `TRAJECTORIES`, in order, without the bytes of their images."""
    columns = []
    for field in TRAJECTORIES:
        if field.name == "rows":
            columns.append(_encode_rows([record.trajectory for record in records], field.type))
        else:
            columns.append(pa.array([_COLUMNS[field.name](record) for record in records], field.type))
    return pa.Table.from_arrays(columns, schema=TRAJECTORIES)


def encode_images(images: Mapping[str, bytes]) -> pa.Table:
    """Images by content hash as rows of `IMAGES`; size and format are null for bytes that are no picture."""
    facts = [_image_facts(encoded) for encoded in images.values()]
    encoded = list(images.values())
    columns = [
        list(images),
        encoded,
        [len(one) for one in encoded],
        *(list(column) for column in zip(*facts, strict=True)),
    ]
    return pa.Table.from_arrays(
        [pa.array(column, field.type) for column, field in zip(columns, IMAGES, strict=True)], schema=IMAGES
    )


def image_names(table: pa.Table) -> set[str]:
    """Content hashes that rows of `TRAJECTORIES` refer to."""
    names: set[str] = set()
    rows = _one_chunk(table["rows"]).flatten()
    prompts = _one_chunk(table["bootstrap"])
    for refs in (rows.field("images"), prompts.filter(prompts.is_valid()).field("images")):
        names.update(refs.flatten().field("content_hash").to_pylist())
    return names


def decode_records(table: pa.Table, images: Mapping[str, bytes]) -> list[ArchivedTrajectory]:
    """Inverse of `encode_records`; `images` holds at least those of `image_names`.

    Arrays are read-only views of the table's memory. Raises `KeyError` for a missing image.
    """
    plain = table.select([name for name in table.column_names if name in _DECODED]).to_pylist()
    rows = _decode_rows(_one_chunk(table["rows"]))
    prompts = _one_chunk(table["bootstrap"]).field("token_ids")
    return [
        _decode_record(values, row, _slice(prompts, index), images)
        for index, (values, row) in enumerate(zip(plain, rows, strict=True))
    ]


def _encode_rows(trajectories: Sequence[Trajectory], kind: pa.DataType) -> pa.Array:
    rows = [row for trajectory in trajectories for row in trajectory.rows]
    offsets = pa.array(_offsets([len(row.token_ids) for row in rows]))
    columns: list[pa.Array] = []
    for name, element in ROW_ARRAYS.items():
        values = np.concatenate([getattr(row, name) for row in rows])
        columns.append(pa.ListArray.from_arrays(offsets, pa.array(values, element)))
    struct = kind.value_type
    columns.append(pa.array([_refs(row.images) for row in rows], struct.field("images").type))
    flat = pa.StructArray.from_arrays(columns, fields=list(struct))
    return pa.ListArray.from_arrays(pa.array(_offsets([len(t.rows) for t in trajectories])), flat, type=kind)


def _offsets(lengths: Sequence[int]) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)


def _refs(images: Sequence[ImageRef]) -> list[dict[str, Any]]:
    return [msgspec.to_builtins(image) for image in images]


def _bootstrap(record: ArchivedTrajectory) -> dict[str, Any] | None:
    prompt = record.trajectory.bootstrap
    return (
        None
        if prompt is None
        else {"token_ids": prompt.token_ids, "images": _refs(prompt.images), "state": prompt.state}
    )


def _turns(record: ArchivedTrajectory) -> list[dict[str, Any]]:
    return [
        msgspec.to_builtins(turn) | {"metrics": _entries(turn.metrics), "judge": _entries(turn.judge)}
        for turn in record.trajectory.turns
    ]


def _entries(values: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [{"name": name, "value": value} for name, value in values.items()]


def _of_record(name: str) -> Callable[[ArchivedTrajectory], Any]:
    return lambda record: getattr(record, name)


def _of_trajectory(name: str) -> Callable[[ArchivedTrajectory], Any]:
    return lambda record: getattr(record.trajectory, name)


def _struct(name: str) -> Callable[[ArchivedTrajectory], Any]:
    return lambda record: msgspec.to_builtins(getattr(record.trajectory, name))


_SPECIAL: dict[str, Callable[[ArchivedTrajectory], Any]] = {
    "version_steps": lambda r: [{"version": version, "step": step} for version, step in r.version_steps.items()],
    "end": lambda r: r.trajectory.end.value,
    "metrics": lambda r: _entries(r.trajectory.metrics),
    "reward_by_component": lambda r: _entries(r.trajectory.reward_by_component),
    "num_turns": lambda r: len(r.trajectory.turns),
    "turns": _turns,
    "rewards": lambda r: msgspec.to_builtins(r.trajectory.rewards),
    "bootstrap": _bootstrap,
    **{name: _struct(name) for name in ("sampling", "engine", "vision")},
}
_RECORD_FIELDS = {field.name for field in msgspec.structs.fields(ArchivedTrajectory)} - {"trajectory"}
_TRAJECTORY_FIELDS = {field.name for field in msgspec.structs.fields(Trajectory)}
_COLUMNS: dict[str, Callable[[ArchivedTrajectory], Any]] = {
    name: _SPECIAL.get(name) or (_of_record(name) if name in _RECORD_FIELDS else _of_trajectory(name))
    for name in TRAJECTORIES.names
}
_DECODED = (_RECORD_FIELDS | _TRAJECTORY_FIELDS) - {"rows"}


def _image_facts(encoded: bytes) -> tuple[int | None, int | None, str | None]:
    try:
        with Image.open(io.BytesIO(encoded)) as picture:
            return picture.width, picture.height, picture.format
    except OSError:
        return None, None, None


def _one_chunk(column: pa.ChunkedArray) -> pa.Array:
    return column.chunk(0) if column.num_chunks == 1 else pa.concat_arrays(column.chunks)


def _slice(lists: pa.ListArray, index: int) -> np.ndarray:
    """Element `index` of a list array of numbers, without a copy."""
    start, end = lists.offsets[index].as_py(), lists.offsets[index + 1].as_py()
    view: np.ndarray = lists.values.slice(start, end - start).to_numpy(zero_copy_only=True)
    return view


def _decode_rows(column: pa.ListArray) -> list[tuple[Row, ...]]:
    """Rows of each trajectory."""
    flat = column.values
    arrays = {name: _views(flat.field(name)) for name in ROW_ARRAYS}
    refs = flat.field("images").to_pylist()
    rows = [
        Row(**{name: views[index] for name, views in arrays.items()}, images=_decode_refs(refs[index]))
        for index in range(len(flat))
    ]
    offsets = column.offsets.to_numpy()
    return [tuple(rows[start:end]) for start, end in zip(offsets[:-1], offsets[1:], strict=True)]


def _views(lists: pa.ListArray) -> list[np.ndarray]:
    values = lists.values.to_numpy(zero_copy_only=True)
    offsets = lists.offsets.to_numpy()
    return [values[start:end] for start, end in zip(offsets[:-1], offsets[1:], strict=True)]


def _decode_refs(refs: Sequence[dict[str, Any]]) -> tuple[ImageRef, ...]:
    return tuple(msgspec.convert(ref, ImageRef) for ref in refs)


def _decode_record(
    values: dict[str, Any], rows: tuple[Row, ...], prompt: np.ndarray, images: Mapping[str, bytes]
) -> ArchivedTrajectory:
    own = {name: values.pop(name) for name in _RECORD_FIELDS}
    own["version_steps"] = {item["version"]: item["step"] for item in own["version_steps"]}
    bootstrap = values.pop("bootstrap")
    if bootstrap is not None:
        bootstrap = BootstrapPrompt(
            token_ids=prompt, images=_decode_refs(bootstrap["images"]), state=bootstrap.get("state") or ""
        )
    for turn in values["turns"]:
        # Absent from parts that were written before there was one, and null where such parts were merged.
        turn["state"] = turn.get("state") or ""
    for holder in (values, *values["turns"]):
        for name in ("metrics", "judge"):
            if name in holder:
                holder[name] = {item["name"]: item["value"] for item in holder[name]}
    refs = [ref for row in rows for ref in row.images] + ([] if bootstrap is None else list(bootstrap.images))
    shell = msgspec.convert(values | {"rows": (), "bootstrap": None}, Trajectory)
    trajectory = msgspec.structs.replace(
        shell,
        rows=rows,
        bootstrap=bootstrap,
        images={ref.content_hash: images[ref.content_hash] for ref in refs},
    )
    return ArchivedTrajectory(trajectory=trajectory, **own)
