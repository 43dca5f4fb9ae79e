"""A scalar as a categorical distribution over equally spaced bins: projection, loss and expectation.

The two-hot projection is that of Schrittwieser et al. 2020 (arXiv 1911.08265, appendix F), without their scaling of
values; regression by cross-entropy goes back to Imani & White 2018 (arXiv 1806.04613). Owns no weights and no range.

Legend: n tokens, M bins.
"""

from __future__ import annotations

import torch
from torch import Tensor


def bin_centres(num_bins: int, value_range: tuple[float, float]) -> Tensor:
    """Centres float32 `[M]`, equally spaced from the lower to the upper end of the range, both included."""
    low, high = value_range
    return torch.linspace(low, high, num_bins, dtype=torch.float64).float()


def two_hot(targets: Tensor, centres: Tensor) -> Tensor:
    """Probabilities float32 `[n, M]` on the two bins around each target `[n]`, whose expectation is the target.

    A target outside the range is that at its end.
    """
    targets = targets.clamp(centres[0], centres[-1])
    upper = torch.searchsorted(centres, targets.contiguous()).clamp(min=1)
    low, high = centres[upper - 1], centres[upper]
    share = ((targets - low) / (high - low))[:, None]
    probabilities = targets.new_zeros(targets.numel(), centres.numel())
    probabilities.scatter_(1, upper[:, None], share)
    return probabilities.scatter_(1, upper[:, None] - 1, 1.0 - share)


def two_hot_loss(logits: Tensor, targets: Tensor, centres: Tensor) -> Tensor:
    """Cross-entropy `[n]` in nats of softmax(`logits` `[n, M]`) against the projection of `targets` `[n]`.

    Its minimum is the entropy of the projection (at most log 2), not 0.
    """
    return -(two_hot(targets, centres) * logits.log_softmax(-1)).sum(-1)


def expectation(logits: Tensor, centres: Tensor) -> Tensor:
    """Mean of the bin centres under softmax(`logits` `[n, M]`), float32 `[n]`."""
    return logits.softmax(-1) @ centres
