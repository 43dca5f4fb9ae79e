"""How a process that passes large messages on keeps its memory."""

from __future__ import annotations

import ctypes
import sys

_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD = -1, -2, -3
"""Parameters of glibc's mallopt."""
_KEPT_BYTES = 128 << 20
_PAD_BYTES = 8 << 20
_LARGEST_BYTES = 32 << 20
"""The most that glibc takes as threshold for a mapping of its own."""


def keep_freed_memory() -> None:
    """Keep up to 128 MB of what is freed, for the next message, where the C library is glibc; nothing elsewhere.

    By default a block of more than 128 kB is a mapping of its own, and freed memory at the end of the heap goes back at
    once: each payload then faults all of its pages in anew, which costs more than copying it.
    """
    if not sys.platform.startswith("linux"):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return
    for parameter, value in (
        (_MMAP_THRESHOLD, _LARGEST_BYTES),
        (_TRIM_THRESHOLD, _KEPT_BYTES),
        (_TOP_PAD, _PAD_BYTES),
    ):
        mallopt(parameter, value)
