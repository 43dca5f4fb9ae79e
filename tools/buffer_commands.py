"""The commands `vagen buffer ...`. Parses and reports; what it runs is imported inside the commands.

Every command that needs a running buffer finds it by `--run-dir`, whose `ready.json` names Redis and the run, or by
`--redis` and `--run`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, NamedTuple

import typer

from vagen.buffer.cli import audit
from vagen.tools.console import user_errors

buffer_app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Look into a buffer and steer it.")
buffer_app.command("audit")(audit)

RunDir = Annotated[Path | None, typer.Option("--run-dir", metavar="DIR", help="Folder of a run whose buffer serves.")]
Redis = Annotated[str | None, typer.Option("--redis", metavar="URL", help="Redis of the run, in place of --run-dir.")]
RunName = Annotated[str | None, typer.Option("--run", metavar="NAME", help="Name of the run, with --redis.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


class RunAddress(NamedTuple):
    """Where the state of one run is."""

    redis_url: str
    run_name: str


def locate(run_dir: Path | None, redis: str | None, run_name: str | None) -> RunAddress:
    """The run that a command's options name.

    Raises `ConfigError` when they name none, or when no buffer serves the folder.
    """
    from vagen.buffer.service import read_ready
    from vagen.common.errors import ConfigError

    if run_dir is not None and redis is None:
        ready = read_ready(run_dir)
        return RunAddress(ready.redis_url, run_name or ready.run_name)
    if run_dir is None and redis is not None and run_name is not None:
        return RunAddress(redis, run_name)
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
