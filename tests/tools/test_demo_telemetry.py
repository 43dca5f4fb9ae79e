"""Telemetry from real exporters, over restarts and silences of the watched process."""

from __future__ import annotations

import json

import pytest

from vagen.common.metrics import Metrics
from vagen.tools.runs import TelemetrySample, read_lines
from vagen.tools.telemetry import Telemetry, metrics_url, rate, scrape, time_shares


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def actor():
    metrics = Metrics("vagen_actor", "run")
    return metrics, f"http://127.0.0.1:{metrics.serve(0)}/metrics"


def test_counters_gauges_and_time(actor, tmp_path):
    metrics, url = actor
    clock = Clock()
    telemetry = Telemetry({"actor": lambda: url}, tmp_path / "t.jsonl", write_every_s=5, clock=clock)
    metrics.count("vagen_actor_tokens_total", 100)
    metrics.count("vagen_actor_wait_seconds_total", 50, what="engine")
    first = telemetry.sample()
    metrics.count("vagen_actor_tokens_total", 300)
    metrics.count("vagen_actor_wait_seconds_total", 4, what="engine")
    metrics.count("vagen_actor_episodes_total", 2, outcome="terminated")
    metrics.gauge("vagen_actor_running_episodes", 7)
    clock.now += 2
    second = telemetry.sample()
    assert second.counters["actor_tokens_total"] == 400
    assert second.counters["actor_episodes_total[terminated]"] == 2
    assert second.gauges["running_episodes"] == 7
    assert rate((first, second), "actor_tokens_total") == 150
    # What was spent before the first look is not held against the observed time.
    assert second.seconds["actor"]["engine"] == 4
    assert time_shares(None, second, {"actor": 8}) == {"actor": {"engine": pytest.approx(0.25)}}
    assert len(list(read_lines(tmp_path / "t.jsonl", TelemetrySample))) == 1


def test_a_restarted_process_goes_on_from_its_old_sum():
    old, new = Metrics("vagen_actor", "run"), Metrics("vagen_actor", "run")
    urls = [f"http://127.0.0.1:{metrics.serve(0)}/metrics" for metrics in (old, new)]
    telemetry = Telemetry({"actor": lambda: urls[0]})
    old.count("vagen_actor_tokens_total", 100)
    telemetry.sample()
    new.count("vagen_actor_tokens_total", 30)
    urls[0] = urls[1]
    assert telemetry.sample().counters["actor_tokens_total"] == 130


def test_silence_is_neither_time_nor_growth(actor):
    metrics, url = actor
    clock = Clock()
    endpoint: list[str | None] = [url]
    telemetry = Telemetry({"actor": lambda: endpoint[0]}, clock=clock)
    telemetry.sample()
    endpoint[0] = None
    clock.now += 1000
    assert telemetry.sample().gauges == {}
    endpoint[0] = url
    clock.now += 1000
    telemetry.sample()
    metrics.count("vagen_actor_wait_seconds_total", 1, what="credit")
    clock.now += 2
    assert telemetry.sample().observed_s == {"actor": 2}


def test_an_interrupted_demo_goes_on_from_its_last_sample(actor):
    metrics, url = actor
    metrics.count("vagen_actor_tokens_total", 5)
    earlier = TelemetrySample(time=1, counters={"actor_tokens_total": 37.0})
    telemetry = Telemetry({"actor": lambda: url}, start=earlier)
    assert telemetry.sample().counters["actor_tokens_total"] == 42


def test_a_dead_endpoint_is_no_error():
    assert scrape("http://127.0.0.1:1/metrics", 0.2) is None


def test_addresses_come_from_ready_files(tmp_path):
    ready = tmp_path / "ready.json"
    assert metrics_url("engine", ready) is None
    ready.write_text(json.dumps({"pid": 1, "url": "http://127.0.0.1:3000/"}))
    assert metrics_url("engine", ready) == "http://127.0.0.1:3000/metrics"
    ready.write_text(json.dumps({"pid": 1, "metrics_port": 9}))
    assert metrics_url("actor", ready) == "http://127.0.0.1:9/metrics"
    ready.write_text('{"pid": ')
    assert metrics_url("actor", ready) is None
