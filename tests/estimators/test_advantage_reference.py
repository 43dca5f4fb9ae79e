"""Random batches against a plain float64 reference, written turn by turn and token by token."""

from __future__ import annotations

import math
import random

import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from vagen.learner.advantages.config import AdvantageConfig
from vagen.learner.advantages.estimate import estimate_advantages
from vagen.learner.advantages.scan import reverse_affine_scan


def clamp(x):
    return max(-20.0, min(20.0, x))


class Reference:
    """Advantages, targets and target positions of one episode, by loops over Python floats."""

    def __init__(self, one, config):
        self.config = config
        self.rewards = torch.tensor(one.rewards, dtype=torch.float32).double().tolist()
        self.values = torch.tensor(one.values_or_zeros, dtype=torch.float32).double().tolist()
        self.log_ratio = [clamp(x) for x in one.exact_log_ratio]
        self.boot = torch.tensor(one.bootstrap, dtype=torch.float32).item()
        self.first, self.last = [], []
        position = 0
        for length in one.turns:
            self.first.append(position)
            position += length
            self.last.append(position - 1)

    def rho(self, log_ratio):
        return min(self.config.rho_bar, math.exp(log_ratio))

    def c(self, log_ratio):
        return min(self.config.c_bar, math.exp(log_ratio))

    def span(self, positions):
        if not positions:
            return None
        total = sum(self.log_ratio[j] for j in positions)
        return clamp(total / len(positions) if self.config.turn_ratio == "geometric" else total)

    def turns(self, anchors, rewards):
        config, advantages, corrections, later = self.config, [], [], 0.0
        for k in reversed(range(len(anchors))):
            here, is_last = anchors[k], k == len(anchors) - 1
            stop = len(self.values) if is_last else anchors[k + 1]
            next_value = self.boot if is_last else self.values[anchors[k + 1]]
            d = rewards[k] + config.turn_discount * next_value - self.values[here]
            trace = config.turn_discount * config.turn_lambda * later
            following, everything = self.span(range(here + 1, stop)), self.span(range(here, stop))
            advantage = d + trace
            if following is not None:
                advantage = self.rho(following) * d + self.c(following) * trace
            later = self.rho(everything) * d + self.c(everything) * trace
            advantages.insert(0, advantage)
            corrections.insert(0, later)
        return advantages, corrections

    def tokens(self, first, last, rewards, end):
        """Token pass over `first..last`; `end` is the (A, X) of the last token, or its next value."""
        config, gl = self.config, self.config.token_discount * self.config.token_lambda
        if isinstance(end, float):
            d = rewards[last] + config.token_discount * end - self.values[last]
            end = (d, self.rho(self.log_ratio[last]) * d)
        advantages, corrections = [end[0]], [end[1]]
        for j in range(last - 1, first - 1, -1):
            d = rewards[j] + config.token_discount * self.values[j + 1] - self.values[j]
            advantages.insert(0, d + gl * corrections[0])
            w = self.log_ratio[j]
            corrections.insert(0, self.rho(w) * d + gl * self.c(w) * corrections[0])
        return advantages, corrections

    def turn_sums(self):
        return [sum(self.rewards[a : b + 1]) for a, b in zip(self.first, self.last, strict=True)]

    def broadcast(self, anchors, rewards):
        advantages, corrections = self.turns(anchors, rewards)
        flat, targets = [], [None] * len(self.values)
        for k, anchor in enumerate(anchors):
            flat += [advantages[k]] * (self.last[k] - self.first[k] + 1)
            targets[anchor] = self.values[anchor] + corrections[k]
        return flat, targets

    def bi_level_ends(self):
        config = self.config
        if config.turn_anchor == "end":
            return list(zip(*self.turns(self.last, [self.rewards[e] for e in self.last]), strict=True))
        _, corrections = self.turns(self.first, self.turn_sums())
        ends = []
        for k, e in enumerate(self.last):
            is_last = k == len(self.last) - 1
            next_value = self.boot if is_last else self.values[self.first[k + 1]]
            trace = 0.0 if is_last else config.turn_discount * config.turn_lambda * corrections[k + 1]
            d = self.rewards[e] + config.turn_discount * next_value - self.values[e]
            w = self.log_ratio[e]
            ends.append((d + trace, self.rho(w) * d + self.c(w) * trace))
        return ends

    def __call__(self):
        name, final = self.config.name, len(self.values) - 1
        if name == "turn_level_gae":
            return self.broadcast(self.first, self.turn_sums())
        if name == "turn_wise_gae":
            if self.config.turn_anchor == "start":
                return self.broadcast(self.first, self.turn_sums())
            return self.broadcast(self.last, [self.rewards[e] for e in self.last])
        advantages, corrections = [], []
        if name == "bi_level_gae":
            for a, b, end in zip(self.first, self.last, self.bi_level_ends(), strict=True):
                of_turn = self.tokens(a, b, self.rewards, end)
                advantages += of_turn[0]
                corrections += of_turn[1]
        elif name == "masked_gae":
            advantages, corrections = self.tokens(0, final, self.rewards, self.boot)
        else:
            advantages, corrections = self.tokens(0, final, [0.0] * final + [sum(self.rewards)], self.boot)
        return advantages, [v + x for v, x in zip(self.values, corrections, strict=True)]


