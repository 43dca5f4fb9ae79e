"""The commands `vagen buffer ...`. Parses and reports; what it runs is imported inside the commands.

Every command that needs a running buffer finds it by `--run-dir`, whose `ready.json` names Redis and the run, or by
`--redis` and `--run`.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from vagen.buffer.cli import audit
from vagen.tools.console import user_errors

if TYPE_CHECKING:
    from redis import Redis as Client

    from vagen.buffer.keys import Keys

buffer_app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Look into a buffer and steer it.")
buffer_app.command("audit")(audit)

RunDir = Annotated[Path | None, typer.Option("--run-dir", metavar="DIR", help="Folder of a run whose buffer serves.")]
Redis = Annotated[str | None, typer.Option("--redis", metavar="URL", help="Redis of the run, in place of --run-dir.")]
RunName = Annotated[str | None, typer.Option("--run", metavar="NAME", help="Name of the run, with --redis.")]
Shards = Annotated[int, typer.Option("--shards", min=1, help="Shards of the run, with --redis.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


class RunAddress(NamedTuple):
    """Where the state of one run is."""

    redis_url: str
    """Of the first shard."""
    run_name: str
    shard_urls: tuple[str, ...]
    """Of every shard, in order."""

    def connect(self) -> list[tuple[Client, Keys]]:
        """A client and the keys of every shard.

        Raises `BufferUnavailableError` within seconds when one does not answer.
        """
        from vagen.buffer.connection import first_contact, make_client
        from vagen.buffer.keys import Keys, Shard

        shards = []
        for index, url in enumerate(self.shard_urls):
            keys = Keys(self.run_name, Shard(index, len(self.shard_urls)))
            shards.append((make_client(url, keys=keys), keys))
            first_contact(shards[-1][0], url)
        return shards


def locate(run_dir: Path | None, redis: str | None, run_name: str | None, shards: int = 1) -> RunAddress:
    """The run that a command's options name.

    Raises `ConfigError` when they name none, or when no buffer serves the folder.
    """
    from vagen.buffer.service import read_ready
    from vagen.common.errors import ConfigError

    if run_dir is not None and redis is None:
        ready = read_ready(run_dir)
        urls = tuple(read_ready(run_dir, shard).redis_url for shard in range(ready.shards))
        return RunAddress(ready.redis_url, run_name or ready.run_name, urls)
    if run_dir is None and redis is not None and run_name is not None:
        return RunAddress(redis, run_name, (redis,) * shards)
    raise ConfigError("expected either --run-dir DIR, or --redis URL together with --run NAME")


@buffer_app.command("acl")
def acl(
    run_name: Annotated[str, typer.Option("--run", metavar="NAME", help="Name of the run.")],
    user: Annotated[str | None, typer.Option("--user", help="Name of the Redis user; vagen-NAME by default.")] = None,
    shards: Annotated[int, typer.Option("--shards", min=1, help="buffer.shards of the run.")] = 1,
    password_file: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Its first line; VAGEN_REDIS_PASSWORD by default.")
    ] = None,
) -> None:
    """Print the ACL SETUSER line of a Redis user who may work on one run and see no other.

    The line holds a hash of the password, not the password.

    Examples:

      vagen buffer acl --run a --password-file redis.password

      vagen buffer acl --run a --password-file redis.password | redis-cli
    """
    with user_errors():
        import os

        from vagen.buffer.acl import acl_line
        from vagen.buffer.address import PASSWORD_VARIABLE, read_password_file
        from vagen.common.errors import ConfigError

        password = read_password_file(password_file) if password_file else os.environ.get(PASSWORD_VARIABLE)
        if not password:
            raise ConfigError(f"expected --password-file FILE or a password in {PASSWORD_VARIABLE}")
        typer.echo(acl_line(run_name, password, user=user, shards=shards))


@buffer_app.command("reshard")
def reshard(
    old: Annotated[int, typer.Option("--from", min=1, help="Shards that the run has.")],
    new: Annotated[int, typer.Option("--to", min=1, max=1024, help="Shards that it shall have.")],
    redis: Annotated[str, typer.Option(metavar="URL", help="Redis of the run; a Redis a shard: all, by commas.")],
    run_name: Annotated[str, typer.Option("--run", metavar="NAME", help="Name of the run.")],
    group_size: Annotated[int, typer.Option(min=1, help="actor.group_size of the recipe.")] = 1,
    evict: Annotated[bool, typer.Option(help="Count what is pending as evicted.")] = False,
) -> None:
    """Give a run that stands still another number of shards, then start it with that `buffer.shards`.

    First stop the actors (SIGTERM; until nothing is in flight), let the learner train what is there and stop it, then
    every vagen-buffer. What is left over, less than a batch, can be kept by `vagen buffer save` before it is evicted.

    Example:

      vagen buffer reshard --run a --redis redis+cluster://node-0:6379 --from 1 --to 3 --evict
    """
    with user_errors(2):
        from vagen.buffer.accounting import format_accounting
        from vagen.buffer.reshard import reshard as move

        typer.echo(format_accounting(move(redis, run_name, old, new, group_size, evict=evict)))


@buffer_app.command("set")
def set_(
    changes: Annotated[
        list[str] | None, typer.Argument(metavar="NAME=VALUE...", help="`recipe` as value drops a live one.")
    ] = None,
    reset: Annotated[list[str] | None, typer.Option("--reset", metavar="NAME", help="Same as NAME=recipe.")] = None,
    by: Annotated[str | None, typer.Option(metavar="WHO", help="Noted with the change; user@host by default.")] = None,
    run_dir: RunDir = None,
    redis: Redis = None,
    run_name: RunName = None,
    shards: Shards = 1,
    as_json: AsJson = False,
) -> None:
    """Change settings of a run that goes on. A live value holds over restarts until it is dropped.

    Names: max_staleness, order, filters, capacity_bytes, when_full, max_running, group_timeout_s, as `vagen buffer
    settings` shows them. Values are yaml. A filter of your own must be importable here and where the learner runs.

    Examples:

      vagen buffer set max_staleness=8 --run-dir runs/a

      vagen buffer set when_full=drop_stalest capacity_bytes=2000000000 --run-dir runs/a

      vagen buffer set order=oldest 'filters=[{name: reward_variance, options: {min_variance: 0.01}}]' --run-dir runs/a

      vagen buffer set filters=recipe --run-dir runs/a

      vagen buffer set --reset max_staleness --redis redis://localhost:6379 --run a
    """
    with user_errors(2):
        import getpass
        import socket

        from vagen.buffer.settings import (
            change_settings,
            check_changes,
            combine_settings,
            parse_changes,
            read_settings,
        )
        from vagen.common.errors import ConfigError
        from vagen.tools.buffer_settings import format_settings

        wanted = parse_changes(changes or (), reset or ())
        if not wanted:
            raise ConfigError("expected at least one NAME=VALUE or --reset NAME")
        parts = locate(run_dir, redis, run_name, shards).connect()
        for client, keys in parts:
            check_changes(client, keys, wanted)
        for client, keys in parts:
            change_settings(client, keys, wanted, by or f"{getpass.getuser()}@{socket.gethostname()}")
        states = combine_settings([read_settings(*part) for part in parts])
    typer.echo(format_settings(states, as_json=as_json))


@buffer_app.command()
def settings(
    run_dir: RunDir = None,
    redis: Redis = None,
    run_name: RunName = None,
    shards: Shards = 1,
    log: Annotated[bool, typer.Option("--log", help="The last 1000 changes instead, newest first.")] = False,
    as_json: AsJson = False,
) -> None:
    """Show the live settings: value, whether from the recipe or set live, when and by whom, and what is not in force.

    Of several shards the first one's values and log are shown, and a warning where another has something else.

    Examples:

      vagen buffer settings --run-dir runs/a

      vagen buffer settings --run-dir runs/a --log --json
    """
    with user_errors(2):
        from vagen.buffer.settings import combine_settings, read_changes, read_settings
        from vagen.tools.buffer_settings import format_changes, format_settings

        parts = locate(run_dir, redis, run_name, shards).connect()
        if log:
            text = format_changes(read_changes(*parts[0]), as_json=as_json)
        else:
            states = combine_settings([read_settings(*part) for part in parts])
            text = format_settings(states, as_json=as_json)
    typer.echo(text)


@buffer_app.command()
def quarantine(
    run_dir: Annotated[Path, typer.Option("--run-dir", metavar="DIR", help="Folder of a run, in service or not.")],
    shard: Annotated[int, typer.Option("--shard", min=0, help="Which shard's.")] = 0,
    as_json: AsJson = False,
) -> None:
    """List refused payloads that were kept: when, who sent them, whether they are intact, and what was wrong.

    Examples:

      vagen buffer quarantine --run-dir runs/a

      vagen buffer quarantine --run-dir runs/a --json
    """
    with user_errors(2):
        from vagen.buffer.service import buffer_dir, quarantine_dir
        from vagen.common.errors import ConfigError
        from vagen.tools.buffer_quarantine import format_quarantine

        if not buffer_dir(run_dir, shard).is_dir():
            raise ConfigError(f"{buffer_dir(run_dir, shard)}: no such folder; expected that of a run's buffer")
        text = format_quarantine(quarantine_dir(run_dir, shard), as_json=as_json)
    typer.echo(text)


@buffer_app.command()
def top(
    run_dir: RunDir = None,
    redis: Redis = None,
    run_name: RunName = None,
    shards: Shards = 1,
    shard: Annotated[int | None, typer.Option("--shard", min=0, help="One shard alone; all as one by default.")] = None,
    interval: Annotated[float, typer.Option(metavar="SECONDS", min=0.1, help="Between two looks.")] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Print one frame and end.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One look as JSON.")] = False,
) -> None:
    """Watch a running buffer: the accounting identity with rates, bytes, staleness, actors, engines, settings.

    Examples:

      vagen buffer top --run-dir runs/a

      vagen buffer top --run-dir runs/a --once

      vagen buffer top --redis redis://localhost:6379 --run a --json | jq .accounting.ready
    """
    with user_errors(2):
        from rich.console import Console

        from vagen.buffer.service import quarantine_dir
        from vagen.common.config import require
        from vagen.tools.buffer_top import Watch, show, show_once

        address = locate(run_dir, redis, run_name, shards)
        parts = address.connect()
        require(shard is None or shard < len(parts), "buffer --shard", shard, f"0 <= int < {len(parts)}")
        chosen = range(len(parts)) if shard is None else [shard]
        which = f"{len(parts)} shards" if shard is None else f"shard {shard} of {len(parts)}"
        title = f"buffer of run {address.run_name}" + (f" · {which}" if len(parts) > 1 else "")
        quarantines = [] if run_dir is None else [quarantine_dir(run_dir, index) for index in chosen]
        watch = Watch([parts[index] for index in chosen], title, quarantines)
        console = Console()
        if once or as_json or not console.is_terminal:
            show_once(watch, interval, as_json=as_json, console=console)
        else:
            show(watch, interval, console)
