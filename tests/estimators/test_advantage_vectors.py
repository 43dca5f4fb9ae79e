"""Every estimator against literal numbers: the published code's, or worked by hand."""

from __future__ import annotations

import pytest
import torch

from vagen.learner.advantages.config import AdvantageConfig
from vagen.learner.advantages.estimate import estimate_advantages

RESTATED = dict(turns=(3, 2), rewards=(0, 0, 1, 0, 2), values=(0.5, 0.4, 0.6, 0.8, 1.0))


def settings(name, g=1.0, token_lambda=1.0, g_t=1.0, turn_lambda=1.0, **more):
    return AdvantageConfig(
        name=name,
        token_discount=g,
        token_lambda=token_lambda,
        turn_discount=g_t,
        turn_lambda=turn_lambda,
        **{"whiten": False, **more},
    )


TABLE = [
    (settings("bi_level_gae", 1, 0.9, 0.9, 0.9), [1.7891, 2.099, 2.11, 1.1, 1.0], [2.2891, 2.499, 2.71, 1.9, 2.0]),
    (settings("bi_level_gae", 1, 1, 0.95, 1), [2.4, 2.5, 2.3, 1.2, 1.0], [2.9, 2.9, 2.9, 2.0, 2.0]),
    (settings("bi_level_gae"), [2.5, 2.6, 2.4, 1.2, 1.0], None),
    (settings("masked_gae"), [2.5, 2.6, 2.4, 1.2, 1.0], None),
    (settings("masked_gae", 1, 0.9), [1.8539, 2.171, 2.19, 1.1, 1.0], [2.3539, 2.571, 2.79, 1.9, 2.0]),
    (settings("token_level_gae", 1, 0.9), [1.8539, 2.171, 2.19, 1.1, 1.0], [2.3539, 2.571, 2.79, 1.9, 2.0]),
    (settings("turn_wise_gae", 1, 1, 0.9, 0.9), [2.11] * 3 + [1.0] * 2, [None, None, 2.71, None, 2.0]),
    (settings("turn_level_gae", 1, 1, 0.9, 0.9), [2.192] * 3 + [1.2] * 2, [2.692, None, None, 2.0, None]),
    (settings("vl_dac", 1, 1, 0.9, 0.9), [2.192] * 3 + [1.2] * 2, [2.692, None, None, 2.0, None]),
    (settings("vl_dac", 1, 1, 0.5, 1), [1.5] * 3 + [1.2] * 2, [2.0, None, None, 2.0, None]),
    (settings("default_gae", 1, 0.9), [1.7, 2.0, 2.0, 2.0, 2.0], None),
    (settings("default_gae"), [2.5, 2.6, 2.4, 2.2, 2.0], None),
]


@pytest.mark.parametrize("correction", ["none", "vtrace"])
@pytest.mark.parametrize(("config", "advantages", "returns"), TABLE, ids=lambda row: getattr(row, "name", ""))
def test_published_numbers_when_every_ratio_is_one(batch, episode, device, config, advantages, returns, correction):
    config = AdvantageConfig(
        **{f: getattr(config, f) for f in config.__struct_fields__} | {"importance_correction": correction}
    )

    out = estimate_advantages(batch(episode(**RESTATED), device=device), config)

    assert out.advantages.dtype == out.value_targets.dtype == torch.float32
    assert out.advantages.tolist() == pytest.approx(advantages, abs=1e-6)
    returns = returns or [a + v for a, v in zip(advantages, RESTATED["values"], strict=True)]
    assert out.value_mask.tolist() == [target is not None for target in returns]
    for target, expected in zip(out.value_targets.tolist(), returns, strict=True):
        assert expected is None or target == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(
    ("config", "whitened"),
    [
        (settings("bi_level_gae", 1, 0.9, 0.9, 0.9), [0.315679, 0.892910, 0.913399, -0.967862, -1.154125]),
        (settings("bi_level_gae", 1, 1, 0.95, 1), [0.723199, 0.862276, 0.584123, -0.945722, -1.223876]),
        (settings("turn_wise_gae", 1, 1, 0.9, 0.9), [0.707107] * 3 + [-0.707107] * 2),
    ],
)
def test_published_whitened_numbers(batch, episode, config, whitened):
    config = AdvantageConfig(**{f: getattr(config, f) for f in config.__struct_fields__} | {"whiten": True})

    assert estimate_advantages(batch(episode(**RESTATED)), config).advantages.tolist() == pytest.approx(
        whitened, abs=2e-6
    )


