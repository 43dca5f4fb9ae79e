"""Which engines there are: those of the command line, and those of a file that may change while the actor runs."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from pathlib import Path

from vagen.common.errors import ConfigError
from vagen.common.wire import MAX_ENGINES

__all__ = ["Roster", "check_engine_url"]

logger = logging.getLogger(__name__)


def check_engine_url(url: str, where: str, expected: str = "http://HOST:PORT") -> str:
    """The URL without a final slash. Raises `ConfigError` naming `where` it stands and what was `expected`."""
    if not url.startswith(("http://", "https://")) or any(c.isspace() for c in url):
        raise ConfigError(f"{where}: expected {expected}, got {url!r}")
    return url.rstrip("/")


class Roster:
    """The list of engines. A list that cannot be read changes nothing: engines leave by being taken off it."""

    def __init__(self, urls: Sequence[str], file: str | None = None) -> None:
        self._urls = list(urls)
        self._file = Path(file) if file is not None else None
        self._seen: list[str] | None = None
        self._problem = ""

    async def read(self) -> list[str]:
        """All engines, each once. Raises `ConfigError` for a file that cannot be used, and when there is no engine."""
        urls = list(dict.fromkeys([*self._urls, *await asyncio.to_thread(self._read_file)]))
        if not urls:
            raise ConfigError(f"{self._file}: no engine in the list" if self._file else "--engine: no engine")
        if len(urls) > MAX_ENGINES:
            raise ConfigError(f"{self._file or '--engine'}: expected at most {MAX_ENGINES} engines, got {len(urls)}")
        self._seen = urls
        return urls

    async def changes(self) -> list[str] | None:
        """The engines when they are others than last time, else None."""
        if self._file is None:
            return None
        before = self._seen
        try:
            urls = await self.read()
        except ConfigError as error:
            if str(error) != self._problem:
                logger.error("the engines stay as they are: %s", error)
            self._problem = str(error)
            return None
        self._problem = ""
        return urls if urls != before else None

    def _read_file(self) -> list[str]:
        if self._file is None:
            return []
        try:
            lines = self._file.read_text().splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{self._file}: cannot read the list of engines: {error}") from None
        entries = [(number, line.partition("#")[0].strip()) for number, line in enumerate(lines, 1)]
        return [check_engine_url(url, f"{self._file}, line {number}") for number, url in entries if url]
