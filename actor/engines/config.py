"""Settings of the pool of engines: `actor.engines` of a recipe."""

from __future__ import annotations

from typing import Literal

from vagen.common.config import Section, require

_CONVERSATION_IDLE_S = 600.0


class EnginesConfig(Section, frozen=True, kw_only=True):
    """Section `actor.engines`. Durations in seconds; the URLs themselves come from the command line or `file`."""

    file: str | None = None
    """A list of engines, one URL a line, read again every `probe_s` and at SIGHUP: engines join and leave with it."""
    router_url: str | None = None
    """SGLang's router: generation goes through it, and the engines are those that it lists, followed as `file` is."""
    request_timeout_s: float = 60.0
    """For one request to one engine; the response is then asked for elsewhere, within `actor.engine_timeout_s`."""
    probe_s: float = 1.0
    """Between looks at an engine's health and load; also the interval at which its limit adapts."""
    probe_timeout_s: float = 5.0
    failures: int = 3
    """Failed probes and requests in a row that put an engine into quarantine."""
    quarantine_s: float = 1.0
    """Of the first time; doubles with each until an answer to a request ends the series."""
    quarantine_max_s: float = 10.0
    """Also the longest time after which an engine of the list that was not there yet is seen."""
    min_in_flight: int = 1
    """Requests of this actor that an engine gets at least, whatever its load."""
    max_in_flight: int = 256
    """And at most; the limit starts here."""
    kv_high: float = 0.9
    """Share of the KV cache in use above which the limit is halved."""
    conversations: Literal["client", "server"] = "client"
    """Who keeps what was said: with `server`, which only SGLang can, a turn sends what is new (see docs/engines.md)."""

    def __post_init__(self) -> None:
        for name in ("request_timeout_s", "probe_s", "probe_timeout_s", "quarantine_s"):
            require(getattr(self, name) > 0, f"actor.engines.{name}", getattr(self, name), "float > 0")
        require(
            self.router_url is None or self.file is None,
            "actor.engines.router_url",
            self.router_url,
            "no router_url beside file: the router lists its engines",
        )
        require(
            self.conversations == "client" or self.router_url is None,
            "actor.engines.conversations",
            self.conversations,
            "client with router_url: the router may send each turn to another engine",
        )
        require(self.failures >= 1, "actor.engines.failures", self.failures, "int >= 1")
        require(self.min_in_flight >= 1, "actor.engines.min_in_flight", self.min_in_flight, "int >= 1")
        require(
            self.max_in_flight >= self.min_in_flight,
            "actor.engines.max_in_flight",
            self.max_in_flight,
            f"int >= min_in_flight ({self.min_in_flight})",
        )
        require(
            self.quarantine_max_s >= self.quarantine_s,
            "actor.engines.quarantine_max_s",
            self.quarantine_max_s,
            f"float >= quarantine_s ({self.quarantine_s:g})",
        )
        require(0 < self.kv_high <= 1, "actor.engines.kv_high", self.kv_high, "0 < float <= 1")

    @property
    def conversation_idle_s(self) -> float:
        """After which SGLang may forget a conversation: it must not while a request of it runs, which is given up
        after `request_timeout_s`."""
        return max(_CONVERSATION_IDLE_S, 10 * self.request_timeout_s)
