"""What goes into the learner's model and what comes out: packed rows, their images, values per scored token.

Owns shapes and their consistency; imports neither megatron nor transformers.

Legend: T tokens of all rows, S rows, N scored tokens, I distinct images, P patches of all images, D values of a patch.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from vagen.common.errors import TrajectoryError

__all__ = ["ImageBatch", "PackedBatch", "TokenOutputs"]


@dataclass(frozen=True, kw_only=True)
class ImageBatch:
    """Preprocessed images, each encoded once.

    patches float32 [P, D] image after image; grids int64 [I, 3] (time, height, width in patches), on the CPU;
    index int64 [M], on the CPU: which image stands at each placeholder run of the pack, in order of `token_ids`. None
    means one run for each image, in order. features [tokens of all images, (1 + K) * hidden_size] are what the vision
    module makes of them where it is frozen and they are known (patches are [0, D] then); None: to be computed.
    """

    patches: Tensor
    grids: Tensor
    index: Tensor | None = None
    features: Tensor | None = None

    def to(self, device: torch.device) -> ImageBatch:
        features = None if self.features is None else self.features.to(device)
        return ImageBatch(patches=self.patches.to(device), grids=self.grids, index=self.index, features=features)


@dataclass(frozen=True, kw_only=True)
class PackedBatch:
    """Rows packed one after another.

    token_ids int64 [T]; position_ids int64 [3, T] (M-RoPE; text repeats one axis three times); cu_seqlens int32
    [S + 1] row boundaries; score_positions int64 [N], the tokens to be scored, each preceded by a token of its row.
    """

    token_ids: Tensor
    position_ids: Tensor
    cu_seqlens: Tensor
    score_positions: Tensor
    images: ImageBatch | None = None

    def to(self, device: torch.device) -> PackedBatch:
        return PackedBatch(
            token_ids=self.token_ids.to(device),
            position_ids=self.position_ids.to(device),
            cu_seqlens=self.cu_seqlens.to(device),
            score_positions=self.score_positions.to(device),
            images=None if self.images is None else self.images.to(device),
        )

    def padded(self, multiple: int) -> PackedBatch:
        """With one more row of unscored tokens where their number does not divide by `multiple`."""
        missing = -self.token_ids.numel() % multiple
        if not missing:
            return self
        return replace(
            self,
            token_ids=F.pad(self.token_ids, (0, missing)),
            position_ids=F.pad(self.position_ids, (0, missing)),
            cu_seqlens=torch.cat([self.cu_seqlens, self.cu_seqlens[-1:] + missing]),
        )

    def with_row_multiple(self, multiple: int) -> PackedBatch:
        """With unscored tokens behind each row whose length does not divide by `multiple`."""
        lengths = self.cu_seqlens.diff().long()
        missing = -lengths % multiple
        if not bool(missing.any()):
            return self
        before = F.pad(missing.cumsum(0), (1, 0))
        places = torch.arange(len(self.token_ids), device=lengths.device) + before[:-1].repeat_interleave(lengths)
        total = len(self.token_ids) + int(before[-1])
        return replace(
            self,
            token_ids=self.token_ids.new_zeros(total).index_copy(0, places, self.token_ids),
            position_ids=self.position_ids.new_zeros(3, total).index_copy(1, places, self.position_ids),
            cu_seqlens=self.cu_seqlens + before.to(self.cu_seqlens.dtype),
            score_positions=places[self.score_positions],
        )

    def check(self) -> None:
        """Raises TrajectoryError naming the field whose shape or content contradicts the others."""
        num_tokens = self.token_ids.numel()
        if self.token_ids.shape != (num_tokens,) or num_tokens == 0:
            raise TrajectoryError("token_ids", f"expected shape [T] with T >= 1, got {list(self.token_ids.shape)}")
        if self.position_ids.shape != (3, num_tokens):
            raise TrajectoryError("position_ids", f"expected [3, {num_tokens}], got {list(self.position_ids.shape)}")
        bounds = self.cu_seqlens
        if bounds.dim() != 1 or int(bounds[0]) != 0 or int(bounds[-1]) != num_tokens or bool((bounds.diff() < 1).any()):
            raise TrajectoryError("cu_seqlens", f"expected to rise from 0 to {num_tokens}")
        scored = self.score_positions
        if scored.dim() != 1 or (scored.numel() and (int(scored.min()) < 0 or int(scored.max()) >= num_tokens)):
            raise TrajectoryError("score_positions", f"expected shape [N] with values in [0, {num_tokens})")
        if bool(torch.isin(scored, bounds[:-1].to(scored.dtype)).any()):
            raise TrajectoryError("score_positions", "the first token of a row has nothing before it to be scored by")


@dataclass(frozen=True, kw_only=True)
class TokenOutputs:
    """Per scored token j, all float32 [N]: log probability and entropy (nats) of the policy that chose it, and the
    critic's value of the state before it. value_logits float32 [N, bins] is what a categorical critic says, whose
    expectation the value is; None for a scalar critic."""

    logprobs: Tensor
    entropy: Tensor
    values: Tensor
    value_logits: Tensor | None = None

    def to(self, device: torch.device) -> TokenOutputs:
        return TokenOutputs(
            logprobs=self.logprobs.to(device),
            entropy=self.entropy.to(device),
            values=self.values.to(device),
            value_logits=None if self.value_logits is None else self.value_logits.to(device),
        )

    def packed(self, *, values_only: bool) -> Tensor:
        """All in one float32 [3 + bins, N], to be sent; without logprobs and entropy where these are not computed."""
        bins = [] if self.value_logits is None else list(self.value_logits.unbind(-1))
        policy = [] if values_only else [self.logprobs, self.entropy]
        return torch.stack([self.values, *policy, *bins])

    @classmethod
    def unpacked(cls, content: Tensor, *, values_only: bool) -> TokenOutputs:
        """The inverse of `packed`."""
        values, *rest = content.unbind()
        policy, bins = (rest[:0], rest) if values_only else (rest[:2], rest[2:])
        logprobs, entropy = policy or (values.new_empty(0), values.new_empty(0))
        return cls(
            logprobs=logprobs, entropy=entropy, values=values, value_logits=torch.stack(bins, -1) if bins else None
        )
