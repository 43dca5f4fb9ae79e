"""A small model, a batch for it and a `PolicyUpdate` over both."""

from __future__ import annotations

import io
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from vagen.buffer.archive.record import ArchivedTrajectory
from vagen.buffer.archive.writer import ArchiveWriter
from vagen.common.trajectory import (
    BootstrapPrompt,
    End,
    ImageRef,
    RewardEntry,
    Row,
    Turn,
    VisionTokens,
    content_hash,
)
from vagen.learner.batching import RowPreparer, prepare_batch
from vagen.learner.config import LearnerConfig, ModelConfig, OptimizerConfig
from vagen.learner.model.parallel import parallel_session
from vagen.learner.model.tiny import save_tiny_model
from vagen.learner.models import load_trained
from vagen.learner.update import PolicyUpdate
from vagen.tools.tiny_tokenizer import train_tokenizer

SMALL = ModelConfig(
    hidden_size=64, intermediate_size=96, num_heads=2, num_kv_heads=1, vision_hidden_size=32, vision_num_heads=2
)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    directory = tmp_path_factory.mktemp("model") / "small"
    return save_tiny_model(SMALL, train_tokenizer(["Move to the goal."], [], 384), directory)


@pytest.fixture(scope="module")
def one_process():
    torch.set_num_threads(1)
    with parallel_session(seed=3):
        yield


@pytest.fixture
def make_update(model_dir):
    def make(**changes):
        settings = {"minibatch_rows": 6, "ppo_epochs": 2, "optimizer": OptimizerConfig(warmup_updates=0)}
        config = LearnerConfig(**(settings | changes))
        trained = load_trained(model_dir, config)
        model = trained.policy.model
        forbidden = torch.tensor([model.hf_config.image_token_id])
        update = PolicyUpdate(
            model,
            trained.policy,
            config,
            seed=5,
            forbidden_token_ids=forbidden,
            reference=trained.reference,
            critic=trained.critic,
        )
        return update, model, forbidden

    return make


@pytest.fixture(scope="module")
def make_episode(make_trajectory, model_dir):
    """Episode number `index`: 1-3 no-concat turns with pictures, every second one truncated; `version` sampled it."""
    image_id = json.loads((model_dir / "config.json").read_text())["image_token_id"]

    def make(index: int, rng: np.random.Generator, version: int = 1, **fields):
        rows, turns, rewards, images = [], [], [], {}
        for turn in range(index % 3 + 1):
            buffer = io.BytesIO()
            Image.fromarray(rng.integers(0, 255, (56, 56, 3), dtype=np.uint8)).save(buffer, "PNG")
            encoded = buffer.getvalue()
            images[content_hash(encoded)] = encoded
            size = int(rng.integers(2, 6))
            ids = np.array([7, *[image_id] * 4, 8, *rng.integers(0, 250, size)], np.int32)
            mask = np.array([0] * 6 + [1] * size, np.uint8)
            rows.append(
                Row(
                    token_ids=ids,
                    policy_mask=mask,
                    behaviour_logprobs=np.where(mask, rng.uniform(-6, -5, len(ids)), 0).astype(np.float32),
                    policy_versions=np.where(mask, version, -1).astype(np.int32),
                    turn_index=np.where(mask, turn, -1).astype(np.int16),
                    images=(ImageRef(content_hash=content_hash(encoded), grid_thw=(1, 4, 4), start=1, num_tokens=4),),
                )
            )
            turns.append(Turn(index=turn, row=turn, start=6, end=6 + size, format_ok=True, action_valid=True))
            rewards.append(RewardEntry(component="task", row=turn, token=5 + size, value=float(rng.normal())))
        truncated = index % 2 == 0
        prompt = BootstrapPrompt(token_ids=rows[-1].token_ids[:6], images=rows[-1].images)
        values = {
            "rows": tuple(rows),
            "turns": tuple(turns),
            "rewards": tuple(rewards),
            "images": images,
            "end": End.TRUNCATED if truncated else End.TERMINATED,
            "bootstrap": prompt if truncated else None,
            "group_id": f"g{index}",
            "vision": VisionTokens(image_token_id=image_id, forbidden_token_ids=(image_id,)),
        }
        return make_trajectory(**(values | fields))

    return make


@pytest.fixture
def batch(make_episode, model_dir):
    """Six episodes from an older policy."""
    rng = np.random.default_rng(0)
    trajectories = [make_episode(index, rng) for index in range(6)]
    return prepare_batch(trajectories, [0] * 6, {f"g{i}": i for i in range(6)}, RowPreparer.load(model_dir))


@pytest.fixture
def make_archive(write_archive, tmp_path):
    """`write_archive` into the test's own folder, under a name."""

    def make(num_steps: int = 4, batch_size: int = 6, name: str = "archive", change=lambda record: record) -> Path:
        return write_archive(tmp_path / name, num_steps, batch_size, change)

    return make


@pytest.fixture(scope="module")
def write_archive(make_episode):
    """An archive of learner steps 0, 1, ... of `batch_size` episodes each, in groups of two, 0-2 steps stale.

    Version `v` has the weights of step `v - 1`. `change` rewrites a record before it is written.
    """

    def write(folder: Path, num_steps: int = 4, batch_size: int = 6, change=lambda record: record) -> Path:
        rng = np.random.default_rng(0)
        with ArchiveWriter(folder) as writer:
            for step in range(num_steps):
                records = []
                for position in range(batch_size):
                    oldest = max(0, step - position // 2 % 3)
                    episode = make_episode(
                        position, rng, version=oldest + 1, group_id=f"s{step}-{position // 2}", group_size=2
                    )
                    record = ArchivedTrajectory(
                        trajectory=episode,
                        step=step,
                        position=position,
                        oldest_step=oldest,
                        staleness=step - oldest,
                        version_steps={oldest + 1: oldest},
                    )
                    records.append(change(record))
                writer.write_part(records)
        return folder

    return write
