"""The two penalties of the KL to a reference policy, against literal numbers."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from vagen.common.errors import ConfigError, TrajectoryError
from vagen.learner.advantages.config import AdvantageConfig
from vagen.learner.advantages.estimate import estimate_advantages
from vagen.learner.config import LearnerConfig
from vagen.learner.losses.config import ReferenceConfig
from vagen.learner.losses.reference import penalised_rewards, reference_loss

PLAIN = AdvantageConfig(
    turn_discount=0.95,
    turn_lambda=1.0,
    token_discount=1.0,
    token_lambda=1.0,
    importance_correction="none",
    whiten=False,
)


@pytest.mark.parametrize(
    ("log_ratio", "advantages"),
    [
        ([0, 0, 0, 0, 0], [2.4, 2.5, 2.3, 1.2, 1.0]),
        ([0, 1, 0, 0, 0], [2.3, 2.4, 2.3, 1.2, 1.0]),
        ([0, 0, 0, 1, 0], [2.4, 2.5, 2.3, 1.1, 1.0]),
    ],
)
def test_a_penalty_inside_a_turn_reaches_no_earlier_turn(batch, episode, log_ratio, advantages):
    inputs = batch(episode(turns=(3, 2), rewards=(0, 0, 1, 0, 2), values=(0.5, 0.4, 0.6, 0.8, 1.0)))
    reference = inputs.proximal_logprobs - torch.tensor(log_ratio, dtype=torch.float32)
    config = ReferenceConfig(model_dir="start", kl_in_reward=0.1)

    rewards = penalised_rewards(inputs.rewards, inputs.proximal_logprobs, reference, config)

    expected = [r - 0.1 * x for r, x in zip([0, 0, 1, 0, 2], log_ratio, strict=True)]
    assert rewards.tolist() == pytest.approx(expected, abs=1e-6)
    out = estimate_advantages(replace(inputs, rewards=rewards), PLAIN)
    assert out.advantages.tolist() == pytest.approx(advantages, abs=1e-5)


@pytest.mark.parametrize(
    ("estimator", "terms", "slopes"),
    [
        # log pi - log ref = log 2 and -log 3; d/d log pi of k2 is x, of k3 1 - ref / pi
        ("k2", [0.5 * math.log(2) ** 2, 0.5 * math.log(3) ** 2], [math.log(2), -math.log(3)]),
        ("k3", [0.5 - 1 + math.log(2), 3 - 1 - math.log(3)], [0.5, -2.0]),
    ],
)
def test_loss(estimator, terms, slopes):
    logprobs = torch.tensor([-1.0, -3.0], requires_grad=True)
    reference = torch.tensor([-1.0 - math.log(2), -3.0 + math.log(3)])
    weights = torch.tensor([0.25, 0.75])

    config = ReferenceConfig(model_dir="start", kl_in_loss=0.2, estimator=estimator)
    loss, found = reference_loss(logprobs, reference, weights, config)

    mean = 0.25 * terms[0] + 0.75 * terms[1]
    assert loss.item() == pytest.approx(0.2 * mean, rel=1e-5)
    assert found["reference_kl"].item() == pytest.approx(mean, rel=1e-5)
    gradient = torch.autograd.grad(loss, logprobs)[0]
    assert gradient.tolist() == pytest.approx([0.2 * 0.25 * slopes[0], 0.2 * 0.75 * slopes[1]], rel=1e-5)


def test_k1_is_a_diagnostic():
    config = ReferenceConfig(model_dir="start", kl_in_reward=0.1, estimator="k1")
    loss, found = reference_loss(torch.tensor([-1.0, -2.0]), torch.tensor([-2.0, -1.5]), torch.full((2,), 0.5), config)
    assert (loss.item(), found["reference_kl"].item()) == (0.0, 0.25)


def test_a_token_far_from_the_reference_stays_finite():
    logprobs = torch.tensor([-200.0], requires_grad=True)
    config = ReferenceConfig(model_dir="start", kl_in_loss=1.0)
    loss, _ = reference_loss(logprobs, torch.tensor([0.0]), torch.ones(1), config)
    assert loss.item() == pytest.approx(math.expm1(10) - 10)
    assert torch.autograd.grad(loss, logprobs)[0].tolist() == [0.0]


def test_unequal_shapes_are_refused():
    config = ReferenceConfig()
    with pytest.raises(TrajectoryError, match=r"reference_logprobs: expected shape \[2\] everywhere, got \[1\]"):
        reference_loss(torch.zeros(2), torch.zeros(1), torch.zeros(2), config)
    with pytest.raises(TrajectoryError, match="reference_logprobs"):
        penalised_rewards(torch.zeros(2), torch.zeros(2), torch.zeros(3), config)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kl_in_loss": -0.1}, r"kl_in_loss: expected float >= 0"),
        ({"kl_in_reward": math.inf}, "kl_in_reward"),
        ({"kl_in_reward": 0.1}, r"reference\.model_dir: expected start"),
        ({"model_dir": "start", "kl_in_loss": 0.1, "estimator": "k1"}, "estimator: expected k2 or k3"),
    ],
)
def test_settings_are_bounded(settings, message):
    with pytest.raises(ConfigError, match=message):
        ReferenceConfig(**settings)


def test_it_is_off_by_default():
    assert not LearnerConfig().reference.is_used
    assert not ReferenceConfig(model_dir="start").is_used
