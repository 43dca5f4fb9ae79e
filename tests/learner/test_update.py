"""One learner step on a small model: what must not matter does not, and the first loss is what the formula says."""

from __future__ import annotations

import io

import numpy as np
import pytest
import torch
from PIL import Image

from vagen.common.errors import TrajectoryError
from vagen.common.trajectory import BootstrapPrompt, End, ImageRef, RewardEntry, Row, Turn, content_hash
from vagen.learner.advantages.estimate import estimate_advantages
from vagen.learner.batching import RowPreparer, prepare_batch
from vagen.learner.config import LearnerConfig, ModelConfig, OptimizerConfig
from vagen.learner.model.actor_critic import VisionLanguageActorCritic
from vagen.learner.model.optimizer import AdamOptions, Trainer
from vagen.learner.model.parallel import parallel_session
from vagen.learner.model.tiny import save_tiny_model
from vagen.learner.update import PolicyUpdate, _advantage_inputs, score
from vagen.tools.tiny_tokenizer import train_tokenizer

SMALL = ModelConfig(
    hidden_size=64, intermediate_size=96, num_heads=2, num_kv_heads=1, vision_hidden_size=32, vision_num_heads=2
)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    directory = tmp_path_factory.mktemp("model") / "small"
    return save_tiny_model(SMALL, train_tokenizer(["Move to the goal."], [], 384), directory)


@pytest.fixture(scope="module", autouse=True)
def one_process():
    torch.set_num_threads(1)
    with parallel_session(seed=3):
        yield


@pytest.fixture
def make_update(model_dir):
    def make(**changes):
        model = VisionLanguageActorCritic.load_hf(model_dir)
        settings = {"minibatch_rows": 6, "ppo_epochs": 2, "optimizer": OptimizerConfig(warmup_updates=0)}
        config = LearnerConfig(**(settings | changes))
        trainer = Trainer(model, AdamOptions())
        forbidden = torch.tensor([model.hf_config.image_token_id])
        return PolicyUpdate(model, trainer, config, seed=5, forbidden_token_ids=forbidden), model, forbidden

    return make


@pytest.fixture
def batch(make_trajectory, model_dir):
    """Six trajectories of 1-3 no-concat turns with pictures, some truncated, from an older policy."""
    rng = np.random.default_rng(0)
    model = VisionLanguageActorCritic.load_hf(model_dir)
    image_id = model.hf_config.image_token_id
    trajectories = []
    for index in range(6):
        rows, turns, rewards, images = [], [], [], {}
        for turn in range(index % 3 + 1):
            buffer = io.BytesIO()
            Image.fromarray(rng.integers(0, 255, (56, 56, 3), dtype=np.uint8)).save(buffer, "PNG")
            encoded = buffer.getvalue()
            images[content_hash(encoded)] = encoded
            size = int(rng.integers(2, 6))
            ids = np.array([7, *[image_id] * 4, 8, *rng.integers(0, 250, size)], np.int32)
            mask = np.array([0] * 6 + [1] * size, np.uint8)
            rows.append(
                Row(
                    token_ids=ids,
                    policy_mask=mask,
                    behaviour_logprobs=np.where(mask, rng.uniform(-6, -5, len(ids)), 0).astype(np.float32),
                    policy_versions=np.where(mask, 1, -1).astype(np.int32),
                    turn_index=np.where(mask, turn, -1).astype(np.int16),
                    images=(ImageRef(content_hash=content_hash(encoded), grid_thw=(1, 4, 4), start=1, num_tokens=4),),
                )
            )
            turns.append(Turn(index=turn, row=turn, start=6, end=6 + size, format_ok=True, action_valid=True))
            rewards.append(RewardEntry(component="task", row=turn, token=5 + size, value=float(rng.normal())))
        truncated = index % 2 == 0
        prompt = BootstrapPrompt(token_ids=rows[-1].token_ids[:6], images=rows[-1].images)
        trajectories.append(
            make_trajectory(
                rows=tuple(rows),
                turns=tuple(turns),
                rewards=tuple(rewards),
                images=images,
                end=End.TRUNCATED if truncated else End.TERMINATED,
                bootstrap=prompt if truncated else None,
                group_id=f"g{index}",
            )
        )
    preparer = RowPreparer.load(model_dir, image_id, model.hf_config.text_config.vocab_size)
    return prepare_batch(trajectories, [0] * 6, {f"g{i}": i for i in range(6)}, preparer)


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


def test_the_first_loss_is_the_formula_by_hand(make_update, batch):
    update, model, forbidden = make_update(ppo_epochs=1, minibatch_rows=1000)
    scores = score(model, batch, 10_000, forbidden)
    outputs = estimate_advantages(_advantage_inputs(batch, scores), update._config.advantage)
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
