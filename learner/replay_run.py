"""Trains from a saved buffer: no actor, no Redis, no engine. Puts the parts together; the loop is the live learner's.

A replay leaves a run folder that a live learner goes on from: the same checkpoints, journal and schedule.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import xxhash

from vagen.buffer.archive.reader import Archive, open_archive
from vagen.common.config import RunConfig, section
from vagen.learner.config import LearnerConfig
from vagen.learner.export import export_model
from vagen.learner.replay import ArchiveSource, Draws, ReplayOptions
from vagen.learner.startup import LearnerParts, learner_parts

__all__ = ["ReplayBegins", "run_replay"]

logger = logging.getLogger(__name__)

_STATE_FILE = "replay.json"

ReplayBegins = Callable[[int, int], None]
"""Is given the first and the last step."""


class _Begun(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which draws a run folder is in, so that the same command goes on with them after a kill."""

    archive: str
    """Hash of what the draws depend on."""
    seed: int
    batch_size: int
    first_draw: int
    """Learner step of the first batch."""


def run_replay(
    recipe: Mapping[str, Any],
    model_dir: Path,
    run_dir: Path,
    options: ReplayOptions,
    on_begin: ReplayBegins = lambda first, last: None,
    on_step: Callable[[dict[str, Any]], None] = lambda line: None,
) -> int:
    """Train until the archive or the recipe's steps end, SIGTERM or SIGINT, and return the step reached.

    Resumes from the newest checkpoint under `run_dir`, one of a live run as well. `on_step` is given each line of the
    journal. Raises `ArchiveError` for what cannot be read or trained on and `ConfigError` for what cannot work.
    """
    run, config = section(recipe, "run", RunConfig), section(recipe, "learner", LearnerConfig)
    archive = open_archive(options.path)
    order = options.resolve(archive)
    draws = None
    if order == "shuffled":
        draws = Draws(archive, seed=run.seed, batch_size=config.batch_size, epochs=options.epochs)
    with learner_parts(recipe, model_dir, run_dir) as parts:
        source = ArchiveSource(
            archive,
            draws,
            first_draw=parts.first_step if draws is None else _first_draw(parts, archive),
            max_staleness=config.max_staleness,
            publish_every=config.publish_every,
        )
        last_step = source.last_step(parts.first_step, config.total_steps)
        with closing(parts.feeder(source)) as feeder:
            learner = parts.learner(source, feeder, last_step=last_step, on_step=on_step)
            parts.announce()
            if parts.is_first:
                logger.info("%s: steps %d-%d, order %s", archive.path, parts.first_step, last_step - 1, order)
                on_begin(parts.first_step, last_step)
            reached = learner.run()
        if parts.is_first:
            logger.info("stopped at step %d of %d", reached, last_step)
        if reached == last_step:
            # `export` is the finished run's; a live learner may go on from this one.
            is_finished = reached == config.total_steps
            name = "export" if is_finished else f"export-step-{reached:08d}"
            export_model(learner.trainer.model, parts.folder / name, reached)
    return reached


def _first_draw(parts: LearnerParts, archive: Archive) -> int:
    """The step of the first draw: where this replay began, or begins."""
    file = parts.folder / _STATE_FILE
    identity = _identity(archive)
    begun = msgspec.json.decode(file.read_bytes(), type=_Begun) if file.is_file() else None
    this = _Begun(
        archive=identity, seed=parts.run.seed, batch_size=parts.config.batch_size, first_draw=parts.first_step
    )
    if begun is not None and msgspec.structs.replace(this, first_draw=begun.first_draw) == begun:
        return begun.first_draw
    if parts.is_first:
        partial = file.with_name(f".{file.name}.partial")
        partial.write_bytes(msgspec.json.encode(this) + b"\n")
        partial.replace(file)
    return this.first_draw


def _identity(archive: Archive) -> str:
    table = archive.table(["trajectory_id", "run_id", "group_id", "weight"])
    return xxhash.xxh3_128_hexdigest(json.dumps(table.to_pydict()).encode())
