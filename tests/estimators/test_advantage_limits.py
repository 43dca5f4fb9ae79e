"""Importance-corrected estimators against the limits that define them."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from vagen.learner.advantages.config import AdvantageConfig
from vagen.learner.advantages.estimate import estimate_advantages

FIVE = ["bi_level_gae", "masked_gae", "default_gae", "turn_level_gae", "turn_wise_gae"]
UNCAPPED = dict(rho_bar=math.inf, c_bar=math.inf, turn_ratio="product", whiten=False)


def random_episode(episode, seed, turns, spread=0.5, **more):
    generator = torch.Generator().manual_seed(seed)
    rewards, values, log_ratio = torch.randn(3, sum(turns), generator=generator).tolist()
    return episode(turns, rewards, values, [spread * x for x in log_ratio], **more)


@pytest.mark.parametrize(("rho_bar", "c_bar"), [(1.0, 1.0), (2.0, 1.0), (0.7, 0.4), (math.inf, math.inf), (1.5, 0.0)])
@pytest.mark.parametrize("name", ["bi_level_gae", "masked_gae"])
def test_one_turn_is_v_trace_expanded_by_brute_force(batch, episode, name, rho_bar, c_bar):
    """`v_s - V_s = sum over t >= s of (g l)^(t-s) c_s ... c_(t-1) rho_t d_t`; the policy gets `d + g l X'`."""
    discount, lam = 0.97, 0.9
    one = random_episode(episode, 1, [7], bootstrap=0.3)
    config = AdvantageConfig(
        name=name,
        turn_discount=discount,
        turn_lambda=lam,
        token_discount=discount,
        token_lambda=lam,
        rho_bar=rho_bar,
        c_bar=c_bar,
        whiten=False,
    )

    out = estimate_advantages(batch(one), config)

    w = [math.exp(x) for x in one.log_ratio]
    v = [*one.values, 0.3]
    d = [one.rewards[t] + discount * v[t + 1] - v[t] for t in range(7)]
    x = [
        sum(
            (discount * lam) ** (t - s) * math.prod(min(c_bar, w[i]) for i in range(s, t)) * min(rho_bar, w[t]) * d[t]
            for t in range(s, 7)
        )
        for s in range(7)
    ] + [0.0]
    assert (out.value_targets - torch.tensor(one.values)).tolist() == pytest.approx(x[:7], abs=2e-6)
    assert out.advantages.tolist() == pytest.approx([d[s] + discount * lam * x[s + 1] for s in range(7)], abs=2e-6)


def test_without_traces_the_value_target_is_one_step_td(batch, episode):
    one = random_episode(episode, 2, [2, 3, 1])
    config = AdvantageConfig(c_bar=1e-12, rho_bar=1.2, turn_discount=0.9, turn_ratio="product", whiten=False)

    corrections = estimate_advantages(batch(one), config).value_targets - torch.tensor(one.values)

    r, v, x = one.rewards, one.values, one.log_ratio
    expected = [
        min(1.2, math.exp(x[0])) * (r[0] + v[1] - v[0]),
        min(1.2, math.exp(x[1] + x[2] + x[3])) * (r[1] + 0.9 * v[4] - v[1]),
        min(1.2, math.exp(x[2])) * (r[2] + v[3] - v[2]),
        min(1.2, math.exp(x[3])) * (r[3] + v[4] - v[3]),
        min(1.2, math.exp(x[4])) * (r[4] + 0.9 * v[5] - v[4]),
        min(1.2, math.exp(x[5])) * (r[5] - v[5]),
    ]
    assert corrections.tolist() == pytest.approx(expected, abs=2e-6)


def rows_of(one, harness):
    """Policy mask and packed indices of each row: all turns in one row, a row a turn, or two turns and the rest."""
    first = list(itertools.accumulate(one.turns, initial=0))
    turns = [list(range(a, b)) for a, b in itertools.pairwise(first)]
    cuts = {"concat": [turns], "no_concat": [[t] for t in turns], "compact": [turns[:2], turns[2:]]}[harness]
    for row in cuts:
        tokens = []
        for turn in row:
            tokens += [(0, None)] * 4 + [(1, j) for j in turn]
        yield tokens


@pytest.mark.parametrize("name", FIVE)
def test_rows_of_an_episode_do_not_matter(batch, episode, name):
    one = random_episode(episode, 3, [3, 1, 4, 2])
    results = []
    for harness in ("concat", "no_concat", "compact"):
        order = [j for row in rows_of(one, harness) for mask, j in row if mask]
        packed = episode(
            one.turns, *([column[j] for j in order] for column in (one.rewards, one.values, one.log_ratio))
        )
        results.append(estimate_advantages(batch(packed), AdvantageConfig(name=name)))

    for other in results[1:]:
        assert torch.equal(other.advantages, results[0].advantages)
        assert torch.equal(other.value_targets, results[0].value_targets)


@pytest.mark.parametrize("name", FIVE)
def test_other_segments_of_the_batch_do_not_matter(batch, episode, name):
    one = random_episode(episode, 4, [3, 1, 4, 2], bootstrap=0.4)
    noise = [random_episode(episode, seed, [5, 70, 1], bootstrap=9.0) for seed in (5, 6)]
    config = AdvantageConfig(name=name, whiten=False)

    alone = estimate_advantages(batch(one), config)
    among = estimate_advantages(batch(noise[0], one, noise[1]), config)

    assert among.advantages[76:86].tolist() == pytest.approx(alone.advantages.tolist(), abs=1e-6)
    assert among.value_targets[76:86].tolist() == pytest.approx(alone.value_targets.tolist(), abs=1e-6)


@pytest.mark.parametrize("name", ["bi_level_gae", "turn_wise_gae"])
@pytest.mark.parametrize("cut", [1, 2, 3])
def test_cutting_an_episode_changes_nothing_when_the_bootstrap_is_the_lambda_value(batch, episode, name, cut):
    turns = [3, 1, 4, 2]
    whole = random_episode(episode, 7, turns, spread=0.0)
    config = AdvantageConfig(name=name, turn_discount=0.9, turn_lambda=0.8, token_lambda=0.7, whiten=False)
    out = estimate_advantages(batch(whole), config)
    kept, anchor = sum(turns[:cut]), sum(turns[: cut + 1]) - 1
    correction = out.value_targets[anchor].item() - whole.values[anchor]
    fragment = episode(
        turns[:cut], whole.rewards[:kept], whole.values[:kept], bootstrap=whole.values[anchor] + 0.8 * correction
    )

    of_fragment = estimate_advantages(batch(fragment), config).advantages

    assert of_fragment.tolist() == pytest.approx(out.advantages[:kept].tolist(), abs=2e-6)


TARGET, BEHAVIOUR = 0.8, 0.5


def turn_rewards(t):
    return t[0] + 2 * t[1], 3 * t[0] * t[2] - t[3]


def all_sixteen_episodes(batch, episode, corrected=True):
    """Two turns of two binary tokens, sampled uniformly; the critic is wrong on purpose."""
    episodes = []
    for tokens in itertools.product((0, 1), repeat=4):
        first, second = turn_rewards(tokens)
        ratios = [math.log((TARGET if t else 1 - TARGET) / BEHAVIOUR) if corrected else 0.0 for t in tokens]
        episodes.append(episode((2, 2), (0, first, 0, second), (0.3, 0.7, -0.2, 0.4), ratios))
    return batch(*episodes)


EXACT = AdvantageConfig(turn_discount=0.9, turn_lambda=1.0, token_discount=1.0, token_lambda=1.0, **UNCAPPED)


@pytest.mark.parametrize(("corrected", "expected"), [(True, 3.408), (False, 1.725)])
def test_values_are_unbiased(batch, episode, corrected, expected):
    out = estimate_advantages(all_sixteen_episodes(batch, episode, corrected), EXACT)

    assert out.value_targets.view(16, 4)[:, 0].mean().item() == pytest.approx(expected, abs=1e-6)


def test_policy_advantages_at_a_turn_end_are_unbiased(batch, episode):
    out = estimate_advantages(all_sixteen_episodes(batch, episode), EXACT)

    given_first_turn = out.advantages.view(4, 4, 4)[:, :, 1].mean(1)

    assert given_first_turn.tolist() == pytest.approx([-1.42, 0.58, 1.74, 3.74], abs=1e-6)


@pytest.mark.parametrize(
    ("name", "more"),
    [("masked_gae", {}), ("turn_level_gae", {}), ("bi_level_gae", {"turn_anchor": "start"})],
)
def test_values_of_the_other_estimators_are_unbiased(batch, episode, name, more):
    """Turn discount 1, so that all of them estimate the same value: 2.4 + 1.12."""
    config = AdvantageConfig(name=name, turn_discount=1.0, turn_lambda=1.0, **UNCAPPED, **more)

    out = estimate_advantages(all_sixteen_episodes(batch, episode), config)

    truth = sum(
        math.prod(TARGET if t else 1 - TARGET for t in tokens) * sum(turn_rewards(tokens))
        for tokens in itertools.product((0, 1), repeat=4)
    )
    assert out.value_targets.view(16, 4)[:, 0].mean().item() == pytest.approx(truth, abs=1e-5)


def test_a_turn_of_one_token_makes_bi_level_and_masked_the_same(batch, episode):
    one = random_episode(episode, 8, [1] * 9, bootstrap=0.2)
    shared = dict(rho_bar=0.9, c_bar=0.6, whiten=False)

    turns = estimate_advantages(batch(one), AdvantageConfig(turn_discount=0.9, turn_lambda=0.8, **shared))
    tokens = estimate_advantages(
        batch(one), AdvantageConfig(name="masked_gae", token_discount=0.9, token_lambda=0.8, **shared)
    )

    assert turns.advantages.tolist() == pytest.approx(tokens.advantages.tolist(), abs=1e-6)
    assert turns.value_targets.tolist() == pytest.approx(tokens.value_targets.tolist(), abs=1e-6)


def test_start_anchors_make_turn_wise_and_turn_level_the_same(batch, episode):
    inputs = batch(random_episode(episode, 9, [3, 1, 4]))

    wise = estimate_advantages(inputs, AdvantageConfig(name="turn_wise_gae", turn_anchor="start", whiten=False))
    level = estimate_advantages(inputs, AdvantageConfig(name="turn_level_gae", whiten=False))

    assert torch.equal(wise.advantages, level.advantages)
    assert torch.equal(wise.value_mask, level.value_mask)


def test_start_anchors_at_discount_and_lambda_one_are_masked_gae(batch, episode):
    one = random_episode(episode, 10, [3, 1, 4], spread=0.0, bootstrap=0.7)
    start = AdvantageConfig(turn_anchor="start", turn_discount=1.0, turn_lambda=1.0, whiten=False)

    out = estimate_advantages(batch(one), start)
    masked = estimate_advantages(batch(one), AdvantageConfig(name="masked_gae", whiten=False))

    assert out.advantages.tolist() == pytest.approx(masked.advantages.tolist(), abs=2e-6)
