"""Builders that fixtures, and the worker processes of tests, share."""

from __future__ import annotations

from typing import Any

import numpy as np
from ulid import ULID

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

IMAGE_TOKEN = 9


def make_trajectory(version: int | list[int] = 1, num_bytes: int = 3000, **fields: Any) -> Trajectory:
    """A valid trajectory of one turn with one image of 4 placeholders; keywords override its fields.

    `version` is the policy version of its 3 sampled tokens (a list gives one each), `num_bytes` the image's size.
    """
    image = b"x" * num_bytes
    name = content_hash(image)
    ids = np.array([1, 2, *[IMAGE_TOKEN] * 4, 3, 50, 51, 52], np.int32)
    mask = np.array([0] * 7 + [1] * 3, np.uint8)
    versions = np.full(10, -1, np.int32)
    versions[7:] = version
    row = Row(
        token_ids=ids,
        policy_mask=mask,
        behaviour_logprobs=(mask * -0.5).astype(np.float32),
        policy_versions=versions,
        turn_index=np.where(mask, 0, -1).astype(np.int16),
        images=(ImageRef(content_hash=name, grid_thw=(1, 4, 4), start=2, num_tokens=4),),
    )
    values: dict[str, Any] = {
        "trajectory_id": str(ULID()),
        "run_id": "run",
        "actor_id": "actor-0",
        "actor_seq": 1,
        "episode_id": str(ULID()),
        "task": "frozen_lake",
        "task_index": 0,
        "seed": 5,
        "group_id": str(ULID()),
        "env_name": "frozen_lake",
        "harness_name": "no_concat",
        "splits_episode_across_rows": True,
        "sampling": SamplingParams(),
        "engine": EngineIdentity(kind="local", incarnation="x", model_hash="m", tokenizer_hash="t"),
        "vision": VisionTokens(image_token_id=IMAGE_TOKEN, forbidden_token_ids=(IMAGE_TOKEN,)),
        "rows": (row,),
        "turns": (Turn(index=0, row=0, start=7, end=10, format_ok=True, action_valid=True, actions=("left",)),),
        "rewards": (RewardEntry(component="task", row=0, token=9, value=1.0),),
        "end": End.TERMINATED,
        "success": True,
        "images": {name: image},
    }
    return Trajectory(**(values | fields))


def make_text_trajectory(task_index: int = 0, num_tokens: int = 8) -> Trajectory:
    """A valid trajectory of one turn without images: all tokens but the first are sampled, by policy version 3."""
    mask = np.ones(num_tokens, np.uint8)
    mask[0] = 0
    row = Row(
        token_ids=np.arange(num_tokens, dtype=np.int32),
        policy_mask=mask,
        behaviour_logprobs=np.where(mask, -0.5, 0).astype(np.float32),
        policy_versions=np.where(mask, 3, -1).astype(np.int32),
        turn_index=np.where(mask, 0, -1).astype(np.int16),
    )
    return Trajectory(
        trajectory_id=str(ULID()),
        run_id="run",
        actor_id="a",
        actor_seq=1,
        episode_id=str(ULID()),
        task="t",
        task_index=task_index,
        seed=1,
        group_id="g",
        env_name="e",
        harness_name="h",
        splits_episode_across_rows=False,
        sampling=SamplingParams(),
        engine=EngineIdentity(kind="local", incarnation="i", model_hash="m", tokenizer_hash="t"),
        rows=(row,),
        turns=(Turn(index=0, row=0, start=1, end=num_tokens, format_ok=True, action_valid=True),),
        rewards=(RewardEntry(component="task", row=0, token=num_tokens - 1, value=1.0),),
        end=End.TERMINATED,
        success=True,
    )
