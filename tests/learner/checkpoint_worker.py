"""Saves one checkpoint after the other until it is killed: `checkpoint_worker.py MODEL_DIR CHECKPOINTS [no-flush]`.

Prints `resumed N` with the step it starts from, then `done N` for every checkpoint that it takes for durable. The
weights of step N are all N; a checkpoint that does not hold what its step says ends the worker with an error.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from vagen.learner.checkpoints import CheckpointFolder
from vagen.learner.config import LearnerConfig
from vagen.learner.model import files
from vagen.learner.model.checkpoint_io import load_checkpoint, save_checkpoint
from vagen.learner.model.optimizer import AdamOptions, Trainer
from vagen.learner.model.parallel import parallel_session
from vagen.learner.models import load_models


def main(model_dir: Path, folder: CheckpointFolder) -> None:
    model, _ = load_models(model_dir, LearnerConfig())
    trainer = Trainer(model, AdamOptions())
    step, newest = 0, folder.newest()
    if newest is not None:
        step = load_checkpoint(newest, model, trainer)["step"]
        assert all(bool((parameter == step).all()) for parameter in model.parameters()), newest
    print("resumed", step, flush=True)
    while True:
        step += 1
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(step)
        trainer.optimizer.reload_model_params()
        save_checkpoint(folder.path_of(step), model, trainer, {"step": step})
        print("done", step, flush=True)
        folder.prune()


if __name__ == "__main__":
    if sys.argv[3:] == ["no-flush"]:
        files.flush = files.flush_tree = lambda path: None
    torch.set_num_threads(1)
    with parallel_session():
        main(Path(sys.argv[1]), CheckpointFolder(Path(sys.argv[2]), keep=2))
