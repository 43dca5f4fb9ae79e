"""The categorical critic: literal projections, their inverse, and the loss with its gradient."""

from __future__ import annotations

import math

import pytest
import torch

from vagen.common.errors import ConfigError, TrajectoryError
from vagen.learner.losses.config import LossConfig
from vagen.learner.losses.two_hot import bin_centres, expectation, two_hot, two_hot_loss
from vagen.learner.losses.value import value_loss

FIVE = LossConfig(value_loss="two_hot", value_bins=5, value_range=(-2.0, 2.0), value_weight=1.0)


@pytest.mark.parametrize(
    ("target", "probabilities"),
    [
        (0.0, [0, 0, 1, 0, 0]),
        (0.25, [0, 0, 0.75, 0.25, 0]),
        (-1.9, [0.9, 0.1, 0, 0, 0]),
        (1.5, [0, 0, 0, 0.5, 0.5]),
        (-2.0, [1, 0, 0, 0, 0]),
        (2.0, [0, 0, 0, 0, 1]),
        (-7.0, [1, 0, 0, 0, 0]),
        (7.0, [0, 0, 0, 0, 1]),
    ],
)
def test_projection(device, target, probabilities):
    centres = bin_centres(5, (-2.0, 2.0)).to(device)
    assert centres.tolist() == [-2, -1, 0, 1, 2]
    assert two_hot(torch.tensor([target], device=device), centres)[0].tolist() == pytest.approx(probabilities, abs=1e-6)


@pytest.mark.parametrize(("bins", "value_range"), [(51, (-3.0, 3.0)), (2, (0.0, 10.0)), (256, (-1.5, 4.0))])
def test_the_expectation_inverts_the_projection(bins, value_range):
    centres = bin_centres(bins, value_range)
    targets = torch.cat([torch.linspace(*value_range, 1001), centres])

    probabilities = two_hot(targets, centres)

    assert bool((probabilities >= 0).all()) and bool(((probabilities > 0).sum(-1) <= 2).all())
    torch.testing.assert_close(probabilities.sum(-1), torch.ones(len(targets)))
    torch.testing.assert_close(probabilities @ centres, targets, atol=1e-6, rtol=1e-6)
    # Logarithms of probabilities are logits of the same distribution.
    torch.testing.assert_close(expectation(probabilities.log(), centres), targets, atol=1e-6, rtol=1e-6)


def test_equal_logits_are_the_middle_of_the_range():
    assert expectation(torch.zeros(1, 51), bin_centres(51, (-3.0, 3.0))).item() == pytest.approx(0.0, abs=1e-6)


def test_loss_and_its_gradient():
    """Cross-entropy, whose gradient is the difference of the distributions."""
    logits = torch.tensor([[0.0] * 5, [0.0, 0.0, math.log(2.0), 0.0, 0.0]], requires_grad=True)
    targets, mask = torch.tensor([0.25, -9.0]), torch.ones(2, dtype=torch.bool)

    loss, found = value_loss(torch.zeros(2), torch.zeros(2), targets, mask, FIVE, logits=logits)

    assert loss.item() == pytest.approx((math.log(5) + math.log(6)) / 2)
    assert found["value_clamped_share"].item() == 0.5
    gradient = torch.autograd.grad(loss, logits)[0]
    assert gradient[0].tolist() == pytest.approx([0.1, 0.1, (0.2 - 0.75) / 2, (0.2 - 0.25) / 2, 0.1])
    assert gradient[1].tolist() == pytest.approx([(1 / 6 - 1) / 2, 1 / 12, 1 / 6, 1 / 12, 1 / 12])


def test_gradients_of_loss_and_expectation_numerically():
    centres = bin_centres(7, (-3.0, 3.0)).double()
    logits = torch.randn(4, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(0), requires_grad=True)
    targets = torch.tensor([-2.9, 0.1, 1.0, 5.0], dtype=torch.float64)

    assert torch.autograd.gradcheck(lambda x: two_hot_loss(x, targets, centres), logits)
    assert torch.autograd.gradcheck(lambda x: expectation(x, centres), logits)


def test_tokens_without_a_target_contribute_nothing_and_micro_batches_add_up():
    logits = torch.randn(6, 5, generator=torch.Generator().manual_seed(1), requires_grad=True)
    targets = torch.tensor([0.3, math.nan, -1.2, 9.0, math.inf, 2.0])
    mask = torch.tensor([1, 0, 1, 1, 0, 1], dtype=torch.bool)
    values = torch.zeros(6)

    whole, found = value_loss(values, values, targets, mask, FIVE, logits=logits)
    parts = [
        value_loss(values[p], values[p], targets[p], mask[p], FIVE, count=4, logits=logits[p])
        for p in (slice(0, 2), slice(2, 5), slice(5, 6))
    ]

    assert sum(loss for loss, _ in parts).item() == pytest.approx(whole.item())
    assert sum(each["value_clamped_share"] for _, each in parts).item() == found["value_clamped_share"].item() == 0.25
    gradient = torch.autograd.grad(whole, logits)[0]
    assert bool(gradient.isfinite().all()) and not gradient[~mask].any() and bool(gradient[mask].any())


@pytest.mark.parametrize("logits", [None, torch.zeros(2, 1), torch.zeros(1, 5)])
def test_logits_that_do_not_fit_are_refused(logits):
    mask = torch.ones(2, dtype=torch.bool)
    with pytest.raises(TrajectoryError, match=r"value_logits: expected shape \[2, 5\]"):
        value_loss(torch.zeros(2), torch.zeros(2), torch.zeros(2), mask, FIVE, logits=logits)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"value_bins": 1}, r"value_bins: expected int in \[2, 4096\], got 1"),
        ({"value_range": (1.0, 1.0)}, "value_range"),
        ({"value_range": (-math.inf, 1.0)}, "value_range"),
        ({"value_range": (math.nan, 1.0)}, "value_range"),
        ({"value_loss": "two_hot", "value_clip": 0.2}, "value_clip"),
    ],
)
def test_settings_are_bounded(settings, message):
    with pytest.raises(ConfigError, match=message):
        LossConfig(**settings)
