"""Models for benchmarks: the architecture of the recipes, initialised at random."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vagen.learner.config import ModelConfig

__all__ = ["bench_model"]

_CORPUS = ("<think>look at the picture, then act</think><answer>left, right, up or down</answer>",)


def bench_model(folder: Path, config: ModelConfig | None = None) -> Path:
    """Write a model directory of these sizes, the recipes' by default; returns it."""
    from vagen.learner.config import ModelConfig
    from vagen.learner.model.tiny import save_tiny_model
    from vagen.tools.tiny_tokenizer import CHAT_TEMPLATE, train_tokenizer

    config = config or ModelConfig()
    tokenizer = train_tokenizer(_CORPUS, ("<think>", "</think>", "<answer>", "</answer>"), config.vocab_size)
    return save_tiny_model(config, tokenizer, folder, chat_template=CHAT_TEMPLATE)
