"""The command `vagen`. Parses and reports; what it runs is imported inside the commands."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from vagen.tools.archive_commands import add_archive_commands
from vagen.tools.buffer_commands import buffer_app
from vagen.tools.console import user_errors
from vagen.tools.engine_commands import doctor_app, serve_sglang, watch_engine
from vagen.tools.export_command import export
from vagen.tools.keys import app as keys_app
from vagen.tools.replay_command import replay

if TYPE_CHECKING:
    from vagen.learner.sft import SFTProgress

logger = logging.getLogger(__name__)

_SFT_LOG_EVERY = 25

app = typer.Typer(
    name="vagen",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="""Train vision-language agents asynchronously.

    Examples:

      vagen demo                                      learn FrozenLake on this machine, from nothing to a report

      vagen demo --seed 2 --set learner.max_staleness=8

      vagen eval --engine http://127.0.0.1:30000 --model runs/demo-seed0/model --config frozenlake

      vagen report runs/demo-seed0

      vagen export runs/demo-seed0 exported

      vagen replay runs/a/archive --model runs/a/learner/export --config frozenlake

      vagen config check my.yaml --set learner.batch_size=48
    """,
)
config_app = typer.Typer(no_args_is_help=True, help="Work with recipes.")
add_archive_commands(buffer_app)
app.add_typer(buffer_app, name="buffer")
app.add_typer(config_app, name="config")
app.add_typer(keys_app, name="keys")
app.command("replay")(replay)
app.command("export")(export)
app.add_typer(doctor_app, name="doctor")
app.command("sglang")(serve_sglang)
app.command("watch-engine")(watch_engine)

Config = Annotated[str, typer.Option("--config", metavar="RECIPE", help="A yaml file, or the name of a shipped one.")]
Overrides = Annotated[
    list[str] | None, typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Override a setting; repeatable.")
]


@app.command()
def demo(
    config: Config = "frozenlake",
    seed: Annotated[int, typer.Option(help="Of weights, scripts, levels and samples.")] = 0,
    run_dir: Annotated[Path | None, typer.Option(help="Folder of the run; runs/demo-seedN by default.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue an unfinished run of that folder.")] = False,
    fresh: Annotated[bool, typer.Option("--fresh", help="Remove the run of that folder first.")] = False,
    engine: Annotated[
        str | None, typer.Option(metavar="local|sglang", help="sglang needs `make sglang-cpu`.  [default: local]")
    ] = None,
    overrides: Overrides = None,
    no_screen: Annotated[bool, typer.Option("--no-screen", help="Log lines instead of the live screen.")] = False,
) -> None:
    """Warm up a small model, train it with all processes running, and write a report.

    Examples:

      vagen demo --seed 1

      vagen demo --seed 1 --resume

      vagen demo --engine sglang --run-dir runs/sglang

      vagen demo --fresh --set learner.total_steps=5 --set demo.levels=100 --no-screen

    Exit codes: 0 both targets met, 1 a process was lost, 2 a wrong setting, 3 a target missed, 130 interrupted.
    """
    with user_errors():
        import sys

        from rich.console import Console

        from vagen.common.logging import setup_logging
        from vagen.tools.demo import DemoOptions, prepare, run_demo
        from vagen.tools.screen import LiveView, LogView, View

        options = DemoOptions(
            config=config,
            seed=seed,
            run_dir=run_dir,
            resume=resume,
            fresh=fresh,
            overrides=overrides or (),
            engine=engine,
        )
        with prepare(options) as prepared:
            is_screen = sys.stdout.isatty() and not no_screen
            setup_logging("WARNING" if is_screen else prepared.recipe.run.log_level)
            view: View = LiveView(Console()) if is_screen else LogView()
            code = run_demo(prepared, view)
    raise typer.Exit(code)


@app.command("eval")
def evaluate(
    engine: Annotated[str, typer.Option(metavar="URL|local", help="An engine that serves, or one started for this.")],
    model: Annotated[Path, typer.Option(metavar="DIR", help="Model folder; its tokenizer and template are used.")],
    config: Config,
    levels: Annotated[int, typer.Option(help="Held-out levels to play.")] = 1000,
    greedy: Annotated[bool, typer.Option("--greedy", help="Most likely tokens instead of samples.")] = False,
    transcripts: Annotated[int, typer.Option(metavar="N", help="Keep the first N episodes with pictures.")] = 0,
    api: Annotated[str, typer.Option(metavar="sglang|openai", help="What the engine speaks.")] = "sglang",
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the result as JSON.")] = None,
    overrides: Overrides = None,
) -> None:
    """Play held-out levels against a running engine and print the success rate with its 95 % interval.

    Example:

      vagen eval --engine http://127.0.0.1:30000 --model runs/demo-seed0/model --config frozenlake --levels 200

    A server of vLLM, with the same model:

      vagen eval --engine http://127.0.0.1:8000 --api openai --model runs/demo-seed0/model --config frozenlake
    """
    with user_errors():
        from rich.console import Console
        from rich.progress import Progress

        from vagen.actor.config import ActorConfig, EnvSection, HarnessConfig
        from vagen.common.config import RunConfig, read_recipe, section
        from vagen.common.logging import setup_logging
        from vagen.tools.evaluate import EvaluationPlan
        from vagen.tools.evaluate import evaluate as play
        from vagen.tools.runs import write_json

        raw = read_recipe(config, overrides or ())
        setup_logging(section(raw, "run", RunConfig).log_level)
        plan = EvaluationPlan(
            engine_url=engine,
            model_dir=model,
            env=section(raw, "env", EnvSection),
            harness=section(raw, "harness", HarnessConfig),
            actor=section(raw, "actor", ActorConfig),
            levels=levels,
            greedy=greedy,
            transcripts=transcripts,
            api=api,
            recipe_arguments=("--config", config, *(word for item in overrides or () for word in ("--set", item))),
        )
        console = Console(stderr=True)
        with Progress(console=console, disable=not console.is_terminal) as bar:
            task = bar.add_task("levels", total=levels)
            result = play(
                plan,
                lambda played, solved: bar.update(task, completed=played, description=f"success {solved / played:.3f}"),
            )
        if out is not None:
            write_json(out, result)
    low, high = result.interval
    typer.echo(
        f"success {result.success:.3f} [{low:.3f}, {high:.3f}] on {result.levels} held-out levels, "
        f"{result.turns_mean:.2f} turns, format {result.format_rate:.3f}, "
        f"{_versions(*result.policy_versions)}, {result.seconds:.1f} s"
    )


def _versions(oldest: int, newest: int) -> str:
    return f"policy versions {oldest}-{newest}" if oldest >= 0 else "policy version unknown"


@app.command()
def sft(
    config: Config,
    out: Annotated[Path, typer.Option(metavar="DIR", help="Model folder to write.")],
    archive: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Imitate this saved buffer, with --model, in place of a script.")
    ] = None,
    model: Annotated[Path | None, typer.Option(metavar="DIR", help="Model folder to go on from.")] = None,
    overrides: Overrides = None,
) -> None:
    """Make the small model of a recipe and warm it up on scripted episodes, or train a model on a saved buffer.

    Examples:

      vagen sft --config frozenlake --out runs/warm/model --set sft.steps=100

      vagen sft --config frozenlake --archive imported --model runs/warm/model --out runs/imitated/model
    """
    with user_errors():
        from vagen.common.config import RunConfig, read_recipe, section
        from vagen.common.errors import ConfigError
        from vagen.common.logging import setup_logging

        raw = read_recipe(config, overrides or ())
        setup_logging(section(raw, "run", RunConfig).log_level)
        if archive is not None and model is not None:
            from vagen.tools.imitation import imitate_archive

            stats = imitate_archive(raw, archive, model, out, _log_sft_step)
        elif archive is None and model is None:
            from vagen.tools.sft import run_sft

            stats = run_sft(raw, out, _log_sft_step)
        else:
            raise ConfigError("expected --archive and --model together")
    typer.echo(", ".join(f"{name} {value:.6g}" for name, value in stats.items()))


@app.command()
def report(run_dir: Annotated[Path, typer.Argument(metavar="RUN_DIR", help="Folder of a run.")]) -> None:
    """Write report.html of a run, finished or not.

    Example:

      vagen report runs/demo-seed0
    """
    with user_errors():
        from vagen.tools.report import write_report

        path = write_report(run_dir)
    typer.echo(path)


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def bench(
    context: typer.Context,
    name: Annotated[
        str | None, typer.Argument(metavar="NAME", help="Of a benchmark; without one they are listed.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    options: Annotated[
        list[str] | None, typer.Option("--option", metavar="KEY=VALUE", help="Of the benchmark; repeatable.")
    ] = None,
) -> None:
    """Measure one part of the system on this machine; without a name, list what can be measured.

    A benchmark's own options follow its name. One that it does not know is answered with those that it knows.

    Examples:

      vagen bench

      vagen bench pipeline --json --option run_dir=runs/demo-seed0

      vagen bench staleness --json --seeds 3 --out runs/study
    """
    with user_errors():
        from vagen.tools.bench import describe, run_benchmark

        if name is None:
            typer.echo(describe())
        else:
            typer.echo(run_benchmark(name, options or (), context.args, as_json=as_json))


@config_app.command("check")
def config_check(
    recipe: Annotated[str, typer.Argument(metavar="RECIPE", help="A yaml file, or the name of a shipped one.")],
    overrides: Overrides = None,
) -> None:
    """Validate all sections of a recipe and what must hold between them.

    Example:

      vagen config check frozenlake --set learner.batch_size=48
    """
    with user_errors():
        from vagen.common.config import read_recipe
        from vagen.tools.recipe import validate_recipe

        validate_recipe(read_recipe(recipe, overrides or ()))
    typer.echo(f"{recipe}: valid")


def _log_sft_step(progress: SFTProgress) -> None:
    if (progress.step + 1) % _SFT_LOG_EVERY == 0:
        logger.info("step %d: loss %.4f, value loss %.4f", progress.step + 1, progress.loss, progress.value_loss)


if __name__ == "__main__":
    app()
