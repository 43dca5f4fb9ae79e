"""`vagen-learner`: the command line of the learner process. Parses first, imports the heavy parts after."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(
    name="vagen-learner",
    help="Trains on trajectories from the buffer and publishes weights to the actors' engines.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


@app.callback()
def main() -> None:
    """Keeps `run` a sub-command."""


@app.command(
    epilog="Example: vagen-learner run --config frozenlake --model runs/a/model --run-dir runs/a "
    "--redis unix:///path/to/valkey.sock --set learner.total_steps=100"
)
def run(
    config: Annotated[str, typer.Option(help="Recipe: a yaml file, or the name of a shipped one.")],
    model: Annotated[Path, typer.Option(help="Model directory to start from (transformers format).")],
    redis: Annotated[str, typer.Option(help="Redis of the buffer: redis://, rediss:// or unix://.")],
    run_dir: Annotated[Path, typer.Option(help="Folder of the run: checkpoints, metrics, logs.")] = Path("runs/run"),
    set_: Annotated[list[str] | None, typer.Option("--set", help="Override a setting: section.key=value.")] = None,
) -> None:
    """Train, resuming from the newest checkpoint under RUN_DIR/learner/checkpoints.

    Under torchrun every rank runs this command; tensor and data parallelism follow from the world size.
    """
    from vagen.buffer.config import BufferConfig
    from vagen.buffer.learner_store import LearnerStore
    from vagen.common.config import RunConfig, read_recipe, section
    from vagen.common.errors import VagenError
    from vagen.common.logging import setup_logging
    from vagen.common.vocabulary import vision_tokens
    from vagen.learner.config import LearnerConfig

    try:
        recipe = read_recipe(config, set_ or [])
        section(recipe, "learner", LearnerConfig)
        redis = section(recipe, "buffer", BufferConfig).complete(redis)
        settings = section(recipe, "run", RunConfig)
        vision_tokens(model)
        # Nobody should wait for torch's import to hear that the buffer is not there.
        LearnerStore.connect(redis, settings.name).close()
        setup_logging(settings.log_level, run_dir / "learner" / "learner.log")

        from vagen.learner.startup import run_learner

        run_learner(recipe, model, run_dir, redis)
    except VagenError as error:
        typer.echo(f"error: {error}", err=True)
        sys.exit(2 if isinstance(error, ValueError) else 1)
