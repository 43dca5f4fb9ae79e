"""The critic's options: whose values count, which parameters move, at which rate, and that checkpoints hold it."""

from __future__ import annotations

import dataclasses
from collections import defaultdict

import numpy as np
import pytest
import torch

from vagen.common.errors import CheckpointError, ConfigError
from vagen.learner.config import CriticConfig, LearnerConfig, OptimizerConfig
from vagen.learner.losses.config import LossConfig, ReferenceConfig
from vagen.learner.model.checkpoint_io import load_checkpoint, save_checkpoint
from vagen.learner.update import PolicyUpdate

pytestmark = pytest.mark.usefixtures("one_process")

STILL = OptimizerConfig(warmup_updates=0, weight_decay=0.1)
HELD = ReferenceConfig(model_dir="start", kl_in_loss=0.2, refresh_every=2)


def weights(model):
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def moved(before, model):
    return {name for name, parameter in model.named_parameters() if not torch.equal(before[name], parameter)}


def start_value_head(update):
    torch.nn.init.normal_(update.critic.model.value_head.weight, std=0.1, generator=torch.Generator().manual_seed(2))


def policy_states(update):
    """The optimizer's state of every parameter that has the policy's rate."""
    for part in update.critic._policy.inner_optimizers():
        for group in part.optimizer.param_groups:
            if not group["is_decoupled_lr"]:
                yield from (part.optimizer.state[parameter] for parameter in group["params"])


HEAD = {"value_head.weight", "value_head.bias"}


@pytest.mark.parametrize("trunk", ["shared", "detached", "separate"])
def test_while_the_critic_warms_up_the_policy_does_not_move_to_the_bit(make_update, batch, trunk):
    update, model, _ = make_update(critic=CriticConfig(trunk=trunk, warmup_steps=2), optimizer=STILL)
    start_value_head(update)
    before, critic_before = weights(model), weights(update.critic.model)
    stats = [update.run(batch, step=step, version=1) for step in range(2)]
    assert moved(before, model) == (set() if trunk == "separate" else HEAD)
    assert HEAD <= moved(critic_before, update.critic.model)
    assert not any(state["exp_avg"].any() for state in policy_states(update)), "nor will it from what it saw meanwhile"
    assert stats[0].lr == 0.0 and stats[1].critic_lr > 0
    assert stats[0].losses["policy_surrogate"] != 0, "it is computed all the same"
    assert (update.num_updates, update.num_critic_updates) == (0, sum(each.num_updates for each in stats))

    update.run(batch, step=2, version=1)
    assert "language_model.decoder.layers.0.mlp.linear_fc1.weight" in moved(before, model)


@pytest.mark.parametrize("trunk", ["shared", "detached"])
def test_the_loss_of_a_detached_critic_stops_at_its_head(make_update, batch, trunk):
    """Without any policy gradient a shared trunk moves with its critic, a detached one does not."""
    update, model, _ = make_update(critic=CriticConfig(trunk=trunk), loss=LossConfig(behaviour_kl=0.0))
    start_value_head(update)
    before = weights(model)
    data = update.estimate(batch, update.score(batch))
    data.outputs = dataclasses.replace(data.outputs, advantages=torch.zeros_like(data.outputs.advantages))
    update.accumulate(batch, np.arange(len(batch.rows)), data, defaultdict(float))
    update.critic.step(update._rates(0, 1.0, alone=False))
    assert moved(before, model) == HEAD if trunk == "detached" else moved(before, model) > HEAD


def test_a_separate_critic_values_learns_and_leaves_the_policy_alone(make_update, batch):
    apart, policy, forbidden = make_update(critic=CriticConfig(trunk="separate"))
    start_value_head(apart)
    scores = apart.score(batch)
    assert scores.values.abs().sum() > 0 and scores.bootstrap_values.abs().sum() > 0, "the policy's own head is zero"
    critic = apart.critic.model
    assert critic is not policy
    before = weights(policy), weights(critic)
    apart.run(batch, step=0, version=1)
    assert not HEAD & moved(before[0], policy)
    found = moved(before[1], critic)
    assert HEAD < found and not any("output_layer" in name for name in found)


def test_the_critic_has_its_own_rate_and_warm_up(make_update, batch):
    critic = CriticConfig(lr=2e-3, warmup_updates=4)
    update, model, _ = make_update(
        critic=critic, optimizer=OptimizerConfig(lr=1e-4, warmup_updates=2), ppo_epochs=1, minibatch_rows=1000
    )
    rates = []
    apply = update.critic._policy.apply

    def spy(norm, lr, *, critic_lr=None):
        rates.append((lr, critic_lr))
        apply(norm, lr, critic_lr=critic_lr)
        groups = update.critic._policy.optimizer.param_groups
        assert {(group["is_decoupled_lr"], group["lr"]) for group in groups} == {(False, lr), (True, critic_lr)}

    update.critic._policy.apply = spy
    gain = None
    for step in range(3):
        stats = update.run(batch, step=step, version=1)
        policy_lr = update._config.optimizer.lr_at(step / 60, step)
        gain = gain or stats.lr / policy_lr
        assert stats.critic_lr == pytest.approx(critic.optimizer(update._config.optimizer).lr_at(step / 60, step))
    assert [critic for _, critic in rates] == pytest.approx([2e-3 / 4, 2e-3 / 2 * 0.985, 2e-3 * 3 / 4 * 0.97], rel=1e-6)
    assert 0 < gain < 1, "this batch is off policy, which damps the policy's rate alone"


