"""The commands `vagen buffer ...` for saved buffers. Parses and reports; what it runs is imported inside them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from vagen.tools.buffer_commands import AsJson, Redis, RunDir, RunName, Shards, locate
from vagen.tools.console import user_errors

if TYPE_CHECKING:
    from vagen.buffer.archive.operations import Change
    from vagen.buffer.archive.record import ArchivedTrajectory

Source = Annotated[Path, typer.Argument(metavar="ARCHIVE", help="Folder of a saved buffer.")]
Out = Annotated[Path, typer.Option("--out", metavar="DIR", help="Archive to write.")]
Force = Annotated[bool, typer.Option("--force", help="Replace an archive that is there.")]


def add_archive_commands(app: typer.Typer) -> None:
    """Put the commands beside those for running buffers."""
    commands: dict[str, Callable[..., None]] = {
        "save": save,
        "load": load,
        "merge": merge,
        "filter": filter_archive,
        "stat": stat,
    }
    commands |= {"relabel": relabel, "recompute-rewards": recompute_rewards, "import": import_chats}
    for name, command in commands.items():
        app.command(name)(command)


def save(
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Archive to write.")],
    run_dir: RunDir = None,
    redis: Redis = None,
    run: RunName = None,
    shards: Shards = 1,
    force: Force = False,
    as_json: AsJson = False,
) -> None:
    """Save what a live buffer holds now: ready, awaiting its group and claimed. The buffer is only read.

    Example:

      vagen buffer save --run-dir runs/demo-seed0 saved
    """
    with user_errors():
        from vagen.buffer.archive.operations import new_archive
        from vagen.buffer.archive.snapshot import read_live

        live = read_live(locate(run_dir, redis, run, shards).connect())
        with new_archive(out, force=force) as writer:
            records = (record for shard in live for record in shard.records())
            count = writer.write_part(_shown("saved", records, sum(map(len, live))))
    gone = sum(shard.num_gone for shard in live)
    _report({"out": str(out), "trajectories": count, "gone_meanwhile": gone}, as_json)


def load(
    source: Source,
    run_dir: RunDir = None,
    redis: Redis = None,
    run: RunName = None,
    buffer: Annotated[str | None, typer.Option(metavar="URL", help="The ingest's endpoint, with --redis.")] = None,
    data_dir: Annotated[Path | None, typer.Option(metavar="DIR", help="Of the spool, with --redis.")] = None,
    same_run: Annotated[
        bool, typer.Option("--same-run", help="Keep the policy versions: the archive came from this very run.")
    ] = False,
    as_step: Annotated[
        int | None, typer.Option(metavar="N", help="Give the policy versions new numbers that mean learner step N.")
    ] = None,
    key_file: Annotated[
        str | None, typer.Option(metavar="FILE", help="Secret key, for a buffer that encrypts; as an actor's.")
    ] = None,
    server_key_file: Annotated[str | None, typer.Option(metavar="FILE", help="The buffer's public key.")] = None,
    timeout: Annotated[float, typer.Option(metavar="SECONDS", help="How long the buffer may take nothing.")] = 30.0,
    as_json: AsJson = False,
) -> None:
    """Put an archive into a live buffer, through the ingest's checks; says what was refused and why.

    Ids that the buffer knows are left out. Policy versions are numbers of the run that they come from: say with
    --same-run that this is that run, or with --as-step N that they count as weights of learner step N here.
    Trajectories whose behaviour policy is unknown are refused, as are versions that were never published.

    Example:

      vagen buffer load saved --run-dir runs/demo-seed1 --as-step 0
    """
    with user_errors():
        import msgspec

        from vagen.actor.config import ActorSecurity
        from vagen.buffer.archive.reader import open_archive
        from vagen.buffer.service import read_ready
        from vagen.common.errors import ConfigError
        from vagen.tools.load import LoadPlan, load_archive

        address = locate(run_dir, redis, run)
        if run_dir is not None and redis is None:
            buffer = buffer or read_ready(run_dir).endpoint
            data_dir = data_dir or run_dir / "load"
        if buffer is None or data_dir is None:
            raise ConfigError("with --redis, expected --buffer URL and --data-dir DIR as well")
        plan = LoadPlan(
            endpoint=buffer,
            redis_url=address.redis_url,
            run_name=address.run_name,
            data_dir=data_dir,
            same_run=same_run,
            as_step=as_step,
            keys=ActorSecurity(key_file=key_file, server_key_file=server_key_file).load(),
            timeout_s=timeout,
        )
        archive = open_archive(source)
        with _progress("loaded", archive.num_trajectories) as update:
            report = load_archive(archive.iterate(), plan, update)
    if as_json:
        _report(msgspec.to_builtins(report), as_json)
        return
    typer.echo(f"stored {report.stored}, known already {report.known}, refused {sum(report.refused.values())}")
    for problem, count in report.refused.items():
        typer.echo(f"refused {count}: {problem}")


def merge(
    sources: Annotated[list[Path], typer.Argument(metavar="ARCHIVE...", help="Folders of saved buffers.")],
    out: Out,
    allow_mixed: Annotated[bool, typer.Option("--allow-mixed", help="Also of different models or tokenizers.")] = False,
    force: Force = False,
    as_json: AsJson = False,
) -> None:
    """Join archives; a trajectory whose id an earlier one of them holds is left out.

    Example:

      vagen buffer merge runs/a/archive runs/b/archive --out both
    """
    with user_errors():
        from vagen.buffer.archive.operations import merged, new_archive
        from vagen.buffer.archive.reader import open_archive

        archives = [open_archive(source) for source in sources]
        found = sum(archive.num_trajectories for archive in archives)
        with new_archive(out, force=force) as writer:
            count = writer.write_part(_shown("merged", merged(archives, allow_mixed=allow_mixed), found))
    _report({"out": str(out), "trajectories": count, "duplicates": found - count}, as_json)


def filter_archive(
    source: Source,
    where: Annotated[str, typer.Option(metavar="CONDITION", help="Over the columns of docs/archive.md.")],
    out: Out,
    force: Force = False,
    as_json: AsJson = False,
) -> None:
    """Keep the trajectories for which a condition holds.

    Conditions compare columns with ==, !=, <, <=, >, >=, in, joined by and, or, not; `reward.NAME` is a component,
    `metrics.NAME` a metric, `engine.kind` a field. What a trajectory lacks compares as false.

    Examples:

      vagen buffer filter saved --where "success and staleness <= 4" --out good

      vagen buffer filter saved --where "reward.format > 0 and task in ('frozen_lake',)" --out good
    """
    with user_errors():
        from vagen.buffer.archive.operations import new_archive
        from vagen.buffer.archive.reader import open_archive
        from vagen.buffer.archive.selection import Selection

        selection = Selection(where)
        archive = open_archive(source)
        mask = selection.mask(archive)
        with new_archive(out, force=force) as writer:
            count = writer.write_part(_shown("kept", archive.iterate(mask), int(mask.sum())))
    _report({"out": str(out), "trajectories": count, "left_out": archive.num_trajectories - count}, as_json)


def stat(source: Source, as_json: AsJson = False) -> None:
    """Say what an archive holds.

    Example:

      vagen buffer stat runs/demo-seed0/archive
    """
    with user_errors():
        import msgspec

        from vagen.buffer.archive.reader import open_archive
        from vagen.buffer.archive.summary import format_summary, summarise

        summary = summarise(open_archive(source))
    if as_json:
        _report(msgspec.to_builtins(summary, str_keys=True), as_json)
    else:
        typer.echo(format_summary(summary))


def relabel(
    source: Source,
    hook: Annotated[str, typer.Option(metavar="MODULE:FUNCTION", help="Called with each trajectory.")],
    out: Out,
    force: Force = False,
    as_json: AsJson = False,
) -> None:
    """Give each trajectory to a function of yours; keep what it returns, leave out where it returns None.

    The result must be a valid trajectory. Relabelling in hindsight: docs/archive.md has an example.

    Example:

      vagen buffer relabel saved --hook my_hooks:reached_goal --out relabelled
    """
    with user_errors():
        from vagen.buffer.archive.operations import load_hook

        _change(source, [load_hook(hook)], out, force=force, as_json=as_json)


def recompute_rewards(
    source: Source,
    out: Out,
    scale: Annotated[
        list[str] | None, typer.Option(metavar="COMPONENT=FACTOR", help="Multiply a component; repeatable.")
    ] = None,
    hook: Annotated[
        str | None, typer.Option(metavar="MODULE:FUNCTION", help="Called with each trajectory, before --scale.")
    ] = None,
    force: Force = False,
    as_json: AsJson = False,
) -> None:
    """Compute the rewards of an archive anew: weights of components, or a function of yours.

    Examples:

      vagen buffer recompute-rewards saved --scale format=0.5 --scale task=2 --out rescaled

      vagen buffer recompute-rewards saved --hook my_hooks:sparse --out sparse
    """
    with user_errors():
        from vagen.buffer.archive.operations import load_hook, scaled_rewards
        from vagen.buffer.archive.reader import open_archive
        from vagen.common.errors import ConfigError

        if not scale and hook is None:
            raise ConfigError("expected --scale COMPONENT=FACTOR or --hook MODULE:FUNCTION")
        changes = [] if hook is None else [load_hook(hook)]
        factors = dict(_parse_factor(item) for item in scale or ())
        if factors:
            table = open_archive(source).table(["reward_by_component"])
            known = {entry["name"] for entries in table["reward_by_component"].to_pylist() for entry in entries}
            unknown = sorted(factors.keys() - known) if hook is None else []
            if unknown:
                raise ConfigError(f"--scale {unknown[0]}: {source} has the components {', '.join(sorted(known))}")
            changes.append(scaled_rewards(factors))
        _change(source, changes, out, force=force, as_json=as_json)


def import_chats(
    files: Annotated[list[Path], typer.Argument(metavar="FILE.jsonl...", help="One conversation a line.")],
    model: Annotated[Path, typer.Option(metavar="DIR", help="Model folder; its tokenizer and template are used.")],
    out: Out,
    skip_invalid: Annotated[
        bool, typer.Option("--skip-invalid", help="Leave out lines that cannot be imported, and say so.")
    ] = False,
    force: Force = False,
    as_json: AsJson = False,
) -> None:
    """Make an archive of conversations (OpenAI's chat format, with pictures) that other programs wrote.

    Every assistant's message is a turn. What sampled it is unknown: such trajectories can be imitated, and are refused
    where an importance ratio is needed. docs/archive.md has the format.

    Example:

      vagen buffer import chats.jsonl --model runs/demo-seed0/model --out imported
    """
    with user_errors():
        from vagen.actor.rendering import ChatRenderer
        from vagen.buffer.archive.operations import new_archive
        from vagen.tools.chat_import import ChatImporter

        importer = ChatImporter(ChatRenderer.load(model), skip_invalid=skip_invalid)
        with new_archive(out, force=force) as writer:
            records = (record for file in files for record in importer.read(file))
            count = writer.write_part(_shown("imported", records, None))
    for problem in importer.skipped:
        typer.echo(f"skipped {problem}", err=True)
    _report({"out": str(out), "trajectories": count, "skipped": len(importer.skipped)}, as_json)


def _parse_factor(text: str) -> tuple[str, float]:
    from vagen.common.errors import ConfigError

    component, _, factor = text.partition("=")
    try:
        return component, float(factor)
    except ValueError:
        raise ConfigError(f"--scale {text}: expected COMPONENT=FACTOR, a number") from None


def _change(source: Path, changes: list[Change], out: Path, *, force: bool, as_json: bool) -> None:
    from vagen.buffer.archive.operations import new_archive, relabelled
    from vagen.buffer.archive.reader import open_archive

    archive = open_archive(source)
    records = _shown("read", archive.iterate(), archive.num_trajectories)
    for change in changes:
        records = relabelled(records, change)
    with new_archive(out, force=force) as writer:
        count = writer.write_part(records)
    _report({"out": str(out), "trajectories": count, "left_out": archive.num_trajectories - count}, as_json)


def _report(facts: dict[str, object], as_json: bool) -> None:
    import json

    if as_json:
        typer.echo(json.dumps(facts))
    else:
        typer.echo(", ".join(f"{name.replace('_', ' ')} {value}" for name, value in facts.items()))


def _shown(what: str, items: Iterable[ArchivedTrajectory], total: int | None) -> Iterator[ArchivedTrajectory]:
    """The items, with a progress bar on a terminal."""
    with _progress(what, total) as update:
        for number, item in enumerate(items, start=1):
            yield item
            update(number)


@contextmanager
def _progress(what: str, total: int | None) -> Iterator[Callable[[int], None]]:
    """A progress bar on stderr where that is a terminal; the function takes how many are done."""
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    with Progress(console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task(what, total=total)
        yield lambda done: bar.update(task, completed=done)
