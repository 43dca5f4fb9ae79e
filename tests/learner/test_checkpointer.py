"""Checkpoints beside training: of the moment they were begun, `done` once durable, and never at the last one's cost."""

from __future__ import annotations

import resource
import threading
from contextlib import contextmanager

import pytest
import torch

from vagen.common.errors import CheckpointError
from vagen.learner.checkpointer import Checkpointer
from vagen.learner.checkpoints import CheckpointFolder
from vagen.learner.config import LearnerConfig
from vagen.learner.model import checkpoint_writer
from vagen.learner.model.checkpoint_io import load_checkpoint, read_record
from vagen.learner.model.optimizer import AdamOptions, Trainer
from vagen.learner.models import load_models

pytestmark = pytest.mark.usefixtures("one_process")


class Bench:
    """A trainer whose state is one number, and the checkpoints of it."""

    def __init__(self, make_trainer, folder, asynchronous):
        self.trainer = make_trainer()
        self.folder = CheckpointFolder(folder, keep=2)
        self.durable = []
        self.saves = Checkpointer(self.folder, self.trainer, asynchronous=asynchronous, on_durable=self._on_durable)
        self._make_trainer = make_trainer

    def _on_durable(self, checkpoint, steps):
        assert read_record(self.folder.path_of(checkpoint.step)) == {"step": checkpoint.step}
        self.durable.append((checkpoint, list(steps)))

    def fill(self, value):
        """Weights, their master copies and the optimizer's moments."""
        with torch.no_grad():
            for tensor in (*self.trainer.model.parameters(), *moments(self.trainer)):
                tensor.fill_(value)
        self.trainer.optimizer.reload_model_params()

    def save(self, step):
        self.fill(step)
        self.saves.save(step, [step - 1], {"step": step})

    def steps_durable(self):
        return [step for _, steps in self.durable for step in steps]

    def values(self, step):
        """Every distinct number in a checkpoint."""
        trainer = self._make_trainer()
        load_checkpoint(self.folder.path_of(step), trainer.model, trainer)
        tensors = [*trainer.model.parameters(), *moments(trainer)]
        return {value for tensor in tensors for value in tensor.unique().tolist()}


def moments(trainer):
    for part in trainer.inner_optimizers():
        for state in part.optimizer.state.values():
            yield state["exp_avg"]
            yield state["exp_avg_sq"]


@pytest.fixture
def bench(model_dir, tmp_path, request):
    def make_trainer():
        return Trainer(load_models(model_dir, LearnerConfig())[0], AdamOptions())

    bench = Bench(make_trainer, tmp_path / "checkpoints", getattr(request, "param", True))
    yield bench
    bench.saves.close()


@pytest.fixture
def gate(monkeypatch):
    """Nothing is written to the files of a state before it is set."""
    event = threading.Event()
    write = checkpoint_writer._write_buckets

    def write_later(*arguments):
        assert event.wait(60)
        return write(*arguments)

    monkeypatch.setattr(checkpoint_writer, "_write_buckets", write_later)
    yield event
    event.set()


@contextmanager
def files_of_at_most(num_bytes):
    """The kernel's own limit; a write beyond it fails like one to a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_it_holds_the_moment_it_was_begun_although_training_goes_on(bench, gate):
    bench.save(3)
    bench.fill(4)
    bench.saves.poll()
    assert bench.saves.is_writing and bench.durable == [] and bench.folder.steps() == []
    gate.set()
    bench.saves.drain()
    assert bench.steps_durable() == [2] and bench.values(3) == {3.0}
    ((checkpoint, _),) = bench.durable
    assert checkpoint.write_s > 0


def test_a_model_beside_the_policy_is_of_that_moment_too(bench, gate, model_dir):
    """Unlike what is trained, its weights lie in no buffer of megatron's."""
    reference, loaded = (load_models(model_dir, LearnerConfig())[0] for _ in range(2))
    fill_all(reference, 3)
    bench.saves.save(3, [2], {"step": 3}, {"reference": reference})
    fill_all(reference, 4)
    gate.set()
    bench.saves.drain()
    load_checkpoint(bench.folder.path_of(3), bench.trainer.model, bench.trainer, {"reference": loaded})
    assert {value for tensor in loaded.parameters() for value in tensor.unique().tolist()} == {3.0}


@torch.no_grad()
def fill_all(model, value):
    for parameter in model.parameters():
        parameter.fill_(value)


def test_a_poll_finishes_what_is_written(bench):
    bench.save(3)
    bench.saves.close()
    assert bench.durable == []
    bench.saves.poll()
    assert bench.steps_durable() == [2] and not bench.saves.is_writing
    assert bench.durable[0][0].hidden_s == bench.durable[0][0].write_s > 0


def test_the_next_one_waits_for_it(bench, gate):
    bench.save(3)
    threading.Timer(0.05, gate.set).start()
    bench.save(6)
    assert bench.steps_durable() == [2], "done in order, one at a time"
    assert bench.durable[0][0].hidden_s <= bench.durable[0][0].write_s
    assert bench.saves.take_blocked_s() > 0.02 and bench.saves.take_blocked_s() == 0
    bench.saves.drain()
    assert (bench.values(3), bench.values(6)) == ({3.0}, {6.0})


@pytest.mark.parametrize("bench", [False], indirect=True)
def test_a_synchronous_one_is_there_when_save_returns(bench):
    bench.save(3)
    assert bench.steps_durable() == [2] and not bench.saves.is_writing


def test_one_that_is_left_alone_is_not_taken_for_complete(bench):
    bench.save(3)
    bench.saves.close()
    assert bench.folder.newest() is None and bench.durable == []


@pytest.mark.parametrize("bench", [True, False], indirect=True)
@pytest.mark.parametrize("share", [0.5, 0.0001], ids=["in-the-background", "at-once"])
def test_a_disk_that_takes_no_more_leaves_the_one_before(bench, share):
    bench.save(3)
    bench.saves.drain()
    largest = max(path.stat().st_size for path in bench.folder.path_of(3).rglob("*.distcp"))
    message = r"step-00000006: could not be written: .*File too large.*; .*step-00000003 is the newest"
    with files_of_at_most(int(largest * share)), pytest.raises(CheckpointError, match=message):
        bench.save(6)
        bench.saves.drain()
    assert bench.folder.steps() == [3] and bench.steps_durable() == [2]
    assert bench.values(3) == {3.0}
    bench.save(6)
    bench.saves.drain()
    assert bench.values(6) == {6.0} and bench.steps_durable() == [2, 5]
