"""GLM-4.1V's and GLM-4.6V's pictures and vision tower: images in one batched forward.

Owns what local engine and learner compute identically, as `vagen.common.vision` does for Qwen2.5-VL, whose positions of
image tokens these models share.

Legend: as `vagen.common.vision`; C width of the tower.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.models.glm4v.modeling_glm4v import Glm4vVisionModel
from transformers.vision_utils import get_vision_position_ids

from vagen.common.grids import GlmGeometry
from vagen.common.vision import BatchedVisionTower, Grid, GridPlan, ImageSpec

__all__ = ["GlmImageSpec", "GlmVisionTower"]


@dataclass(frozen=True, kw_only=True)
class GlmImageSpec(GlmGeometry, ImageSpec):
    """How pictures become patches: as `ImageSpec`, with GLM's sizes."""


@dataclass(frozen=True, kw_only=True)
class _GlmPlan(GridPlan):
    """Learned positions are resampled to the grid: `places` float32 [1, Q, 1, 2], where in the table (width, height in
    [-1, 1]) each patch stands."""

    places: Tensor


class GlmVisionTower(BatchedVisionTower):
    """Features [M, H]."""

    module_types = (Glm4vVisionModel,)

    def _attention_kinds(self) -> list[bool]:
        return [True] * len(self._visual.blocks)

    def _forward(self, patches: Tensor, grid: Grid) -> Tensor:
        plan = self._plan(grid, patches.device)
        assert isinstance(plan, _GlmPlan)
        visual = self._visual
        projection, downsample = visual.patch_embed.proj, visual.downsample
        x = F.linear(patches.to(projection.weight.dtype), projection.weight.flatten(1), projection.bias)
        x = visual.post_conv_layernorm(x) + self._positions(plan.places).to(x.dtype)
        for block in visual.blocks:
            x = x + self._attention(block.attn, block.norm1(x), plan, True)
            x = x + block.mlp(block.norm2(x))
        # A convolution over the patches of one placeholder, which lie together: [n, M, merge_unit, C].
        x = visual.post_layernorm(x).unflatten(1, (-1, self.merge_unit)).flatten(2)
        return visual.merger(F.linear(x, downsample.weight.permute(0, 2, 3, 1).flatten(1), downsample.bias))

    def _positions(self, places: Tensor) -> Tensor:
        """[Q, C] float32."""
        table = self._visual.embeddings.position_embedding.weight.float()
        side = round(len(table) ** 0.5)
        squares = table.view(1, side, side, -1).permute(0, 3, 1, 2)
        sampled = F.grid_sample(squares, places, mode="bicubic", align_corners=False, padding_mode="border")
        return sampled[0, :, :, 0].T

    @torch.no_grad()
    def _make_plan(self, grid: Grid, device: torch.device) -> GridPlan:
        plan = super()._make_plan(grid, device)
        rows, columns = get_vision_position_ids(torch.tensor([grid]), self._merge_size, kwargs={}).float().unbind(1)
        across, down = ((columns + 0.5) / grid[2]) * 2 - 1, ((rows + 0.5) / grid[1]) * 2 - 1
        return _GlmPlan(**vars(plan), places=torch.stack((across, down), -1)[None, :, None].to(device))
