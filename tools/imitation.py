"""`vagen sft --archive`: imitate the trajectories of a saved buffer, imported conversations among them.

Needs of a trajectory its tokens, its mask and its rewards, never what sampled it. Owns the layout of an archive as rows
to imitate; the loop over optimizer steps is `vagen.learner.sft`'s.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from vagen.actor.rendering import ChatRenderer
from vagen.buffer.archive.reader import Archive, open_archive
from vagen.common.config import RunConfig, section
from vagen.common.errors import ArchiveError, ConfigError
from vagen.common.trajectory import Trajectory
from vagen.learner.batching import RowPreparer
from vagen.learner.config import LearnerConfig, SFTConfig
from vagen.learner.model.actor_critic import VisionLanguageActorCritic
from vagen.learner.model.parallel import parallel_session
from vagen.learner.models import trained_options
from vagen.learner.sft import SFTData, SFTProgress, train_sft

__all__ = ["imitate_archive"]


def imitate_archive(
    recipe: Mapping[str, Any],
    archive_dir: Path,
    model_dir: Path,
    out_dir: Path,
    on_step: Callable[[SFTProgress], None],
) -> dict[str, float]:
    """Train the model of `model_dir` on an archive, write it to `out_dir` and return its statistics.

    `learner.lora` and `learner.freeze_vision` hold here too. The critic learns the discounted return from each turn on.
    Raises `ConfigError` when `out_dir` exists and `ArchiveError` for trajectories of another tokenizer.
    """
    run, config = section(recipe, "run", RunConfig), section(recipe, "sft", SFTConfig)
    if out_dir.exists():
        raise ConfigError(f"{out_dir}: exists already; remove it or choose another --out")
    started = time.perf_counter()
    torch.set_num_threads(config.num_threads)
    archive = open_archive(archive_dir)
    renderer = ChatRenderer.load(model_dir)
    _check_tokenizer(archive, renderer.tokenizer_hash, model_dir)
    learner = section(recipe, "learner", LearnerConfig)
    losses: list[float] = []

    def record(progress: SFTProgress) -> None:
        losses.append(progress.loss)
        on_step(progress)

    with parallel_session(seed=run.seed + 1):
        model = VisionLanguageActorCritic.load_hf(model_dir, trained_options(learner))
        preparer = RowPreparer.load(model_dir)
        data = _lay_out(archive, preparer, learner.advantage.turn_discount)
        train_sft(
            *(model, data, config),
            seed=run.seed,
            forbidden_token_ids=preparer.forbidden_token_ids,
            on_step=record,
        )
        out_dir.parent.mkdir(parents=True, exist_ok=True)
        model.save_hf(out_dir)
    stats = {
        "trajectories": float(archive.num_trajectories),
        "rows": float(len(data.rows)),
        "policy_tokens": float(len(data.returns)),
        "final_loss": float(np.mean(losses[-20:])),
        "seconds": time.perf_counter() - started,
    }
    (out_dir / "sft.json").write_text(json.dumps(stats, indent=2) + "\n")
    return stats


def _check_tokenizer(archive: Archive, expected: str, model_dir: Path) -> None:
    for table in archive.iterate_tables(["trajectory_id", "engine"]):
        for row in table.to_pylist():
            found = row["engine"]["tokenizer_hash"]
            if found != expected:
                raise ArchiveError(
                    f"{archive.path}: trajectory {row['trajectory_id']} has tokens of tokenizer {found}, {model_dir} "
                    f"has {expected}"
                )


def _lay_out(archive: Archive, preparer: RowPreparer, discount: float) -> SFTData:
    """All rows of an archive with policy tokens, and the critic's target of each of these."""
    store = preparer.new_store()
    rows, returns = [], []
    num_slots = 0
    for record in archive.iterate():
        trajectory = record.trajectory
        of_turn = _returns(trajectory, discount)
        first = trajectory.turns[0].index
        for row in trajectory.rows:
            size = int(row.policy_mask.sum())
            if size:
                slots = np.arange(num_slots, num_slots + size)
                rows.append(preparer.policy_row(row, slots, trajectory.images, store))
                returns.append(of_turn[row.turn_index[row.policy_mask != 0] - first])
                num_slots += size
    return SFTData(rows=rows, images=store, returns=torch.from_numpy(np.concatenate(returns)))


def _returns(trajectory: Trajectory, discount: float) -> np.ndarray:
    """Discounted return from each turn on, float32 `[K]`."""
    rewards = np.zeros(len(trajectory.turns))
    for entry in trajectory.rewards:
        turn = trajectory.rows[entry.row].turn_index[entry.token] - trajectory.turns[0].index
        rewards[turn] += entry.value
    for turn in range(len(rewards) - 2, -1, -1):
        rewards[turn] += discount * rewards[turn + 1]
    return rewards.astype(np.float32)
