"""Watches the running processes through their own Prometheus endpoints.

Owns the scraping, and sums that survive restarts (a counter that goes back has begun anew). Says nothing of what the
numbers mean to a person: see `vagen.tools.screen` and `vagen.tools.report`.
"""

from __future__ import annotations

import http.client
import json
import logging
import time
import urllib.error
import urllib.request
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from vagen.tools.runs import TelemetrySample, append_line

logger = logging.getLogger(__name__)

SCRAPE_TIMEOUT_S = 0.5
MAX_EXPOSITION_BYTES = 4 << 20

Labels = tuple[tuple[str, str], ...]
Samples = dict[tuple[str, Labels], float]

_TIME_METRICS: Mapping[str, tuple[str, str]] = {
    # Metric -> label that says what the time went to, or the word for it.
    "vagen_actor_wait_seconds_total": ("what", ""),
    "vagen_engine_busy_seconds_total": ("", "busy"),
    "vagen_engine_paused_seconds_total": ("", "paused"),
    "vagen_buffer_wait_seconds_total": ("what", ""),
    "vagen_learner_seconds_total": ("stage", ""),
}

_GAUGES: Mapping[str, str] = {
    "vagen_buffer_ready": "ready",
    "vagen_buffer_claimed": "claimed",
    "vagen_buffer_running": "running",
    "vagen_buffer_bytes": "buffer_bytes",
    "vagen_actor_running_episodes": "running_episodes",
    "vagen_actor_in_flight": "in_flight",
    "vagen_actor_success": "actor_success",
    "vagen_engine_running_requests": "running_requests",
    "vagen_engine_waiting_requests": "waiting_requests",
    "sglang:num_running_reqs": "running_requests",
    "sglang:num_queue_reqs": "waiting_requests",
    "vagen_engine_policy_version": "engine_version",
    "vagen_learner_step": "learner_step",
}


def metrics_url(process: str, ready: Path) -> str | None:
    """The metrics endpoint that a process names in its `ready.json`; None before it serves."""
    if not ready.is_file():
        return None
    try:
        entry = json.loads(ready.read_text())
    except json.JSONDecodeError:
        return None  # is being written
    if process == "engine":
        return f"{entry['url'].rstrip('/')}/metrics" if "url" in entry else None
    port = entry.get("metrics_port")
    return f"http://127.0.0.1:{port}/metrics" if port else None


def scrape(url: str, timeout_s: float = SCRAPE_TIMEOUT_S) -> Samples | None:
    """All samples of one endpoint without the `run` label; None when it does not answer in time."""
    try:
        with urllib.request.urlopen(url, timeout=timeout_s) as answer:
            text = answer.read(MAX_EXPOSITION_BYTES).decode()
    except (urllib.error.URLError, http.client.HTTPException, TimeoutError, ConnectionError) as error:
        logger.debug("%s: %s", url, error)
        return None
    return parse_exposition(text)


def parse_exposition(text: str) -> Samples:
    """Prometheus text format -> (name, sorted labels without `run`) -> value."""
    return {
        (sample.name, tuple(sorted((k, v) for k, v in sample.labels.items() if k != "run"))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


class Telemetry:
    """Cumulative counters of all processes of a run; one `sample()` a tick, each also a line of `telemetry.jsonl`."""

    def __init__(
        self,
        endpoints: Mapping[str, Callable[[], str | None]],
        file: Path | None = None,
        *,
        write_every_s: float = 2.0,
        window_s: float = 15.0,
        clock: Callable[[], float] = time.time,
        start: TelemetrySample | None = None,
    ) -> None:
        """`endpoints` gives the present address of each process; `start` is the last sample of an earlier attempt."""
        self._endpoints = endpoints
        self._file = file
        self._write_every_s = write_every_s
        self._clock = clock
        self._written_at = float("-inf")
        self._last_raw: dict[str, Samples] = {}
        self._last_seen: dict[str, float] = {}
        self._counters: dict[str, float] = dict(start.counters) if start else {}
        self._seconds: dict[str, dict[str, float]] = (
            {process: dict(parts) for process, parts in start.seconds.items()} if start else {}
        )
        self._observed_s: dict[str, float] = dict(start.observed_s) if start else {}
        self._recent: deque[TelemetrySample] = deque()
        self._window_s = window_s

    def sample(self) -> TelemetrySample:
        """Scrape every process once and add up."""
        now = self._clock()
        gauges: dict[str, float] = {}
        for process, endpoint in self._endpoints.items():
            url = endpoint()
            samples = scrape(url) if url is not None else None
            if samples is None:
                self._last_seen.pop(process, None)
                continue
            self._add(process, samples, now)
            gauges.update({_GAUGES[name]: value for (name, _), value in samples.items() if name in _GAUGES})
        sample = TelemetrySample(
            time=now,
            counters=dict(self._counters),
            seconds={process: dict(parts) for process, parts in self._seconds.items()},
            observed_s=dict(self._observed_s),
            gauges=gauges,
        )
        self._recent.append(sample)
        while now - self._recent[0].time > self._window_s and len(self._recent) > 2:
            self._recent.popleft()
        if self._file is not None and now - self._written_at >= self._write_every_s:
            append_line(self._file, sample)
            self._written_at = now
        return sample

    def window(self) -> tuple[TelemetrySample, TelemetrySample] | None:
        """The oldest and the newest sample of the recent past; None before there are two."""
        return (self._recent[0], self._recent[-1]) if len(self._recent) > 1 else None

    def _add(self, process: str, samples: Samples, now: float) -> None:
        last = self._last_raw.get(process, {})
        seen = process in self._last_seen
        for (name, labels), value in samples.items():
            if not name.startswith("vagen_") or not name.endswith("_total"):
                continue
            before = last.get((name, labels), 0.0)
            grown = value - before if value >= before else value
            if name in _TIME_METRICS:
                label, word = _TIME_METRICS[name]
                parts = self._seconds.setdefault(process, {})
                key = dict(labels).get(label, word) if label else word
                # What was spent before the first look has no observed time to compare it with.
                parts[key] = parts.get(key, 0.0) + (grown if seen else 0.0)
            else:
                key = name.removeprefix("vagen_") + "".join(f"[{value}]" for _, value in labels)
                self._counters[key] = self._counters.get(key, 0.0) + grown
        if seen:
            self._observed_s[process] = self._observed_s.get(process, 0.0) + now - self._last_seen[process]
        self._last_raw[process] = samples
        self._last_seen[process] = now


def rate(window: tuple[TelemetrySample, TelemetrySample] | None, counter: str) -> float:
    """Growth of one counter a second."""
    if window is None or window[1].time <= window[0].time:
        return 0.0
    first, last = window
    return (last.counters.get(counter, 0.0) - first.counters.get(counter, 0.0)) / (last.time - first.time)


def time_shares(
    first: TelemetrySample | None, last: TelemetrySample, slots: Mapping[str, int] | None = None
) -> dict[str, dict[str, float]]:
    """Process -> what -> share of its time between two samples (from the beginning where `first` is None).

    A process with `slots` spends that many seconds a second (the actor's episodes).
    """
    shares: dict[str, dict[str, float]] = {}
    for process, parts in last.seconds.items():
        begun = first.seconds.get(process, {}) if first else {}
        span = last.observed_s.get(process, 0.0) - (first.observed_s.get(process, 0.0) if first else 0.0)
        if span <= 0:
            continue
        span *= (slots or {}).get(process, 1)
        shares[process] = {what: max(0.0, total - begun.get(what, 0.0)) / span for what, total in parts.items()}
    return shares
