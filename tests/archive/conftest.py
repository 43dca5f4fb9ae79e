"""Archives of varied trajectories: several rows, pictures that repeat, every kind of end."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from PIL import Image

from vagen.buffer.archive.record import ArchivedTrajectory
from vagen.buffer.archive.writer import ArchiveWriter
from vagen.buffer.config import BufferConfig
from vagen.buffer.requests import Put, read_request
from vagen.common.trajectory import (
    BootstrapPrompt,
    End,
    ImageRef,
    RewardEntry,
    Row,
    SamplingParams,
    Trajectory,
    Turn,
    content_hash,
)
from vagen.common.wire import Kind, encode_trajectory

IMAGE_TOKEN = 9


def png(shade: int, size: tuple[int, int] = (56, 56)) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", size, (shade % 256, shade // 256, 7)).save(buffer, "PNG")
    return buffer.getvalue()


def _row(turn: int, name: str, rng: np.random.Generator, version: int) -> Row:
    size = int(rng.integers(2, 6))
    mask = np.array([0] * 6 + [1] * size, np.uint8)
    return Row(
        token_ids=np.array([7, *[IMAGE_TOKEN] * 4, 8, *rng.integers(10, 250, size)], np.int32),
        policy_mask=mask,
        behaviour_logprobs=np.where(mask, rng.uniform(-6, -1, len(mask)), 0).astype(np.float32),
        policy_versions=np.where(mask, version, -1).astype(np.int32),
        turn_index=np.where(mask, turn, -1).astype(np.int16),
        images=(ImageRef(content_hash=name, grid_thw=(1, 4, 4), start=1, num_tokens=4),),
    )


@pytest.fixture
def varied(make_trajectory: Callable[..., Trajectory]) -> Callable[..., Trajectory]:
    """The `number`-th of a series: 1-3 rows of one turn each, pictures of `shades` kinds; keywords override fields."""

    def make(number: int, version: int = 1, shades: int = 5, **fields: Any) -> Trajectory:
        rng = np.random.default_rng(number)
        count = number % 3 + 1
        encoded = [png((number + turn) % shades) for turn in range(count + 1)]
        rows = tuple(_row(turn, content_hash(encoded[turn]), rng, version) for turn in range(count))
        turns = tuple(
            Turn(
                index=turn,
                row=turn,
                start=6,
                end=len(row.token_ids),
                format_ok=bool(turn % 2),
                action_valid=True,
                actions=("left", "up")[: turn + 1],
                finish_reason="length" if turn else "stop",
                engine_s=0.25 * turn,
                env_s=1e-3,
                metrics={"effective": turn / 3, "distance": -1.0},
                judge={"verdict": "grün", "text": "line\none"} if turn else {},
                state="P . .\n. O G" if turn else "",
            )
            for turn, row in enumerate(rows)
        )
        rewards = tuple(
            RewardEntry(component=component, row=turn, token=len(row.token_ids) - 1, value=value)
            for turn, row in enumerate(rows)
            for component, value in (("task", float(rng.normal())), ("format", 0.1))
        )
        end = (End.TERMINATED, End.TRUNCATED, End.CUT)[number % 3]
        closing = content_hash(encoded[count])
        prompt = BootstrapPrompt(
            token_ids=np.array([7, *[IMAGE_TOKEN] * 4, 8], np.int32),
            images=(ImageRef(content_hash=closing, grid_thw=(1, 4, 4), start=1, num_tokens=4),),
            state="after all",
        )
        with_bootstrap = end is not End.TERMINATED
        used = encoded if with_bootstrap else encoded[:count]
        values: dict[str, Any] = {
            "rows": rows,
            "turns": turns,
            "rewards": rewards,
            "end": end,
            "is_last": end is not End.CUT,
            "bootstrap": prompt if with_bootstrap else None,
            "images": {content_hash(image): image for image in used},
            "success": number % 2 == 0,
            "metrics": {"steps": float(count), "share": 1 / 3},
            "sampling": SamplingParams(temperature=0.7, max_new_tokens=64),
            "actor_seq": number + 1,
            "seed": number,
            "task_index": number,
            "started_at": 1.5e9 + number / 7,
            "finished_at": 1.5e9 + number,
        }
        return make_trajectory(**(values | fields))

    return make


@pytest.fixture
def step_items(varied: Callable[..., Trajectory]) -> Callable[..., list[ArchivedTrajectory]]:
    """What a learner would archive of one step, `count` trajectories; the older half is one step more stale."""

    def make(step: int, count: int = 4, **fields: Any) -> list[ArchivedTrajectory]:
        return [
            ArchivedTrajectory(
                trajectory=varied(step * count + position, version=step + 1, **fields),
                step=step,
                position=position,
                oldest_step=step - position % 2,
                staleness=position % 2,
                version_steps={step + 1: step - position % 2},
                weight=1.0 + position,
            )
            for position in range(count)
        ]

    return make


@pytest.fixture
def archive_of(tmp_path: Path, step_items: Callable[..., list[ArchivedTrajectory]]) -> Callable[..., Path]:
    """Writes an archive of `steps` learner steps, one part each, and returns its folder."""

    def make(steps: int = 3, count: int = 4, name: str = "archive", **fields: Any) -> Path:
        with ArchiveWriter(tmp_path / name) as writer:
            for step in range(steps):
                writer.write_step(step, step_items(step, count, **fields))
        return tmp_path / name

    return make


def plain(record: ArchivedTrajectory) -> tuple[bytes, dict[str, Any]]:
    """A record in a form that compares exactly: the trajectory as its wire bytes, images by name."""
    trajectory = record.trajectory
    ordered = msgspec.structs.replace(trajectory, images=dict(sorted(trajectory.images.items())))
    circumstances = {name: getattr(record, name) for name in record.__struct_fields__ if name != "trajectory"}
    return encode_trajectory(ordered)[1], circumstances


@pytest.fixture(name="plain")
def plain_fixture() -> Callable[[ArchivedTrajectory], Any]:
    return plain


@pytest.fixture
def put_of() -> Callable[[Trajectory], Put]:
    """What the ingest makes of a trajectory that an actor sends."""

    def make(trajectory: Trajectory) -> Put:
        frames = (b"peer", Kind.PUT.value, *encode_trajectory(trajectory))
        request = read_request([memoryview(frame) for frame in frames], "run", BufferConfig().capacity_bytes)
        assert isinstance(request, Put), request
        return request

    return make


@pytest.fixture(name="png")
def png_fixture() -> Callable[..., bytes]:
    return png
