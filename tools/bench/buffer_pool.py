"""Trajectories like those of a real run, for measuring what carries them: as many bytes, and valid ones."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from ulid import ULID

from vagen.common.config import require
from vagen.common.trajectory import (
    End,
    EngineIdentity,
    ImageRef,
    RewardEntry,
    Row,
    SamplingParams,
    Trajectory,
    Turn,
    VisionTokens,
    content_hash,
)
from vagen.common.validation import validate_trajectory
from vagen.common.wire import encode_trajectory

IMAGE_TOKEN = 151_655
RUN = "bench"
POOL_SIZE = 32
_GRID = (1, 16, 16)
_PLACEHOLDERS = 64


def make_trajectory(generator: np.random.Generator, *, tokens: int, images: int, image_bytes: int) -> Trajectory:
    """One row of `tokens` tokens: per image a turn of a prompt with its placeholders and a response of equal length.

    Images are random bytes, as incompressible as the PNGs and JPEGs they stand for. Without images there is one turn.
    Raises `ConfigError` when a turn has no room for its image and a response.
    """
    turns = max(1, images)
    length = tokens // turns
    placeholders = _PLACEHOLDERS if images else 0
    require(length >= placeholders + 4, "tokens", tokens, f">= {turns * (placeholders + 4)} for {images} images")
    ids = np.minimum(generator.zipf(1.3, tokens), 150_000).astype(np.int32)
    mask, turn_index = np.zeros(tokens, np.uint8), np.full(tokens, -1, np.int16)
    encoded = [generator.bytes(image_bytes) for _ in range(images)]
    refs, spans = [], []
    for turn in range(turns):
        start = turn * length + 1
        ids[start : start + placeholders] = IMAGE_TOKEN if images else ids[start]
        middle = start + placeholders + (length - placeholders) // 2 - 1
        end = (turn + 1) * length
        mask[middle:end], turn_index[middle:end] = 1, turn
        spans.append((middle, end))
        if images:
            name = content_hash(encoded[turn])
            refs.append(ImageRef(content_hash=name, grid_thw=_GRID, start=start, num_tokens=placeholders))
    logprobs = np.where(mask, -generator.exponential(0.5, tokens), 0).astype(np.float32)
    row = Row(
        token_ids=ids,
        policy_mask=mask,
        behaviour_logprobs=logprobs,
        policy_versions=np.where(mask, 1, -1).astype(np.int32),
        turn_index=turn_index,
        images=tuple(refs),
    )
    trajectory = Trajectory(
        trajectory_id=str(ULID()),
        run_id=RUN,
        actor_id="pool",
        actor_seq=1,
        episode_id=str(ULID()),
        task="find the blue button",
        task_index=0,
        seed=0,
        group_id=str(ULID()),
        env_name="bench",
        harness_name="concat",
        splits_episode_across_rows=False,
        sampling=SamplingParams(),
        engine=EngineIdentity(kind="local", incarnation="bench", model_hash="m", tokenizer_hash="t"),
        vision=VisionTokens(image_token_id=IMAGE_TOKEN, forbidden_token_ids=tuple(range(151_652, 151_657))),
        rows=(row,),
        turns=tuple(
            Turn(index=k, row=0, start=start, end=end, format_ok=True, action_valid=True, actions=("click",))
            for k, (start, end) in enumerate(spans)
        ),
        rewards=tuple(RewardEntry(component="task", row=0, token=end - 1, value=0.1) for _, end in spans),
        end=End.TERMINATED,
        success=True,
        images={content_hash(image): image for image in encoded},
    )
    validate_trajectory(trajectory)
    return trajectory


def write_pool(folder: Path, *, tokens: int, images: int, image_bytes: int) -> int:
    """Write the trajectories that producers repeat; returns the mean size of a payload in bytes."""
    generator = np.random.default_rng(0)
    sizes = []
    for index in range(POOL_SIZE):
        trajectory = make_trajectory(generator, tokens=tokens, images=images, image_bytes=image_bytes)
        payload = encode_trajectory(trajectory)[1]
        (folder / f"{index:03d}.msgpack").write_bytes(payload)
        sizes.append(len(payload))
    return round(sum(sizes) / len(sizes))
