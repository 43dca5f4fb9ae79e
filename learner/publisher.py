"""From weights to engines: versions, members that come and go, and the check that both sides compute the same.

A version is recorded before any engine may sample with it. An engine takes traffic only after its checksum matched;
one that joins between two publishes gets the tensors of the last one. Owns the snapshot of what was published last;
the transfer itself is `vagen.learner.broadcast`'s.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from vagen.buffer.learner_store import EngineLease
from vagen.buffer.sharded_store import Store
from vagen.learner.broadcast import Broadcaster, ProbeAnswer, PublishReport
from vagen.learner.frozen_weights import FrozenWeights

__all__ = ["Publisher", "Published"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Published:
    """One publish: its version and what became of each member."""

    version: int
    step: int
    report: PublishReport
    answers: list[ProbeAnswer] | None = None
    """What an engine sampled for the probe at exactly this version; None where it was not asked, or failed."""
    mismatch: float | None = None
    """Mean |engine - learner| log-probability of `answers`, where the learner had these weights to compare."""


@dataclass(frozen=True)
class _Snapshot:
    version: int
    step: int
    tensors: Sequence[tuple[str, Tensor]]


@dataclass
class Publisher:
    """Publishes from one rank."""

    store: Store
    broadcaster: Broadcaster
    incarnation: str
    frozen: FrozenWeights | None = None
    """What no publish changes; set before the first."""
    _snapshot: _Snapshot | None = None
    _members: dict[str, str] = field(default_factory=dict)
    """Engines that serve the last version: url -> incarnation."""

    @property
    def version(self) -> int:
        """The version published last; -1 before the first."""
        return -1 if self._snapshot is None else self._snapshot.version

    @property
    def members(self) -> Sequence[str]:
        """URLs of the engines that serve the last version."""
        return sorted(list(self._members))

    def version_of(self, step: int) -> int:
        """The version published last, if it is that of a learner step; -1 if it is not."""
        snapshot = self._snapshot
        return snapshot.version if snapshot is not None and snapshot.step == step else -1

    def publish(self, tensors: Sequence[tuple[str, Tensor]], step: int) -> Published:
        """Give weights a new version, that of learner step `step`, and send it to every announced engine.

        Engines that lack `frozen` weights get those as well. The tensors must stay as they are until the next publish:
        engines that join get them. An engine that is dead or hangs costs at most the broadcast time-out, and is out of
        traffic.
        """
        version = self.store.next_version()
        self.store.record_version(version, self.incarnation, step, checksum="")
        self._snapshot = _Snapshot(version, step, tensors)
        report = self._send(self._present())
        self.store.record_version(version, self.incarnation, step, report.checksum)
        return Published(version=version, step=step, report=report)

    def tend_members(self) -> PublishReport | None:
        """Send the last version to engines that joined since; None when none did.

        The others are not asked to pause. One whose announcement had ended joins again when it comes back: the end took
        it out of traffic.
        """
        serving = {(url, incarnation, self.version) for url, incarnation in self._members.items()}
        joiners = [e for e in self._present() if (e.url, e.incarnation, e.version) not in serving]
        if self._snapshot is None or not joiners:
            return None
        return self._send(joiners)

    def close(self) -> None:
        """Leave the groups."""
        self.broadcaster.close()

    def _present(self) -> list[EngineLease]:
        """Engines that actors announce; those that left are members no more."""
        announced = self.store.engines()
        for url in self._members.keys() - {engine.url for engine in announced}:
            logger.info("%s has left", url)
            self._members.pop(url)
            self.broadcaster.forget(url)
        return announced

    def _send(self, engines: Sequence[EngineLease]) -> PublishReport:
        assert self._snapshot is not None
        snapshot = self._snapshot
        urls = [engine.url for engine in engines]
        report = self.broadcaster.publish(snapshot.tensors, snapshot.version, urls, frozen=self.frozen)
        by_url = {engine.url: engine for engine in engines}
        for url in report.ok:
            if self.store.admit_engine(url, by_url[url].incarnation, snapshot.version):
                self._members[url] = by_url[url].incarnation
        for url, reason in report.failed.items():
            logger.warning("version %d did not reach %s: %s", snapshot.version, url, reason)
            self.store.withdraw_engine(url, by_url[url].incarnation)
            self._members.pop(url, None)
        return report
