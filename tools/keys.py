"""`vagen keys`: key pairs of buffers and actors. Secret keys are written to files and never shown."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from vagen.tools.console import user_errors

app = typer.Typer(no_args_is_help=True, help="Keys for encrypted connections between actors and buffer.")

Folder = Annotated[Path, typer.Option("--out", metavar="DIR", help="Folder of the key files.")]


@app.command("new")
def new(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Of the machine or process that will own the pair.")],
    out: Folder = Path("keys"),
) -> None:
    """Make NAME.key (public, to be copied) and NAME.key_secret (mode 600, stays where it is) and print the public key.

    Examples:

      vagen keys new buffer

      vagen keys new actor-0 --out /etc/vagen/keys
    """
    from vagen.common.curve import create_key_pair, load_public_key

    with user_errors():
        path = create_key_pair(out, name)
        typer.echo(f"{path}\t{load_public_key(path, 'keys').decode()}")


@app.command("list")
def list_keys(
    folder: Annotated[Path, typer.Argument(metavar="[DIR]", help="Folder of the key files.")] = Path("keys"),
    allowed: Annotated[
        Path | None, typer.Option("--allowed", metavar="DIR", help="buffer.security.allowed_dir; DIR/allowed if none.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show names and public keys of a folder and of the allowed ones, and which of them are allowed.

    Examples:

      vagen keys list

      vagen keys list /etc/vagen/keys --allowed /etc/vagen/allowed --json
    """
    import json

    from vagen.common.curve import read_public_keys
    from vagen.common.errors import ConfigError

    gate = allowed or folder / "allowed"
    with user_errors():
        try:
            here, problems = read_public_keys(folder)
            admitted, more = read_public_keys(gate) if allowed or gate.is_dir() else ({}, [])
        except OSError as error:
            raise ConfigError(f"{error.filename}: {error.strerror}; `vagen keys new` makes keys") from error
        entries = [
            {"name": name, "public_key": key.decode(), "allowed": key in admitted}
            for key, name in sorted((here | admitted).items(), key=lambda item: item[1])
        ]
        for problem in problems + more:
            typer.echo(problem, err=True)
        if as_json:
            typer.echo(json.dumps(entries))
            return
        for entry in entries:
            typer.echo(f"{entry['name']:<24}{entry['public_key']}  {'allowed' if entry['allowed'] else ''}".rstrip())
