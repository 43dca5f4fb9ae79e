"""The command line of `vagen export`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from vagen.tools.console import user_errors

__all__ = ["export"]


def export(
    source: Annotated[Path, typer.Argument(metavar="RUN_OR_CHECKPOINT", help="Folder of a run, or of one checkpoint.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Model folder to write.")],
    step: Annotated[int | None, typer.Option(metavar="N", help="Learner step of the checkpoint.  [newest]")] = None,
    dtype: Annotated[
        str | None, typer.Option(metavar="float32|bfloat16", help="Of the weights.  [as they were trained]")
    ] = None,
    max_shard_gb: Annotated[float, typer.Option(help="Larger models are written in several files.")] = 5.0,
    force: Annotated[bool, typer.Option("--force", help="Replace a model folder at OUT.")] = False,
    run: Annotated[Path | None, typer.Option(metavar="DIR", help="Run of a checkpoint that was moved away.")] = None,
    push: Annotated[str | None, typer.Option(metavar="OWNER/NAME", help="Upload it to this repository too.")] = None,
    private: Annotated[bool, typer.Option("--private/--public", help="Of a repository that is made.")] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Write a checkpoint as a model folder that transformers and SGLang load, with a card of its run.

    Examples:

      vagen export runs/demo-seed0 exported

      vagen export runs/a out/a --push OWNER/NAME

      vagen export runs/a out/a-40 --step 40 --dtype bfloat16

      vagen export runs/a/learner/checkpoints/step-00000040 exported --force --json
    """
    with user_errors():
        import msgspec
        from rich.console import Console

        from vagen.common.errors import ConfigError
        from vagen.common.logging import setup_logging
        from vagen.tools.export import ExportOptions
        from vagen.tools.export import export as write

        if max_shard_gb <= 0:
            raise ConfigError(f"--max-shard-gb: expected a number > 0, got {max_shard_gb:g}")
        setup_logging("WARNING")
        options = ExportOptions(
            source=source,
            out=out,
            step=step,
            force=force,
            dtype=dtype,
            max_shard_bytes=int(max_shard_gb * 1e9),
            run=run,
            push=push,
            private=private,
        )
        with Console(stderr=True).status("export") as status:
            done = write(options, lambda stage: status.update(stage))
    if as_json:
        typer.echo(msgspec.json.encode(done).decode())
    else:
        typer.echo(f"{done.path}: step {done.step}, {done.dtype}, {done.num_bytes / 1e6:.1f} MB")
        if done.commit is not None:
            typer.echo(done.commit)
