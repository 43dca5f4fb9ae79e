"""A pipeline of real processes, started as a person would start them."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import yaml

from vagen.buffer.accounting import Accounting, audit
from vagen.buffer.connection import make_client
from vagen.buffer.keys import Key, Keys
from vagen.common.config import read_recipe
from vagen.tools.child import ProcessSpec
from vagen.tools.launch import ENVIRONMENT, Launcher, assign_ports
from vagen.tools.runs import RunDir
from vagen.tools.sft import run_sft

OVERRIDES = (
    "run.name=pipeline",
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
KEYS = Keys("pipeline")


class Pipeline:
    """The processes of one run, started as a person would."""

    def __init__(self, root: Path, model: Path, overrides: Sequence[str], torchrun: Sequence[str] = ()) -> None:
        """With options of `torchrun` it starts the learner, on several ranks."""
        self.run = RunDir(root)
        self._torchrun = torchrun
        self._launcher = Launcher(self.run)
        self._children: dict[str, subprocess.Popen[bytes]] = {}
        recipe = read_recipe("frozenlake", [*OVERRIDES, *overrides])
        assign_ports(recipe)
        self._port = recipe["engine"]["port"]
        self.run.root.mkdir(parents=True)
        self.run.recipe.write_text(yaml.safe_dump(recipe))
        shutil.copytree(model, self.run.model)

    def spec(self, name: str) -> ProcessSpec:
        if name == "engine":
            return self._launcher.engine(self._port)
        if name == "learner":
            return self._on_ranks(self._launcher.learner(lambda: False))
        spec: ProcessSpec = getattr(self._launcher, name)()
        return spec

    def _on_ranks(self, learner: ProcessSpec) -> ProcessSpec:
        if not self._torchrun:
            return learner
        launcher = (sys.executable, "-m", "torch.distributed.run", "--standalone", *self._torchrun)
        return replace(learner, argv=(*launcher, "-m", "vagen.learner", *learner.argv[1:]))

    def rank(self, number: int) -> psutil.Process:
        """A rank of the learner that torchrun has started."""
        ranks = psutil.Process(self._children["learner"].pid).children()
        (rank,) = [child for child in ranks if child.environ().get("RANK") == str(number)]
        return rank

    def end_of(self, name: str, timeout_s: float) -> int:
        """Exit code of a process that ends by itself."""
        return self._children[name].wait(timeout_s)

    def start(self, name: str, timeout_s: float = 240.0) -> None:
        spec = self.spec(name)
        self.run.ready(name).unlink(missing_ok=True)
        log = (self.run.root / f"{name}.out").open("ab")
        self._children[name] = subprocess.Popen(spec.argv, stdout=log, stderr=log, env={**os.environ, **ENVIRONMENT})
        self.wait(self.run.ready(name).exists, f"{name} to serve", timeout_s)

    def kill(self, name: str) -> None:
        self._children[name].kill()
        self._children[name].wait(10)

    def stop(self, name: str, timeout_s: float = 180.0) -> int:
        self._children[name].send_signal(signal.SIGTERM)
        return self._children[name].wait(timeout_s)

    def wait_for_end(self, name: str, timeout_s: float = 60.0) -> None:
        assert self._children[name].wait(timeout_s) == 0, self.tail(name)

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
        return audit(json.loads(self.run.ready("buffer").read_text())["redis_url"], "pipeline")

    def drain_and_audit(self) -> Accounting:
        """Stop the actor in order, then compare both sides of the identity."""
        assert self.stop("actor") == 0
        accounting = self.audit()
        self.start("actor")
        return accounting

    def close(self) -> None:
        for name in reversed(self._children):
            if self._children[name].poll() is None:
                self.stop(name)


class ManifestWatch:
    """Every manifest that Redis held at some time, by step."""

    def __init__(self, redis_url: str) -> None:
        self.seen: dict[int, set[bytes]] = {}
        self._redis = make_client(redis_url)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        while not self._stop.wait(0.02):
            for step in self._redis.hkeys(KEYS[Key.CLAIMS]):
                manifest = self._redis.get(KEYS.of(Key.MANIFEST, step.decode()))
                if manifest is not None:
                    self.seen.setdefault(int(step), set()).add(manifest)

    def close(self) -> None:
        self._stop.set()
        self._thread.join(10)


@pytest.fixture
def watch_manifests():
    """Starts to watch the manifests of a pipeline whose buffer serves."""
    watches: list[ManifestWatch] = []

    def watch(pipeline: Pipeline) -> ManifestWatch:
        watches.append(ManifestWatch(json.loads(pipeline.run.ready("buffer").read_text())["redis_url"]))
        return watches[-1]

    yield watch
    for each in watches:
        each.close()


@pytest.fixture(scope="session")
def small_model(tmp_path_factory) -> Path:
    """The recipe's model, hardly warmed up."""
    directory = tmp_path_factory.mktemp("warm") / "model"
    run_sft(read_recipe("frozenlake", OVERRIDES), directory, on_step=lambda progress: None)
    return directory


@pytest.fixture(scope="session")
def make_pipeline(request, tmp_path_factory):
    """A pipeline of a recipe with overrides, of which nothing runs yet; what was started stops when the block ends.

    `model` is the folder to start from, the recipe's by default; with options of `torchrun` that starts the learner.
    """

    @contextmanager
    def make(
        overrides: Sequence[str] = (), model: Path | None = None, torchrun: Sequence[str] = ()
    ) -> Iterator[Pipeline]:
        model = model or request.getfixturevalue("small_model")
        pipeline = Pipeline(tmp_path_factory.mktemp("run") / "run", model, overrides, torchrun)
        try:
            yield pipeline
        finally:
            pipeline.close()

    return make


@pytest.fixture(scope="session")
def run_pipeline(make_pipeline):
    """Starts all processes of a recipe with overrides; stops them when the block ends.

    `prepare` is given the run's folder before anything starts.
    """

    @contextmanager
    def run(overrides: Sequence[str] = (), prepare: Callable[[RunDir], None] = lambda run: None) -> Iterator[Pipeline]:
        with make_pipeline(overrides) as pipeline:
            prepare(pipeline.run)
            for name in ("buffer", "engine", "learner", "actor"):
                pipeline.start(name)
            yield pipeline

    return run
