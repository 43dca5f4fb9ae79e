"""How the commands of `vagen` end: an error of a user is one line on stderr that begins with `error:`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import typer


@contextmanager
def user_errors(exit_code: int = 1) -> Iterator[None]:
    """Show what we raise on purpose as one line; anything else keeps its traceback.

    A wrong setting or file of the user's exits with 2, what else went wrong with `exit_code`.
    """
    from vagen.common.errors import ArchiveError, ConfigError, TrajectoryError, VagenError

    try:
        yield
    except VagenError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(2 if isinstance(error, (ConfigError, ArchiveError, TrajectoryError)) else exit_code) from None
