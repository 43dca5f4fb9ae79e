"""What `vagen replay` measures is what a learner step would do with a part of a batch, without doing it."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
import torch

from vagen.learner.advantages.config import AdvantageConfig
from vagen.learner.advantages.estimate import estimate_advantages
from vagen.learner.config import LearnerConfig
from vagen.learner.losses.config import LossConfig
from vagen.learner.losses.diagnostics import effective_sample_size
from vagen.learner.models import load_models, load_trained
from vagen.learner.packing import microbatches
from vagen.learner.token_data import advantage_inputs
from vagen.tools.replay_measure import Bench

STALE = np.array([1, 3, 4])
DEFAULT = LearnerConfig()


@pytest.fixture
def bench(model_dir, batch, one_process):
    trained = load_trained(model_dir, DEFAULT)
    forbidden = torch.tensor([trained.policy.model.hf_config.image_token_id])
    return Bench.of(trained, batch, forbidden, seed=5, max_tokens=10_000)


def ratios(bench, members):
    chosen = np.isin(bench.batch.segment_ids.numpy(), members)
    return (bench.scores.logprobs - bench.batch.behaviour_logprobs)[torch.from_numpy(chosen)].double()


def test_the_gradient_is_that_of_the_policy_loss_of_the_parts_own_tokens(bench, model_dir):
    found = bench.correction(DEFAULT)(STALE).grad_norm
    batch = bench.batch
    model, _ = load_models(model_dir, DEFAULT)
    advantages = estimate_advantages(
        advantage_inputs(batch, bench.scores, DEFAULT.reference), DEFAULT.advantage
    ).advantages
    is_stale = torch.from_numpy(np.isin(batch.segment_ids.numpy(), STALE))
    for packed, slots in microbatches(batch.rows, batch.images, 10_000):
        out = model(packed, temperature=1.0, forbidden_token_ids=bench.forbidden)
        behaviour, proximal = batch.behaviour_logprobs[slots], bench.scores.logprobs[slots]
        weight = (proximal - behaviour).exp().clamp(max=2.0)
        x = behaviour - out.logprobs
        loss = -weight * advantages[slots] * (out.logprobs - proximal).exp() + 0.1 * (x.exp() - 1 - x)
        (loss[is_stale[slots]].sum() / is_stale.sum()).backward()
    by_hand = sum(float(p.grad.square().sum()) for p in model.parameters() if p.grad is not None) ** 0.5
    assert found == pytest.approx(by_hand, rel=1e-4)


def test_the_gradient_of_everything_is_that_of_a_learner_step(bench, make_update, batch):
    loss = msgspec.structs.replace(DEFAULT.loss, value_weight=0.0)
    update, _, _ = make_update(loss=loss, ppo_epochs=1, minibatch_rows=1000)
    everything = np.arange(batch.num_segments)
    assert bench.correction(DEFAULT)(everything).grad_norm == pytest.approx(update.run(batch, 0, 1).grad_norm, rel=1e-5)


def test_measuring_moves_no_weight_and_leaves_nothing_behind(bench):
    before = [parameter.detach().clone() for parameter in bench.model.parameters()]
    measure = bench.correction(DEFAULT)
    first = measure(STALE)
    measure(np.array([0, 2, 5]))
    assert measure(STALE) == first
    assert all(torch.equal(a, b) for a, b in zip(before, bench.model.parameters(), strict=True))


def test_weights_are_those_with_which_advantages_enter_the_gradient(bench):
    log_ratio = ratios(bench, STALE)
    expected = float(effective_sample_size(log_ratio.clamp(max=np.log(2.0))))
    assert expected != pytest.approx(1.0, abs=1e-3)
    assert bench.correction(DEFAULT)(STALE).weight_ess == pytest.approx(expected, rel=1e-5)
    alone = LearnerConfig(loss=LossConfig(behaviour_weight="none"))
    assert bench.correction(alone)(STALE).weight_ess == pytest.approx(1.0)
    plain = bench.correction(LearnerConfig(loss=LossConfig(anchor="behaviour", behaviour_weight="none")))(STALE)
    assert 0 < plain.clipped_share < 1
    # Anchored at the behaviour policy a token counts its ratio, or 0 where the objective is flat.
    assert plain.weight_ess < float(effective_sample_size(log_ratio))


def test_shares_are_counted_over_the_parts_own_tokens(bench):
    ratio = ratios(bench, STALE).exp()
    assert bench.correction(DEFAULT)(STALE).truncated_share == pytest.approx(float((ratio > 2).double().mean()))
    reject = bench.correction(LearnerConfig(loss=LossConfig(behaviour_weight="token_reject")))(STALE)
    outside = float(((ratio < 0.5) | (ratio > 2)).double().mean())
    assert 0 < outside and reject.rejected_share == pytest.approx(outside)


@pytest.mark.parametrize("name", ["bi_level_gae", "turn_wise_gae"])
def test_the_value_error_is_against_the_corrections_own_return(bench, name):
    config = LearnerConfig(advantage=AdvantageConfig(name=name, importance_correction="none"))
    inputs = advantage_inputs(bench.batch, bench.scores, config.reference)
    outputs = estimate_advantages(inputs, config.advantage)
    assert outputs.value_mask.all() == (name == "bi_level_gae"), "turn_wise_gae has one target a turn"
    kept = torch.from_numpy(np.isin(bench.batch.segment_ids.numpy(), STALE)) & outputs.value_mask
    error = (bench.scores.values - outputs.value_targets)[kept].square().mean().sqrt()
    assert bench.correction(config)(STALE).value_error == pytest.approx(float(error), rel=1e-5)
    corrected = LearnerConfig(advantage=AdvantageConfig(name=name))
    assert bench.correction(corrected)(STALE).value_error != pytest.approx(float(error), rel=1e-3)


def test_a_bucket_says_how_far_its_data_is(bench):
    bucket = bench.bucket((4, 7), STALE)
    log_ratio = ratios(bench, STALE)
    assert (bucket.name, bucket.trajectories, bucket.tokens) == ("4-7", 3, len(log_ratio))
    assert bucket.log_ratio == pytest.approx(float(log_ratio.abs().mean()))
    assert bucket.ess == pytest.approx(float(effective_sample_size(log_ratio)))
