"""`vagen export`: a checkpoint as a model directory that transformers and SGLang load, with a card of its run.

Owns which checkpoint is meant and what may be overwritten.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors import SafetensorError

from vagen.common.errors import CheckpointError, ConfigError
from vagen.learner.checkpoints import CheckpointFolder
from vagen.learner.config import require_repository
from vagen.learner.export import export_model, exported_step
from vagen.learner.model.checkpoint_io import load_model, read_record
from vagen.learner.model.parallel import parallel_session
from vagen.tools.hub import push
from vagen.tools.model_card import write_model_card
from vagen.tools.runs import RunDir

__all__ = ["ExportOptions", "Exported", "export"]


@dataclass(frozen=True, kw_only=True)
class ExportOptions:
    """What is exported, and where to."""

    source: Path
    """Folder of a run, or one checkpoint."""
    out: Path
    step: int | None = None
    """The checkpoint before this learner step; None: the newest."""
    force: bool = False
    """Replace a model directory at `out`."""
    dtype: str | None = None
    """`float32` or `bfloat16`; None: as it was trained."""
    max_shard_bytes: int | None = None
    run: Path | None = None
    """Folder of the run of a checkpoint that was moved away from it."""
    push: str | None = None
    """OWNER/NAME of a repository to upload the folder to."""
    private: bool = True
    """Of a repository that is made."""

    def __post_init__(self) -> None:
        if self.push is not None:
            require_repository("push", self.push)


class Exported(msgspec.Struct, frozen=True, kw_only=True):
    """What was written."""

    path: str
    checkpoint: str
    step: int
    dtype: str
    num_bytes: int
    files: tuple[str, ...]
    commit: str | None
    """Address of the upload."""


def export(options: ExportOptions, on_stage: Callable[[str], None] = lambda stage: None) -> Exported:
    """Write the model directory; it appears complete, or what was there stays.

    Raises `ConfigError` where there is no such checkpoint or `out` may not be replaced, and `CheckpointError` for a
    checkpoint that is not whole and a folder that takes no more.
    """
    checkpoint, run = _find(options)
    step = int(read_record(checkpoint)["step"])
    _check_target(options)
    try:
        name = _write(options, checkpoint, run, step, on_stage)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{options.out}: could not be written, what was there is left: {error}") from error
    commit = None
    if options.push is not None:
        on_stage(f"uploading to {options.push}")
        commit = push(options.out, options.push, f"Learner step {step}", private=options.private)
    files = sorted(file for file in options.out.iterdir() if file.is_file())
    return Exported(
        path=str(options.out),
        checkpoint=str(checkpoint),
        step=step,
        dtype=name,
        num_bytes=sum(file.stat().st_size for file in files),
        files=tuple(file.name for file in files),
        commit=commit,
    )


def _write(
    options: ExportOptions, checkpoint: Path, run: RunDir | None, step: int, on_stage: Callable[[str], None]
) -> str:
    """Returns the dtype's name."""
    with parallel_session():
        on_stage(f"reading {checkpoint}")
        model, _ = load_model(checkpoint)
        dtype = model.config.params_dtype if options.dtype is None else _dtype(options.dtype)
        name = str(dtype).removeprefix("torch.")
        on_stage(f"writing {options.out}")
        export_model(
            model,
            options.out,
            step,
            dtype=dtype,
            max_shard_bytes=options.max_shard_bytes,
            add_files=lambda folder: write_model_card(folder, run, step, name),
            anew=True,
        )
    return name


def _find(options: ExportOptions) -> tuple[Path, RunDir | None]:
    """The checkpoint, and the run that it lies in."""
    source = options.source.absolute()
    if not source.is_dir():
        raise ConfigError(f"{options.source}: no such folder")
    run = RunDir(source)
    if run.checkpoints.is_dir():
        folder = CheckpointFolder(run.checkpoints, keep=1)
        steps = folder.steps()
        if not steps:
            raise ConfigError(f"{run.checkpoints}: holds no complete checkpoint")
        wanted = steps[-1] if options.step is None else options.step
        if wanted not in steps:
            there = ", ".join(map(str, steps))
            raise ConfigError(f"--step: expected one of the run's checkpoints ({there}), got {wanted}")
        return folder.path_of(wanted), run
    run = RunDir(source.parents[2]) if len(source.parents) > 2 else run
    step = read_record(source)["step"]
    if options.step not in (None, step):
        raise ConfigError(f"--step: {options.source} is the checkpoint of step {step}, got {options.step}")
    if options.run is not None:
        return source, RunDir(options.run)
    return source, run if run.checkpoints == source.parent else None


def _check_target(options: ExportOptions) -> None:
    out = options.out
    if not out.exists():
        return
    if not options.force:
        step = exported_step(out)
        what = "already exists" if step is None else f"already holds the model of step {step}"
        raise ConfigError(f"{out}: {what}; --force replaces it")
    if not (out / "config.json").is_file():
        raise ConfigError(f"{out}: expected a model directory to replace, it has no config.json")


def _dtype(name: str) -> torch.dtype:
    known: dict[str, Any] = {"float32": torch.float32, "bfloat16": torch.bfloat16}
    if name not in known:
        raise ConfigError(f"--dtype: expected {' or '.join(known)}, got {name}")
    dtype: torch.dtype = known[name]
    return dtype
