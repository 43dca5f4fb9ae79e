"""Logits to tokens and their log-probabilities.

The uniform number behind a token is a hash of (seed of the request, index of the token), so that a request with a
`sampling_seed` gets the same tokens whatever else runs in the batch, and after it was retracted and resumed.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

__all__ = ["Sampler", "uniform"]


class Sampler:
    """Samples from `softmax(logits / temperature)` over the ids that are not forbidden."""

    def __init__(self, vocab_size: int, forbidden: Sequence[int], device: torch.device) -> None:
        self._bias = torch.zeros(vocab_size, device=device)
        self._bias[list(forbidden)] = -torch.inf

    def __call__(
        self,
        logits: Tensor,
        temperatures: NDArray[np.float32],
        seeds: NDArray[np.uint64],
        indices: NDArray[np.int64],
    ) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """Tokens [R] and their log-probabilities [R] from logits float32 [R, V].

        A temperature of 0 takes the most likely token and reports its log-probability at temperature 1. `seeds` [R]
        and `indices` [R] (of the token within its request) determine the draw.
        """
        device = logits.device
        greedy = temperatures == 0
        scale = torch.from_numpy(np.where(greedy, np.float32(1), temperatures)).to(device)
        logprobs = torch.log_softmax((logits + self._bias) / scale[:, None], -1)
        # In double: a float32 sum over a large vocabulary would move probability between neighbours.
        cumulated = logprobs.exp().cumsum(-1, dtype=torch.float64)
        draws = torch.from_numpy(uniform(seeds, indices)).to(device)[:, None]
        # Strictly below the total, so that the first id whose sum exceeds it has a probability above zero.
        tokens = torch.searchsorted(cumulated, draws * cumulated[:, -1:], right=True)
        if greedy.any():
            tokens = torch.where(
                torch.from_numpy(greedy).to(device)[:, None], logprobs.argmax(-1, keepdim=True), tokens
            )
        return tokens[:, 0].cpu().numpy(), logprobs.gather(1, tokens)[:, 0].cpu().numpy()


def uniform(seeds: NDArray[np.uint64], indices: NDArray[np.int64]) -> NDArray[np.float64]:
    """Numbers in [0, 1 - 2^-48], one for each pair (seed, index): the finaliser of splitmix64 over their sum."""
    z = seeds + (indices.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return ((z ^ (z >> np.uint64(31))) >> np.uint64(16)) * 2.0**-48
