"""Pictures of rows that lie on several ranks: each rank encodes a part of them, and all ranks get the features of all.

Backward a picture's gradient is summed over the ranks that hold its placeholders, and goes to the one that encoded it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from torch import Tensor

from vagen.common.errors import ObservationError
from vagen.common.vision import Grid

__all__ = ["encode_in_parts", "first_images"]


def first_images(num_patches: Sequence[int], size: int) -> list[int]:
    """The first image of each of `size` ranks, and the number of images: runs of nearly equal numbers of patches."""
    ends = torch.tensor(num_patches).cumsum(0)
    middles = 2 * ends - torch.tensor(num_patches)
    owners = middles * size // (2 * ends[-1])
    return [int((owners < rank).sum()) for rank in range(size + 1)]


def encode_in_parts(
    tower: Callable[[Tensor, list[Grid]], Tensor],
    patches: Tensor,
    grids: list[Grid],
    *,
    merge_unit: int,
    nothing: Tensor,
    is_trained: bool,
) -> Tensor:
    """What `tower` makes of all images, [tokens, width], as on one rank. Collective over the ranks that share rows.

    A token is of `merge_unit` patches. `nothing` [0, width], of the features' dtype, is what no images give;
    `is_trained` whether features have a gradient. Raises ObservationError where the patches do not fit the grids.
    """
    group = parallel_state.get_context_parallel_group()
    size, rank = group.size(), group.rank()
    num_patches = [t * h * w for t, h, w in grids]
    firsts = first_images(num_patches, size)
    starts = [sum(num_patches[:first]) for first in firsts]
    if len(patches) != starts[-1]:
        raise ObservationError(f"{len(patches)} patches for grids that need {starts[-1]}")
    mine = slice(firsts[rank], firsts[rank + 1])
    if grids[mine]:
        features = tower(patches[starts[rank] : starts[rank + 1]], grids[mine])
    else:
        # The others wait for its part in the backward pass, too.
        features = nothing.detach().requires_grad_(is_trained)
    tokens = [(end - start) // merge_unit for start, end in zip(starts, starts[1:], strict=False)]
    longest = max(tokens)
    whole = gather_from_sequence_parallel_region(F.pad(features, (0, 0, 0, longest - len(features))), group=group)
    return torch.cat([part[:count] for part, count in zip(whole.split(longest), tokens, strict=True)])
