"""What a learner took for durable when it said `done` is there, whole, after a power cut at any moment."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import pytest

WORKER = Path(__file__).with_name("checkpoint_worker.py")


@pytest.fixture
def done_and_resumed(power_cut, model_dir, tmp_path):
    """Lets a worker save, cuts the power at a random moment, starts it again, `cuts` times.

    Yields for each cut the last step that was done before, and the step that was found after it, None where what was
    found did not load.
    """

    def run(cuts, seed, *options):
        print(f"seed {seed}")
        rng = random.Random(seed)
        command = [sys.executable, str(WORKER), str(model_dir), str(tmp_path / "run" / "checkpoints"), *options]
        told = 0
        for cut in range(cuts + 1):
            with worker_of(command) as worker:
                first_line = worker.stdout.readline().split()
                resumed = int(first_line[1]) if first_line else None
                if cut:
                    yield told, resumed
                assert resumed is not None
                told = resumed
                for line in (worker.stdout.readline() for _ in range(rng.randint(1, 6))):
                    told = int(line.split()[1])
                wait_for_part_of_the_next(tmp_path / "run" / "checkpoints", rng.randrange(6))
                worker.kill()
                # Ends with the last process that has this pipe: a save starts none that outlives its learner.
                for line in worker.communicate(timeout=60)[0].splitlines():
                    told = int(line.split()[1])
            power_cut.apply(tmp_path / "run")

    @contextmanager
    def worker_of(command):
        environment = {**os.environ, **power_cut.environment}
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as worker:
            try:
                yield worker
            finally:
                worker.kill()

    return run


def wait_for_part_of_the_next(checkpoints, count):
    """Return while a checkpoint is being written that consists of at least so many files, or has been renamed."""
    before = {path.name for path in checkpoints.iterdir()}
    while {path.name for path in checkpoints.iterdir()} == before:
        time.sleep(0.001)
    while (parts := list(checkpoints.glob(".*.incomplete"))) and sum(1 for _ in parts[0].rglob("*")) < count:
        pass


@pytest.mark.slow
@pytest.mark.parametrize("options", [(), ("asynchronous",)], ids=["waiting", "asynchronous"])
def test_what_was_done_loads_after_a_power_cut(done_and_resumed, options):
    for told, resumed in done_and_resumed(6, random.randrange(1 << 32), *options):
        assert resumed in (told, told + 1), "the one that was being saved may have made it"


@pytest.mark.slow
def test_without_flushing_the_cut_loses_it(done_and_resumed):
    """The control."""
    told, resumed = next(done_and_resumed(1, 1, "no-flush"))
    assert told > 0 and resumed in (None, 0)
