"""A publisher, and the ingest through which actors announce engines, on one Valkey."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Any

from vagen.buffer.config import BufferConfig
from vagen.buffer.learner_store import LearnerStore
from vagen.buffer.requests import Beat
from vagen.buffer.store import IngestStore
from vagen.common.engines import incarnation_of
from vagen.common.wire import EngineAnnouncement, EngineStatus, Heartbeat
from vagen.learner.broadcast import Broadcaster
from vagen.learner.config import BroadcastConfig
from vagen.learner.publisher import Publisher


class Fleet:
    """What a learner and its actors know of the engines; the clock is this object's."""

    def __init__(self, redis_url: str, config: BroadcastConfig) -> None:
        self.now = time.time()
        self._lock = threading.Lock()
        self._ingest = IngestStore(redis_url, "run", BufferConfig())
        store = LearnerStore.connect(redis_url, "run", timeout_s=30)
        store.register("learner", step=0, batch_size=4, max_staleness=2)
        self.broadcaster = Broadcaster(config)
        self.publisher = Publisher(store=store, broadcaster=self.broadcaster, incarnation="learner")
        self._seen: dict[int, tuple[str, str]] = {}

    def announce(self, *engines: Any) -> None:
        """As an actor's heartbeat does."""
        announced = []
        for engine in engines:
            if engine.process.pid not in self._seen:
                info = engine.call("/server_info", key=engine.api_key)[1]
                self._seen[engine.process.pid] = (info.get("kind", "sglang"), incarnation_of(info))
            kind, incarnation = self._seen[engine.process.pid]
            announced.append(EngineAnnouncement(url=engine.url, kind=kind, incarnation=incarnation))
        self.beat("actor", announced)

    def beat(self, actor_id: str, announced: Sequence[EngineAnnouncement]) -> Sequence[EngineStatus]:
        """One heartbeat of an actor, and the engines that it is told of; any thread."""
        beat = Heartbeat(
            run_id="run", actor_id=actor_id, incarnation="a", journalled=0, in_flight=0, engines=tuple(announced)
        )
        with self._lock:
            return self._ingest.commit([Beat(actor_id.encode(), beat)], self.now).status.engines

    def leave_all_but(self, *engines: Any) -> None:
        """The announcements of the others end."""
        self.now += BufferConfig().heartbeat_timeout_s - 1
        self.announce(*engines)
        with self._lock:
            self.now += 2
            self._ingest.tick(self.now, leases_end=True)

    def serving(self) -> dict[str, int]:
        """Engines that actors may use, with their versions, as told to the actors."""
        status = self._ingest.commit([], self.now).status
        return {engine.url: engine.policy_version for engine in status.engines}

    def join(self, engine: Any) -> None:
        """Tend until an engine serves; what it had begun before it was stopped may cost it a time-out or two."""
        reports = []
        while engine.url not in self.serving():
            reports.append(self.publisher.tend_members())
            assert len(reports) <= 4, reports
