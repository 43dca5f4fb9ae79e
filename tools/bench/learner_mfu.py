"""The share of a device's matrix-product speed that a training step reaches, for a text model of 3 B parameters.

The ceiling is measured: the best of large square products in the dtype of the step. Operations are counted as is
usual (Narayanan et al. 2021, arXiv 2104.04473, without recomputation): 6 per weight of a matrix product and token, and
those of causal attention.
"""

from __future__ import annotations

import statistics
import time
from pathlib import Path

import numpy as np
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from vagen.learner.model.actor_critic import VisionLanguageActorCritic
from vagen.learner.model.batch import PackedBatch
from vagen.learner.model.cpu_compat import compute_device
from vagen.learner.model.gpt import ModelOptions
from vagen.learner.model.optimizer import AdamOptions, Trainer
from vagen.tools.bench import Figure

__all__ = ["SHAPE_3B", "matmul_ceiling", "measure_mfu", "training_flops"]

SHAPE_3B = {
    "hidden_size": 2048,
    "intermediate_size": 11008,
    "num_hidden_layers": 36,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "vocab_size": 151936,
}
"""Qwen2.5-3B."""


def measure_mfu(
    folder: Path,
    shape: dict[str, int] = SHAPE_3B,
    *,
    rows: int = 8,
    tokens: int = 2048,
    steps: int = 5,
    side: int = 8192,
    bf16: bool = True,
) -> dict[str, Figure]:
    """`mfu`, with the ceiling and the speed that it is made of, of steps over `rows` rows of `tokens` tokens.

    Every token but a row's first is scored. A model of the shape is written to `folder`.
    """
    config = Qwen2Config(**shape, tie_word_embeddings=True, max_position_embeddings=max(tokens, 64))
    with torch.device(compute_device()):
        model = Qwen2ForCausalLM(config).to(torch.bfloat16 if bf16 else torch.float32)
    model.save_pretrained(folder)
    del model
    trainer = Trainer(VisionLanguageActorCritic.load_hf(folder, ModelOptions(bf16=bf16)).train(), AdamOptions())
    batch = _batch(rows, tokens, shape["vocab_size"]).to(compute_device())
    seconds = []
    for _ in range(steps + 1):
        start = time.perf_counter()
        trainer.zero_grad()
        trainer.accumulate([(batch, None)], lambda _, out: -out.logprobs.mean())
        trainer.step(1e-5)
        _synchronise()
        seconds.append(time.perf_counter() - start)
    ceiling = matmul_ceiling(side, torch.bfloat16 if bf16 else torch.float32)
    flops = training_flops(shape, rows, tokens)
    shares = [flops / spent / ceiling for spent in seconds[1:]]
    speeds = [rows * tokens / spent for spent in seconds[1:]]
    return {
        "mfu": Figure(value=statistics.median(shares), unit="of the ceiling", spread=(min(shares), max(shares))),
        "mfu_tokens_per_s": Figure(value=statistics.median(speeds), unit="tokens/s", spread=(min(speeds), max(speeds))),
        "matmul_ceiling": Figure(value=ceiling / 1e12, unit="TFLOP/s"),
    }


def training_flops(shape: dict[str, int], rows: int, tokens: int) -> float:
    """Operations of forward and backward over `rows` rows of `tokens` tokens, logits of all of them included."""
    hidden, heads, groups = shape["hidden_size"], shape["num_attention_heads"], shape["num_key_value_heads"]
    attention = hidden * hidden * 2 + 2 * hidden * (hidden // heads) * groups
    weights = shape["num_hidden_layers"] * (attention + 3 * hidden * shape["intermediate_size"])
    weights += hidden * shape["vocab_size"]
    # Scores and their product with the values, over the half of all pairs that is causal.
    pairs = shape["num_hidden_layers"] * 2 * hidden * tokens * tokens / 2
    return 6.0 * rows * (weights * tokens + pairs)


def matmul_ceiling(side: int, dtype: torch.dtype, repeats: int = 10) -> float:
    """Operations a second of the best of some products of square matrices."""
    a, b = (torch.randn(side, side, device=compute_device(), dtype=torch.float32).to(dtype) for _ in range(2))
    best = 0.0
    for _ in range(repeats):
        _synchronise()
        start = time.perf_counter()
        torch.mm(a, b)
        _synchronise()
        best = max(best, 2.0 * side**3 / (time.perf_counter() - start))
    return best


def _batch(rows: int, tokens: int, vocab_size: int) -> PackedBatch:
    starts = np.arange(rows + 1) * tokens
    scored = np.setdiff1d(np.arange(rows * tokens), starts)
    positions = torch.arange(tokens).repeat(rows)
    return PackedBatch(
        token_ids=torch.from_numpy(np.random.default_rng(0).integers(0, vocab_size, rows * tokens)),
        position_ids=positions[None].repeat(3, 1),
        cu_seqlens=torch.from_numpy(starts.astype(np.int32)),
        score_positions=torch.from_numpy(scored),
    )


def _synchronise() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