@pytest.mark.parametrize(("position", "advantages"), [(1, [2.3, 2.4, 2.3, 1.2, 1.0]), (3, [2.4, 2.5, 2.3, 1.1, 1.0])])
def test_a_reward_inside_a_turn_reaches_no_earlier_turn(batch, episode, position, advantages):
    rewards = list(RESTATED["rewards"])
    rewards[position] = -0.1

    out = estimate_advantages(batch(episode(**RESTATED | {"rewards": rewards})), settings("bi_level_gae", g_t=0.95))

    assert out.advantages.tolist() == pytest.approx(advantages, abs=1e-6)


def test_truncated_segment_bootstraps_with_the_discount_of_its_level(batch, episode):
    cut = batch(episode(**RESTATED, bootstrap=10.0))

    last = {
        name: estimate_advantages(cut, settings(name, g=0.5, g_t=0.9)).advantages[-1].item()
        for name in ("bi_level_gae", "turn_wise_gae", "masked_gae")
    }

    # R + discount * V_boot - V of the last token
    assert last == pytest.approx({"bi_level_gae": 10.0, "turn_wise_gae": 10.0, "masked_gae": 6.0})


def test_trajectory_grpo(batch, episode):
    """Totals 1 and 3: mean 2, population std 1; totals 0, 0 and 6: mean 2, std sqrt(8)."""
    groups = [(2, 1.0, 0), (1, 3.0, 0), (1, 0.0, 1), (1, 6.0, 1), (2, 0.0, 1)]
    inputs = batch(*[episode(turns=[n], rewards=[0] * (n - 1) + [r], group=group) for n, r, group in groups])

    out = estimate_advantages(inputs, settings("trajectory_grpo", whiten=True))

    a, b, c = 1 / (1 + 1e-6), 2 / (8**0.5 + 1e-6), 4 / (8**0.5 + 1e-6)
    assert out.advantages.tolist() == pytest.approx([-a, -a, a, -b, c, -b, -b], abs=1e-7)
    assert not out.value_mask.any()


def test_rloo(batch, episode):
    """Totals 1, 2 and 6: minus the mean of the other two, 4, 3.5 and 1.5. Alone in its group: 0."""
    inputs = batch(
        episode(turns=[1, 1], rewards=[0.25, 0.75]),
        episode(turns=[1], rewards=[2]),
        episode(turns=[1], rewards=[6]),
        episode(turns=[1], rewards=[5], group=1),
    )

    assert estimate_advantages(inputs, settings("rloo")).advantages.tolist() == [-3, -3, -1.5, 4.5, 0]


def test_gtpo_normalises_over_all_turns_of_the_group(batch, episode):
    """g_t = .5. Turn rewards (1, 0) give returns 1, 0; (0, 2) give 1, 2: mean 1, population std sqrt(1/2)."""
    inputs = batch(
        episode(turns=[2, 1], rewards=[0.5, 0.5, 0]), episode(turns=[1, 1], rewards=[0, 2]), episode([1], [7], group=1)
    )

    out = estimate_advantages(inputs, settings("gtpo", g_t=0.5))

    a = 1 / (0.5**0.5 + 1e-6)
    assert out.advantages.tolist() == pytest.approx([0, 0, -a, 0, a, 0], abs=1e-6)


@pytest.mark.parametrize("name", ["trajectory_grpo", "rloo", "gtpo"])
@pytest.mark.parametrize("num_episodes", [2, 3, 7, 10])
def test_a_group_of_equal_rewards_gives_exactly_zero(batch, episode, name, num_episodes):
    equal = [episode(turns=[2], rewards=[0.1, 0.7]) for _ in range(num_episodes)]
    unequal = [episode(turns=[1], rewards=[r], group=1) for r in (0.0, 1.0)]

    out = estimate_advantages(batch(*equal, *unequal), settings(name, whiten=True))

    assert out.advantages[:-2].abs().max().item() == 0.0
    assert out.advantages[-2:].abs().min().item() > 0.4


def test_equal_totals_added_in_another_order_give_exactly_zero(batch, episode):
    """Thirty times .02 is one float32 step from .6."""
    orders = ([0.1, 0.2, 0.3], [0.3, 0.2, 0.1], [0.6], [-0.1, 0.4, 0.3], [0.02] * 30)
    inputs = batch(*[episode(turns=[len(r)], rewards=r) for r in orders])

    assert estimate_advantages(inputs, settings("trajectory_grpo")).advantages.abs().max().item() == 0.0


def test_equal_advantages_whiten_to_exactly_zero(batch, episode):
    inputs = batch(*[episode(turns=[1], rewards=[0.1]) for _ in range(7)])

    assert estimate_advantages(inputs, settings("masked_gae", whiten=True)).advantages.abs().max().item() == 0.0
