"""What an engine says of its load in `/metrics`: SGLang's names and the local engine's."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Load", "parse_load"]

_NAMES = {
    "sglang:num_running_reqs": "running",
    "sglang:num_queue_reqs": "waiting",
    "sglang:token_usage": "kv_usage",
    # Out of memory only: a pause that retracts does not count here, or each publish would look like congestion.
    "sglang:num_retracted_requests_total": "retractions",
    "vagen_engine_running_requests": "running",
    "vagen_engine_waiting_requests": "waiting",
    "vagen_engine_kv_usage": "kv_usage",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """An engine's load, of all its clients. Zeros where it says nothing."""

    running: float = 0.0
    waiting: float = 0.0
    kv_usage: float = 0.0
    """Share of the KV cache in use."""
    retractions: float = 0.0
    """Requests put back for want of KV cache so far."""

    @property
    def requests(self) -> float:
        """Running and waiting."""
        return self.running + self.waiting


def parse_load(text: str) -> Load:
    """Load in a Prometheus exposition; of several samples of a name, as with tensor-parallel ranks, the greatest."""
    found: dict[str, float] = {}
    for line in text.splitlines():
        name = _NAMES.get(line.partition("{")[0].partition(" ")[0])
        if name is None:
            continue
        try:
            value = float(line.rpartition("}")[2].split()[0] if "}" in line else line.split()[1])
        except (ValueError, IndexError):
            continue
        found[name] = max(value, found.get(name, 0.0))
    return Load(**found)
