"""One rank of the test of layouts of `test_model_lora.py`, started by torchrun."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from vagen.learner.layout import ParallelLayout
from vagen.learner.model import parallel
from vagen.learner.model.actor_critic import VisionLanguageActorCritic
from vagen.learner.model.batch import PackedBatch, TokenOutputs
from vagen.learner.model.checkpoint_io import load_checkpoint, save_checkpoint
from vagen.learner.model.gpt import ModelOptions
from vagen.learner.model.lora import AdapterOptions
from vagen.learner.model.optimizer import AdamOptions, Trainer

OPTIONS = ModelOptions(adapter=AdapterOptions(rank=4, alpha=16.0))
ADAM = AdamOptions(eps=1e-3, weight_decay=0.1, clip_grad=0.5)
SPREAD = replace(OPTIONS, sequence_parallel=True)
LAYOUTS = {
    "tp2": (ParallelLayout(tensor=2), OPTIONS),
    "tp2-sp": (ParallelLayout(tensor=2), SPREAD),
    "pp2": (ParallelLayout(pipeline=2), OPTIONS),
    "pp2-recompute": (ParallelLayout(pipeline=2), replace(OPTIONS, recompute=True)),
    "cp2": (ParallelLayout(context=2), OPTIONS),
}


def loss_of(_: None, out: TokenOutputs) -> torch.Tensor:
    return (out.logprobs.sum() + (out.values - 1).square().sum()) / 24


def train_steps(trainer: Trainer, batch: PackedBatch, count: int) -> list[float]:
    """Gradient norms of some steps."""
    norms = []
    for _ in range(count):
        trainer.zero_grad()
        trainer.accumulate([(batch, None)], loss_of)
        norms.append(trainer.step(1e-2).grad_norm)
    return norms


def run(work: Path, batch: PackedBatch, name: str = "one", options: ModelOptions = OPTIONS) -> dict[str, Any]:
    """Everything that must not depend on the layout, `name`; saves `own-NAME`, loads `foreign` of one rank."""
    model = VisionLanguageActorCritic.load_hf(work / "vl", options).train()
    trainer = Trainer(model, ADAM)
    result: dict[str, Any] = {"norms": train_steps(trainer, batch, 3), "merged": model.export_hf_state()}
    published = model.frozen_weights().whole(list(model.engine_weights()))
    result["published"] = {name: x.clone() for name, x in published}
    save_checkpoint(work / f"own-{name}", model, trainer, {})
    model.save_hf(work / f"saved-{name}")
    result["adapter"] = load_file(work / f"saved-{name}" / "adapter" / "adapter_model.safetensors")
    if not (work / "foreign").exists():
        save_checkpoint(work / "foreign", model, trainer, {})
    load_checkpoint(work / "foreign", model, trainer)
    result["resumed"] = model.export_hf_state()
    result["resumed_norms"] = train_steps(trainer, batch, 2)
    return result


def main(work: Path) -> None:
    torch.set_num_threads(1)
    batch: PackedBatch = torch.load(work / "batch.pt", weights_only=False)
    for name, (layout, options) in LAYOUTS.items():
        with parallel.parallel_session(layout, timeout_s=60) as place:
            result = run(work, batch, name, options)
            if place.rank == 0:
                torch.save(result, work / f"result-{name}.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
