"""`vagen-learner`: the command line of the learner process. Parses first, imports the heavy parts after."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from vagen.learner.config import LearnerConfig

app = typer.Typer(
    name="vagen-learner",
    help="Trains on trajectories from the buffer and publishes weights to the actors' engines.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


class ReplayOrder(StrEnum):
    """Choices of --replay-order."""

    archive = "archive"
    shuffled = "shuffled"


@app.callback()
def main() -> None:
    """Keeps `run` a sub-command."""


@app.command(
    epilog="Examples: vagen-learner run --config frozenlake --model runs/a/model --run-dir runs/a "
    "--redis unix:///path/to/valkey.sock --set learner.total_steps=100 · "
    "vagen-learner run --config frozenlake --model runs/a/model --run-dir runs/b --replay runs/a/archive"
)
def run(
    config: Annotated[str, typer.Option(metavar="RECIPE", help="A yaml file, or the name of a shipped one.")],
    model: Annotated[Path, typer.Option(metavar="DIR", help="Hugging Face model folder to start from.")],
    redis: Annotated[
        str | None,
        typer.Option(metavar="URL[,..]", help="Redis of the buffer; of shards with a Redis each all, in order."),
    ] = None,
    run_dir: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Folder of the run; runs/<run.name> by default.")
    ] = None,
    set_: Annotated[
        list[str] | None, typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Override a setting; repeatable.")
    ] = None,
    replay: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Train from this saved buffer: no actor, no Redis, no engine."),
    ] = None,
    replay_order: Annotated[
        ReplayOrder | None,
        typer.Option(help="The archive's own steps (default where it has them), or whole groups drawn by run.seed."),
    ] = None,
    replay_epochs: Annotated[int, typer.Option(help="Passes over the archive, shuffled.")] = 1,
) -> None:
    """Train, resuming from the newest checkpoint under RUN_DIR/learner/checkpoints.

    With --replay from a saved buffer; the same command without it, but with --redis, goes on live from there. On
    several processes: `torchrun --nproc-per-node 4 -m vagen.learner run ...`, see docs/parallelism.md.
    """
    from vagen.buffer.config import BufferConfig
    from vagen.common.config import RunConfig, read_recipe, section
    from vagen.common.errors import ConfigError, VagenError
    from vagen.common.logging import setup_logging
    from vagen.common.vocabulary import vision_tokens
    from vagen.learner.config import LearnerConfig

    try:
        recipe = read_recipe(config, set_ or [])
        settings = section(recipe, "run", RunConfig)
        run_dir = run_dir or Path("runs") / settings.name
        learner = section(recipe, "learner", LearnerConfig)
        _check_layout(learner, model)
        _check_checkpoint(learner, model, run_dir)
        vision_tokens(model)
        log = run_dir / "learner" / "learner.log"
        if replay is not None:
            if redis is not None:
                raise ConfigError("--replay trains from a saved buffer: leave --redis out")
            _replay(
                recipe,
                model,
                run_dir,
                replay,
                replay_order,
                replay_epochs,
                lambda: setup_logging(settings.log_level, log),
            )
            return
        if redis is None:
            raise ConfigError("expected --redis, the buffer to train from, or --replay, a saved one")
        if replay_order is not None or replay_epochs != 1:
            raise ConfigError("--replay-order and --replay-epochs: expected --replay with them")
        buffer = section(recipe, "buffer", BufferConfig)
        redis = ",".join(buffer.complete(url) for url in redis.split(","))
        _train(recipe, buffer.shards, model, run_dir, redis, lambda: setup_logging(settings.log_level, log))
    except VagenError as error:
        typer.echo(f"error: {error}", err=True)
        sys.exit(2 if isinstance(error, ValueError) else 1)


def _check_layout(config: LearnerConfig, model: Path) -> None:
    """Every rank says so before it waits for others, or for torch."""
    from vagen.common.config import require
    from vagen.common.model_types import require_unquantised
    from vagen.common.vocabulary import read_model_json

    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    config.layout.require_world(world_size)
    require(
        not config.sequence_parallel or config.tensor_parallel_size > 1,
        "learner.sequence_parallel",
        config.sequence_parallel,
        "false, or a tensor_parallel_size above 1",
    )
    config.layout.require_batch(config.batch_size, world_size)
    content = read_model_json(model / "config.json")
    config.layout.require_model(content, model / "config.json", sequence_parallel=config.sequence_parallel)
    require_unquantised(content, model / "config.json")


def _check_checkpoint(config: LearnerConfig, model: Path, run_dir: Path) -> None:
    """Of another model, it is refused before anybody waits for torch."""
    from vagen.learner.checkpoint_match import require_matching_checkpoint
    from vagen.learner.checkpoints import CheckpointFolder

    newest = CheckpointFolder.of_run(run_dir, config.keep_checkpoints).newest()
    if newest is not None:
        require_matching_checkpoint(newest, model, config)


def _train(
    recipe: Mapping[str, Any],
    num_shards: int,
    model: Path,
    run_dir: Path,
    redis: str,
    start_logging: Callable[[], None],
) -> None:
    from vagen.buffer.sharded_store import connect_store
    from vagen.common.config import RunConfig, section
    from vagen.common.memory import collect_rarely, keep_freed_memory

    keep_freed_memory()
    collect_rarely()
    # Nobody should wait for torch's import to hear that the buffer is not there.
    connect_store(redis, section(recipe, "run", RunConfig).name, num_shards=num_shards).close()
    start_logging()

    from vagen.learner.startup import run_learner

    run_learner(recipe, model, run_dir, redis)


def _replay(
    recipe: Mapping[str, Any],
    model: Path,
    run_dir: Path,
    path: Path,
    order: ReplayOrder | None,
    epochs: int,
    start_logging: Callable[[], None],
) -> None:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from vagen.buffer.archive.reader import open_archive

    open_archive(path)

    from vagen.learner.replay import ReplayOptions
    from vagen.learner.replay_run import run_replay

    options = ReplayOptions(path=path, order=order.value if order else None, epochs=epochs)
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        # While the bar is live it stands in for stderr, so that lines of the log appear above it.
        start_logging()
        task = bar.add_task("replay", total=None)
        run_replay(
            recipe,
            model,
            run_dir,
            options,
            on_begin=lambda first, last: bar.update(task, completed=first, total=last),
            on_step=lambda line: bar.update(
                task, completed=line["step"] + 1, description=f"loss {line['loss']['total']:+.4f}"
            ),
        )
