"""A least-recently-used map bounded by the bytes of its values."""

from __future__ import annotations

from collections import OrderedDict
from typing import Generic, TypeVar

__all__ = ["ByteBoundedCache"]

V = TypeVar("V")


class ByteBoundedCache(Generic[V]):
    """Keeps the most recently used values whose sizes sum to at most `max_bytes`; for one thread."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._entries: OrderedDict[str, tuple[V, int]] = OrderedDict()
        self._num_bytes = 0

    def get(self, key: str) -> V | None:
        """The value, which becomes the most recently used one."""
        entry = self._entries.get(key)
        if entry is None:
            return None
        self._entries.move_to_end(key)
        return entry[0]

    def put(self, key: str, value: V, num_bytes: int) -> None:
        """Keep `value`; a key that is there already, or a value above the bound, changes nothing."""
        if key in self._entries or num_bytes > self._max_bytes:
            return
        self._entries[key] = (value, num_bytes)
        self._num_bytes += num_bytes
        while self._num_bytes > self._max_bytes:
            self._num_bytes -= self._entries.popitem(last=False)[1][1]

    def clear(self) -> None:
        """Forget everything."""
        self._entries.clear()
        self._num_bytes = 0
