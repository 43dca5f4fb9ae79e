"""Publishing beside training: a thread sends what the loop has put down, and the loop goes on.

    submit    copies the weights and goes on. A copy that still waits is replaced by the newer one: an engine that is
              slow gets fewer versions, not older ones. So at most two copies exist, one that is being sent or was
              sent last, which joiners get, and one that waits.
    thread    takes the copy that waits, gives it a version, sends it, samples the probe before anything else can be
              published; meanwhile, and while nothing waits, it sends the last version to engines that have joined.
    finished  what became of the publishes since the last call. `drain` waits for those submitted, within a bound.

One thread alone publishes, so versions are in the order of learner steps. What it raises, the loop's next call raises.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

from torch import Tensor

from vagen.common.errors import InfrastructureError
from vagen.learner.broadcast import ProbeAnswer
from vagen.learner.frozen_weights import FrozenWeights
from vagen.learner.probe import Probe
from vagen.learner.publisher import Published, Publisher
from vagen.learner.snapshot import SnapshotBuffer

__all__ = ["PublishTally", "PublishThread", "SampleProbe"]

logger = logging.getLogger(__name__)

SampleProbe = Callable[[Probe, str, int], list[ProbeAnswer]]
"""A probe's answers from the engine at a URL, all of one version. Raises InfrastructureError."""

_TEND_EVERY_S = 0.25
_RETRY_JOINERS_S = 2.0
"""After a joiner that failed: one that hangs costs a time-out each time, in which nothing else can be published."""


@dataclass(frozen=True, kw_only=True)
class _Copy:
    buffer: SnapshotBuffer
    step: int
    probe: Probe | None


@dataclass
class PublishTally:
    """What publishing has cost the loop."""

    waited_s: float = 0.0
    """Seconds in `drain`."""
    num_replaced: int = 0
    """Copies that were never sent, because a newer one came."""


@dataclass
class PublishThread:
    """Publishes from one rank, in a thread that the first `submit` starts."""

    publisher: Publisher
    sample: SampleProbe
    drain_timeout_s: float
    """Bound of a wait for everything that was submitted."""
    _tally: PublishTally = field(default_factory=PublishTally)
    _free: list[SnapshotBuffer] = field(default_factory=lambda: [SnapshotBuffer(), SnapshotBuffer()])
    _waiting: _Copy | None = None
    _last_step: int = -1
    _finished: list[Published] = field(default_factory=list)
    _is_busy: bool = False
    _is_closed: bool = False
    _failure: Exception | None = None

    def __post_init__(self) -> None:
        self._changed = threading.Condition()
        self._sent: SnapshotBuffer | None = None
        self._joiners_after = 0.0
        self._thread = threading.Thread(target=self._run, name="publish", daemon=True)

    @property
    def version(self) -> int:
        """Of the weights submitted last; -1 while no engine can have sampled from them."""
        return self.publisher.version_of(self._last_step)

    @property
    def members(self) -> Sequence[str]:
        """URLs of the engines that serve the last version."""
        return self.publisher.members

    def freeze(self, frozen: FrozenWeights) -> None:
        """Say what no publish changes, before the first `submit`: that is not copied."""
        self.publisher.frozen = frozen

    def submit(self, weights: Iterable[tuple[str, Tensor]], step: int, probe: Probe | None = None) -> None:
        """Copy the weights of a learner step, which may change as soon as this returns, and have them published.

        Iterates to the end of `weights`. Raises what the thread has raised.
        """
        self.check()
        with self._changed:
            # Taken back first: nobody sends what is being written.
            replaced, self._waiting = self._waiting, None
            buffer = self._free.pop() if replaced is None else replaced.buffer
        buffer.take(weights)
        with self._changed:
            if replaced is not None:
                self._tally.num_replaced += 1
                logger.info("step %d: its weights are not published, those of step %d are newer", replaced.step, step)
            self._waiting, self._last_step = _Copy(buffer=buffer, step=step, probe=probe), step
            self._changed.notify_all()
        if not self._thread.is_alive():
            self._thread.start()

    def finished(self) -> list[Published]:
        """Publishes that have ended since the last call, oldest first. Raises what the thread has raised."""
        self.check()
        with self._changed:
            finished, self._finished = self._finished, []
        return finished

    def drain(self) -> bool:
        """Wait until all that was submitted has been published; whether it was within the bound.

        Raises what the thread has raised.
        """
        start = time.monotonic()
        with self._changed:
            is_idle = self._changed.wait_for(lambda: self._failure or not self._is_publishing, self.drain_timeout_s)
        self._tally.waited_s += time.monotonic() - start
        self.check()
        if not is_idle:
            logger.warning("step %d: not published within %.0f s, going on", self._last_step, self.drain_timeout_s)
        return bool(is_idle)

    def take_tally(self) -> PublishTally:
        """Since the last call."""
        tally, self._tally = self._tally, PublishTally()
        return tally

    def check(self) -> None:
        """Raise what the thread has raised."""
        if self._failure is not None:
            raise self._failure

    def close(self) -> None:
        """End the thread after what it is at, and leave the groups; what waits is dropped."""
        with self._changed:
            self._is_closed, self._waiting = True, None
            self._changed.notify_all()
        if self._thread.is_alive():
            self._thread.join(self.drain_timeout_s)
        if self._thread.is_alive():
            logger.warning("a publish goes on after %.0f s; its groups end with the process", self.drain_timeout_s)
        else:
            self.publisher.close()

    @property
    def _is_publishing(self) -> bool:
        return self._is_busy or self._waiting is not None

    def _run(self) -> None:
        try:
            while not self._is_closed:
                copy = self._next()
                if copy is not None:
                    self._publish(copy)
                elif time.monotonic() > self._joiners_after:
                    self._tend()
        except Exception as error:
            logger.exception("publishing has ended")
            with self._changed:
                self._failure = error
                self._changed.notify_all()

    def _next(self) -> _Copy | None:
        """The copy that waits, or None when none does for a while."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting is not None or self._is_closed, _TEND_EVERY_S)
            copy, self._waiting = self._waiting, None
            if copy is not None:
                self._is_busy = True
                if self._sent is not None:
                    self._free.append(self._sent)
                self._sent = copy.buffer
            return copy

    def _publish(self, copy: _Copy) -> None:
        published = self.publisher.publish(copy.buffer.tensors, copy.step)
        published = replace(published, answers=self._answers(copy.probe, published))
        with self._changed:
            self._finished.append(published)
            self._is_busy = False
            self._changed.notify_all()

    def _answers(self, probe: Probe | None, published: Published) -> list[ProbeAnswer] | None:
        """Of the first member; one that fails meanwhile is the next publish's business."""
        if probe is None or not published.report.ok:
            return None
        url = published.report.ok[0]
        try:
            return self.sample(probe, url, published.version)
        except InfrastructureError as error:
            logger.warning("version %d: the probe failed on %s: %s", published.version, url, error)
            return None

    def _tend(self) -> None:
        report = self.publisher.tend_members()
        if report is not None and report.failed:
            self._joiners_after = time.monotonic() + _RETRY_JOINERS_S
