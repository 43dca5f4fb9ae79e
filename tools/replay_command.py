"""`vagen replay`: the command line of comparing corrections on a saved buffer."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from vagen.tools.console import user_errors

if TYPE_CHECKING:
    from vagen.tools.replay_compare import Correction

__all__ = ["parse_corrections", "replay"]


def replay(
    path: Annotated[Path, typer.Argument(metavar="ARCHIVE", help="A saved buffer.")],
    model: Annotated[Path, typer.Option(metavar="DIR", help="Hugging Face model folder.")],
    config: Annotated[str, typer.Option(metavar="RECIPE", help="A yaml file, or the name of a shipped one.")],
    compare: Annotated[
        str, typer.Option(metavar="NAMES", help="Corrections of the staleness study, separated by commas.")
    ] = "default,uncorrected,plain_ppo",
    overrides: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="[NAME:]SECTION.KEY=VALUE",
            help="Override a setting of all corrections, or of one of your own called NAME; repeatable.",
        ),
    ] = None,
    checkpoint: Annotated[
        Path | None, typer.Option(metavar="DIR", help="A learner's checkpoint: its weights instead of the model's.")
    ] = None,
    at_step: Annotated[
        int | None, typer.Option(help="Learner step of the model, where neither export nor checkpoint says it.")
    ] = None,
    per_bucket: Annotated[int, typer.Option(help="Trajectories of each bucket, drawn by run.seed.")] = 96,
    buckets: Annotated[str, typer.Option(help="Lowest staleness of each bucket.")] = "0,1,2,4,8,16,32",
    out: Annotated[Path | None, typer.Option(metavar="FILE.html", help="Write a page of charts.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of the table.")] = False,
) -> None:
    """Compare corrections on a saved buffer without training: weights, gradients and critic by staleness.

    Examples:

      vagen replay runs/a/archive --model runs/a/learner/export --config runs/a/recipe.yaml --out compare.html

      vagen replay runs/a/archive --model runs/a/model --checkpoint runs/a/learner/checkpoints/step-00000040
        --config frozenlake --compare default,m2po --set cap4:learner.loss.weight_cap=4
    """
    with user_errors(2):
        import msgspec
        from rich.console import Console
        from rich.progress import Progress

        from vagen.common.logging import setup_logging
        from vagen.tools.replay_compare import CompareOptions
        from vagen.tools.replay_compare import compare as run_comparison
        from vagen.tools.replay_page import comparison_table, render_page

        shared, corrections = parse_corrections(compare, overrides or ())
        options = CompareOptions(
            path=path,
            model_dir=model,
            corrections=corrections,
            config=config,
            overrides=shared,
            checkpoint=checkpoint,
            at_step=at_step,
            per_bucket=per_bucket,
            bounds=_parse_bounds(buckets),
        )
        setup_logging("WARNING")
        console = Console(stderr=True)
        with Progress(console=console, disable=not console.is_terminal) as bar:
            task = bar.add_task("replay")
            result = run_comparison(
                options,
                lambda doing, done, total: bar.update(task, description=doing, completed=done, total=total),
            )
        if out is not None:
            out.write_text(render_page(result), encoding="utf-8")
        if as_json:
            typer.echo(msgspec.json.encode(result).decode())
        else:
            Console(width=None if Console().is_terminal else 140).print(comparison_table(result))


def parse_corrections(names: str, overrides: Sequence[str]) -> tuple[list[str], list[Correction]]:
    """Overrides of all, and the corrections: those named, then those that `NAME:` defines, in order.

    Raises `ConfigError` for a name that is unknown, or that the study has and `NAME:` defines again.
    """
    from vagen.common.config import require
    from vagen.tools.bench.study_plan import CORRECTIONS
    from vagen.tools.replay_compare import Correction

    known = {variant.name: variant.overrides for variant in CORRECTIONS}
    chosen = list(filter(None, names.split(",")))
    shared: list[str] = []
    own: dict[str, list[str]] = {}
    for override in overrides:
        key, equals, value = override.partition("=")
        name, colon, setting = key.rpartition(":")
        if not colon:
            shared.append(override)
            continue
        require(bool(name) and name not in known, "compare.set", override, "NAME: that is not one of the study's")
        own.setdefault(name, []).append(setting + equals + value)
    unknown = [name for name in chosen if name not in known and name not in own]
    require(not unknown, "compare.names", ",".join(unknown), f"names out of {', '.join([*known, *own])}")
    chosen += [name for name in own if name not in chosen]
    return shared, [Correction(name=name, overrides=tuple(own.get(name, known.get(name, ())))) for name in chosen]


def _parse_bounds(text: str) -> tuple[int, ...]:
    from vagen.common.config import require

    parts = text.split(",")
    require(all(part.strip().isdigit() for part in parts), "compare.buckets", text, "integers separated by commas")
    return tuple(map(int, parts))
