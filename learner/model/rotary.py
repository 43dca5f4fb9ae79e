"""Angles of multi-axis rotary positions where the axes interleave within a head, which megatron does not have."""

from __future__ import annotations

import torch
from megatron.core.models.common.embeddings.rotary_pos_embedding import MultimodalRotaryEmbedding
from torch import Tensor

from vagen.common.vision import mrope_axes

__all__ = ["InterleavedRotaryEmbedding"]


class InterleavedRotaryEmbedding(MultimodalRotaryEmbedding):
    """Megatron's embedding with Qwen3-VL's order of axes (see `mrope_axes`)."""

    def forward(self, position_ids: Tensor, mrope_section: list[int], cp_group: object = None) -> Tensor:
        """position_ids int64 [3, b, T] -> angles float32 [T, b, 1, d]. Context parallelism is not implemented."""
        del cp_group
        axes = torch.from_numpy(mrope_axes(mrope_section, interleaved=True)).to(position_ids.device)
        half = position_ids.permute(2, 1, 0)[..., axes].float() * self.inv_freq.to(position_ids.device)
        return torch.cat((half, half), -1)[:, :, None]
