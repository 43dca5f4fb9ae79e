"""One log format for every process: to stderr for people, and to a file for the run's folder."""

from __future__ import annotations

import logging
import sys
from pathlib import Path

FORMAT = "%(asctime)s %(levelname)-7s %(process)d %(name)s: %(message)s"


def setup_logging(level: str = "INFO", file: Path | None = None) -> None:
    """Configure the root logger once, at the start of a process.

    With `file`, lines are appended there as well and its folder is created.
    """
    handlers: list[logging.Handler] = [logging.StreamHandler(sys.stderr)]
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        handlers.append(logging.FileHandler(file))
    logging.basicConfig(level=level.upper(), format=FORMAT, handlers=handlers, force=True)
    logging.getLogger("aiohttp.access").setLevel(logging.WARNING)
