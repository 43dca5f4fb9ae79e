"""kill -9 of any one process, and starting it again with the same command, continues the run and loses nothing.

One pipeline of real processes for all tests; each test kills one of them in mid-stream, waits for further steps, lets
the actor drain, and audits.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
import yaml

from vagen.buffer.accounting import Accounting, audit
from vagen.common.config import read_recipe
from vagen.tools.child import ProcessSpec
from vagen.tools.launch import ENVIRONMENT, Launcher, assign_ports
from vagen.tools.runs import RunDir
from vagen.tools.sft import run_sft

OVERRIDES = (
    "run.name=kills",
    "sft.turns=400",
    "sft.steps=40",
    "actor.concurrency=16",
    "actor.drain_s=20",
    "buffer.lease_s=5",
    "buffer.heartbeat_timeout_s=3",
    "learner.total_steps=100000",
    "learner.batch_size=16",
    "learner.minibatch_rows=64",
    "learner.checkpoint_every=2",
    "learner.broadcast.broadcast_timeout_s=5",
)


class Pipeline:
    """The processes of one run, started as a person would."""

    def __init__(self, root: Path) -> None:
        self.run = RunDir(root)
        self._launcher = Launcher(self.run)
        self._children: dict[str, subprocess.Popen[bytes]] = {}

    def prepare(self) -> None:
        recipe = read_recipe("frozenlake", OVERRIDES)
        assign_ports(recipe)
        self._port = recipe["engine"]["port"]
        self.run.root.mkdir(parents=True)
        self.run.recipe.write_text(yaml.safe_dump(recipe))
        run_sft(recipe, self.run.model, on_step=lambda progress: None)

    def spec(self, name: str) -> ProcessSpec:
        if name == "engine":
            return self._launcher.engine(self._port)
        if name == "learner":
            return self._launcher.learner(lambda: False)
        spec: ProcessSpec = getattr(self._launcher, name)()
        return spec

    def start(self, name: str, timeout_s: float = 90.0) -> None:
        spec = self.spec(name)
        self.run.ready(name).unlink(missing_ok=True)
        log = (self.run.root / f"{name}.out").open("ab")
        self._children[name] = subprocess.Popen(spec.argv, stdout=log, stderr=log, env={**os.environ, **ENVIRONMENT})
        self.wait(self.run.ready(name).exists, f"{name} to serve", timeout_s)

    def kill(self, name: str) -> None:
        self._children[name].kill()
        self._children[name].wait(10)

    def stop(self, name: str, timeout_s: float = 60.0) -> int:
        self._children[name].send_signal(signal.SIGTERM)
        return self._children[name].wait(timeout_s)

    def wait(self, holds: Callable[[], bool], what: str, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while not holds():
            for name, child in self._children.items():
                if child.poll() not in (None, 0, -signal.SIGKILL):
                    pytest.fail(f"{name} ended with {child.returncode}:\n{self.tail(name)}")
            if time.monotonic() > deadline:
                pytest.fail(f"waited {timeout_s} s for {what}; learner:\n{self.tail('learner')}")
            time.sleep(0.05)

    def tail(self, name: str) -> str:
        return "\n".join((self.run.root / f"{name}.out").read_text().splitlines()[-15:])

    def lines(self) -> list[dict]:
        file = self.run.root / "learner" / "metrics.jsonl"
        return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []

    def wait_for_steps(self, count: int, timeout_s: float = 120.0) -> None:
        """Further lines of the learner, those of repeated steps among them."""
        target = len(self.lines()) + count
        self.wait(lambda: len(self.lines()) >= target, f"{count} further steps", timeout_s)

    def audit(self) -> Accounting:
        return audit(json.loads(self.run.ready("buffer").read_text())["redis_url"], "kills")

    def drain_and_audit(self) -> Accounting:
        """Stop the actor in order, then compare both sides of the identity."""
        assert self.stop("actor") == 0
        accounting = self.audit()
        self.start("actor")
        return accounting

    def close(self) -> None:
        for name in ("actor", "learner", "engine", "buffer"):
            if name in self._children and self._children[name].poll() is None:
                self.stop(name)


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory) -> Iterator[Pipeline]:
    pipeline = Pipeline(tmp_path_factory.mktemp("kills") / "run")
    pipeline.prepare()
    try:
        for name in ("buffer", "engine", "learner", "actor"):
            pipeline.start(name)
        pipeline.wait_for_steps(2)
        yield pipeline
    finally:
        pipeline.close()


def assert_nothing_lost(pipeline: Pipeline) -> None:
    accounting = pipeline.drain_and_audit()
    assert accounting.identity_holds, accounting
    assert accounting.in_flight == 0
    assert accounting.refused == 0, accounting.refused_by_field
    assert accounting.produced >= accounting.trained > 0


@pytest.mark.parametrize("name", ["actor", "engine", "buffer"])
def test_a_killed_process_is_started_again_and_the_run_goes_on(pipeline, name):
    pipeline.kill(name)
    pipeline.start(name)
    pipeline.wait_for_steps(8)
    assert_nothing_lost(pipeline)


def test_a_killed_redis_comes_back_by_itself_with_everything_acknowledged(pipeline):
    (valkey,) = [
        p
        for p in psutil.process_iter(["cmdline"])
        if str(pipeline.run.root) in " ".join(p.info["cmdline"] or []) and "valkey" in p.name()
    ]
    before = pipeline.audit()
    valkey.kill()
    pipeline.wait_for_steps(8)
    after = pipeline.audit()
    assert after.produced >= before.produced and after.trained >= before.trained
    assert_nothing_lost(pipeline)


def test_a_killed_learner_resumes_from_its_checkpoint_with_the_same_batches(pipeline):
    pipeline.wait_for_steps(3)
    pipeline.kill("learner")
    reached = pipeline.lines()[-1]["step"]
    pipeline.start("learner")
    resumed_at = json.loads(pipeline.run.ready("learner").read_text())["first_step"]
    assert reached - 2 <= resumed_at - 1 <= reached
    pipeline.wait_for_steps(8)
    lines = pipeline.lines()
    assert sorted({line["step"] for line in lines}) == list(range(lines[-1]["step"] + 1))
    by_step: dict[int, list[dict]] = {}
    for line in lines:
        by_step.setdefault(line["step"], []).append(line)
    for first, *repeats in by_step.values():
        for repeat in repeats:
            same = ("num_trajectories", "reward_mean", "policy_tokens", "staleness", "loss", "grad_norm")
            assert {key: repeat[key] for key in same} == {key: first[key] for key in same}
    assert_nothing_lost(pipeline)


def test_versions_never_go_back_and_engine_and_learner_agree(pipeline):
    lines = pipeline.lines()
    versions = [line["version"] for line in lines]
    assert versions == sorted(versions) and len(set(versions)) == len(versions)
    mismatches = [line["probe_mismatch"] for line in lines if line["probe_mismatch"] is not None]
    assert len(mismatches) > len(lines) / 2
    assert max(mismatches) < 1e-4
