"""Which engines there are: those of the command line, and those of a file or a router, which may change meanwhile."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from pathlib import Path

import msgspec

from vagen.actor.engines.http import EngineHttp
from vagen.common.errors import ConfigError, EngineError
from vagen.common.wire import MAX_ENGINES

__all__ = ["Roster", "check_engine_url"]

logger = logging.getLogger(__name__)


def check_engine_url(url: str, where: str, expected: str = "http://HOST:PORT") -> str:
    """The URL without a final slash. Raises `ConfigError` naming `where` it stands and what was `expected`."""
    if not url.startswith(("http://", "https://")) or any(c.isspace() for c in url):
        raise ConfigError(f"{where}: expected {expected}, got {url!r}")
    return url.rstrip("/")


class _Worker(msgspec.Struct):
    url: str


class _Workers(msgspec.Struct):
    """What SGLang's router answers to `/workers`."""

    workers: list[_Worker]


class Roster:
    """The list of engines. A list that cannot be read changes nothing: engines leave by being taken off it."""

    def __init__(self, urls: Sequence[str], file: str | None = None, router: EngineHttp | None = None) -> None:
        """`router` is SGLang's router, which is asked for its engines in place of a file."""
        self.router = router
        self._urls = list(urls)
        self._file = Path(file) if file is not None else None
        self._seen: list[str] | None = None
        self._problem = ""

    async def read(self) -> list[str]:
        """All engines, each once. Raises `ConfigError` for a file that cannot be used, and when there is no engine."""
        listed = await self._ask_router() if self.router else await asyncio.to_thread(self._read_file)
        urls = list(dict.fromkeys([*self._urls, *listed]))
        where = self.router.url if self.router else self._file or "--engine"
        if not urls:
            raise ConfigError(f"{where}: no engine in the list")
        if len(urls) > MAX_ENGINES:
            raise ConfigError(f"{where}: expected at most {MAX_ENGINES} engines, got {len(urls)}")
        self._seen = urls
        return urls

    async def changes(self) -> list[str] | None:
        """The engines when they are others than last time, else None."""
        if self._file is None and self.router is None:
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

    async def _ask_router(self) -> list[str]:
        assert self.router is not None
        try:
            return [w.url for w in self.router.decode(await self.router.call("GET", "/workers"), _Workers).workers]
        except EngineError as error:
            raise ConfigError(f"{self.router.url}: no list of SGLang's router: {error}") from None

    def _read_file(self) -> list[str]:
        if self._file is None:
            return []
        try:
            lines = self._file.read_text().splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{self._file}: cannot read the list of engines: {error}") from None
        entries = [(number, line.partition("#")[0].strip()) for number, line in enumerate(lines, 1)]
        return [check_engine_url(url, f"{self._file}, line {number}") for number, url in entries if url]
