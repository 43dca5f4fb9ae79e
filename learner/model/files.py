"""Files of the model side: transformers model directories, and directories that appear complete or not at all.

Owns names and durability. Does not know what the tensors mean (see `weights.py`).
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from huggingface_hub import save_torch_state_dict
from safetensors.torch import load_file
from torch import Tensor

from vagen.common.errors import CheckpointError
from vagen.common.files import flush, flush_tree, make_directory

__all__ = [
    "MAX_SHARD_BYTES",
    "VALUE_HEAD_FILE",
    "atomic_directory",
    "begin_directory",
    "commit_directory",
    "copy_companions",
    "read_weights",
    "set_dtype",
    "write_weights",
]

_WEIGHTS_FILE = "model.safetensors"
VALUE_HEAD_FILE = "value_head.safetensors"
_INDEX_FILE = "model.safetensors.index.json"
MAX_SHARD_BYTES = 5_000_000_000
"""What the hub takes well; a single tensor may be larger."""
_DTYPE_KEYS = ("dtype", "torch_dtype")
_COMPANIONS = ("*.json", "*.jinja", "*.txt", "*.model")


def read_weights(model_dir: Path) -> dict[str, Tensor]:
    """All tensors of a model directory, under the names on disk. Raises CheckpointError where there are none."""
    index = model_dir / _INDEX_FILE
    names = sorted(set(json.loads(index.read_text())["weight_map"].values())) if index.is_file() else [_WEIGHTS_FILE]
    state: dict[str, Tensor] = {}
    for name in names:
        if not (model_dir / name).is_file():
            raise CheckpointError(f"{model_dir / name}: no such file (weights are read from safetensors only)")
        state |= load_file(model_dir / name)
    return state


def write_weights(state: Mapping[str, Tensor], target: Path, max_shard_bytes: int = MAX_SHARD_BYTES) -> None:
    """Write tensors as safetensors that `read_weights` and transformers read: one file, or shards with an index."""
    save_torch_state_dict(dict(state), target, max_shard_size=max_shard_bytes)


def copy_companions(source: Path, target: Path) -> None:
    """Copy what a model directory holds besides weights: configs, tokenizer, image processor, chat template."""
    for pattern in _COMPANIONS:
        for file in sorted(source.glob(pattern)):
            if file.name != _INDEX_FILE:
                shutil.copyfile(file, target / file.name)


def set_dtype(config: Path, dtype: torch.dtype) -> None:
    """Name the weights' dtype in a config.json wherever it names one, since transformers loads in what it finds."""
    content = json.loads(config.read_text())
    name = str(dtype).removeprefix("torch.")
    changed = _with_dtype(content, name) | {"dtype": name}
    if changed != content:
        config.write_text(json.dumps(changed, indent=2) + "\n")


def _with_dtype(content: dict[str, Any], name: str) -> dict[str, Any]:
    nested = {key: _with_dtype(value, name) if isinstance(value, dict) else value for key, value in content.items()}
    return {key: name if key in _DTYPE_KEYS else value for key, value in nested.items()}


@contextmanager
def atomic_directory(path: Path, *, replace: bool = False) -> Iterator[Path]:
    """A temporary directory that becomes `path`, flushed to disk, when the block ends without an exception.

    Collective over all ranks where torch.distributed runs: all write into the same directory on a shared file system,
    rank 0 makes and renames it. An existing `path` is refused (CheckpointError) so that nothing durable is lost, unless
    `replace`: then it goes when its successor is complete. After a failure the temporary directory is left for
    `path`'s next attempt, which clears it.
    """
    temporary = begin_directory(path, replace=replace)
    yield temporary
    commit_directory(path)


def begin_directory(path: Path, *, replace: bool = False) -> Path:
    """The first half of `atomic_directory`: an empty directory beside `path`, for all ranks. Collective."""
    temporary = _temporary(path)
    problem: list[str | None] = [None]
    if _is_first():
        if path.exists() and not replace:
            problem[0] = f"{path}: already exists"
        else:
            shutil.rmtree(temporary, ignore_errors=True)
            make_directory(temporary)
    if dist.is_initialized():
        dist.broadcast_object_list(problem, src=0)
    if problem[0]:
        raise CheckpointError(problem[0])
    return temporary


def commit_directory(path: Path) -> None:
    """The second half: flush what all ranks have written, and give it its name. Collective."""
    if dist.is_initialized():
        dist.barrier()
    if _is_first():
        temporary = _temporary(path)
        flush_tree(temporary)
        replaced = path.absolute().with_name(f".{path.name}.replaced")
        if path.exists():
            shutil.rmtree(replaced, ignore_errors=True)
            path.rename(replaced)
        temporary.rename(path)
        flush(temporary.parent)
        shutil.rmtree(replaced, ignore_errors=True)
    if dist.is_initialized():
        dist.barrier()


def _temporary(path: Path) -> Path:
    return path.absolute().with_name(f".{path.name}.incomplete")


def _is_first() -> bool:
    return not dist.is_initialized() or dist.get_rank() == 0
