"""Versions of the weights as safetensors, on a disk that engines see too: complete under their names, or not there.

    DISK_DIR/v000123-9f03ab12/model-00001-of-00002.safetensors ..  model.safetensors.index.json

A folder is flushed to disk before it gets its name, which is never used again. The newest versions stay, and so does
what an engine was asked to read and has not answered for. Does not know engines, nor what the tensors mean.
"""

from __future__ import annotations

import json
import logging
import re
import shutil
import tempfile
import threading
import uuid
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import save_file

from vagen.common.errors import BroadcastError, ConfigError, EngineRefusedError
from vagen.common.files import flush, flush_tree, make_directory
from vagen.learner.weight_buckets import Buckets

__all__ = ["WeightFolders"]

logger = logging.getLogger(__name__)

_INDEX = "model.safetensors.index.json"
_FOLDER = re.compile(r"v(\d+)-[0-9a-f]{8}")
_PARTIAL = ".partial"
_MAX_UNANSWERED = 2
"""Folders that stay for one engine that does not answer, so that it cannot fill the disk."""


class WeightFolders:
    """The folders of one run. Threads may `write` at the same time; all else is one thread's."""

    def __init__(self, directory: Path, keep: int) -> None:
        """`keep` versions stay. Raises ConfigError where `directory` cannot be written to."""
        self._directory = directory
        self._keep = keep
        self._lock = threading.Lock()
        self._current: dict[tuple[str, str], Path] = {}
        """(version, form) -> folder, of the version written last."""
        self._partial: set[Path] = set()
        self._distrusted: set[Path] = set()
        self._readers: dict[str, deque[Path]] = {}
        try:
            make_directory(directory)
            with tempfile.TemporaryFile(dir=directory):
                pass
        except OSError as error:
            raise ConfigError(
                f"$.learner.broadcast.disk_dir: expected a folder to write to, got {directory}: {error.strerror}"
            ) from error

    def write(self, version: str, form: str, buckets: Buckets, given_up: threading.Event) -> Path:
        """The folder with the tensors of `buckets`, a file for each; the same one for the same version and form.

        Nothing appears once `given_up` is set. Raises BroadcastError for that, and where the disk does not take it.
        """
        if not version.isdecimal():
            raise BroadcastError(f"version {version} is no number, as names of folders need it")
        with self._lock:
            known = self._current.get((version, form))
            if known is not None and known not in self._distrusted and known.is_dir():
                return known
            self._current = {key: folder for key, folder in self._current.items() if key[0] == version}
            self._prune(int(version))
            folder = self._directory / f"v{int(version):06d}-{uuid.uuid4().hex[:8]}"
            partial = folder.with_name(folder.name + _PARTIAL)
            self._partial.add(partial)
        try:
            partial.mkdir()
            for index in range(len(buckets)):
                _write_bucket(partial, buckets, index)
                _go_on(folder, given_up)
            _write_index(partial, buckets)
            flush_tree(partial)
            with self._lock:
                _go_on(folder, given_up)
                partial.rename(folder)
                flush(self._directory)
                self._current[version, form] = folder
        except (OSError, SafetensorError) as error:
            raise BroadcastError(f"{folder}: could not be written: {error}") from error
        finally:
            with self._lock:
                shutil.rmtree(partial, ignore_errors=True)
                self._partial.discard(partial)
        return folder

    @contextmanager
    def reading(self, engine: str, folder: Path) -> Iterator[None]:
        """While the engine of a URL reads a folder; a folder that it refuses is distrusted.

        An engine that does not answer may read on, so that the folder stays until it has answered for a later one.
        """
        self._readers.setdefault(engine, deque(maxlen=_MAX_UNANSWERED)).append(folder)
        try:
            yield
        except EngineRefusedError:
            self.distrust(folder)
            self.forget(engine)
            raise
        self.forget(engine)

    def forget(self, engine: str) -> None:
        """The engine of a URL reads nothing any more."""
        self._readers.pop(engine, None)

    def distrust(self, folder: Path) -> None:
        """Write its content anew when it is asked for again."""
        self._distrusted.add(folder)

    def _prune(self, version: int) -> None:
        """Make room for a version: remove what is neither new, nor read, nor being written by this process."""
        used = {folder for folder in self._current.values() if folder not in self._distrusted}
        used |= {folder for folders in self._readers.values() for folder in folders}
        staying = {version}
        for folder in sorted(self._directory.iterdir(), key=_age):
            name = _FOLDER.fullmatch(folder.name.removesuffix(_PARTIAL))
            if name is None or folder in self._partial:
                continue
            is_trusted = folder.suffix != _PARTIAL and folder not in self._distrusted
            is_new = is_trusted and (int(name[1]) in staying or len(staying) < self._keep)
            if is_new or folder in used:
                staying.add(int(name[1]))
            else:
                logger.info("removing %s", folder)
                shutil.rmtree(folder, ignore_errors=True)
                self._distrusted.discard(folder)


def _go_on(folder: Path, given_up: threading.Event) -> None:
    if given_up.is_set():
        raise BroadcastError(f"{folder}: given up before it was complete")


def _age(folder: Path) -> float:
    """Newest first. By the clock, not by version: those of a run that began anew are lower."""
    return -folder.stat().st_mtime


def _write_bucket(folder: Path, buckets: Buckets, index: int) -> None:
    state = {}
    seen = set()
    for name, tensor in buckets.members(index):
        tensor = tensor.detach().contiguous().cpu()
        # A tied head is a second name for the same memory, which the format does not have.
        state[name] = tensor.clone() if tensor.data_ptr() in seen else tensor
        seen.add(tensor.data_ptr())
    save_file(state, folder / _file_name(index, len(buckets)), metadata={"format": "pt"})


def _write_index(folder: Path, buckets: Buckets) -> None:
    files = {name: _file_name(i, len(buckets)) for i in range(len(buckets)) for name, _ in buckets.members(i)}
    total = sum(tensor.nbytes for _, tensor in buckets.tensors)
    (folder / _INDEX).write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": files}))


def _file_name(index: int, count: int) -> str:
    return f"model-{index + 1:05d}-of-{count:05d}.safetensors"
