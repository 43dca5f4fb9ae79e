"""How long the learner takes a step when it need not wait for data: what paces the actors.

Owns the measurement; what follows from it is the buffer's.
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable

__all__ = ["StepTime"]

_RECENT = 5
"""Steps; one that takes long, for a checkpoint or a pause, changes their median little."""


class StepTime:
    """Of one loop, told after each of its steps."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._last: float | None = None
        self._recent: deque[float] = deque(maxlen=_RECENT)

    def after_step(self, waited_s: float) -> float | None:
        """Median seconds of the last steps without `waited_s`, which this one waited for data.

        None after the first, whose beginning nobody saw: engines joined, memory was taken.
        """
        now = self._clock()
        if self._last is not None:
            self._recent.append(max(0.0, now - self._last - waited_s))
        self._last = now
        return statistics.median(self._recent) if self._recent else None
