"""One engine of the pool: health, admission, load and slots.

answers `failures` times in a row not -> quarantine, back-off doubled -> a probe answers -> healthy
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Literal

from vagen.actor.engines.config import EnginesConfig
from vagen.actor.engines.exchange import Exchange
from vagen.actor.engines.http import EngineHttp
from vagen.actor.engines.limit import Limit
from vagen.actor.engines.load import Load, parse_load
from vagen.actor.rendering import ChatRenderer
from vagen.common.errors import EngineError, EngineRefusedError, EngineUnavailableError
from vagen.common.trajectory import EngineIdentity
from vagen.common.wire import EngineStatus

__all__ = ["Member"]

logger = logging.getLogger(__name__)

_MAX_DOUBLINGS = 30


class Member:
    """Belongs to the pool's event loop."""

    def __init__(
        self, url: str, renderer: ChatRenderer, config: EnginesConfig, api_key: str, router: EngineHttp | None = None
    ) -> None:
        """`router` takes the requests in place of the engine, and passes them to an engine of its own choice."""
        self.http = EngineHttp(url, api_key)
        self.exchange = Exchange(router or self.http, renderer)
        self.is_routed = router is not None
        self.limit = Limit(config)
        self.load = Load()
        """As of the last probe."""
        self.in_flight = 0
        """Requests of this actor that hold a slot."""
        self.identity: EngineIdentity | None = None
        """None until it has answered, and while it is in quarantine."""
        self.admission: EngineStatus | None = None
        """What the buffer said last of this URL."""
        self.is_leaving = False
        """Off the list, so that nobody finds it any more; what runs there ends."""
        self.lost = asyncio.Event()
        """Set while it is in quarantine for not answering: who waits for it need not wait longer."""
        self._renderer = renderer
        self._config = config
        self._failures = {"probe": 0, "request": 0}
        self._quarantines = 0
        self._quarantined_until = 0.0
        self._others = 0.0
        self._has_no_metrics = False

    @property
    def url(self) -> str:
        """Base URL."""
        return self.http.url

    @property
    def is_healthy(self) -> bool:
        """Whether it has answered and is not in quarantine."""
        return self.identity is not None

    @property
    def is_usable(self) -> bool:
        """Whether this very start of the engine holds weights that the learner has checked, and it answers."""
        admission, identity = self.admission, self.identity
        return identity is not None and admission is not None and admission.incarnation == identity.incarnation

    @property
    def may_start(self) -> bool:
        """Whether new episodes may be played on it: usable, and its weights are not late."""
        return self.is_usable and not self.is_late

    @property
    def is_late(self) -> bool:
        """Whether what it samples would be too old by the time it is trained on."""
        return self.admission is not None and self.admission.is_late

    @property
    def version(self) -> int:
        """Oldest version that it can sample with; -1 before it is admitted."""
        return -1 if self.admission is None else self.admission.policy_version

    @property
    def state(self) -> str:
        """For people: what keeps it from taking requests, or how many it has."""
        if self.is_usable:
            return f"has {self.in_flight} of {self.limit.value} requests"
        return "does not answer" if self.identity is None else "is not admitted"

    @property
    def has_room(self) -> bool:
        """Whether it may get one request more."""
        return self.in_flight < self.limit.value

    @property
    def pressure(self) -> float:
        """How loaded it is: requests of ours and of others over our limit, plus the share of its KV cache in use."""
        return (self.in_flight + self._others) / self.limit.value + self.load.kv_usage

    @property
    def probe_due(self) -> bool:
        """Whether it may be probed: the back-off of its quarantine is over."""
        return time.monotonic() >= self._quarantined_until

    async def probe(self) -> None:
        """Look at health, identity and load, and adapt the limit; a failure counts."""
        try:
            await self.look()
        except EngineError as error:
            self.note_failure(error, "probe")

    async def look(self) -> None:
        """As `probe`, but a failure is raised as an `EngineError` and does not count."""
        timeout_s = self._config.probe_timeout_s
        await self.http.call("GET", "/ready", None, timeout_s)
        load = await self._read_load()
        identity = await self._identify()
        if self.is_routed and self._renderer.vision is not None and identity.kind != "local":
            raise EngineRefusedError(
                f"{self.url}: SGLang's router, which drops logit_bias (as 0.3.2 does), is no place for a model with "
                "vision: it could sample image tokens, and its log-probabilities would be another distribution's; "
                "list the engines instead"
            )
        if self._config.conversations == "server" and identity.kind != "sglang":
            raise EngineRefusedError(
                f"{self.url} is the local engine, which keeps no conversations: "
                "set actor.engines.conversations to client"
            )
        if self.identity is None:
            logger.info("engine %s answers: incarnation %s", self.url, identity.incarnation)
        elif self.identity.incarnation != identity.incarnation:
            logger.warning("engine %s was restarted: incarnation %s", self.url, identity.incarnation)
        self.identity = identity
        self.lost.clear()
        self._failures["probe"] = 0
        self.load = load
        # What others have there; our own requests come and go faster than probes.
        self._others = max(0.0, load.requests - self.in_flight)
        self.limit.adapt(load, self.in_flight)

    def note_answer(self) -> None:
        """A request was answered as it should be."""
        self._failures = {"probe": 0, "request": 0}
        self._quarantines = 0

    def note_failure(self, error: EngineError, source: Literal["probe", "request"]) -> None:
        """A probe or a request failed; too many in a row put the engine into quarantine."""
        if not self.probe_due:
            return  # it was under way when the quarantine began
        if self.is_routed and source == "request":
            return  # nobody knows which engine it was
        self._failures[source] += 1
        count, most = self._failures[source], self._config.failures
        logger.warning("engine %s, failed %s %d of %d: %s", self.url, source, count, most, error)
        if count < most and self.identity is not None:
            return
        doubled = self._config.quarantine_s * 2.0 ** min(self._quarantines, _MAX_DOUBLINGS)
        pause = min(doubled, self._config.quarantine_max_s)
        self._failures = {"probe": 0, "request": 0}
        self._quarantines += 1
        self._quarantined_until = time.monotonic() + pause
        self.identity = None
        logger.warning("engine %s is in quarantine for %.1f s", self.url, pause)
        if source == "probe":
            self.lost.set()

    async def _identify(self) -> EngineIdentity:
        """Who answers. SGLang's scheduler, which knows, is silent while it receives weights: then it is who it was."""
        try:
            return await self.http.identity(self._renderer.model_hash, self._renderer.tokenizer_hash)
        except EngineUnavailableError:
            if self.identity is None:
                raise
            return self.identity

    async def _read_load(self) -> Load:
        try:
            text = await self.http.call("GET", "/metrics", None, self._config.probe_timeout_s)
        except EngineRefusedError:
            if not self._has_no_metrics:
                logger.warning("engine %s has no /metrics: its limit does not adapt (--enable-metrics)", self.url)
            self._has_no_metrics = True
            return Load()
        return parse_load(text.decode(errors="replace"))
