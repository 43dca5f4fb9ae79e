"""Qwen3-VL's vision tower: images in one batched forward, and the features that go into the first decoder layers.

Owns the tower only, as `vagen.common.vision` owns Qwen2.5-VL's. Where features of
inner blocks (DeepStack) enter the decoder is the business of engine and learner.

Legend: as `vagen.common.vision`; K inner blocks whose features the decoder reads too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLVisionModel
from transformers.models.qwen3_vl_moe.modeling_qwen3_vl_moe import Qwen3VLMoeVisionModel
from transformers.vision_utils import get_vision_interpolation_indices_and_weights

from vagen.common.vision import BatchedVisionTower, Grid, GridPlan

__all__ = ["DeepstackVisionTower"]


@dataclass(frozen=True, kw_only=True)
class _DeepstackPlan(GridPlan):
    """Learned positions are resampled to the grid: `taps` int64 [Q, 4] rows of the table, their `weights` [Q, 4]."""

    taps: Tensor
    weights: Tensor


class DeepstackVisionTower(BatchedVisionTower):
    """Features [M, (1 + K) * H]: what stands at the placeholders, then what decoder layers 0 .. K - 1 add there."""

    module_types = (Qwen3VLVisionModel, Qwen3VLMoeVisionModel)

    def __init__(self, visual: Any) -> None:
        super().__init__(visual)
        self.num_deepstack = len(self._visual.deepstack_visual_indexes)

    def _attention_kinds(self) -> list[bool]:
        return [True] * len(self._visual.blocks)

    def _forward(self, patches: Tensor, grid: Grid) -> Tensor:
        plan = self._plan(grid, patches.device)
        assert isinstance(plan, _DeepstackPlan)
        visual = self._visual
        projection = visual.patch_embed.proj
        x = F.linear(patches.to(projection.weight.dtype), projection.weight.flatten(1), projection.bias)
        x = x + (visual.pos_embed(plan.taps) * plan.weights[:, :, None]).sum(1).to(x.dtype)
        mergers = dict(zip(visual.deepstack_visual_indexes, visual.deepstack_merger_list, strict=True))
        inner: list[Tensor] = []
        for index, block in enumerate(visual.blocks):
            x = x + self._attention(block.attn, block.norm1(x), plan, True)
            x = x + block.mlp(block.norm2(x))
            if index in mergers:
                inner.append(mergers[index](x))
        features = torch.cat([visual.merger(x), *inner], -1)
        return features.view(len(patches), -1, features.shape[-1])

    @torch.no_grad()
    def _make_plan(self, grid: Grid, device: torch.device) -> GridPlan:
        visual = self._visual
        plan = super()._make_plan(grid, device)
        taps, weights = get_vision_interpolation_indices_and_weights(
            torch.tensor([grid]),
            visual.num_grid_per_side,
            mode=visual.interpolation_mode,
            align_corners=visual.interpolation_align_corners,
            spatial_merge_size=self._merge_size,
            kwargs={},
        )
        return _DeepstackPlan(**vars(plan), taps=taps.to(device), weights=weights.to(device))
