"""Files of the model side: transformers model directories, and directories that appear complete or not at all.

Owns names and durability. Does not know what the tensors mean (see `weights.py`).
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor

from vagen.common.errors import CheckpointError
from vagen.common.files import flush, flush_tree, make_directory

__all__ = ["VALUE_HEAD_FILE", "WEIGHTS_FILE", "atomic_directory", "copy_companions", "read_weights"]

WEIGHTS_FILE = "model.safetensors"
VALUE_HEAD_FILE = "value_head.safetensors"
_INDEX_FILE = "model.safetensors.index.json"
_COMPANIONS = ("*.json", "*.jinja", "*.txt", "*.model")


def read_weights(model_dir: Path) -> dict[str, Tensor]:
    """All tensors of a model directory, under the names on disk. Raises CheckpointError where there are none."""
    index = model_dir / _INDEX_FILE
    names = sorted(set(json.loads(index.read_text())["weight_map"].values())) if index.is_file() else [WEIGHTS_FILE]
    state: dict[str, Tensor] = {}
    for name in names:
        if not (model_dir / name).is_file():
            raise CheckpointError(f"{model_dir / name}: no such file (weights are read from safetensors only)")
        state |= load_file(model_dir / name)
    return state


def copy_companions(source: Path, target: Path) -> None:
    """Copy what a model directory holds besides weights: configs, tokenizer, image processor, chat template."""
    for pattern in _COMPANIONS:
        for file in sorted(source.glob(pattern)):
            if file.name != _INDEX_FILE:
                shutil.copyfile(file, target / file.name)


@contextmanager
def atomic_directory(path: Path) -> Iterator[Path]:
    """A temporary directory that becomes `path`, flushed to disk, when the block ends without an exception.

    Collective over all ranks where torch.distributed runs: all write into the same directory on a shared file system,
    rank 0 makes and renames it. An existing `path` is refused (CheckpointError) so that nothing durable is lost; after
    a failure the temporary directory is left for `path`'s next attempt, which clears it.
    """
    path = path.absolute()
    temporary = path.with_name(f".{path.name}.incomplete")
    first = not dist.is_initialized() or dist.get_rank() == 0
    problem: list[str | None] = [None]
    if first:
        if path.exists():
            problem[0] = f"{path}: already exists"
        else:
            shutil.rmtree(temporary, ignore_errors=True)
            make_directory(temporary)
    if dist.is_initialized():
        dist.broadcast_object_list(problem, src=0)
    if problem[0]:
        raise CheckpointError(problem[0])
    yield temporary
    if dist.is_initialized():
        dist.barrier()
    if first:
        flush_tree(temporary)
        temporary.rename(path)
        flush(path.parent)
    if dist.is_initialized():
        dist.barrier()
