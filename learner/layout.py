"""How a learner's processes share one model, and why a launch cannot work: said before torch is imported.

Owns the arithmetic of layouts. Starting processes is torchrun's, groups are `vagen.learner.model.parallel`'s.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vagen.common.errors import ConfigError

__all__ = ["ParallelLayout"]

_CUT_BY_TENSOR = ("num_attention_heads", "num_key_value_heads", "intermediate_size", "vocab_size")


@dataclass(frozen=True, kw_only=True)
class ParallelLayout:
    """Processes that share rows of a batch: `tensor` times `pipeline` hold one copy of the model, and `context` times
    as many have a part of each row. What is left of the world has other rows (data parallelism)."""

    tensor: int = 1
    """Ranks that each layer is cut into."""
    pipeline: int = 1
    """Stages of consecutive layers."""
    context: int = 1
    """Ranks that each row is cut into; each has all weights of its shard."""

    @property
    def group_size(self) -> int:
        """Processes that share rows."""
        return self.tensor * self.pipeline * self.context

    def require_world(self, world_size: int) -> None:
        """Raises ConfigError where `world_size` processes do not divide into groups that share rows."""
        if world_size % self.group_size:
            raise ConfigError(
                f"$.learner: tensor_parallel_size {self.tensor} * pipeline_parallel_size {self.pipeline} * "
                f"context_parallel_size {self.context} = {self.group_size} processes train the same rows and must "
                f"divide the {world_size} that run; start `torchrun --nproc-per-node {self.group_size}` (or a multiple "
                "of it), or lower one of the three"
            )

    def require_model(self, config: Mapping[str, Any], where: str | Path) -> None:
        """Raises ConfigError where a transformers config (its `text_config`, if it has one) cannot be cut so."""
        text = config.get("text_config") or config
        for name in _CUT_BY_TENSOR:
            value = text.get(name)
            if isinstance(value, int) and value % self.tensor:
                raise ConfigError(
                    f"{where}: {name} {value} does not divide by $.learner.tensor_parallel_size {self.tensor}"
                )
        num_layers = text.get("num_hidden_layers")
        if isinstance(num_layers, int) and num_layers % self.pipeline:
            raise ConfigError(
                f"{where}: num_hidden_layers {num_layers} does not divide by $.learner.pipeline_parallel_size "
                f"{self.pipeline}"
            )

    def require_batch(self, batch_size: int, world_size: int) -> None:
        """Raises ConfigError where a data-parallel rank would have no trajectory of a batch."""
        groups = world_size // self.group_size
        if batch_size < groups:
            raise ConfigError(
                f"$.learner.batch_size: expected int >= {groups}, one trajectory for each copy of the model on "
                f"{world_size} processes, got {batch_size}"
            )
