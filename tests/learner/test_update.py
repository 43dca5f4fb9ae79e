"""One learner step on a small model: what must not matter does not, and the first loss is what the formula says."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from vagen.common.errors import TrajectoryError
from vagen.learner.advantages.estimate import estimate_advantages
from vagen.learner.scoring import score
from vagen.learner.token_data import advantage_inputs

pytestmark = pytest.mark.usefixtures("one_process")


def weights(model):
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def test_microbatches_do_not_change_the_step(make_update, batch):
    results = []
    for max_tokens in (16, 40, 10_000):
        update, model, _ = make_update(max_tokens_per_microbatch=max_tokens)
        stats = update.run(batch, step=0, version=1)
        results.append((stats, weights(model)))
    (reference, expected), *others = results
    for stats, found in others:
        assert stats.losses == pytest.approx(reference.losses, abs=1e-5)
        for name, parameter in expected.items():
            torch.testing.assert_close(found[name], parameter, atol=2e-5, rtol=1e-4)


def test_the_same_step_gives_the_same_bits(make_update, batch):
    runs = []
    for _ in range(2):
        update, model, _ = make_update()
        update.run(batch, step=4, version=1)
        runs.append(weights(model))
    assert all(torch.equal(runs[0][name], runs[1][name]) for name in runs[0])


def test_weights_of_one_are_no_weights_to_the_bit(make_update, batch):
    found = []
    for given in (None, torch.ones(batch.num_segments)):
        update, model, _ = make_update()
        stats = update.run(dataclasses.replace(batch, weights=given), step=4, version=1)
        found.append((stats.losses, weights(model)))
    assert found[0][0] == found[1][0]
    assert all(torch.equal(found[0][1][name], parameter) for name, parameter in found[1][1].items())


def test_a_trajectory_counts_by_its_weight_in_every_loss(make_update, batch):
    """The losses are means of sums over trajectories: those of each alone add up to those of all."""
    parts = []
    for given in (None, *torch.eye(batch.num_segments), torch.full((batch.num_segments,), 0.5)):
        update, *_ = make_update(ppo_epochs=1, minibatch_rows=1000)
        stats = update.run(dataclasses.replace(batch, weights=given), step=0, version=1)
        parts.append({name: stats.losses[name] for name in ("policy_surrogate", "behaviour_kl", "value_loss")})
    whole, *single, half = parts
    for name, value in whole.items():
        assert sum(part[name] for part in single) == pytest.approx(value, abs=1e-5)
        assert half[name] == pytest.approx(value / 2, abs=1e-5)


def test_the_first_loss_is_the_formula_by_hand(make_update, batch):
    update, model, forbidden = make_update(ppo_epochs=1, minibatch_rows=1000)
    scores = score(model, batch, 10_000, forbidden)
    outputs = estimate_advantages(advantage_inputs(batch, scores, update._config.reference), update._config.advantage)
    weight = (scores.logprobs - batch.behaviour_logprobs).exp().clamp(max=2.0)
    x = batch.behaviour_logprobs - scores.logprobs
    surrogate = -(weight * outputs.advantages).mean()
    kl = (x.exp() - 1 - x).mean()
    error = (scores.values - outputs.value_targets).abs()
    huber = torch.where(error < 1, 0.5 * error**2, error - 0.5).mean()
    stats = update.run(batch, step=0, version=1)
    assert stats.num_updates == 1
    assert stats.losses["policy_surrogate"] == pytest.approx(float(surrogate), abs=1e-5)
    assert stats.losses["behaviour_kl"] == pytest.approx(float(kl), abs=1e-5)
    assert stats.losses["value_loss"] == pytest.approx(float(huber), abs=1e-5)
    assert stats.losses["total_loss"] == pytest.approx(float(surrogate + 0.1 * kl + 0.5 * huber), abs=1e-5)
    assert stats.losses["clip_share"] == 0


def test_bootstrap_values_come_from_the_prompts_of_truncated_episodes_alone(make_update, batch):
    _, model, forbidden = make_update()
    torch.nn.init.normal_(model.value_head.weight)
    scores = score(model, batch, 10_000, forbidden)
    first = scores.values[[int((batch.segment_ids == s).nonzero()[0]) for s in range(6)]]
    assert (scores.bootstrap_values != 0).tolist() == [True, False] * 3
    # Segment 0 has one turn, whose prompt is also its bootstrap prompt here.
    assert float(scores.bootstrap_values[0]) == pytest.approx(float(first[0]), rel=1e-4)


def test_values_that_are_not_finite_stop_the_step_before_anything_changes(make_update, batch):
    update, model, _ = make_update()
    with torch.no_grad():
        model.value_head.bias.fill_(float("inf"))
    before = weights(model)
    with pytest.raises(TrajectoryError, match="values"):
        update.run(batch, step=0, version=1)
    assert all(torch.equal(before[name], parameter) for name, parameter in model.named_parameters())


def test_a_gradient_that_is_not_finite_skips_its_optimizer_step(make_update, batch):
    update, model, _ = make_update(ppo_epochs=1, minibatch_rows=1000)
    next(model.parameters()).register_hook(lambda gradient: gradient * float("inf"))
    before = weights(model)
    stats = update.run(batch, step=0, version=1)
    assert (stats.num_updates, stats.skipped_updates) == (1, 1)
    assert all(torch.equal(before[name], parameter) for name, parameter in model.named_parameters())
