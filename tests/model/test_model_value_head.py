"""The categorical value head in files and checkpoints: kept where it fits, never taken for another."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from vagen.common.errors import CheckpointError
from vagen.learner.model.actor_critic import VisionLanguageActorCritic
from vagen.learner.model.batch import TokenOutputs
from vagen.learner.model.checkpoint_io import load_checkpoint, save_checkpoint
from vagen.learner.model.gpt import ModelOptions
from vagen.learner.model.optimizer import AdamOptions, Trainer

SCALAR = ModelOptions()
CATEGORICAL = ModelOptions(value_bins=7, value_range=(-2.0, 3.0))
FEWER = ModelOptions(value_bins=5, value_range=(-2.0, 3.0))
WIDER = ModelOptions(value_bins=7, value_range=(-3.0, 3.0))


def _load(directory: Path, options: ModelOptions) -> VisionLanguageActorCritic:
    return VisionLanguageActorCritic.load_hf(directory, options)


@pytest.mark.parametrize("options", [SCALAR, CATEGORICAL])
def test_a_head_is_saved_and_loaded(save_qwen2: Any, tmp_path: Path, options: ModelOptions, caplog: Any) -> None:
    model = _load(save_qwen2()[1], options)
    torch.nn.init.normal_(model.value_head.weight)
    torch.nn.init.normal_(model.value_head.bias)
    model.save_hf(tmp_path / "saved")
    again = _load(tmp_path / "saved", options)
    assert torch.equal(again.value_head.weight, model.value_head.weight)
    assert torch.equal(again.value_head.bias, model.value_head.bias)
    assert not caplog.records


@pytest.mark.parametrize(
    ("saved", "wanted"),
    [(SCALAR, CATEGORICAL), (CATEGORICAL, SCALAR), (CATEGORICAL, FEWER), (CATEGORICAL, WIDER)],
)
def test_another_head_starts_from_zero_and_says_so(
    save_qwen2: Any, tmp_path: Path, caplog: Any, saved: ModelOptions, wanted: ModelOptions
) -> None:
    model = _load(save_qwen2()[1], saved)
    torch.nn.init.normal_(model.value_head.weight)
    model.save_hf(tmp_path / "saved")
    with caplog.at_level(logging.WARNING):
        fresh = _load(tmp_path / "saved", wanted)
    assert fresh.value_head.weight.shape == (wanted.value_bins or 1, 64)
    assert not fresh.value_head.weight.any() and not fresh.value_head.bias.any()
    (record,) = caplog.records
    assert "value_head.safetensors" in record.getMessage() and "starts from zero" in record.getMessage()


@pytest.mark.parametrize("options", [SCALAR, CATEGORICAL])
def test_a_head_of_another_hidden_size_is_refused(save_qwen2: Any, options: ModelOptions) -> None:
    directory = save_qwen2()[1]
    bins = options.value_bins or 1
    save_file({"weight": torch.ones(bins, 32), "bias": torch.ones(bins)}, directory / "value_head.safetensors")
    with pytest.raises(CheckpointError, match="size mismatch"):
        _load(directory, options)


def test_a_categorical_head_resumes_exactly_and_only_as_itself(
    save_vl: Any, vl_rows: Any, pack: Any, tmp_path: Path
) -> None:
    directory, batch = save_vl()[1], pack(vl_rows)

    def trainer(options: ModelOptions) -> Trainer:
        return Trainer(_load(directory, options).train(), AdamOptions())

    def step(of: Trainer) -> float:
        losses = []

        def loss_of(_: None, out: TokenOutputs) -> torch.Tensor:
            assert out.value_logits is not None
            losses.append(-out.value_logits.log_softmax(-1)[:, 3].mean())
            return losses[0]

        of.zero_grad()
        of.accumulate([(batch, None)], loss_of)
        of.step(1e-3)
        return losses[0].item()

    trained = trainer(CATEGORICAL)
    step(trained)
    save_checkpoint(tmp_path / "step-1", trained.model, trained, {})
    expected = [step(trained), step(trained)]
    resumed = trainer(CATEGORICAL)
    load_checkpoint(tmp_path / "step-1", resumed.model, resumed)
    assert [step(resumed), step(resumed)] == expected
    for options in (SCALAR, FEWER, WIDER):
        other = trainer(options)
        with pytest.raises(CheckpointError, match="does not match the model"):
            load_checkpoint(tmp_path / "step-1", other.model, other)
