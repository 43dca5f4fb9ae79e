"""One log format for every process: to stderr for people, and to a file for the run's folder."""

from __future__ import annotations

import logging
import sys
from pathlib import Path

from vagen.common.redaction import redact

FORMAT = "%(asctime)s %(levelname)-7s %(process)d %(name)s: %(message)s"


class _Formatter(logging.Formatter):
    """Shows no password of a URL, whoever logs it, tracebacks included."""

    def format(self, record: logging.LogRecord) -> str:
        return redact(super().format(record))


def setup_logging(level: str = "INFO", file: Path | None = None) -> None:
    """Configure the root logger once, at the start of a process.

    With `file`, lines are appended there as well and its folder is created.
    """
    handlers: list[logging.Handler] = [logging.StreamHandler(sys.stderr)]
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        handlers.append(logging.FileHandler(file))
    for handler in handlers:
        handler.setFormatter(_Formatter(FORMAT))
    logging.basicConfig(level=level.upper(), handlers=handlers, force=True)
    logging.getLogger("aiohttp.access").setLevel(logging.WARNING)
