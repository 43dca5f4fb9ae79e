"""Parts of a document that a benchmark writes: what stands between `<!-- begin NAME -->` and `<!-- end NAME -->`."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path

from vagen.common.errors import ConfigError


def replace_parts(path: Path, parts: Mapping[str, str]) -> str:
    """The file's text with its parts replaced. Raises `ConfigError` for a missing file or part."""
    if not path.is_file():
        raise ConfigError(f"{path}: no such file")
    text = path.read_text()
    for name, content in parts.items():
        begin, end = f"<!-- begin {name} -->", f"<!-- end {name} -->"
        pattern = re.compile(re.escape(begin) + ".*?" + re.escape(end), re.DOTALL)
        if len(pattern.findall(text)) != 1:
            raise ConfigError(f"{path}: expected one part {begin} ... {end}")
        text = pattern.sub(_literal(f"{begin}\n{content}\n{end}"), text)
    return text


def _literal(replacement: str) -> Callable[[re.Match[str]], str]:
    return lambda match: replacement
