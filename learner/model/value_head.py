"""The critic's head: one scalar per hidden state, or a categorical distribution over bins of a range.

Owns its file in a model directory. Does not own its loss (see `losses/value.py`).
"""

from __future__ import annotations

import json
import logging
from pathlib import Path

import torch.nn.functional as F
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from vagen.learner.losses.two_hot import bin_centres, expectation
from vagen.learner.model.files import VALUE_HEAD_FILE
from vagen.learner.model.gpt import ModelOptions

__all__ = ["ValueHead", "save_value_head"]

logger = logging.getLogger(__name__)

_RANGE = "value_range"
"""Key of the metadata of a categorical head's file."""


class ValueHead(nn.Linear):
    """Starts from zero, in the dtype of the rest (see `build_gpt`); its master copy and its product are float32."""

    def __init__(self, hidden_size: int, options: ModelOptions) -> None:
        super().__init__(hidden_size, options.num_value_outputs, dtype=options.dtype)
        nn.init.zeros_(self.weight)
        nn.init.zeros_(self.bias)
        self._file_metadata = _metadata(options)
        self._centres: Tensor | None
        centres = bin_centres(options.value_bins, options.value_range) if options.value_bins else None
        self.register_buffer("_centres", centres, persistent=False)

    def values(self, hidden: Tensor) -> tuple[Tensor, Tensor | None]:
        """Values float32 [N] of hidden states [N, hidden_size]; logits float32 [N, bins] of a categorical head."""
        answers = F.linear(hidden.float(), self.weight.float(), self.bias.float())
        return (answers[:, 0], None) if self._centres is None else (expectation(answers, self._centres), answers)

    def load_from(self, directory: Path) -> None:
        """Weights of a model directory that has any. A head of other bins or another range answers another question:
        it is left alone, with a warning.

        Raises RuntimeError for one of another hidden size.
        """
        file = directory / VALUE_HEAD_FILE
        if not file.is_file():
            return
        with safe_open(file, framework="pt") as content:
            state = {name: content.get_tensor(name) for name in content.keys()}  # noqa: SIM118 (not a mapping)
            found_range = (content.metadata() or {}).get(_RANGE)
        weight = state.get("weight")
        if weight is not None and weight.shape[1:] == self.weight.shape[1:]:
            found, wanted = (len(weight), found_range), (len(self.weight), self._file_metadata.get(_RANGE))
            if found != wanted:
                logger.warning(
                    "%s: outputs and range of the value head are %s, expected %s: the critic starts from zero",
                    *(file, found, wanted),
                )
                return
        self.load_state_dict(state)


def save_value_head(state: dict[str, Tensor], directory: Path, options: ModelOptions) -> None:
    """Write the weights of a head, on whatever stage it is, to a model directory."""
    save_file(state, directory / VALUE_HEAD_FILE, metadata=_metadata(options) or None)


def _metadata(options: ModelOptions) -> dict[str, str]:
    return {_RANGE: json.dumps(options.value_range)} if options.value_bins else {}
