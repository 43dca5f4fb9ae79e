"""Loads the server-side scripts and fills in the names of the keys.

A script takes the run's prefix as its only key. `prelude.lua` is put in front of each, and `K.<name>` becomes the
expression for that key, so that names are written down in `vagen.buffer.keys` alone.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.resources
import re

from vagen.buffer.keys import Key


class Source:
    """The text of one script and the hash by which Redis knows it."""

    def __init__(self, name: str) -> None:
        folder = importlib.resources.files("vagen.buffer").joinpath("scripts")
        text = "\n".join(folder.joinpath(f"{part}.lua").read_text() for part in ("prelude", name))
        self.text = re.sub(r"\bK\.(\w+)", lambda match: f"(KEYS[1]..'{Key[match[1].upper()].value}')", text)
        self.sha = hashlib.sha1(self.text.encode()).hexdigest()


@functools.cache
def source(name: str) -> Source:
    """The script `name`, read once a process."""
    return Source(name)
