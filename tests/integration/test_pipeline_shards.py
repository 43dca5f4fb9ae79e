"""The whole pipeline over a buffer of two shards: an ingest and an actor each, one learner, one accounting."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from vagen.buffer.accounting import audit

pytestmark = pytest.mark.slow


def with_option(argv: tuple[str, ...], name: str, value: str) -> tuple[str, ...]:
    """The command line with an option set to a value."""
    if name not in argv:
        return (*argv, name, value)
    at = argv.index(name) + 1
    return (*argv[:at], value, *argv[at + 1 :])


class TwoShards:
    """Names the processes of a pipeline that its launcher does not know."""

    def __init__(self, pipeline: Any) -> None:
        self._pipeline = pipeline
        self._spec = pipeline.spec
        pipeline.spec = self.spec

    def spec(self, name: str) -> Any:
        kind, _, number = name.partition("-")
        spec = self._spec(kind)
        if kind == "buffer":
            argv = with_option(spec.argv, "--shard", number or "0")
            return replace(spec, argv=with_option(argv, "--endpoint", "tcp://127.0.0.1:*"))
        if kind == "actor":
            argv = with_option(spec.argv, "--buffer", ",".join(self.announced("endpoint")))
            return replace(spec, argv=with_option(argv, "--name", name))
        return spec

    def announced(self, field: str) -> list[str]:
        files = [self._pipeline.run.ready(name) for name in ("buffer", "buffer-1")]
        return [json.loads(file.read_text())[field] for file in files]


def test_a_learner_trains_on_batches_of_two_shards(make_pipeline: Any, valkey: Any) -> None:
    settings = ["buffer.shards=2", f"buffer.redis_url={valkey.url}", "learner.total_steps=6"]
    with make_pipeline([*settings, "actor.group_size=2", "learner.checkpoint_every=3"]) as pipeline:
        TwoShards(pipeline)
        for name in ("buffer", "buffer-1", "engine", "learner", "actor-0", "actor-1"):
            pipeline.start(name)
        pipeline.wait(lambda: len(pipeline.lines()) == 6, "6 steps", 240)
        pipeline.wait_for_end("learner", 120)
        for name in ("actor-0", "actor-1"):
            assert pipeline.stop(name) == 0
        accounting = audit(valkey.url, "pipeline", 2)
        assert pipeline.stop("buffer") == pipeline.stop("buffer-1") == 0
    assert accounting.identity_holds and accounting.trained == 6 * 16 and accounting.refused == 0
    assert len(accounting.actors) == 2 and all(actor.journalled > 0 for actor in accounting.actors)
    assert max(line["probe_mismatch"] for line in pipeline.lines() if line["probe_mismatch"] is not None) < 1e-4
