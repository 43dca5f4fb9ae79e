"""Optimizer steps against torch's AdamW, and checkpoints that resume exactly."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from vagen.common.errors import CheckpointError, ConfigError
from vagen.learner.model.actor_critic import VisionLanguageActorCritic
from vagen.learner.model.batch import PackedBatch, TokenOutputs
from vagen.learner.model.checkpoint_io import begin_checkpoint, load_checkpoint, read_record, save_checkpoint
from vagen.learner.model.gpt import ModelOptions
from vagen.learner.model.optimizer import AdamOptions, StepStats, Trainer

Pack = Callable[..., PackedBatch]
OPTIONS = AdamOptions(betas=(0.9, 0.98), eps=1e-6, weight_decay=0.1, clip_grad=0.5)


def _loss(out: TokenOutputs) -> torch.Tensor:
    return -out.logprobs.mean() + 0.5 * (out.values - 1).square().mean() - 0.01 * out.entropy.mean()


def _trainer(directory: Path, *, bf16: bool = False) -> Trainer:
    return Trainer(VisionLanguageActorCritic.load_hf(directory, ModelOptions(bf16=bf16)).train(), OPTIONS)


def _step(trainer: Trainer, batch: PackedBatch, lr: float = 1e-3) -> tuple[float, StepStats]:
    losses = _accumulate(trainer, [batch], _loss)
    return losses[0], trainer.step(lr)


def _accumulate(
    trainer: Trainer, batches: list[PackedBatch], loss_of: Callable[[TokenOutputs], torch.Tensor]
) -> list[float]:
    losses = []

    def loss(_: None, out: TokenOutputs) -> torch.Tensor:
        value = loss_of(out)
        losses.append(value.item())
        return value

    trainer.zero_grad()
    trainer.accumulate([(batch, None) for batch in batches], loss)
    return losses


def test_steps_equal_torch_adamw(save_vl: Any, vl_rows: Any, pack: Pack) -> None:
    _, directory = save_vl()
    trainer, batch = _trainer(directory), pack(vl_rows)
    reference = VisionLanguageActorCritic.load_hf(directory).train()
    groups = [
        {"params": [p for p in reference.parameters() if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in reference.parameters() if p.dim() == 1], "weight_decay": 0.0},
    ]
    adam = torch.optim.AdamW(groups, lr=0.0, betas=(0.9, 0.98), eps=1e-6)
    for lr in (1e-3, 3e-3, 5e-4):
        _, stats = _step(trainer, batch, lr)
        adam.zero_grad()
        _loss(reference(batch)).backward()
        norm = float(torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.5))
        assert norm > 0.5, "the clip must be active for this test to mean anything"
        for group in adam.param_groups:
            group["lr"] = lr
        adam.step()
        assert not stats.skipped and stats.grad_norm == pytest.approx(norm, rel=1e-5)
    expected = dict(reference.named_parameters())
    for name, parameter in trainer.model.named_parameters():
        torch.testing.assert_close(parameter, expected[name], rtol=1e-5, atol=2e-6)


def test_microbatches_add_up(save_vl: Any, vl_rows: Any, pack: Pack) -> None:
    _, directory = save_vl()
    whole, parts = _trainer(directory), _trainer(directory)
    patches = pack(vl_rows[:2]).images.patches  # type: ignore[union-attr]
    split = [pack([row], patches=part) for row, part in zip(vl_rows[:2], (patches[:16], patches[16:]), strict=True)]
    for trainer, batches in ((whole, [pack(vl_rows[:2])]), (parts, split)):
        _accumulate(trainer, batches, lambda out: out.logprobs.sum() / 12)
    a, b = whole.step(1e-3), parts.step(1e-3)
    assert a.grad_norm == pytest.approx(b.grad_norm, rel=1e-5) and a.grad_norm > 0.1


def test_non_finite_gradients_change_nothing(save_vl: Any, vl_rows: Any, pack: Pack) -> None:
    _, directory = save_vl()
    trainer, twin, batch = _trainer(directory), _trainer(directory), pack(vl_rows)
    _step(trainer, batch)
    _step(twin, batch)
    before = trainer.model.export_hf_state()
    for bad in (math.nan, math.inf):
        _accumulate(trainer, [batch], lambda out, bad=bad: _loss(out) * bad)
        stats = trainer.step(1e-3)
        assert stats.skipped and not math.isfinite(stats.grad_norm)
        assert all(torch.equal(x, before[name]) for name, x in trainer.model.export_hf_state().items())
    assert _step(trainer, batch) == _step(twin, batch)
    assert _step(trainer, batch) == _step(twin, batch)


def test_bf16_follows_float32(save_vl: Any, vl_rows: Any, pack: Pack) -> None:
    _, directory = save_vl()
    exact, rounded, batch = _trainer(directory), _trainer(directory, bf16=True), pack(vl_rows)
    assert {p.dtype for p in rounded.model.parameters()} == {torch.bfloat16}
    losses = [(_step(exact, batch)[0], _step(rounded, batch)[0]) for _ in range(8)]
    for a, b in losses:
        assert b == pytest.approx(a, rel=0.02)
    assert losses[-1][1] < losses[0][1] - 0.2
    # Master weights: steps far below the resolution of bfloat16 add up.
    before = rounded.model.language_model.decoder.final_layernorm.weight.clone()
    for _ in range(40):
        _step(rounded, batch, lr=2e-4)
    assert not torch.equal(rounded.model.language_model.decoder.final_layernorm.weight, before)


def test_frozen_vision_is_not_updated(save_vl: Any, vl_rows: Any, pack: Pack) -> None:
    _, directory = save_vl()
    model = VisionLanguageActorCritic.load_hf(directory, ModelOptions(freeze_vision=True)).train()
    before = model.export_hf_state()
    _step(Trainer(model, OPTIONS), pack(vl_rows))
    for name, tensor in model.export_hf_state().items():
        assert torch.equal(tensor, before[name]) is name.startswith("model.visual."), name


@pytest.mark.parametrize(
    ("family", "tied", "bf16"),
    [
        ("vl", False, False),
        ("vl", True, False),
        ("vl", True, True),
        ("qwen3_vl_moe", False, False),
        ("glm4v", False, False),
    ],
)
def test_resume_is_bit_identical(
    request: pytest.FixtureRequest, vl_rows: Any, pack: Pack, tmp_path: Path, family: str, tied: bool, bf16: bool
) -> None:
    _, directory = request.getfixturevalue(f"save_{family}")(tied=tied)
    trainer, batch = _trainer(directory, bf16=bf16), pack(vl_rows)
    for _ in range(3):
        _step(trainer, batch)
    path = tmp_path / "step-3"
    save_checkpoint(path, trainer.model, trainer, {"step": 3, "manifest": ["a", "b"]})
    drawn = (random.random(), np.random.rand(), torch.rand(3).tolist())
    expected = [_step(trainer, batch, lr) for lr in (1e-3, 2e-3, 1e-4)]
    final = trainer.model.export_hf_state()

    assert read_record(path) == {"step": 3, "manifest": ["a", "b"]}
    for warm in (False, True):
        resumed = _trainer(directory, bf16=bf16)
        if warm:
            _step(resumed, batch)
        assert load_checkpoint(path, resumed.model, resumed) == {"step": 3, "manifest": ["a", "b"]}
        assert (random.random(), np.random.rand(), torch.rand(3).tolist()) == drawn
        assert [_step(resumed, batch, lr) for lr in (1e-3, 2e-3, 1e-4)] == expected
        for name, tensor in resumed.model.export_hf_state().items():
            assert torch.equal(tensor, final[name]), name


def test_checkpoint_before_the_first_step(save_vl: Any, vl_rows: Any, pack: Pack, tmp_path: Path) -> None:
    _, directory = save_vl()
    trainer, batch = _trainer(directory), pack(vl_rows)
    save_checkpoint(tmp_path / "step-0", trainer.model, trainer, {})
    expected = [_step(trainer, batch), _step(trainer, batch)]
    resumed = _trainer(directory)
    _step(resumed, batch)
    load_checkpoint(tmp_path / "step-0", resumed.model, resumed)
    assert [_step(resumed, batch), _step(resumed, batch)] == expected


def test_checkpoints_appear_whole_or_not_at_all(save_vl: Any, save_qwen2: Any, tmp_path: Path) -> None:
    _, directory = save_vl()
    trainer, path = _trainer(directory), tmp_path / "checkpoints" / "step-1"
    pending = begin_checkpoint(path, trainer.model, trainer, {})
    pending.wait()
    assert not path.exists()
    with pytest.raises(CheckpointError, match="not a complete checkpoint"):
        load_checkpoint(path, trainer.model, trainer)
    pending.finish()
    assert [entry.name for entry in path.parent.iterdir()] == ["step-1"]
    with pytest.raises(CheckpointError, match="already exists"):
        save_checkpoint(path, trainer.model, trainer, {})
    other = _trainer(save_qwen2()[1])
    with pytest.raises(CheckpointError, match="does not match the model"):
        load_checkpoint(path, other.model, other)


def test_optimizer_options_are_checked() -> None:
    with pytest.raises(ConfigError, match="betas"):
        AdamOptions(betas=(0.9, 1.0))
    with pytest.raises(ConfigError, match="weight_decay"):
        AdamOptions(weight_decay=-0.1)