settings_of_an_estimator = st.fixed_dictionaries(
    {
        "turn_discount": st.sampled_from([1.0, 0.95, 0.5]),
        "turn_lambda": st.sampled_from([1.0, 0.9, 0.0]),
        "token_discount": st.sampled_from([1.0, 0.99, 0.7]),
        "token_lambda": st.sampled_from([1.0, 0.95, 0.2]),
        "rho_bar": st.sampled_from([2.0, 1.0, 0.8, math.inf]),
        "c_bar": st.sampled_from([1.0, 0.5, 0.0, 1.1]),
        "turn_ratio": st.sampled_from(["geometric", "product"]),
        "turn_anchor": st.sampled_from(["end", "start"]),
    }
)


def random_episodes(episode, rng, shapes, spread):
    for turns in shapes:
        n = sum(turns)
        yield episode(
            turns,
            [rng.gauss(0, 1) if rng.random() < 0.3 else 0.0 for _ in range(n)],
            [rng.gauss(0, 1) for _ in range(n)],
            [rng.choice([30.0, -30.0]) if rng.random() < 0.02 else rng.gauss(0, spread) for _ in range(n)],
            bootstrap=rng.gauss(0, 1),
        )


@pytest.mark.parametrize("name", ["bi_level_gae", "masked_gae", "default_gae", "turn_level_gae", "turn_wise_gae"])
@hypothesis_settings(max_examples=60, deadline=None)
@given(
    shapes=st.lists(st.lists(st.integers(1, 40), min_size=1, max_size=8), min_size=1, max_size=6),
    options=settings_of_an_estimator,
    spread=st.sampled_from([0.0, 0.2, 1.0]),
    seed=st.integers(0, 2**32),
)
def test_random_batches_agree_with_the_reference(batch, episode, device, name, shapes, options, spread, seed):
    episodes = list(random_episodes(episode, random.Random(seed), shapes, spread))
    config = AdvantageConfig(name=name, whiten=False, **options)
    inputs = batch(*episodes, device=device)
    exact = (inputs.proximal_logprobs.double() - inputs.behaviour_logprobs.double()).tolist()

    out = estimate_advantages(inputs, config)

    advantages, targets = [], []
    for one in episodes:
        object.__setattr__(one, "exact_log_ratio", exact[len(advantages) : len(advantages) + len(one.rewards)])
        of_one = Reference(one, config)()
        advantages += of_one[0]
        targets += of_one[1]
    has_target = [t is not None for t in targets]
    assert out.value_mask.tolist() == has_target
    assert out.advantages.tolist() == pytest.approx(advantages, rel=1e-6, abs=1e-6)
    assert out.value_targets[out.value_mask].tolist() == pytest.approx(
        [t for t in targets if t is not None], rel=1e-6, abs=1e-6
    )


def test_long_episodes_keep_float32_precision(batch, episode):
    """4,000 tokens in ten turns and in one, and a trace that neither decays nor stops."""
    shapes = [[400] * 10, [4000], [1] * 4000]
    episodes = list(random_episodes(episode, random.Random(0), shapes, 0.1))
    for name in ("bi_level_gae", "masked_gae"):
        config = AdvantageConfig(name=name, turn_discount=1.0, turn_lambda=1.0, c_bar=1.0, whiten=False)
        inputs = batch(*episodes)
        exact = (inputs.proximal_logprobs.double() - inputs.behaviour_logprobs.double()).tolist()
        out = estimate_advantages(inputs, config)
        for i, one in enumerate(episodes):
            object.__setattr__(one, "exact_log_ratio", exact[4000 * i : 4000 * (i + 1)])
            advantages, _ = Reference(one, config)()
            assert out.advantages[4000 * i : 4000 * (i + 1)].tolist() == pytest.approx(advantages, rel=1e-6, abs=1e-6)


@hypothesis_settings(max_examples=60, deadline=None)
@given(size=st.one_of(st.integers(1, 300), st.sampled_from([64, 4096, 4097, 300_000])), seed=st.integers(0, 2**32))
def test_scan_is_the_recursion(size, seed):
    generator = torch.Generator().manual_seed(seed)
    offset = torch.randn(size, generator=generator, dtype=torch.float64)
    coefficient = torch.rand(size, generator=generator, dtype=torch.float64) * 1.2
    coefficient[torch.rand(size, generator=generator) < 0.05] = 0.0

    scanned = reverse_affine_scan(offset, coefficient)

    later = torch.cat([scanned[1:], scanned.new_zeros(1)])
    assert torch.allclose(scanned, offset + coefficient * later, rtol=1e-12, atol=1e-12)


def test_an_exploding_trace_does_not_leak_over_a_segment_end():
    offset = torch.ones(500, dtype=torch.float64)
    coefficient = torch.full((500,), 1e8, dtype=torch.float64)
    coefficient[[99, 199]] = 0.0

    scanned = reverse_affine_scan(offset, coefficient)

    assert scanned[[99, 199]].tolist() == [1.0, 1.0]
    assert scanned[[98, 198]].tolist() == [1.0 + 1e8, 1.0 + 1e8]
    assert not scanned.isnan().any()


@pytest.mark.parametrize("turn_ratio", ["geometric", "product"])
def test_extreme_ratios_stay_finite(batch, episode, turn_ratio):
    """Every log-ratio far beyond the clamp, in both directions, without caps on 300 tokens."""
    episodes = [episode([100, 200], [0.0] * 299 + [1.0], [0.5] * 300, [sign * 1e4] * 300) for sign in (1.0, -1.0)]

    out = estimate_advantages(
        batch(*episodes), AdvantageConfig(rho_bar=2.0, c_bar=1.0, turn_ratio=turn_ratio, whiten=False)
    )

    assert out.advantages.isfinite().all() and out.value_targets.isfinite().all()
    assert out.advantages.abs().max().item() < 1e3
