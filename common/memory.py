"""How a process that passes large messages on keeps its memory."""

from __future__ import annotations

import ctypes
import gc
import sys
from collections.abc import Callable

_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD = -1, -2, -3
"""Parameters of glibc's mallopt."""
_KEPT_BYTES = 128 << 20
_PAD_BYTES = 8 << 20
_GC_THRESHOLD = 20_000
_LARGEST_BYTES = 32 << 20
"""The most that glibc takes as threshold for a mapping of its own."""


def keep_freed_memory() -> None:
    """Keep up to 128 MB of what is freed, for the next message, where the C library is glibc; nothing elsewhere.

    By default a block of more than 128 kB is a mapping of its own, and freed memory at the end of the heap goes back at
    once: each payload then faults all of its pages in anew, which costs more than copying it.
    """
    mallopt = _of_glibc("mallopt")
    if mallopt is None:
        return
    for parameter, value in (
        (_MMAP_THRESHOLD, _LARGEST_BYTES),
        (_TRIM_THRESHOLD, _KEPT_BYTES),
        (_TOP_PAD, _PAD_BYTES),
    ):
        mallopt(parameter, value)


def release_freed_memory() -> None:
    """Give back to the system what is freed, wherever it lies in the heap, where the C library is glibc.

    A small block that is in use keeps everything below it from going back by itself.
    """
    malloc_trim = _of_glibc("malloc_trim")
    if malloc_trim is not None:
        malloc_trim(0)


def _of_glibc(name: str) -> Callable[..., int] | None:
    return getattr(ctypes.CDLL(None), name, None) if sys.platform.startswith("linux") else None


def collect_rarely() -> None:
    """Look for reference cycles less often, and never in what was imported.

    Each trajectory is a few hundred objects that end without the collector, which by default goes through all objects
    of the process every few dozen of them.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(_GC_THRESHOLD)
