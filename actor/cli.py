"""The command `vagen-actor`. Parses and reports; what it runs is imported inside the commands."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated, Any

import typer

app = typer.Typer(
    name="vagen-actor",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="Play episodes with a policy served by an engine, and send them to the buffer.",
)

Recipe = Annotated[
    str | None, typer.Option("--config", metavar="RECIPE", help="A yaml file, or the name of a shipped one.")
]
Overrides = Annotated[
    list[str] | None, typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Override a setting; repeatable.")
]
Model = Annotated[Path, typer.Option("--model", metavar="DIR", help="Hugging Face model folder.")]

_RUN_HELP = """Play episodes until stopped.

Examples:

  vagen-actor run --engine local --buffer tcp://127.0.0.1:5600 --config frozenlake --model runs/tiny

  vagen-actor run --engine http://10.0.0.7:30000 --engine http://10.0.0.8:30000 --buffer tcp://10.0.0.1:5600
    --config my.yaml --model Qwen2.5-VL-3B --name actor-7 --set actor.concurrency=128

  vagen-actor run --engines engines.txt --buffer tcp://10.0.0.1:5600 --config my.yaml --model Qwen2.5-VL-3B

engines.txt has one URL a line; the actor reads it again every second and at SIGHUP, so engines join and leave with it.

SIGTERM and SIGINT stop it in order: running episodes get actor.drain_s, unacked trajectories are kept on disk and are
sent by the next start with the same --data-dir.
"""

_ENGINE_HELP = """Serve a model from this machine with the local engine, over SGLang's HTTP API.

Example:

  vagen-actor engine --model runs/tiny --port 30000
"""


@app.command("run", help=_RUN_HELP)
def run_command(
    model: Model,
    buffer: Annotated[
        str,
        typer.Option(
            "--buffer",
            metavar="tcp://HOST:PORT[,..]",
            help="Where vagen-buffer listens; of several shards all, in order: this actor takes one by its name.",
        ),
    ],
    engine: Annotated[
        list[str] | None,
        typer.Option("--engine", metavar="URL|local", help="An engine, repeatable; by default one of its own."),
    ] = None,
    engines: Annotated[
        Path | None, typer.Option("--engines", metavar="FILE", help="List of engines that may change while it runs.")
    ] = None,
    config: Recipe = None,
    overrides: Overrides = None,
    name: Annotated[str, typer.Option("--name", help="Of this actor, unique within the run.")] = "actor-0",
    run_dir: Annotated[
        Path | None, typer.Option("--run-dir", metavar="DIR", help="Folder of the run; runs/<run.name> by default.")
    ] = None,
    data_dir: Annotated[
        Path | None, typer.Option("--data-dir", metavar="DIR", help="Journal and spool; RUN_DIR/NAME/spool by default.")
    ] = None,
) -> None:
    from vagen.common.errors import VagenError

    try:
        _run(engine or [], engines, buffer, model, name, run_dir, data_dir, config, overrides or [])
    except* VagenError as errors:
        _fail(errors)


@app.command("engine", help=_ENGINE_HELP)
def engine_command(
    model: Model,
    port: Annotated[int, typer.Option("--port", help="0 picks a free one.")] = 0,
    host: Annotated[str | None, typer.Option("--host", help="Default: engine.host of the recipe.")] = None,
    config: Recipe = None,
    overrides: Overrides = None,
    ready_file: Annotated[Path | None, typer.Option("--ready-file", help="Written once it serves.")] = None,
    with_parent: Annotated[bool, typer.Option("--with-parent", hidden=True)] = False,
) -> None:
    from vagen.common.errors import VagenError

    try:
        _engine(model, port, host, config, overrides or [], ready_file, with_parent)
    except* VagenError as errors:
        _fail(errors)


def _run(
    engines: list[str],
    engines_file: Path | None,
    buffer: str,
    model: Path,
    name: str,
    run_dir: Path | None,
    data_dir: Path | None,
    config: str | None,
    overrides: list[str],
) -> None:
    from vagen.actor.engines.roster import Roster, check_engine_url
    from vagen.actor.service import ActorOptions, ActorSections, serve
    from vagen.common.errors import ConfigError
    from vagen.common.logging import setup_logging

    recipe = _read(config, overrides)
    if engines_file is not None:
        actor = recipe.get("actor") or {}
        recipe["actor"] = actor | {"engines": (actor.get("engines") or {}) | {"file": str(engines_file)}}
    sections = ActorSections.of(recipe)
    listed = sections.actor.engines.file or sections.actor.engines.router_url
    if not engines and listed is None:
        engines = ["local"]
    if "local" in engines and (len(engines) > 1 or listed is not None):
        raise ConfigError("--engine local: expected no other engine beside the actor's own")
    if engines != ["local"]:
        engines = [check_engine_url(url, "--engine", "http://HOST:PORT or local") for url in engines]
        if sections.actor.engines.router_url is None:
            asyncio.run(Roster(engines, sections.actor.engines.file).read())
    folder = run_dir or Path("runs") / sections.run.name
    options = ActorOptions(
        engines=engines,
        buffer=buffer,
        model_dir=model,
        name=name,
        run_dir=folder,
        data_dir=data_dir or folder / name / "spool",
        recipe_source=config,
        overrides=overrides,
    )
    setup_logging(sections.run.log_level, options.actor_dir / "actor.log")
    asyncio.run(serve(options, sections))


def _engine(
    model: Path,
    port: int,
    host: str | None,
    config: str | None,
    overrides: list[str],
    ready_file: Path | None,
    with_parent: bool,
) -> None:
    from vagen.actor.local_engine import run_engine
    from vagen.actor.local_engine.config import EngineConfig
    from vagen.common.config import RunConfig, section
    from vagen.common.logging import setup_logging

    recipe = _read(config, overrides)
    listen = {"port": port} | ({"host": host} if host else {})
    recipe["engine"] = recipe.get("engine", {}) | listen
    run = section(recipe, "run", RunConfig)
    setup_logging(run.log_level)
    if with_parent:
        _end_with_parent()
    run_engine(model, section(recipe, "engine", EngineConfig), run, ready_file)


def _read(config: str | None, overrides: list[str]) -> dict[str, Any]:
    from vagen.common.config import read_recipe
    from vagen.common.errors import ConfigError

    if config is None and overrides:
        raise ConfigError(f"--set {overrides[0]}: nothing to override without --config")
    return read_recipe(config, overrides) if config is not None else {}


def _end_with_parent() -> None:
    """Stop this process in order when the pipe on its standard input ends, as it does when the parent dies."""
    import os
    import signal
    import threading

    def watch() -> None:
        # Not sys.stdin: its lock, held by a daemon thread, would abort the interpreter's exit.
        while os.read(0, 1 << 12):
            pass
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, name="parent", daemon=True).start()


def _fail(errors: BaseExceptionGroup[Any]) -> None:
    """One line for each error, and exit status 1. Errors that are not ours keep their traceback."""
    leaves: list[BaseException] = list(errors.exceptions)
    while leaves:
        error = leaves.pop(0)
        if isinstance(error, BaseExceptionGroup):
            leaves[:0] = error.exceptions
        else:
            typer.echo(f"vagen-actor: {error}", err=True)
    raise SystemExit(1)


if __name__ == "__main__":
    app()
