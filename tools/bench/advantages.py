"""What credit assignment costs: against a plain Python recursion, and as a share of a training step."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import msgspec

from vagen.common.config import Section
from vagen.tools.bench import Figure, Figures, benchmark, parse_options

if TYPE_CHECKING:
    from torch import Tensor

    from vagen.learner.advantages.batch import AdvantageInputs
    from vagen.learner.advantages.config import AdvantageConfig

R = TypeVar("R")
PositiveInt = Annotated[int, msgspec.Meta(ge=1)]


class AdvantageOptions(Section, frozen=True, kw_only=True):
    """Options of `vagen bench advantages`. `tokens` and `turns` are those of one episode."""

    episodes: PositiveInt = 512
    tokens: PositiveInt = 4000
    turns: PositiveInt = 10
    repeats: PositiveInt = 3
    step: bool = True
    """Also measure the share of a real learner step."""


@benchmark("advantages")
def advantages(options: Mapping[str, str]) -> Figures:
    """Advantage estimation against Python loops, and its share of a step; --episodes, --tokens, --turns, --step."""
    import torch

    from vagen.learner.advantages.config import AdvantageConfig
    from vagen.learner.advantages.estimate import estimate_advantages

    config = parse_options(options, AdvantageOptions)
    torch.set_num_threads(1)
    inputs = _random_batch(config)
    published = AdvantageConfig(importance_correction="none", whiten=False)
    reference_s, expected = _timed(lambda: published_bi_level_gae(inputs, published), 1)
    floats_s, _ = _timed(lambda: python_bi_level_gae(inputs, published), 1)
    ours_s, outputs = _timed(lambda: estimate_advantages(inputs, published), config.repeats)
    corrected_s, _ = _timed(lambda: estimate_advantages(inputs, AdvantageConfig()), config.repeats)
    error = (outputs.advantages - expected).abs().max().item()
    figures = {
        "speedup_vs_python_reference": Figure(value=reference_s / ours_s, unit="times"),
        "speedup_vs_python_floats": Figure(value=floats_s / ours_s, unit="times"),
        "python_reference_s": Figure(value=reference_s, unit="s"),
        "python_floats_s": Figure(value=floats_s, unit="s"),
        "bi_level_gae_s": Figure(value=ours_s, unit="s"),
        "bi_level_gae_corrected_whitened_s": Figure(value=corrected_s, unit="s"),
        "tokens_per_s": Figure(value=inputs.rewards.numel() / ours_s, unit="policy tokens/s"),
        "largest_difference": Figure(value=error, unit="advantage"),
    }
    if config.step:
        figures["advantages_share_of_training_step"] = Figure(value=_share_of_step(), unit="share of time")
    return figures


def published_bi_level_gae(inputs: AdvantageInputs, config: AdvantageConfig) -> Tensor:
    """The published recursion as it is written down: loops in Python over the elements of tensors; advantages `[N]`."""
    rewards, values, turns, segments = inputs.rewards, inputs.values, inputs.turn_ids, inputs.segment_ids
    found, zero = values.new_zeros(len(values)), values.new_zeros(())
    turn_advantage = turn_value = following = zero
    count = len(rewards)
    for j in range(count - 1, -1, -1):
        if j + 1 == count or turns[j] != turns[j + 1]:
            if j + 1 == count or segments[j] != segments[j + 1]:
                turn_advantage, turn_value = zero, inputs.bootstrap_values[segments[j]]
            error = rewards[j] + config.turn_discount * turn_value - values[j]
            following = turn_advantage = error + config.turn_discount * config.turn_lambda * turn_advantage
            turn_value = values[j]
        else:
            error = rewards[j] + config.token_discount * values[j + 1] - values[j]
            following = error + config.token_discount * config.token_lambda * following
        found[j] = following
    return found


def python_bi_level_gae(inputs: AdvantageInputs, config: AdvantageConfig) -> list[float]:
    """The same over lists of Python floats: the fastest that plain Python gets, many times faster than over tensors."""
    rewards, values = inputs.rewards.tolist(), inputs.values.tolist()
    turns, segments = inputs.turn_ids.tolist(), inputs.segment_ids.tolist()
    boot = inputs.bootstrap_values.tolist()
    found = [0.0] * len(rewards)
    token_trace = config.token_discount * config.token_lambda
    turn_trace = config.turn_discount * config.turn_lambda
    turn_advantage = turn_value = following = 0.0
    for j in range(len(rewards) - 1, -1, -1):
        is_last = j + 1 == len(rewards)
        if is_last or turns[j] != turns[j + 1]:
            if is_last or segments[j] != segments[j + 1]:
                turn_advantage, turn_value = 0.0, boot[segments[j]]
            error = rewards[j] + config.turn_discount * turn_value - values[j]
            following = turn_advantage = error + turn_trace * turn_advantage
            turn_value = values[j]
        else:
            error = rewards[j] + config.token_discount * values[j + 1] - values[j]
            following = error + token_trace * following
        found[j] = following
    return found


def _random_batch(config: AdvantageOptions) -> AdvantageInputs:
    """Episodes of equal length and turns; reward at each turn's last token."""
    import torch

    from vagen.learner.advantages.batch import AdvantageInputs

    generator = torch.Generator().manual_seed(0)
    count = config.episodes * config.tokens
    position = torch.arange(count)
    turn = (position % config.tokens) * config.turns // config.tokens
    turn_ids = position // config.tokens * config.turns + turn
    is_end = torch.ones(count, dtype=torch.bool)
    is_end[:-1] = turn_ids[1:] != turn_ids[:-1]
    behaviour = -torch.rand(count, generator=generator)
    return AdvantageInputs(
        rewards=torch.rand(count, generator=generator) * is_end,
        values=torch.randn(count, generator=generator),
        behaviour_logprobs=behaviour,
        proximal_logprobs=behaviour + 0.05 * torch.randn(count, generator=generator),
        turn_ids=turn_ids,
        segment_ids=position // config.tokens,
        bootstrap_values=torch.zeros(config.episodes),
        group_ids=torch.arange(config.episodes),
    )


def _share_of_step() -> float:
    """Of scoring, estimating and updating on a batch of the demo's recipe, after a first step that warms up."""
    from vagen.learner.model.parallel import parallel_session
    from vagen.tools.bench.study import RunSpec, StudyTrainer
    from vagen.tools.sft import run_sft

    spec = RunSpec(variant="share", episodes=96, steps=2, overrides=("sft.steps=80", "sft.turns=1000"))
    with tempfile.TemporaryDirectory(prefix="vagen-bench-") as folder:
        model = Path(folder) / "model"
        run_sft(spec.recipe(), model, lambda progress: None)
        with parallel_session():
            trainer = StudyTrainer(spec, model)
            trainer.step()
            seconds = trainer.step()[1].seconds
    return seconds["advantages"] / sum(seconds.values())


def _timed(call: Callable[[], R], repeats: int) -> tuple[float, R]:
    """Shortest of `repeats` calls in seconds, and what the last one returned."""
    shortest = float("inf")
    for _ in range(repeats):
        started = time.perf_counter()
        result = call()
        shortest = min(shortest, time.perf_counter() - started)
    return shortest, result
