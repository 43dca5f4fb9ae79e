"""Model directories of a learner: what transformers and engines load, and the step that it is of.

Owns the marker of the step. Weights and names are `VisionLanguageActorCritic`'s.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from vagen.learner.model.actor_critic import VisionLanguageActorCritic
from vagen.learner.model.files import atomic_directory

__all__ = ["export_model", "exported_step"]

_STEP_FILE = "learner.step"


def export_model(
    model: VisionLanguageActorCritic,
    target: Path,
    step: int,
    *,
    dtype: torch.dtype | None = None,
    max_shard_bytes: int | None = None,
    add_files: Callable[[Path], None] = lambda folder: None,
    anew: bool = False,
) -> None:
    """Write the model of a learner step as a model directory; what is there is replaced, unless it is of that step and
    not wanted `anew`.

    It appears complete and flushed, or not at all. `dtype` and `max_shard_bytes` as `write_hf`'s; rank 0 adds further
    files to the folder by `add_files`. Collective over all ranks.
    """
    if not anew and exported_step(target) == step:
        return
    with atomic_directory(target, replace=True) as folder:
        model.write_hf(folder, dtype=dtype, max_shard_bytes=max_shard_bytes)
        if torch.distributed.get_rank() == 0:
            (folder / _STEP_FILE).write_text(str(step))
            add_files(folder)


def exported_step(model_dir: Path) -> int | None:
    """The learner step of a model directory that `export_model` wrote; None for any other."""
    marker = model_dir / _STEP_FILE
    return int(marker.read_text()) if marker.is_file() else None
