"""Archives from archives: merged, filtered, relabelled. A result appears whole or not at all."""

from __future__ import annotations

import importlib
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from vagen.buffer.archive.layout import is_archive
from vagen.buffer.archive.part import flush
from vagen.buffer.archive.reader import Archive
from vagen.buffer.archive.record import ArchivedTrajectory
from vagen.buffer.archive.selection import Selection
from vagen.buffer.archive.writer import ArchiveWriter
from vagen.common.errors import ArchiveError, ConfigError, TrajectoryError
from vagen.common.trajectory import Trajectory
from vagen.common.validation import validate_trajectory

__all__ = ["Change", "filtered", "load_hook", "merged", "new_archive", "relabelled", "scaled_rewards"]

Change = Callable[[Trajectory], Trajectory | None]
"""What a hook is: the trajectory as it shall be, or None to leave it out."""


@contextmanager
def new_archive(out: Path, *, force: bool) -> Iterator[ArchiveWriter]:
    """A writer over a hidden folder that becomes `out` when the block ends without an exception.

    Raises `ArchiveError` when `out` exists; with `force` an archive there is replaced, and nothing else ever is.
    """
    if out.exists():
        if not force:
            raise ArchiveError(f"{out}: exists already; choose another name, or --force to replace it")
        if not (out.is_dir() and (is_archive(out) or not any(out.iterdir()))):
            raise ArchiveError(f"{out}: is no archive, --force does not replace it")
    hidden = out.with_name(f".{out.name}.incomplete")
    shutil.rmtree(hidden, ignore_errors=True)
    try:
        with ArchiveWriter(hidden) as writer:
            yield writer
        if not is_archive(hidden):
            raise ArchiveError(f"{out}: not written, no trajectory is left for it")
    except BaseException:
        shutil.rmtree(hidden, ignore_errors=True)
        raise
    if out.exists():
        shutil.rmtree(out)
    hidden.rename(out)
    flush(out.absolute().parent)


def merged(archives: Sequence[Archive], *, allow_mixed: bool = False) -> Iterator[ArchivedTrajectory]:
    """The trajectories of all archives; one whose id an earlier archive holds is left out.

    Within one archive an id stands once for each step that trained it.

    Raises `ArchiveError` when they were sampled from different models or tokenizers, unless `allow_mixed`.
    """
    if not allow_mixed:
        _check_same_model(archives)
    seen: set[str] = set()
    for archive in archives:
        own: set[str] = set()
        for record in archive.iterate():
            own.add(record.trajectory.trajectory_id)
            if record.trajectory.trajectory_id not in seen:
                yield record
        seen |= own


def _check_same_model(archives: Sequence[Archive]) -> None:
    found: dict[tuple[str, str], Path] = {}
    for archive in archives:
        for table in archive.iterate_tables(["engine"]):
            for engine in table["engine"].to_pylist():
                found.setdefault((engine["model_hash"], engine["tokenizer_hash"]), archive.path)
    if len(found) > 1:
        (first, one), (second, other) = list(found.items())[:2]
        raise ArchiveError(
            f"{one} holds model {first[0]} with tokenizer {first[1]}, {other} model {second[0]} with tokenizer "
            f"{second[1]}: token ids may not mean the same; --allow-mixed merges them anyway"
        )


def filtered(archive: Archive, selection: Selection) -> Iterator[ArchivedTrajectory]:
    """The trajectories for which a condition holds."""
    yield from archive.iterate(selection.mask(archive))


def relabelled(records: Iterable[ArchivedTrajectory], change: Change) -> Iterator[ArchivedTrajectory]:
    """Records whose trajectory a hook has changed and validation accepts; those it answers with None are left out.

    Raises `TrajectoryError` for a trajectory that is invalid after the change, naming it.
    """
    for record in records:
        changed = change(record.trajectory)
        if changed is None:
            continue
        name = record.trajectory.trajectory_id
        if not isinstance(changed, Trajectory):
            raise TrajectoryError(name, f"the hook returned {type(changed).__name__}, expected Trajectory or None")
        try:
            validate_trajectory(changed, behaviour_known=changed.behaviour_known)
        except TrajectoryError as error:
            raise TrajectoryError(error.field, f"{error.problem} (trajectory {name}, after the hook)") from None
        yield msgspec.structs.replace(record, trajectory=changed)


def scaled_rewards(factors: Mapping[str, float]) -> Change:
    """A hook that multiplies the rewards of components; 0 takes their entries away."""

    def change(trajectory: Trajectory) -> Trajectory:
        rewards = tuple(
            msgspec.structs.replace(entry, value=entry.value * factors.get(entry.component, 1.0))
            for entry in trajectory.rewards
            if factors.get(entry.component, 1.0) != 0
        )
        return msgspec.structs.replace(trajectory, rewards=rewards)

    return change


def load_hook(name: str) -> Change:
    """The hook `module:function`; modules of the current folder are found too. Raises `ConfigError`."""
    module_name, colon, function_name = name.partition(":")
    if not (module_name and colon and function_name):
        raise ConfigError(f"--hook {name}: expected module:function")
    if "" not in sys.path:
        sys.path.insert(0, "")
    try:
        module: Any = importlib.import_module(module_name)
    except ImportError as error:
        raise ConfigError(f"--hook {name}: {error}") from error
    hook = getattr(module, function_name, None)
    if not callable(hook):
        raise ConfigError(f"--hook {name}: {module_name} has no function {function_name!r}")
    return hook
