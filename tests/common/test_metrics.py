"""The table of metrics is consistent: every process can make its own, and serve them."""

from __future__ import annotations

import urllib.request

import pytest

from vagen.common.errors import ConfigError
from vagen.common.metrics import COUNTERS, GAUGES, HISTOGRAMS, Metrics

PREFIXES = ("vagen_actor", "vagen_engine", "vagen_buffer", "vagen_learner")


@pytest.mark.parametrize("prefix", PREFIXES)
def test_every_entry_of_a_process_can_be_set_and_is_served(prefix):
    metrics = Metrics(prefix, "run-1")
    names = []
    for table, use in ((COUNTERS, metrics.count), (GAUGES, metrics.gauge), (HISTOGRAMS, metrics.observe)):
        for name, (_, labels, *_) in table.items():
            if name.startswith(prefix + "_"):
                use(name, 1.0, **dict.fromkeys(labels, "x"))
                names.append(name)
    assert names
    port = metrics.serve(0)
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as answer:
        text = answer.read().decode()
    for name in names:
        assert f'{name}{{run="run-1"' in text or f'{name}_count{{run="run-1"' in text or f"{name}{{" in text


def test_every_entry_belongs_to_a_process():
    for name in (*COUNTERS, *GAUGES, *HISTOGRAMS):
        assert name.startswith(tuple(prefix + "_" for prefix in PREFIXES))


def test_a_taken_port_is_an_error_that_names_it():
    port = Metrics("vagen_actor", "run").serve(0)
    with pytest.raises(ConfigError, match=str(port)):
        Metrics("vagen_actor", "run").serve(port)
