"""`vagen-buffer`: the command line. Imports what is heavy inside the commands."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(
    help="The buffer between actors and learner.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

Config = Annotated[str, typer.Option("--config", metavar="RECIPE", help="A yaml file, or the name of a shipped one.")]
Override = Annotated[
    list[str] | None, typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Override a setting; repeatable.")
]
RunDir = Annotated[
    Path | None, typer.Option("--run-dir", metavar="DIR", help="Folder of the run; runs/<run.name> by default.")
]


@app.command()
def serve(
    config: Config,
    overrides: Override = None,
    run_dir: RunDir = None,
    endpoint: Annotated[
        str | None, typer.Option(metavar="URL", help="Where actors connect, for example tcp://0.0.0.0:5600.")
    ] = None,
    redis: Annotated[
        str | None,
        typer.Option(
            metavar="URL", help="A Redis that runs already; by default buffer.redis_url, else one is started."
        ),
    ] = None,
    shard: Annotated[int, typer.Option(min=0, help="Which of buffer.shards this process serves.")] = 0,
) -> None:
    """Take in trajectories and pace the actors, until SIGTERM or SIGINT.

    What `buffer.fsync` promises: `always` (default), an acknowledged trajectory survives a crash of Redis and a power
    cut; `everysec`, about two seconds of acknowledged trajectories may be lost; `none`, all that the kernel has not
    written back may be lost in a power cut.
    """
    from vagen.buffer.config import BufferConfig
    from vagen.buffer.service import serve as run_service
    from vagen.common.config import RunConfig, read_recipe, section
    from vagen.common.errors import VagenError

    try:
        recipe = read_recipe(config, overrides or ())
        options = dict(recipe.get("buffer", {}))
        options |= {} if endpoint is None else {"endpoint": endpoint}
        options |= {} if redis is None else {"redis_url": redis}
        run = section(recipe, "run", RunConfig)
        run_service(
            run, section({"buffer": options}, "buffer", BufferConfig), run_dir or Path("runs") / run.name, shard
        )
    except VagenError as error:
        raise _failure(error) from error


@app.command()
def audit(
    config: Annotated[
        str | None,
        typer.Option("--config", metavar="RECIPE", help="Names the run; by default --run-dir does."),
    ] = None,
    overrides: Override = None,
    run_dir: RunDir = None,
    redis: Annotated[
        str | None, typer.Option(metavar="URL", help="Redis of the run; by default its ready.json says.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Print the accounting identity by reason; exit with 1 when it does not hold, with 2 when it cannot be read.

    Examples:

      vagen buffer audit --run-dir runs/a

      vagen buffer audit --config frozenlake --redis redis://localhost:6379
    """
    import msgspec

    from vagen.buffer.accounting import audit as read_audit
    from vagen.buffer.accounting import format_accounting
    from vagen.buffer.config import BufferConfig
    from vagen.buffer.service import read_ready
    from vagen.common.config import RunConfig, read_recipe, section
    from vagen.common.errors import ConfigError, VagenError

    try:
        if config is not None:
            recipe = read_recipe(config, overrides or ())
            name = section(recipe, "run", RunConfig).name
            url = redis or read_ready(run_dir or Path("runs") / name).redis_url
            buffer = section(recipe, "buffer", BufferConfig)
            url, num_shards = buffer.complete(url), buffer.shards
        elif run_dir is not None:
            ready = read_ready(run_dir)
            name, num_shards = ready.run_name, ready.shards
            own = [read_ready(run_dir, shard).redis_url for shard in range(num_shards)]
            url = redis or ",".join(dict.fromkeys(own))
        else:
            raise ConfigError("expected --run-dir DIR or --config RECIPE")
        accounting = read_audit(url, name, num_shards)
    except VagenError as error:
        raise _failure(error) from error
    if as_json:
        plain = msgspec.to_builtins(accounting)
        plain |= {"pending": accounting.pending, "accounted": accounting.accounted}
        plain |= {"actors_age_s": accounting.actors_age_s, "identity_holds": accounting.identity_holds}
        typer.echo(msgspec.json.encode(plain).decode())
    else:
        typer.echo(format_accounting(accounting))
    if not accounting.identity_holds:
        raise typer.Exit(1)


def _failure(error: Exception) -> typer.Exit:
    typer.echo(f"error: {error}", err=True)
    return typer.Exit(2)
