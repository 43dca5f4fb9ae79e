"""Variables of this process's environment, for libraries and child processes that read them when they start."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

__all__ = ["environment_defaults"]


@contextmanager
def environment_defaults(defaults: Mapping[str, str]) -> Iterator[None]:
    """Sets what is not set, for the time of the block: the user's own choice and what comes later are untouched."""
    added = {name: value for name, value in defaults.items() if name not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            del os.environ[name]
