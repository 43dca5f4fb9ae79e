"""DeepStack: features of inner vision blocks, added at the image placeholders behind the first decoder layers.

They travel as megatron's `context`, which a decoder without cross-attention does not read: an argument and a result of
every layer, so that activation recomputation carries their gradients like those of the hidden states.

Legend: T tokens, N rows that are left, M image tokens, K decoder layers that add features, H hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor

__all__ = ["DeepstackLayer", "DeepstackSeqParams", "add_deepstack"]


@dataclass
class DeepstackSeqParams(PackedSeqParams):
    """`image_rows` int64 [M]: the image placeholders of the pack."""

    image_rows: Tensor | None = None


class DeepstackLayer(TransformerLayer):
    """A layer of Transformer Engine's spec, for decoders that read inner vision features."""

    def forward(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        """As `TransformerLayer.forward`; the context is what following layers add."""
        hidden_states, _ = super().forward(*args, **kwargs)
        return add_deepstack(hidden_states, kwargs.get("context"), kwargs["packed_seq_params"], self.layer_number)


def add_deepstack(
    hidden_states: Tensor, features: Tensor | None, params: Any, layer_number: int
) -> tuple[Tensor, Tensor | None]:
    """Hidden states [T, 1, H] of layer `layer_number` (from 1) with its features of [K, M, H] added, and what following
    layers add: the same features, or None behind the last that adds any."""
    if features is None:
        return hidden_states, None
    added = hidden_states.index_add(0, params.image_rows, features[layer_number - 1, :, None])
    return added, features if layer_number < len(features) else None
