"""What `vagen bench learner` compares: the learner's step, and the step that a user of transformers writes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForImageTextToText

from vagen.learner.batching import PreparedRow
from vagen.learner.model.actor_critic import VisionLanguageActorCritic
from vagen.learner.model.batch import TokenOutputs
from vagen.learner.model.cpu_compat import compute_device
from vagen.learner.model.gpt import ModelOptions
from vagen.learner.model.optimizer import AdamOptions, Trainer
from vagen.learner.packing import microbatches
from vagen.tools.bench.learner_rows import BenchRows

__all__ = ["LearnerSide", "TransformersSide"]

_ADAM = AdamOptions(betas=(0.9, 0.98), eps=1e-6, weight_decay=0.0, clip_grad=1.0)
_LR = 1e-4


class LearnerSide:
    """Packed rows through megatron's decoder, the output projection at scored tokens, each picture encoded once."""

    def __init__(self, model_dir: Path, max_tokens: int, options: ModelOptions | None = None) -> None:
        self._trainer = Trainer(VisionLanguageActorCritic.load_hf(model_dir, options).train(), _ADAM)
        self._max_tokens = max_tokens

    def step(self, rows: BenchRows) -> float:
        trainer, total = self._trainer, 0.0

        def loss_of(_: torch.Tensor, out: TokenOutputs) -> torch.Tensor:
            nonlocal total
            loss = -out.logprobs.sum() / rows.num_scored
            total += float(loss.detach())
            return loss

        trainer.zero_grad()
        trainer.accumulate(microbatches(rows.rows, rows.images, self._max_tokens), loss_of)
        assert not trainer.step(_LR).skipped
        return total


class TransformersSide:
    """Rows in their order, padded to the longest of a batch that fits the same bound on tokens; every logit."""

    def __init__(self, model_dir: Path, max_tokens: int) -> None:
        self._device = compute_device()
        model: Any = AutoModelForImageTextToText.from_pretrained(
            model_dir, dtype=torch.float32, attn_implementation="sdpa"
        )
        self._model = model.to(self._device).train()
        self._max_tokens = max_tokens
        self._optimizer = torch.optim.AdamW(
            self._model.parameters(), lr=_LR, betas=_ADAM.betas, eps=_ADAM.eps, weight_decay=_ADAM.weight_decay
        )

    def step(self, rows: BenchRows) -> float:
        self._optimizer.zero_grad()
        total = 0.0
        for members in _padded(rows.rows, self._max_tokens):
            batch = {name: tensor.to(self._device) for name, tensor in self._collate(members, rows).items()}
            share = sum(len(row.slots) for row in members) / rows.num_scored
            loss = self._model(**batch, use_cache=False).loss * share
            loss.backward()
            total += float(loss.detach())
        torch.nn.utils.clip_grad_norm_(self._model.parameters(), _ADAM.clip_grad)
        self._optimizer.step()
        return total

    def _collate(self, rows: Sequence[PreparedRow], data: BenchRows) -> dict[str, Tensor]:
        shape = (len(rows), max(map(len, rows)))
        ids, attended = torch.zeros(shape, dtype=torch.int64), torch.zeros(shape, dtype=torch.int64)
        labels = torch.full(shape, -100)
        for number, row in enumerate(rows):
            tokens = torch.from_numpy(row.token_ids)
            ids[number, : len(row)] = tokens
            attended[number, : len(row)] = 1
            labels[number, row.score_positions] = tokens[row.score_positions]
        kinds = ((ids == self._model.config.image_token_id) & (attended == 1)).long()
        batch = {"input_ids": ids, "attention_mask": attended, "labels": labels, "mm_token_type_ids": kinds}
        pictures = [data.images.batch([name]) for row in rows for name in row.images]
        found = [picture for picture in pictures if picture is not None]
        if found:
            batch["pixel_values"] = torch.cat([picture.patches for picture in found])
            batch["image_grid_thw"] = torch.cat([picture.grids for picture in found])
        return batch


def _padded(rows: Sequence[PreparedRow], max_tokens: int) -> Iterator[list[PreparedRow]]:
    """Batches in order, each of as many rows as fit when padded (a longer row is alone)."""
    batch: list[PreparedRow] = []
    for row in rows:
        if batch and (len(batch) + 1) * max(len(row), *map(len, batch)) > max_tokens:
            yield batch
            batch = []
        batch.append(row)
    if batch:
        yield batch
