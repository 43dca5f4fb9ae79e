"""Angles of multi-axis rotary positions that megatron does not have: axes interleave, or part of a head rotates."""

from __future__ import annotations

import torch
from megatron.core.models.common.embeddings.rotary_pos_embedding import MultimodalRotaryEmbedding
from torch import Tensor

from vagen.common.vision import mrope_axes

__all__ = ["InterleavedRotaryEmbedding", "PartialRotaryEmbedding"]


class InterleavedRotaryEmbedding(MultimodalRotaryEmbedding):
    """Megatron's embedding with Qwen3-VL's order of axes (see `mrope_axes`)."""

    def forward(self, position_ids: Tensor, mrope_section: list[int], cp_group: object = None) -> Tensor:
        """position_ids int64 [3, b, T] -> angles float32 [T, b, 1, d]."""
        del cp_group
        axes = torch.from_numpy(mrope_axes(mrope_section, interleaved=True)).to(position_ids.device)
        half = position_ids.permute(2, 1, 0)[..., axes].float() * self.inv_freq.to(position_ids.device)
        return torch.cat((half, half), -1)[:, :, None]


class PartialRotaryEmbedding(MultimodalRotaryEmbedding):
    """Megatron's embedding of `rotary_dim` channels; the other ones of a head of `head_dim` do not rotate.

    The angles of both halves of a head begin with those of the channels that do.
    """

    def __init__(self, rotary_dim: int, head_dim: int, rotary_base: float) -> None:
        super().__init__(rotary_dim, 1.0, rotary_base=rotary_base)
        self._still = (head_dim - rotary_dim) // 2

    def forward(self, position_ids: Tensor, mrope_section: list[int], cp_group: object = None) -> Tensor:
        """position_ids int64 [3, b, T] -> angles float32 [T, b, 1, head_dim]."""
        half = super().forward(position_ids, mrope_section, cp_group).chunk(2, -1)[0]
        half = torch.nn.functional.pad(half, (0, self._still))
        return torch.cat((half, half), -1)
