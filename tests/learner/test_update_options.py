"""Options of the learner step that are off by default: the categorical critic and the KL to the starting model."""

from __future__ import annotations

import math
from dataclasses import replace

import msgspec
import pytest
import torch

from vagen.common.errors import ConfigError
from vagen.learner.advantages.config import AdvantageConfig
from vagen.learner.config import LearnerConfig, OptimizerConfig
from vagen.learner.losses.config import LossConfig, ReferenceConfig
from vagen.learner.model.actor_critic import VisionLanguageActorCritic
from vagen.learner.model.optimizer import AdamOptions, Trainer
from vagen.learner.models import load_models
from vagen.learner.packing import microbatches
from vagen.learner.scoring import score
from vagen.learner.token_data import advantage_inputs
from vagen.learner.update import PolicyUpdate

pytestmark = pytest.mark.usefixtures("one_process")

TWO_HOT = LossConfig(value_loss="two_hot", value_bins=21, value_range=(-2.0, 2.0))
HELD = ReferenceConfig(model_dir="start", kl_in_loss=0.2, kl_in_reward=0.5)


def disturb(model):
    """Move the policy away from the model that it started from."""
    with torch.no_grad():
        for parameter in model.language_model.parameters():
            parameter.add_(0.02 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))


def test_a_categorical_critic_learns_a_fixed_batch(make_update, batch):
    # With lambda 1 targets do not move with the critic, so that its loss is of one problem.
    fixed = AdvantageConfig(turn_lambda=1.0, token_lambda=1.0, importance_correction="none")
    update, model, forbidden = make_update(
        loss=msgspec.structs.replace(TWO_HOT, ess_power=0.0),
        advantage=fixed,
        optimizer=OptimizerConfig(lr=3e-3, warmup_updates=0),
    )
    assert model.value_head.weight.shape == (21, 64)
    terminated = replace(batch, bootstrap_rows=[])

    stats = [update.run(terminated, step=step, version=1) for step in range(8)]

    losses = [each.losses["value_loss"] for each in stats]
    assert losses[0] < math.log(21) and losses[-1] < 0.6 * losses[0], losses
    assert stats[-1].explained_variance > stats[0].explained_variance
    assert all(0 <= each.losses["value_clamped_share"] < 1 for each in stats)
    values = score(model, batch, 10_000, forbidden).values
    assert values.shape == (batch.num_policy_tokens,) and bool((values.abs() <= 2).all()) and float(values.std()) > 0


def test_values_of_a_categorical_critic_are_its_expectations(make_update, batch):
    _, model, _ = make_update(loss=TWO_HOT)
    torch.nn.init.normal_(model.value_head.weight)
    packed, _ = next(iter(microbatches(batch.rows, batch.images, 10_000)))
    with torch.no_grad():
        out = model(packed)
    assert out.value_logits.dtype == torch.float32 and out.value_logits.shape == (batch.num_policy_tokens, 21)
    expected = out.value_logits.double().softmax(-1) @ torch.linspace(-2, 2, 21, dtype=torch.float64)
    torch.testing.assert_close(out.values.double(), expected, atol=1e-5, rtol=1e-5)


def test_microbatches_do_not_change_a_step_with_both_options(make_update, batch):
    results = []
    for max_tokens in (16, 10_000):
        update, model, _ = make_update(loss=TWO_HOT, reference=HELD, max_tokens_per_microbatch=max_tokens)
        disturb(model)
        results.append(update.run(batch, step=0, version=1).losses)
    assert results[0] == pytest.approx(results[1], abs=1e-5)


def test_a_critic_of_another_kind_is_refused(model_dir):
    model = VisionLanguageActorCritic.load_hf(model_dir)
    with pytest.raises(ConfigError, match=r"value_loss: expected a model with a critic for two_hot, got one of 1"):
        PolicyUpdate(
            model,
            Trainer(model, AdamOptions()),
            LearnerConfig(loss=TWO_HOT),
            seed=0,
            forbidden_token_ids=torch.tensor([model.hf_config.image_token_id]),
        )


def test_the_reference_is_the_start_and_stays_it(make_update, batch, model_dir):
    update, model, forbidden = make_update(reference=HELD)
    start = VisionLanguageActorCritic.load_hf(model_dir)
    expected = score(start, batch, 10_000, forbidden).logprobs

    # At the start policy and reference are one, so that nothing is penalised ...
    first = score(model, batch, 10_000, forbidden, update._reference)
    assert torch.equal(first.reference_logprobs, expected) and torch.equal(first.logprobs, expected)
    assert torch.equal(advantage_inputs(batch, first, HELD).rewards, batch.rewards)
    # ... and training moves the one, not the other.
    stats = [update.run(batch, step=step, version=1) for step in range(2)]
    assert 0 < stats[0].losses["reference_kl"] < stats[1].losses["reference_kl"]
    later = score(model, batch, 10_000, forbidden, update._reference)
    assert torch.equal(later.reference_logprobs, expected) and not torch.equal(later.logprobs, expected)


def test_rewards_and_loss_change_by_the_penalties(make_update, batch):
    update, model, forbidden = make_update(reference=HELD, ppo_epochs=1, minibatch_rows=1000)
    disturb(model)
    scores = score(model, batch, 10_000, forbidden, update._reference)
    x = scores.logprobs - scores.reference_logprobs
    assert float(x.abs().max()) > 0.01
    assert torch.equal(advantage_inputs(batch, scores, HELD).rewards, batch.rewards - 0.5 * x)

    losses = update.run(batch, step=0, version=1).losses

    k3 = float(((-x).exp() - 1 + x).mean())
    assert losses["reference_kl"] == pytest.approx(k3, rel=1e-3)
    parts = losses["policy_loss"] + 0.5 * losses["value_loss"] + 0.2 * losses["reference_kl"]
    assert losses["total_loss"] == pytest.approx(parts, abs=1e-6)


def test_zero_coefficients_build_no_reference(model_dir, make_update, batch):
    config = LearnerConfig(reference=ReferenceConfig(model_dir="start"))
    assert load_models(model_dir, config)[1] is None
    _, reference = load_models(model_dir, LearnerConfig(reference=HELD))
    assert reference is not None and not any(p.requires_grad for p in reference.parameters())
    update, _, _ = make_update()
    assert "reference_kl" not in update.run(batch, step=0, version=1).losses


def test_a_missing_reference_is_refused(model_dir):
    model = VisionLanguageActorCritic.load_hf(model_dir)
    with pytest.raises(ConfigError, match=r"learner\.reference: expected a reference model"):
        PolicyUpdate(
            model,
            Trainer(model, AdamOptions()),
            LearnerConfig(reference=HELD),
            seed=0,
            forbidden_token_ids=torch.tensor([model.hf_config.image_token_id]),
        )
