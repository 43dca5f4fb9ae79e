"""The policy loss: literal numbers, a slow reference for every combination, gradients, and what is refused."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from vagen.common.config import convert
from vagen.common.errors import ConfigError, TrajectoryError
from vagen.learner.losses.config import LossConfig
from vagen.learner.losses.policy import PolicyLossInputs, behaviour_kl, interpolated_logprobs, policy_loss
from vagen.learner.losses.weights import BehaviourWeights, behaviour_weights, loss_weights

PLAIN = dict(behaviour_kl=0.0, behaviour_weight="none")


def one_token(ratio, advantage, *, weight=1.0, **more):
    """A token whose current probability is `ratio` times the proximal, `weight` the proximal over the behaviour."""
    proximal = torch.tensor([-1.0])
    return PolicyLossInputs(
        logprobs=(proximal + math.log(ratio)).requires_grad_(),
        behaviour_logprobs=proximal - math.log(weight),
        proximal_logprobs=proximal,
        advantages=torch.tensor([float(advantage)]),
        loss_weights=torch.ones(1),
        sequence_ids=torch.zeros(1, dtype=torch.int64),
        **more,
    )


def loss_and_gradient(inputs, config):
    loss, diagnostics = policy_loss(inputs, config)
    (gradient,) = torch.autograd.grad(loss, inputs.logprobs)
    return loss.item(), gradient.tolist(), {name: tensor.item() for name, tensor in diagnostics.items()}


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "gradient", "clip_share"),
    [
        (1.1, 2.0, -2.2, -2.2, 0),
        (1.5, 2.0, -2.56, 0.0, 1),  # 1 + .28
        (0.5, 2.0, -1.0, -1.0, 0),
        (1.5, -2.0, 3.0, 3.0, 0),
        (0.5, -2.0, 1.6, 0.0, 1),  # 1 - .2
        (9.0, -2.0, 18.0, 18.0, 0),
    ],
)
def test_asymmetric_clip(ratio, advantage, loss, gradient, clip_share):
    found = loss_and_gradient(one_token(ratio, advantage), LossConfig(**PLAIN))

    assert found[0] == pytest.approx(loss, rel=1e-6)
    assert found[1] == pytest.approx([gradient], rel=1e-6)
    assert found[2]["clip_share"] == clip_share


def test_dual_clip_bounds_the_loss_of_a_negative_advantage():
    config = LossConfig(dual_clip=3.0, **PLAIN)

    assert loss_and_gradient(one_token(9.0, -2.0), config)[:2] == (pytest.approx(6.0), [0.0])
    assert loss_and_gradient(one_token(2.0, -2.0), config)[:2] == (pytest.approx(4.0), [pytest.approx(4.0)])
    assert loss_and_gradient(one_token(9.0, 2.0), config)[0] == pytest.approx(-2.56)


def test_decoupled_ppo_clips_against_the_proximal_and_weighs_by_the_truncated_ratio():
    config = LossConfig(behaviour_kl=0.0)

    assert loss_and_gradient(one_token(1.1, 2.0, weight=1.5), config)[0] == pytest.approx(-2.2 * 1.5, rel=1e-6)
    loss, gradient, diagnostics = loss_and_gradient(one_token(1.1, 2.0, weight=7.0), config)
    assert (loss, gradient[0]) == (pytest.approx(-2.2 * 2.0), pytest.approx(-2.2 * 2.0))
    assert diagnostics["truncated_share"] == 1 and diagnostics["behaviour_weight"] == pytest.approx(2.0)


def test_behaviour_anchored_ppo_clips_the_whole_ratio():
    config = LossConfig(anchor="behaviour", **PLAIN)

    assert loss_and_gradient(one_token(1.1, 2.0, weight=1.1), config)[0] == pytest.approx(-2.42, rel=1e-6)
    assert loss_and_gradient(one_token(1.1, 2.0, weight=1.3), config)[0] == pytest.approx(-2.56, rel=1e-6)


def test_cispo_keeps_the_gradient_of_a_clipped_token():
    config = LossConfig(objective="cispo", **PLAIN)

    loss, gradient, diagnostics = loss_and_gradient(one_token(1.5, 2.0), config)
    assert loss == pytest.approx(-1.28 * 2.0 * (math.log(1.5) - 1.0), rel=1e-6)
    assert gradient == pytest.approx([-2.56], rel=1e-6)
    assert diagnostics["clip_share"] == 1
    assert loss_and_gradient(one_token(0.5, 2.0), config)[1] == pytest.approx([-1.0], rel=1e-6)


def test_gspo_clips_a_sequence_by_its_geometric_mean_ratio():
    """Sequences with ratios (4, 1/4), whose mean is 1, and (2, 2), which is clipped as a whole."""
    logprobs = torch.tensor([4.0, 0.25, 2.0, 2.0]).log().requires_grad_()
    inputs = PolicyLossInputs(
        logprobs=logprobs,
        behaviour_logprobs=torch.zeros(4),
        proximal_logprobs=torch.zeros(4),
        advantages=torch.ones(4),
        loss_weights=torch.full((4,), 0.25),
        sequence_ids=torch.tensor([7, 7, 9, 9]),
    )

    loss, gradient, diagnostics = loss_and_gradient(inputs, LossConfig(objective="gspo", **PLAIN))

    assert loss == pytest.approx(-(1 + 1 + 1.28 + 1.28) / 4, rel=1e-6)
    assert gradient == pytest.approx([-0.25, -0.25, 0, 0], rel=1e-6)
    assert diagnostics["clip_share"] == 0.5


def test_interpolated_proximal():
    """From the behaviour policy (staleness 0) towards the current one; never through the gradient."""
    logprobs = torch.full((3,), -1.0, requires_grad=True)

    anchor = interpolated_logprobs(logprobs, torch.full((3,), -2.0), torch.tensor([0, 1, 3]))

    assert anchor.tolist() == [-2.0, -1.5, -1.25]
    assert not anchor.requires_grad
    inputs = one_token(1.2, 2.0, staleness=torch.tensor([1]))
    config = LossConfig(anchor="interpolated", behaviour_kl=0.0)
    # half-way in log space: weight and ratio are both sqrt(1.2)
    assert loss_and_gradient(inputs, config)[0] == pytest.approx(-1.2 * 2.0, rel=1e-6)
    assert loss_and_gradient(inputs, config)[1] == pytest.approx([-1.2 * 2.0], rel=1e-6)


def test_behaviour_kl_is_k3_with_a_capped_exponent():
    logprobs = torch.tensor([-1.0, -1.0, -2.0, -50.0], requires_grad=True)
    behaviour = torch.tensor([-1.0, -2.0, -1.0, -1.0])

    kl = behaviour_kl(logprobs, behaviour)
    (gradient,) = torch.autograd.grad(kl.sum(), logprobs)

    assert kl.tolist() == pytest.approx([0.0, math.exp(-1), math.e - 2, math.exp(10) - 11], rel=1e-6)
    assert gradient.tolist() == pytest.approx([0.0, 1 - math.exp(-1), 1 - math.e, 0.0], rel=1e-6)


def test_entropy_and_kl_enter_with_their_weights():
    inputs = one_token(1.0, 2.0, weight=math.exp(-1), entropy=torch.tensor([0.7]))
    config = LossConfig(behaviour_weight="none", behaviour_kl=0.1, entropy_bonus=0.01)

    loss, _, diagnostics = loss_and_gradient(inputs, config)

    assert loss == pytest.approx(-2.0 + 0.1 * (math.e - 2) - 0.01 * 0.7, rel=1e-6)
    assert diagnostics["behaviour_kl"] == pytest.approx(math.e - 2, rel=1e-6)
    assert diagnostics["entropy"] == pytest.approx(0.7)


RATIOS = [0.25, 0.5, 1.0, 2.0, 4.0, 6.0]


@pytest.mark.parametrize(
    ("config", "weights", "rejected", "truncated"),
    [
        ({"behaviour_weight": "none"}, [1, 1, 1, 1, 1, 1], [], []),
        ({"behaviour_weight": "token_tis"}, [0.25, 0.5, 1, 2, 2, 2], [], [4, 5]),
        # products over the sequences: .125, 2 and 24
        ({"behaviour_weight": "sequence_tis"}, [0.125, 0.125, 2, 2, 2, 2], [], [4, 5]),
        ({"behaviour_weight": "token_reject"}, [0, 1, 1, 1, 0, 0], [0, 4, 5], []),
        ({"behaviour_weight": "token_reject", "keep_range": (0.2, 5)}, [1, 1, 1, 1, 1, 0], [5], []),
        ({"behaviour_weight": "icepop"}, [0, 0.5, 1, 2, 4, 0], [0, 5], []),
        # squared logs ascending: 0, .48, .48, 1.92, 1.92, 3.21; their running means: 0, .24, .32, .72, .96, 1.34
        ({"behaviour_weight": "m2po", "m2po_threshold": 0.33}, [0, 1, 1, 1, 0, 0], [0, 4, 5], []),
        ({"behaviour_weight": "m2po", "m2po_threshold": 0.97}, [1, 1, 1, 1, 1, 0], [5], []),
        ({"behaviour_weight": "m2po", "m2po_threshold": 9.0}, [1, 1, 1, 1, 1, 1], [], []),
    ],
)
def test_behaviour_weights(config, weights, rejected, truncated):
    # a hair inside, so that the bounds 0.5, 2 and 5 do not hang on rounding
    log_ratio = torch.tensor(RATIOS, dtype=torch.float32).log() * (1 - 1e-6)
    sequence_ids = torch.tensor([3, 3, 4, 4, 8, 8])

    found = behaviour_weights(log_ratio.requires_grad_(), sequence_ids, LossConfig(**config))

    assert found.weights.tolist() == pytest.approx(weights, rel=1e-5)
    assert found.rejected.nonzero().flatten().tolist() == rejected
    assert found.truncated.nonzero().flatten().tolist() == truncated
    assert not found.weights.requires_grad


@pytest.mark.parametrize(
    ("weighting", "expected"),
    [
        ("token", [1 / 5] * 5),
        ("turn", [1 / 6, 1 / 6, 1 / 3, 1 / 6, 1 / 6]),
        ("sequence", [1 / 6, 1 / 6, 1 / 6, 1 / 4, 1 / 4]),
    ],
)
def test_loss_weights(weighting, expected):
    turn_ids, sequence_ids = torch.tensor([1, 1, 4, 5, 5]), torch.tensor([0, 0, 0, 1, 1])

    assert loss_weights(turn_ids, sequence_ids, weighting).tolist() == pytest.approx(expected)
    halved = loss_weights(
        turn_ids, sequence_ids, weighting, count=2 * {"token": 5, "turn": 3, "sequence": 2}[weighting]
    )
    assert halved.tolist() == pytest.approx([x / 2 for x in expected])


def random_inputs(seed=0, n=24, **more):
    generator = torch.Generator().manual_seed(seed)
    proximal = -torch.rand(n, generator=generator) - 0.5
    tensors = dict(
        logprobs=(proximal + 0.3 * torch.randn(n, generator=generator)).requires_grad_(),
        behaviour_logprobs=proximal + 0.5 * torch.randn(n, generator=generator),
        proximal_logprobs=proximal,
        advantages=torch.randn(n, generator=generator),
        sequence_ids=torch.arange(n) // 4,
        staleness=torch.arange(n) % 5,
        entropy=torch.rand(n, generator=generator).requires_grad_(),
    )
    tensors["loss_weights"] = loss_weights(
        torch.arange(n) // 2, tensors["sequence_ids"], more.pop("weighting", "token")
    )
    return PolicyLossInputs(**tensors | more)


def slow_reference(inputs, config):
    """Loss by a loop over tokens of Python floats."""

    def column(tensor):
        return tensor.double().tolist()

    pi, mu, a = column(inputs.logprobs), column(inputs.behaviour_logprobs), column(inputs.advantages)
    m, s, prox = column(inputs.loss_weights), inputs.staleness.tolist(), column(inputs.proximal_logprobs)
    ids, n = inputs.sequence_ids.tolist(), len(pi)
    mid = [mu[j] + s[j] / (s[j] + 1) * (pi[j] - mu[j]) for j in range(n)]
    anchor = {"proximal": prox, "behaviour": mu, "interpolated": mid}[config.anchor]
    stale = mid if config.anchor == "interpolated" else prox
    lw = [stale[j] - mu[j] for j in range(n)]
    low, high = config.kept_ratios
    dropped = set()
    by_size = sorted(range(n), key=lambda j: -(lw[j] ** 2))
    while config.behaviour_weight == "m2po" and len(dropped) < n:
        rest = [lw[j] ** 2 for j in by_size[len(dropped) :]]
        if sum(rest) / len(rest) < config.m2po_threshold:
            break
        dropped.add(by_size[len(dropped)])
    total = 0.0
    for j in range(n):
        mates = [i for i in range(n) if ids[i] == ids[j]]
        w, wide = math.exp(lw[j]), math.exp(sum(lw[i] for i in mates))
        weight = {
            "none": 1.0,
            "token_tis": min(w, config.weight_cap),
            "sequence_tis": min(wide, config.weight_cap),
            "token_reject": float(low <= w <= high),
            "icepop": w if low <= w <= high else 0.0,
            "m2po": float(j not in dropped),
        }[config.behaviour_weight]
        ratio = math.exp(pi[j] - anchor[j])
        if config.objective == "gspo":
            ratio = math.exp(sum(pi[i] - anchor[i] for i in mates) / len(mates))
        if config.objective == "cispo":
            objective = min(ratio, 1 + config.clip_high) * a[j] * pi[j]
        else:
            clipped = max(1 - config.clip_low, min(1 + config.clip_high, ratio))
            objective = min(ratio * a[j], clipped * a[j])
            if config.dual_clip is not None and a[j] < 0:
                objective = max(objective, config.dual_clip * a[j])
        kl = math.exp(mu[j] - pi[j]) - 1 - (mu[j] - pi[j])
        total += m[j] * (
            -weight * objective + config.behaviour_kl * kl - config.entropy_bonus * inputs.entropy[j].item()
        )
    return total


COMBINATIONS = [
    dict(objective=objective, anchor=anchor, behaviour_weight=weight)
    for objective, anchor, weight in itertools.product(
        ("ppo_clip", "gspo", "cispo"),
        ("proximal", "behaviour", "interpolated"),
        ("none", "token_tis", "sequence_tis", "token_reject", "icepop", "m2po"),
    )
    if not (anchor == "behaviour" and weight in ("token_tis", "sequence_tis", "icepop"))
    and not (anchor == "interpolated" and weight in ("sequence_tis", "m2po"))
]


@pytest.mark.parametrize("combination", COMBINATIONS, ids=lambda c: "-".join(c.values()))
@pytest.mark.parametrize("weighting", ["token", "turn", "sequence"])
def test_every_combination_agrees_with_the_slow_reference(combination, weighting):
    config = LossConfig(dual_clip=1.1, m2po_threshold=0.1, entropy_bonus=0.05, weighting=weighting, **combination)
    for seed in range(3):
        inputs = random_inputs(seed, weighting=weighting)

        assert policy_loss(inputs, config)[0].item() == pytest.approx(slow_reference(inputs, config), abs=2e-6)


def test_micro_batches_add_up():
    """Losses, gradients and diagnostics, with the weights of the whole batch (here: those that need all of it)."""
    config = LossConfig(behaviour_weight="m2po", m2po_threshold=0.1, entropy_bonus=0.05, weighting="sequence")
    whole = random_inputs(weighting="sequence")
    weights = behaviour_weights(whole.proximal_logprobs - whole.behaviour_logprobs, whole.sequence_ids, config)
    assert 0 < weights.rejected.sum() < 24
    loss, diagnostics = policy_loss(whole, config)
    (gradient,) = torch.autograd.grad(loss, whole.logprobs)

    total, sums, gradients = 0.0, dict.fromkeys(diagnostics, 0.0), []
    for part in (slice(0, 6), slice(6, 24)):
        logprobs = whole.logprobs.detach()[part].requires_grad_()
        fields = {name: getattr(whole, name)[part] for name in whole.__dataclass_fields__ if name != "weights"}
        of_part = type(weights)(*(getattr(weights, name)[part] for name in weights.__dataclass_fields__))
        partial, numbers = policy_loss(PolicyLossInputs(**fields | {"logprobs": logprobs, "weights": of_part}), config)
        total += partial.item()
        gradients.append(torch.autograd.grad(partial, logprobs)[0])
        sums = {name: sums[name] + numbers[name].item() for name in sums}

    assert total == pytest.approx(loss.item(), abs=1e-6)
    assert torch.cat(gradients).tolist() == pytest.approx(gradient.tolist(), abs=1e-6)
    assert sums == pytest.approx({name: tensor.item() for name, tensor in diagnostics.items()}, abs=1e-6)


def test_rejected_tokens_stay_in_the_denominator():
    """Two tokens of which one is rejected: the other counts a half, not all."""
    inputs = PolicyLossInputs(
        logprobs=torch.zeros(2, requires_grad=True),
        behaviour_logprobs=torch.tensor([0.0, -3.0]),
        proximal_logprobs=torch.zeros(2),
        advantages=torch.ones(2),
        loss_weights=loss_weights(torch.arange(2), torch.arange(2), "token"),
        sequence_ids=torch.arange(2),
    )

    loss, gradient, diagnostics = loss_and_gradient(inputs, LossConfig(behaviour_weight="token_reject", behaviour_kl=0))

    assert loss == -0.5 and gradient == [-0.5, 0.0]
    assert diagnostics["rejected_share"] == 0.5


@pytest.mark.parametrize("combination", COMBINATIONS, ids=lambda c: "-".join(c.values()))
def test_only_logprobs_and_entropy_carry_gradients(combination):
    leaves = ("behaviour_logprobs", "proximal_logprobs", "advantages", "loss_weights")
    fixed = random_inputs()
    inputs = random_inputs(**{name: getattr(fixed, name).clone().requires_grad_() for name in leaves})

    policy_loss(inputs, LossConfig(entropy_bonus=0.05, **combination))[0].backward()

    assert all(getattr(inputs, name).grad is None for name in leaves)
    assert inputs.logprobs.grad.isfinite().all()
    assert inputs.entropy.grad.tolist() == pytest.approx([-0.05 / 24] * 24)


def test_weights_given_from_outside_are_constants():
    given = torch.full((24,), 0.5, requires_grad=True)
    nothing = torch.zeros(24, dtype=torch.bool)
    inputs, plain = random_inputs(weights=BehaviourWeights(given, nothing, nothing)), random_inputs()

    loss = policy_loss(inputs, LossConfig(behaviour_kl=0.0))[0]
    loss.backward()

    assert loss.item() == pytest.approx(0.5 * policy_loss(plain, LossConfig(**PLAIN))[0].item())
    assert given.grad is None


@pytest.mark.parametrize("weight", ["none", "token_tis"])
def test_gradient_is_that_of_finite_differences(weight):
    inputs = random_inputs()
    config = LossConfig(behaviour_weight=weight)
    (gradient,) = torch.autograd.grad(policy_loss(inputs, config)[0], inputs.logprobs)

    for j in range(0, 24, 5):
        losses = []
        for step in (1e-4, -1e-4):
            moved = inputs.logprobs.detach().double().clone()
            moved[j] += step
            losses.append(slow_reference(random_inputs(logprobs=moved), config))
        assert gradient[j].item() == pytest.approx((losses[0] - losses[1]) / 2e-4, abs=1e-5)


@pytest.mark.parametrize("objective", ["ppo_clip", "gspo", "cispo"])
def test_extreme_ratios_stay_finite(objective):
    inputs = random_inputs(logprobs=torch.tensor([-500.0, 0.0] * 12, requires_grad=True))

    loss, _ = policy_loss(inputs, LossConfig(objective=objective))
    (gradient,) = torch.autograd.grad(loss, inputs.logprobs)

    assert loss.isfinite() and gradient.isfinite().all()


@pytest.mark.parametrize(
    ("change", "config", "message"),
    [
        ({"proximal_logprobs": None}, {}, "proximal_logprobs: required by"),
        ({"staleness": None}, {"anchor": "interpolated"}, "staleness: required by"),
        ({"entropy": None}, {"entropy_bonus": 0.1}, "entropy: required by"),
        ({"proximal_logprobs": None}, {"anchor": "behaviour", "behaviour_weight": "m2po"}, "proximal_logprobs: requir"),
        ({"advantages": torch.ones(3)}, {}, r"advantages: expected shape \[24\], got \[3\]"),
    ],
)
def test_missing_and_misshapen_inputs_are_refused(change, config, message):
    with pytest.raises(TrajectoryError, match=message):
        policy_loss(random_inputs(**change), LossConfig(**config))


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ({"clip_low": 1.0}, r"\$.learner.loss.clip_low: expected float in \(0, 1\), got 1.0"),
        ({"clip_high": 0.0}, "clip_high: expected float > 0, got 0.0"),
        ({"dual_clip": 1.0}, "dual_clip: expected null or float > 1, got 1.0"),
        ({"weight_cap": 0.0}, "weight_cap: expected float > 0"),
        ({"behaviour_kl": -0.1}, "behaviour_kl: expected float >= 0, got -0.1"),
        ({"value_weight": float("nan")}, "value_weight: expected float >= 0"),
        ({"ess_power": 1.5}, r"ess_power: expected float in \[0, 1\], got 1.5"),
        ({"keep_range": [2.0, 0.5]}, "keep_range: expected .low, high., low < 1 < high"),
        ({"value_clip": 0.0}, "value_clip: expected null or float > 0"),
        ({"anchor": "behaviour"}, "behaviour_weight: expected none, token_reject or m2po with anchor behaviour"),
        ({"anchor": "interpolated", "behaviour_weight": "m2po"}, "a weight of single tokens with anchor interpolated"),
        ({"objective": "ppo"}, "ppo"),
        ({"kl": 0.1}, "kl: unknown key"),
    ],
)
def test_settings_that_cannot_work_are_refused(raw, message):
    with pytest.raises(ConfigError, match=message):
        convert(raw, LossConfig, "$.learner.loss")
