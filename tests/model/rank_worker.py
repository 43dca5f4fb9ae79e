"""One rank of `test_model_parallel.py`, started by torchrun: loads, scores, trains, resumes, saves."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch

from vagen.learner.layout import ParallelLayout
from vagen.learner.model import parallel
from vagen.learner.model.actor_critic import VisionLanguageActorCritic
from vagen.learner.model.batch import PackedBatch, TokenOutputs
from vagen.learner.model.checkpoint_io import begin_checkpoint, load_checkpoint, save_checkpoint
from vagen.learner.model.gpt import ModelOptions
from vagen.learner.model.optimizer import AdamOptions, Trainer
from vagen.learner.model.pipeline import outputs_of

LAYOUTS = (
    ParallelLayout(tensor=2),
    ParallelLayout(pipeline=2),
    ParallelLayout(context=2),
    ParallelLayout(),
)
EXPERT_LAYOUTS = (
    ParallelLayout(tensor=2),
    ParallelLayout(pipeline=2),
    ParallelLayout(expert=2),
    ParallelLayout(tensor=2, expert=2),
    ParallelLayout(context=2),
    ParallelLayout(context=2, expert=2),
)
FORBIDDEN = torch.tensor([500, 501, 502])


def name_of(place: parallel.ParallelTopology) -> str:
    return f"tp{place.tp_size}-pp{place.pp_size}-cp{place.cp_size}-dp{place.dp_size}-ep{place.ep_size}"


def has_experts(work: Path) -> bool:
    return "num_experts_per_tok" in (work / "vl" / "config.json").read_text()


def loss_of(_: None, out: TokenOutputs) -> torch.Tensor:
    return (out.logprobs.sum() + out.entropy.sum() + (out.values - 1).square().sum()) / 24


def train_steps(trainer: Trainer, batches: list[PackedBatch], place: parallel.ParallelTopology) -> list[float]:
    """Two steps on this data-parallel rank's share of the batches; gradient norms."""
    norms = []
    for _ in range(2):
        trainer.zero_grad()
        mine = [(batch, None) for batch in batches[place.dp_rank :: place.dp_size]]
        trainer.accumulate(mine, loss_of, forbidden_token_ids=FORBIDDEN)
        norms.append(trainer.step(1e-3).grad_norm)
    return norms


def run(work: Path, batches: list[PackedBatch], place: parallel.ParallelTopology) -> dict[str, Any]:
    """Everything that must not depend on the layout; resumes `work / "foreign"` where it exists, else makes it."""
    # A mixture of experts demands it.
    options = ModelOptions(sequence_parallel=place.tp_size > 1 and has_experts(work))
    model = VisionLanguageActorCritic.load_hf(work / "vl", options).train()
    result: dict[str, Any] = {"loaded": model.export_hf_state()}
    every = [(batch, None) for batch in batches]
    outputs = [out for _, out in outputs_of(model, every, temperature=0.8, forbidden_token_ids=FORBIDDEN)]
    result["outputs"] = [(out.logprobs, out.entropy, out.values) for out in outputs]
    trainer = Trainer(model, AdamOptions(eps=1e-3, weight_decay=0.1, clip_grad=0.5))
    result["norms"] = train_steps(trainer, batches, place)
    result["trained"], result["engine"] = model.export_hf_state(), dict(model.engine_named_tensors())
    if not (work / "foreign").exists():
        save_checkpoint(work / "foreign", model, trainer, {"step": 2})
    save_checkpoint(work / f"own-{name_of(place)}", model, trainer, {"step": 2})
    load_checkpoint(work / "foreign", model, trainer)
    result["resumed"] = model.export_hf_state()
    result["resumed_norms"] = train_steps(trainer, batches, place)
    result["resumed_trained"] = model.export_hf_state()
    beside = work / f"beside-{name_of(place)}"
    pending = begin_checkpoint(beside, model, trainer, {"step": 4})
    result["going_on"] = train_steps(trainer, batches, place)
    pending.finish()
    load_checkpoint(beside, model, trainer)
    result["again"] = train_steps(trainer, batches, place)
    load_checkpoint(beside, model, trainer)
    model.save_hf(work / f"saved-{name_of(place)}")
    return result


def main(work: Path) -> None:
    torch.set_num_threads(1)
    batches: list[PackedBatch] = torch.load(work / "batches.pt", weights_only=False)
    for layout in EXPERT_LAYOUTS if has_experts(work) else LAYOUTS:
        with parallel.parallel_session(layout, timeout_s=60) as place:
            result = run(work, batches, place)
            if place.rank == 0:
                torch.save(result, work / f"result-{name_of(place)}.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
