"""The factor of the learning rate: literal values, and one value for all ranks."""

from __future__ import annotations

import math

import pytest
import torch

from vagen.learner.losses.config import LossConfig
from vagen.learner.losses.diagnostics import effective_sample_size
from vagen.learner.losses.gain import sample_size_scale, staleness_scale, step_gain


def test_sample_size_scale() -> None:
    assert sample_size_scale(0.25, 0.5) == 0.5
    assert sample_size_scale(0.25, 0.0) == 1.0


def test_steps_are_full_up_to_the_free_staleness_and_then_fall_by_the_power() -> None:
    assert [staleness_scale(s, 4.0, 0.5) for s in (0.0, 1.0, 4.0, 16.0, 64.0)] == [1.0, 1.0, 1.0, 0.5, 0.25]
    assert staleness_scale(16.0, 4.0, 1.0) == 0.25
    assert staleness_scale(16.0, 4.0, 0.0) == 1.0


def test_the_gain_is_the_product_of_both() -> None:
    log_ratio = torch.tensor([1.0, 3.0]).log()
    gain = step_gain(log_ratio, torch.tensor([8, 24]), LossConfig(staleness_free=4.0, staleness_power=0.5), None)
    assert gain == pytest.approx(16 / 20 * 0.5)


def test_every_rank_gets_the_gain_of_the_global_batch() -> None:
    generator = torch.Generator().manual_seed(1)
    parts = [(torch.randn(n, generator=generator), torch.randint(0, 40, (b,))) for n, b in ((7, 2), (100, 5))]
    config = LossConfig(staleness_power=0.5)
    told: list[torch.Tensor] = []
    for log_ratio, staleness in parts:
        step_gain(log_ratio, staleness, config, lambda totals: told.append(totals) or totals)  # type: ignore[func-returns-value]
    gains = [step_gain(*part, config, lambda _: sum(told, torch.zeros(5, dtype=torch.float64))) for part in parts]
    whole = [torch.cat(column) for column in zip(*parts, strict=True)]
    assert gains[0] == gains[1] == pytest.approx(step_gain(*whole, config, None), rel=1e-12)
    mean = float(whole[1].double().mean())
    expected = float(effective_sample_size(whole[0])) * math.sqrt(4.0 / mean)
    assert gains[0] == pytest.approx(expected)
