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

_EXPERTS = ("num_experts", "num_local_experts")
"""As files on the hub say it, and as transformers writes it."""


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
    expert: int = 1
    """Ranks of one stage that the experts of its layers are shared out to: its shards, copies and parts of rows."""

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
        ranks = world_size // self.pipeline
        if ranks % self.expert:
            raise ConfigError(
                f"$.learner.expert_parallel_size: expected a divisor of the {ranks} processes of a pipeline stage, "
                f"which share out its experts, got {self.expert}"
            )

    def require_model(self, config: Mapping[str, Any], where: str | Path, *, sequence_parallel: bool) -> None:
        """Raises ConfigError where a transformers config (its `text_config`, if it has one) cannot be cut so."""
        text = config.get("text_config") or config
        self._require_experts(text, where, sequence_parallel=sequence_parallel)
        # An expert is cut only where its rank has all of them.
        for name in (*_CUT_BY_TENSOR, *(("moe_intermediate_size",) if self.expert == 1 else ())):
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

    def _require_experts(self, text: Mapping[str, Any], where: str | Path, *, sequence_parallel: bool) -> None:
        name = next((name for name in _EXPERTS if isinstance(text.get(name), int)), None)
        if name is None:
            if self.expert > 1:
                raise ConfigError(
                    f"$.learner.expert_parallel_size: expected 1 for a model without experts ({where}), "
                    f"got {self.expert}"
                )
            return
        if text[name] % self.expert:
            raise ConfigError(
                f"{where}: {name} {text[name]} does not divide by $.learner.expert_parallel_size {self.expert}"
            )
        if self.tensor > 1 and not sequence_parallel:
            raise ConfigError(
                f"$.learner.sequence_parallel: expected true for a mixture of experts ({where}) with "
                f"tensor_parallel_size {self.tensor}: its experts would be trained on the same tokens by every shard"
            )

    def require_batch(self, batch_size: int, world_size: int) -> None:
        """Raises ConfigError where a data-parallel rank would have no trajectory of a batch."""
        groups = world_size // self.group_size
        if batch_size < groups:
            raise ConfigError(
                f"$.learner.batch_size: expected int >= {groups}, one trajectory for each copy of the model on "
                f"{world_size} processes, got {batch_size}"
            )
