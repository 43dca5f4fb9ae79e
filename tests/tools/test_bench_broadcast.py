"""The benchmark of publishing: real publishes to a real engine, and figures that say what their names say."""

from __future__ import annotations

import json

import pytest

from vagen.common.errors import ConfigError
from vagen.tools.bench import run_benchmark
from vagen.tools.bench.broadcast import _figures


def test_an_engine_is_published_to_in_both_modes_and_beside_it_a_bare_broadcast_runs(tmp_path):
    document = tmp_path / "performance.md"
    document.write_text("above\n<!-- begin broadcast -->old<!-- end broadcast -->\n")
    words = ["--megabytes", "4", "--rounds", "2", "--requests", "2", "--docs", str(document)]
    figures = json.loads(run_benchmark("broadcast", (), words, as_json=True))["figures"]
    assert {"vs_bare_broadcast", "publish_s", "stall_ms_retract", "stall_ms_in_place"} <= set(figures)
    for figure in figures.values():
        assert 0 < figure["spread"][0] <= figure["value"] <= figure["spread"][1]
    stall_s = figures["stall_ms_retract_4mb"]["spread"][0] / 1e3
    transfer_s = 4e-3 / figures["transfer_gb_per_s_4mb"]["spread"][1]
    assert transfer_s * 0.9 < stall_s < figures["publish_s_4mb"]["spread"][1]
    assert "old" not in document.read_text() and "| vs_bare_broadcast | " in document.read_text()


def test_the_headline_is_the_worst_ratio_and_the_largest_model():
    rounds = {"publish_s": [1.0, 3.0, 2.0], "stall_ms_retract": [5.0], "stall_ms_in_place": [6.0]}
    figures = _figures(
        {
            "100mb": rounds | {"vs_bare_broadcast": [0.8, 0.9, 0.7]},
            "1gb": rounds | {"publish_s": [10.0], "vs_bare_broadcast": [1.0]},
        }
    )
    assert figures["vs_bare_broadcast"].value == 0.8 and figures["vs_bare_broadcast"].spread == (0.7, 0.9)
    assert figures["publish_s"].value == 10.0 and figures["publish_s_100mb"].value == 2.0
    assert figures["stall_ms_retract"].unit == "ms" and figures["publish_s"].unit == "s"


@pytest.mark.parametrize("megabytes", ["3", "100,", "many", "10.5"])
def test_sizes_that_are_none_are_refused(megabytes):
    with pytest.raises(ConfigError, match="megabytes"):
        run_benchmark("broadcast", (), ["--megabytes", megabytes], as_json=True)
