"""Critic-free estimators that compare the episodes of one group (of one task). No importance correction: the ratio of a
token is in the policy loss, and there is no later value to correct.

Statistics are float64 sums over the group, reduced over ranks where the group is spread over them. Sums of equal
float32 returns are then exact, so a group of equal returns gives exactly 0.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from vagen.learner.advantages.batch import AdvantageInputs, AdvantageOutputs, Layout
from vagen.learner.advantages.config import AdvantageConfig
from vagen.learner.advantages.registry import advantage_estimator
from vagen.learner.advantages.scan import reverse_affine_scan

if TYPE_CHECKING:
    from vagen.learner.advantages.registry import Reduce

_RELATIVE_ROUNDING = 1e-6
"""A spread below this share of the mean is rounding of float32 rewards that were added in another order."""


@advantage_estimator("trajectory_grpo", needs_critic=False, needs_groups=True, whole_episode=True)
def trajectory_grpo(inputs: AdvantageInputs, config: AdvantageConfig, reduce: Reduce) -> AdvantageOutputs:
    """`A = (S - mean) / (std + 1e-6)` for all tokens of an episode with total reward `S`; mean and population standard
    deviation over the episodes of its group (Shao et al. 2024, arXiv 2402.03300). A standard deviation of 0 gives 0.
    """
    layout = inputs.checked()
    advantages = _standardise(_episode_totals(inputs, layout), inputs.group_ids, _num_groups(inputs), reduce)
    return _critic_free(inputs, advantages[inputs.segment_ids])


@advantage_estimator("rloo", needs_critic=False, needs_groups=True, whole_episode=True)
def rloo(inputs: AdvantageInputs, config: AdvantageConfig, reduce: Reduce) -> AdvantageOutputs:
    """`A_i = S_i - mean of S_j over the other n - 1 episodes of the group = n / (n - 1) * (S_i - mean)`

    (Ahmadian et al. 2024, arXiv 2402.14740). An episode alone in its group has nothing to be compared with and gets 0.
    """
    layout = inputs.checked()
    totals, groups = _episode_totals(inputs, layout), inputs.group_ids
    count, mean = _group_means(totals, groups, _num_groups(inputs), reduce)
    scale = count / (count - 1.0).clamp(min=1.0)
    advantages = scale[groups] * (totals - mean[groups])
    return _critic_free(inputs, advantages[inputs.segment_ids])


@advantage_estimator("gtpo", needs_critic=False, needs_groups=True, whole_episode=True)
def gtpo(inputs: AdvantageInputs, config: AdvantageConfig, reduce: Reduce) -> AdvantageOutputs:
    """Group turn policy optimisation (Ding et al. 2025, arXiv 2511.14846): normalised discounted returns of turns.

        G_ik = sum over m >= k of g_t^(m - k) r_im,      A_ik = (G_ik - mean) / (std + 1e-6)

    `r_im` is the reward of turn `m` of episode `i`; every token of turn `k` gets `A_ik`. Mean and population standard
    deviation are over *all turns of all episodes of the group*. A standard deviation of 0 gives 0. The paper's shaping
    of rewards from generated code belongs to the environment.
    """
    layout = inputs.checked()
    rewards = layout.sum_over_turns(inputs.rewards)
    coefficient = torch.full_like(rewards, config.turn_discount).index_fill_(0, layout.last_turns, 0.0)
    returns = reverse_affine_scan(rewards, coefficient).float().double()
    groups = inputs.group_ids[layout.segment_of_turn]
    advantages = _standardise(returns, groups, _num_groups(inputs), reduce)
    return _critic_free(inputs, advantages[layout.turn_of_token])


def _episode_totals(inputs: AdvantageInputs, layout: Layout) -> Tensor:
    """Total reward of each segment `[S]`, rounded to float32 so that sums that should be equal are."""
    return layout.sum_over_segments(inputs.rewards).float().double()


def _num_groups(inputs: AdvantageInputs) -> int:
    return int(inputs.group_ids.max()) + 1 if inputs.num_groups is None else inputs.num_groups


def _group_means(terms: Tensor, groups: Tensor, num_groups: int, reduce: Reduce) -> tuple[Tensor, Tensor]:
    """Count and mean of `terms` (float64 `[M]`, group of each in `groups`) in every group, `[num_groups]` each."""
    sums = terms.new_zeros(2, num_groups).index_add(1, groups, torch.stack([torch.ones_like(terms), terms]))
    count, total = reduce(sums).unbind()
    return count, total / count.clamp(min=1.0)


def _standardise(terms: Tensor, groups: Tensor, num_groups: int, reduce: Reduce) -> Tensor:
    count, mean = _group_means(terms, groups, num_groups, reduce)
    deviation = terms - mean[groups]
    squares = reduce(terms.new_zeros(num_groups).index_add(0, groups, deviation.square()))
    std = (squares / count.clamp(min=1.0)).sqrt()
    varies = std > _RELATIVE_ROUNDING * mean.abs()
    return torch.where(varies[groups], deviation / (std[groups] + 1e-6), 0.0)


def _critic_free(inputs: AdvantageInputs, advantages: Tensor) -> AdvantageOutputs:
    return AdvantageOutputs(advantages.float(), inputs.values, torch.zeros_like(inputs.rewards, dtype=torch.bool))
