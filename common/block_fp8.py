"""Weights as float8 with a scale for each block of 128 x 128: the format of DeepSeek-V3's checkpoints, and of `fp8`
with `weight_block_size` [128, 128] in transformers and SGLang.

    w[n, k] ~ q[n, k] * scale_inv[n // 128, k // 128],    scale_inv = max |w| of the block / 448

N rows and K columns need not be multiples of 128. Imports torch inside its functions only, as all of `vagen.common`
must import without it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

__all__ = ["SCALE_SUFFIX", "dequantise", "is_quantised", "quantise", "scale_shape"]

SCALE_SUFFIX = "_scale_inv"
"""Behind the name of a weight."""
_BLOCK = 128
_QUANTISED = re.compile(r"model\.layers\.\d+\..*_proj\.weight")


def is_quantised(name: str, shape: Sequence[int]) -> bool:
    """Whether a tensor of this engine's name goes in float8: the matrices of the decoder's layers."""
    return len(shape) == 2 and _QUANTISED.fullmatch(name) is not None


def scale_shape(shape: Sequence[int]) -> tuple[int, int]:
    """[N, K] -> [ceil(N / 128), ceil(K / 128)]."""
    rows, columns = shape
    return -(-rows // _BLOCK), -(-columns // _BLOCK)


def quantise(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """float8_e4m3fn [N, K] and float32 scales [ceil(N / 128), ceil(K / 128)] of a weight [N, K] of any float dtype."""
    import torch

    largest_number = torch.finfo(torch.float8_e4m3fn).max
    blocks = _blocks(weight.float())
    largest = blocks.abs().amax(dim=(1, 3))
    # A block of zeros has any scale.
    scale = torch.where(largest > 0, largest_number / largest, 1.0)
    scaled = (blocks * scale[:, None, :, None]).clamp(-largest_number, largest_number).to(torch.float8_e4m3fn)
    return _joined(scaled, weight.shape), 1.0 / scale


def dequantise(quantised: torch.Tensor, scale_inv: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """What `quantise` made, as a weight [N, K] of `dtype`."""
    return _joined((_blocks(quantised.float()) * scale_inv[:, None, :, None]).to(dtype), quantised.shape)


def _blocks(weight: torch.Tensor) -> torch.Tensor:
    """[N, K] -> [rows of blocks, 128, columns of blocks, 128], with zeros at the ends."""
    import torch

    rows, columns = scale_shape(weight.shape)
    ends = (0, columns * _BLOCK - weight.shape[1], 0, rows * _BLOCK - weight.shape[0])
    return torch.nn.functional.pad(weight, ends).view(rows, _BLOCK, columns, _BLOCK)


def _joined(blocks: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """Contiguous [N, K]."""
    rows, _, columns, _ = blocks.shape
    return blocks.reshape(rows * _BLOCK, columns * _BLOCK)[: shape[0], : shape[1]].contiguous()