@pytest.mark.parametrize("trunk", ["shared", "separate"])
def test_a_critic_with_the_policys_rate_changes_nothing_of_the_policy(make_update, batch, trunk):
    """A group of its own is no other arithmetic; a separate critic is one that the policy does not see."""
    results = []
    for critic in (CriticConfig(trunk="detached"), CriticConfig(trunk=trunk, warmup_updates=0)):
        update, model, _ = make_update(critic=critic, ppo_epochs=1, minibatch_rows=1000)
        before = weights(model)
        update.run(batch, step=0, version=1)
        results.append({name: x for name, x in weights(model).items() if name not in HEAD and name in before})
    # The head starts at zero, so that one step's trunk gradient is the policy's.
    for name, expected in results[0].items():
        torch.testing.assert_close(results[1][name], expected, atol=1e-5, rtol=1e-5)


def test_a_gradient_of_the_critic_that_is_not_finite_skips_both(make_update, batch):
    update, model, _ = make_update(critic=CriticConfig(trunk="separate"), ppo_epochs=1, minibatch_rows=1000)
    critic = update.critic.model
    next(critic.parameters()).register_hook(lambda gradient: gradient * float("inf"))
    start_value_head(update)
    before = weights(model), weights(critic)
    stats = update.run(batch, step=0, version=1)
    assert (stats.num_updates, stats.skipped_updates) == (1, 1)
    assert not moved(before[0], model) and not moved(before[1], critic)


@pytest.mark.parametrize(
    "settings", [{"critic": CriticConfig(trunk="separate")}, {"critic": CriticConfig(lr=1e-3)}, {"reference": HELD}]
)
def test_a_resumed_run_goes_on_to_the_bit(make_update, batch, tmp_path, settings):
    update, model, _ = make_update(**settings)
    for step in range(3):
        update.run(batch, step=step, version=1)
    trainer = update.critic._policy
    save_checkpoint(tmp_path / "c", model, trainer, {"n": update.num_updates}, update.beside_policy())
    expected = [update.run(batch, step=step, version=1).losses for step in (3, 4)]

    again, model, _ = make_update(**settings)
    record = load_checkpoint(tmp_path / "c", model, again.critic._policy, again.beside_policy())
    again.num_updates = again.num_critic_updates = record["n"]
    assert [again.run(batch, step=step, version=1).losses for step in (3, 4)] == expected


def test_a_checkpoint_without_the_critic_is_refused(make_update, tmp_path):
    update, model, _ = make_update()
    save_checkpoint(tmp_path / "c", model, update.critic._policy, {})
    apart, model, _ = make_update(critic=CriticConfig(trunk="separate"))
    with pytest.raises(CheckpointError, match=r"has \[\] beside the policy, expected \['critic'\]"):
        load_checkpoint(tmp_path / "c", model, apart.critic._policy, apart.beside_policy())


def test_a_trainer_that_does_not_fit_the_critic_is_refused(make_update):
    shared, model, forbidden = make_update()
    for critic, message in ((CriticConfig(trunk="separate"), "trunk: separate"), (CriticConfig(lr=1.0), "value head")):
        with pytest.raises(ConfigError, match=message):
            PolicyUpdate(
                model, shared.critic._policy, LearnerConfig(critic=critic), seed=0, forbidden_token_ids=forbidden
            )


def test_the_reference_becomes_the_policy_every_few_steps(make_update, batch):
    update, model, _ = make_update(reference=HELD)
    kls = []
    for step in range(5):
        before = weights(model)
        kls.append(update.run(batch, step=step, version=1).losses["reference_kl"])
        reference = dict(update._reference.named_parameters())
        is_refreshed = all(torch.equal(before[name], x) for name, x in reference.items() if name not in HEAD)
        assert is_refreshed == (step in (0, 2, 4))
    assert kls[2] < kls[1] and kls[4] < kls[3]


def test_schedules_end_where_they_say():
    config = OptimizerConfig(lr=1.0, lr_end_fraction=0.2, warmup_updates=0)
    for schedule, middle, end in (("linear", 0.6, 0.2), ("cosine", 0.6, 0.2), ("constant", 1.0, 1.0)):
        rates = [config.lr_at(progress, 0, schedule) for progress in (0.0, 0.5, 1.0, 1.5)]
        assert rates == pytest.approx([1.0, middle, end, end])
    assert config.lr_at(0.25, 0, "cosine") == pytest.approx(0.2 + 0.8 * (1 + 2**-0.5) / 2)
