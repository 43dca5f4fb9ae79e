"""The critic's loss and the diagnostics of a batch, against literal numbers."""

from __future__ import annotations

import math

import pytest
import torch

from vagen.common.errors import TrajectoryError
from vagen.learner.losses.config import LossConfig
from vagen.learner.losses.diagnostics import (
    effective_sample_size,
    explained_variance,
    ratio_diagnostics,
    staleness_histogram,
)
from vagen.learner.losses.value import value_loss

EVERYWHERE = torch.ones(2, dtype=torch.bool)


@pytest.mark.parametrize(
    ("settings", "loss", "gradient", "clip_share"),
    [
        # errors 3 and -.5
        ({"value_loss": "mse"}, 0.5 * (4.5 + 0.125) / 2, [0.5 * 3 / 2, 0.5 * -0.5 / 2], 0.0),
        ({"value_loss": "smooth_l1"}, 0.5 * (2.5 + 0.125) / 2, [0.5 * 1 / 2, 0.5 * -0.5 / 2], 0.0),
        # from old values 4 and 0 a value may move .2: 3.8 (error 3.8 > 3) and .2 (error -.8)
        (
            {"value_loss": "mse", "value_clip": 0.2, "value_weight": 1.0},
            (0.5 * 3.8**2 + 0.5 * 0.8**2) / 2,
            [0.0, 0.0],
            1.0,
        ),
        ({"value_loss": "mse", "value_clip": 9.0}, 0.5 * (4.5 + 0.125) / 2, [0.75, -0.125], 0.0),
    ],
)
def test_value_loss(settings, loss, gradient, clip_share):
    values = torch.tensor([3.0, 0.5], requires_grad=True)

    found, diagnostics = value_loss(
        values, torch.tensor([4.0, 0.0]), torch.tensor([0.0, 1.0]), EVERYWHERE, LossConfig(**settings)
    )

    assert found.item() == pytest.approx(loss)
    assert torch.autograd.grad(found, values)[0].tolist() == pytest.approx(gradient)
    assert diagnostics["value_clip_share"].item() == clip_share
    assert diagnostics["value_loss"].item() == pytest.approx(loss / LossConfig(**settings).value_weight)


def test_value_clip_takes_the_larger_loss():
    """From 0 towards the target 0 a value of 3 may count as .2, whose loss is smaller: its own loss stays."""
    values = torch.tensor([3.0], requires_grad=True)
    config = LossConfig(value_loss="mse", value_clip=0.2, value_weight=1.0)

    loss, diagnostics = value_loss(values, torch.zeros(1), torch.zeros(1), EVERYWHERE[:1], config)

    assert loss.item() == pytest.approx(4.5)
    assert torch.autograd.grad(loss, values)[0].tolist() == [3.0]
    assert diagnostics["value_clip_share"].item() == 0.0


@pytest.mark.parametrize("clip", [None, 0.2])
def test_tokens_without_a_target_never_contribute(clip):
    """Not even when what stands in their place is not a number."""
    values = torch.tensor([3.0, 7.0, 0.5], requires_grad=True)
    targets, old = torch.tensor([0.0, math.nan, 1.0]), torch.tensor([3.0, math.inf, 0.5])
    mask = torch.tensor([True, False, True])

    loss, _ = value_loss(values, old, targets, mask, LossConfig(value_loss="mse", value_clip=clip))

    assert loss.item() == pytest.approx(0.5 * (4.5 + 0.125) / 2)
    assert torch.autograd.grad(loss, values)[0].tolist() == pytest.approx([0.75, 0.0, -0.125])


def test_no_target_at_all_is_zero_with_a_gradient():
    values = torch.tensor([3.0, 7.0], requires_grad=True)

    loss, _ = value_loss(values, values.detach(), torch.zeros(2), ~EVERYWHERE, LossConfig())

    assert loss.item() == 0.0
    assert torch.autograd.grad(loss, values)[0].tolist() == [0.0, 0.0]


def test_micro_batches_of_targets_add_up():
    values = torch.randn(8, generator=torch.Generator().manual_seed(0))
    mask = torch.tensor([1, 1, 0, 1, 0, 0, 0, 1], dtype=torch.bool)
    config = LossConfig()

    whole = value_loss(values, values, torch.ones(8), mask, config)[0]
    parts = [
        value_loss(values[p], values[p], torch.ones(8)[p], mask[p], config, count=4)[0]
        for p in (slice(0, 4), slice(4, 7), slice(7, 8))
    ]

    assert sum(parts).item() == pytest.approx(whole.item())


def test_unequal_shapes_are_refused():
    with pytest.raises(TrajectoryError, match=r"targets: expected shape \[2\], got \[1\]"):
        value_loss(torch.zeros(2), torch.zeros(2), torch.zeros(1), EVERYWHERE, LossConfig())


def test_ratio_diagnostics_separate_numerics_from_staleness():
    behaviour = torch.full((6,), -1.0)
    log_ratio = torch.tensor([0.0, 0.02, math.log(2.0), math.log(3.0), -30.0, 25.0])
    staleness = torch.tensor([0, 0, 1, 4, 4, 9])

    found = ratio_diagnostics(behaviour + log_ratio, behaviour, staleness, cap=2.5)

    assert found.fresh.num_tokens == 2
    assert found.fresh.mean_abs_log_ratio == pytest.approx(0.01, abs=1e-6)
    assert found.fresh.max_abs_log_ratio == pytest.approx(0.02, abs=1e-6)
    assert found.fresh.kl == pytest.approx((math.exp(0.02) - 1.02) / 2, rel=1e-3)
    assert found.stale.num_tokens == 4
    assert found.stale.mean_abs_log_ratio == pytest.approx((math.log(2) + math.log(3) + 40) / 4)
    assert found.max == pytest.approx(math.exp(20))
    assert found.mean == pytest.approx((1 + math.exp(0.02) + 2 + 3 + math.exp(-20) + math.exp(20)) / 6)
    assert found.capped_share == pytest.approx(2 / 6)
    assert found.clamped_share == pytest.approx(2 / 6)


def test_p99_is_the_smallest_ratio_that_99_in_100_do_not_exceed():
    log_ratio = torch.arange(1, 201, dtype=torch.float32).log()[torch.randperm(200)]

    found = ratio_diagnostics(log_ratio, torch.zeros(200), torch.zeros(200, dtype=torch.int64), cap=2.0)

    assert found.p99 == pytest.approx(198)
    assert found.stale.num_tokens == 0 and found.stale.kl == 0.0


def test_effective_sample_size():
    assert effective_sample_size(torch.zeros(7)).item() == pytest.approx(1.0)
    assert effective_sample_size(torch.tensor([1.0, 3.0]).log()).item() == pytest.approx(16 / 20)
    assert effective_sample_size(torch.tensor([19.0] + [-19.0] * 3)).item() == pytest.approx(0.25)


def test_staleness_histogram_collects_the_tail():
    assert staleness_histogram(torch.tensor([0, 0, 2, 3, 9]), 4).tolist() == [2, 0, 1, 2]


def test_explained_variance_looks_at_targets_only():
    targets, mask = torch.tensor([1.0, 3.0, 99.0]), torch.tensor([True, True, False])

    assert explained_variance(targets, targets, mask).item() == 1.0
    assert explained_variance(torch.tensor([0.0, 1.0, -5.0]), targets, mask).item() == pytest.approx(0.75)
    assert explained_variance(torch.zeros(3), torch.ones(3), mask).item() == 0.0
    assert explained_variance(torch.zeros(3), targets, torch.zeros(3, dtype=torch.bool)).item() == 0.0
