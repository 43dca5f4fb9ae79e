"""Saves one checkpoint after the other until it is killed: `checkpoint_worker.py MODEL_DIR CHECKPOINTS [OPTION ...]`.

Prints `resumed N` with the step it starts from, then `done N` for every checkpoint that it takes for durable. The
weights of step N are all N; a checkpoint that does not hold what its step says ends the worker with an error. Options:
`asynchronous` goes on training while it writes, `no-flush` flushes nothing.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from vagen.learner.checkpointer import Checkpointer
from vagen.learner.checkpoints import CheckpointFolder
from vagen.learner.config import LearnerConfig
from vagen.learner.model import checkpoint_writer, files
from vagen.learner.model.checkpoint_io import load_checkpoint
from vagen.learner.model.optimizer import AdamOptions, Trainer
from vagen.learner.model.parallel import parallel_session
from vagen.learner.models import load_models


def main(model_dir: Path, folder: CheckpointFolder, asynchronous: bool) -> None:
    model, _ = load_models(model_dir, LearnerConfig())
    trainer = Trainer(model, AdamOptions())
    step, newest = 0, folder.newest()
    if newest is not None:
        step = load_checkpoint(newest, model, trainer)["step"]
        assert all(bool((parameter == step).all()) for parameter in model.parameters()), newest
    print("resumed", step, flush=True)

    def train(value: int) -> None:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(value)
        trainer.optimizer.reload_model_params()

    def tell(checkpoint, steps) -> None:
        print("done", checkpoint.step, flush=True)
        folder.prune()

    saves = Checkpointer(folder, trainer, asynchronous=asynchronous, on_durable=tell)
    while True:
        step += 1
        train(step)
        saves.save(step, [step], {"step": step})
        while saves.is_writing:
            train(-step)
            saves.poll()


if __name__ == "__main__":
    options = sys.argv[3:]
    if "no-flush" in options:
        files.flush = files.flush_tree = checkpoint_writer.flush_tree = lambda path: None
    torch.set_num_threads(1)
    with parallel_session():
        main(Path(sys.argv[1]), CheckpointFolder(Path(sys.argv[2]), keep=2), "asynchronous" in options)
