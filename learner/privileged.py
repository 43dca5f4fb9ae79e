"""What a privileged critic reads: rows in which the environment's state text stands before each response.

Owns where the text goes and how it becomes tokens. The policy's rows stay as they were sampled, and the same tokens are
valued: that of a response's first token is the value of the state that the text in front of it tells.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np
from tokenizers import Tokenizer

from vagen.common.errors import ConfigError, TrajectoryError
from vagen.common.trajectory import BootstrapPrompt, Row, Turn, VisionTokens

__all__ = ["StateText"]


class StateText:
    """Puts state texts into rows, in the tokens of one model."""

    def __init__(self, tokenizer: Tokenizer, vision: VisionTokens | None) -> None:
        self._tokenizer = tokenizer
        self._forbidden = frozenset(vision.forbidden_token_ids if vision else ())

    @classmethod
    def load(cls, model_dir: Path, vision: VisionTokens | None) -> StateText:
        """With the tokenizer of a model directory. Raises `ConfigError` where it has none."""
        file = model_dir / "tokenizer.json"
        if not file.is_file():
            raise ConfigError(f"{file}: no such file; $.learner.critic.privileged needs it for the state's text")
        return cls(Tokenizer.from_file(str(file)), vision)

    def row(self, row: Row, turns: Sequence[Turn]) -> Row:
        """A row with the state of each of its `turns` in front of its response; what is added is not the policy's.

        Raises `TrajectoryError` for a turn without a state, or with one that spells an image placeholder.
        """
        starts = np.array([turn.start for turn in turns], dtype=np.int64)
        texts = [self._encode(turn.state, f"turns[{turn.index}].state") for turn in turns]
        where = np.repeat(starts, [len(ids) for ids in texts])

        def widen(values: np.ndarray, filling: np.ndarray | int) -> np.ndarray:
            return np.insert(values, where, filling).astype(values.dtype)

        lengths = np.array([len(ids) for ids in texts])
        images = tuple(
            msgspec.structs.replace(image, start=image.start + int(lengths[starts <= image.start].sum()))
            for image in row.images
        )
        return Row(
            token_ids=widen(row.token_ids, np.concatenate(texts)),
            policy_mask=widen(row.policy_mask, 0),
            behaviour_logprobs=widen(row.behaviour_logprobs, 0),
            policy_versions=widen(row.policy_versions, -1),
            turn_index=widen(row.turn_index, -1),
            images=images,
        )

    def prompt(self, prompt: BootstrapPrompt) -> np.ndarray:
        """int32 [T]: the bootstrap prompt, then its state. Raises as `row`."""
        return np.concatenate([prompt.token_ids, self._encode(prompt.state, "bootstrap.state")])

    def _encode(self, state: str, path: str) -> np.ndarray:
        ids = self._tokenizer.encode(state, add_special_tokens=False).ids
        if not ids:
            raise TrajectoryError(path, "is empty, and $.learner.critic.privileged needs what the environment says")
        if self._forbidden.intersection(ids):
            raise TrajectoryError(path, "spells a token that only a template may place")
        return np.array(ids, dtype=np.int32)
