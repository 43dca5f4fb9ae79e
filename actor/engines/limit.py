"""How many requests one engine gets: additive increase, multiplicative decrease, driven by its KV cache."""

from __future__ import annotations

from vagen.actor.engines.config import EnginesConfig
from vagen.actor.engines.load import Load

__all__ = ["Limit"]


class Limit:
    """The limit of one engine. `adapt` is called once an interval."""

    def __init__(self, config: EnginesConfig) -> None:
        self._config = config
        self._retractions = 0.0
        self.value = config.max_in_flight
        """Requests of this actor that the engine may have."""

    def adapt(self, load: Load, in_flight: int) -> None:
        """Halve when the KV cache is fuller than `kv_high` or requests were retracted since last time, else add one.

        A limit that was halved stays until the requests above it have ended: what is measured before that is what
        it was halved for.
        """
        config = self._config
        # A counter that went back is of an engine that was restarted.
        is_congested = load.kv_usage > config.kv_high or load.retractions > self._retractions
        self._retractions = load.retractions
        if in_flight > self.value:
            return
        if is_congested:
            # From what is in flight: a limit far above it would take many intervals to be felt.
            self.value = max(config.min_in_flight, min(self.value, in_flight) // 2)
        else:
            self.value = min(config.max_in_flight, self.value + 1)
