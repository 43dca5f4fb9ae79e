"""The local engine's forward passes of each family against transformers' own, in one process."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from vagen.actor.local_engine.config import EngineConfig
from vagen.actor.local_engine.model import EngineModel

NUM_TOKENS = 6
TEXTS = [[40, 41, 42, 43, 44], [50, 51], [60, 61, 62, 63]]


def padded(rows):
    """Ids [n, L], and lengths."""
    ids = np.zeros((len(rows), max(map(len, rows))), np.int64)
    for i, row in enumerate(rows):
        ids[i, : len(row)] = row
    return ids, np.array([len(row) for row in rows])


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
@torch.no_grad()
def test_logits_of_a_text_model_are_those_of_transformers(lab, tmp_path, family):
    hf = lab.build(family, tmp_path)
    engine = EngineModel(tmp_path, EngineConfig(max_running=4, max_context=64))
    ids, lengths = padded(TEXTS)
    rows = [list(row) for row in TEXTS]
    positions = np.broadcast_to(np.arange(ids.shape[1]), (3, *ids.shape)).copy()
    logits = engine.prefill(0, ids, positions, lengths, [])
    for _ in range(NUM_TOKENS):
        for got, row in zip(logits, rows, strict=True):
            torch.testing.assert_close(got, hf(torch.tensor([row])).logits[0, -1], rtol=1e-4, atol=2e-5)
        sampled = logits.argmax(-1).numpy()
        logits = engine.decode(sampled, lengths, lengths)
        lengths = lengths + 1
        rows = [[*row, int(token)] for row, token in zip(rows, sampled, strict=True)]


@torch.no_grad()
def test_weights_written_into_parameters_reach_the_forward_pass(lab, tmp_path):
    """The engine computes with fused tensors, of which transformers' parameters must stay views."""
    hf = lab.build("qwen3", tmp_path)
    engine = EngineModel(tmp_path, EngineConfig(max_running=1, max_context=64))
    for parameter, written in zip(hf.parameters(), engine.hf.parameters(), strict=True):
        parameter.add_(0.05 * torch.randn_like(parameter))
        written.data.copy_(parameter)
    ids, lengths = padded(TEXTS[:1])
    positions = np.broadcast_to(np.arange(ids.shape[1]), (3, *ids.shape)).copy()
    logits = engine.prefill(0, ids, positions, lengths, [])
    torch.testing.assert_close(logits[0], hf(torch.tensor(TEXTS[:1])).logits[0, -1], rtol=1e-4, atol=2e-5)
