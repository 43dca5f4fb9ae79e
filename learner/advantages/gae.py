"""GAE and its turn-level relatives, all on the importance-corrected scan of `scan.py`.

Notation of the docstrings: `R` reward at a token, `V` value before it, `e_k` and `f_k` the last and first token of turn
`k`, `V_boot` the value after the segment; `g`, `l` the token and `g_t`, `l_t` the turn discount and lambda; `A`, `X`
the policy advantage and value correction of `corrected_scan`. Critic targets are `V + X`. With every ratio 1, or
`importance_correction: none`, `A == X` and each is its published form.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from vagen.learner.advantages.batch import AdvantageInputs, AdvantageOutputs, Anchor, Layout
from vagen.learner.advantages.config import AdvantageConfig
from vagen.learner.advantages.registry import advantage_estimator
from vagen.learner.advantages.scan import (
    Caps,
    SpanRatios,
    corrected_scan,
    log_ratios,
    shift_back,
    span_ratios,
    truncated_ratios,
)

if TYPE_CHECKING:
    from vagen.learner.advantages.registry import Reduce


@advantage_estimator("bi_level_gae", needs_critic=True)
def bi_level_gae(inputs: AdvantageInputs, config: AdvantageConfig, reduce: Reduce) -> AdvantageOutputs:
    """GAE over turns, then GAE over the tokens inside each turn from the turn's advantage (VAGEN, arXiv 2510.16907).

        turn pass    d_k = R[e_k] + g_t V[e_k+1] - V[e_k],  trace g_t l_t                   -> A_k, X_k
        token pass   at e_k: A_k, X_k;  elsewhere d_j = R[j] + g V[j+1] - V[j], trace g l   -> A_j, X_j

    The token pass restarts at every turn end, so a reward inside a turn reaches no earlier turn. With `turn_anchor:
    start` the turn pass runs over the first tokens (`_turn_pass`), and turn `k` ends in the first token of turn `k+1`:
    `d = R[e_k] + g_t V[f_k+1] - V[e_k]`, `A = d + g_t l_t X_k+1`, `X = rho(w) d + g_t l_t c(w) X_k+1`.
    """
    layout = inputs.checked()
    log_ratio, caps = _log_ratio(inputs, config), Caps(config.rho_bar, config.c_bar)
    pinned = _turn_pass(inputs, config, layout, config.turn_anchor, log_ratio)
    if config.turn_anchor == "start":
        pinned = _last_tokens(inputs, config, layout, pinned[1], log_ratio)
    td_error = _td_error(inputs.rewards, inputs.values, config.token_discount, layout.ends)
    trace = config.token_discount * config.token_lambda
    advantage, correction = corrected_scan(td_error, trace, layout.ends, _per_token(log_ratio), caps, pinned)
    return _outputs(advantage, correction.add(inputs.values))


@advantage_estimator("masked_gae", aliases=("token_level_gae",), needs_critic=True)
def masked_gae(inputs: AdvantageInputs, config: AdvantageConfig, reduce: Reduce) -> AdvantageOutputs:
    """GAE over the policy's tokens, jumping over observations: `d_j = R[j] + g V[j+1] - V[j]`, trace `g l`."""
    return _token_pass(inputs, config, inputs.rewards, inputs.checked())


@advantage_estimator("default_gae", needs_critic=True, whole_episode=True)
def default_gae(inputs: AdvantageInputs, config: AdvantageConfig, reduce: Reduce) -> AdvantageOutputs:
    """`masked_gae` with the episode's whole reward moved to its last token."""
    layout = inputs.checked()
    rewards = torch.zeros_like(inputs.rewards, dtype=torch.float64)
    rewards[layout.segment_ends] = layout.sum_over_segments(inputs.rewards)
    return _token_pass(inputs, config, rewards, layout)


@advantage_estimator("turn_level_gae", needs_critic=True)
def turn_level_gae(inputs: AdvantageInputs, config: AdvantageConfig, reduce: Reduce) -> AdvantageOutputs:
    """GAE over turns with the value at each turn's first token; `A_k` broadcast over turn `k`.

        d_k = sum of R over turn k + g_t V[f_k+1] - V[f_k],  trace g_t l_t

    The first token alone is a critic target. The correction is exact for that token; broadcasting it leaves out that
    the turn's later tokens have fewer tokens still to come.
    """
    layout = inputs.checked()
    return _broadcast_turns(inputs, config, layout, "start")


@advantage_estimator("turn_wise_gae", needs_critic=True, whiten_over="targets")
def turn_wise_gae(inputs: AdvantageInputs, config: AdvantageConfig, reduce: Reduce) -> AdvantageOutputs:
    """The turn pass of `bi_level_gae` alone; `A_k` broadcast over turn `k`, critic target at its anchor only.

    Whitened, as published, over turns rather than tokens. With `turn_anchor: start` it is `turn_level_gae` before that.
    """
    layout = inputs.checked()
    return _broadcast_turns(inputs, config, layout, config.turn_anchor)


@advantage_estimator("vl_dac", needs_critic=True)
def vl_dac(inputs: AdvantageInputs, config: AdvantageConfig, reduce: Reduce) -> AdvantageOutputs:
    """VL-DAC (Bredis et al. 2025, arXiv 2508.04280): PPO on tokens, the value learnt at environment steps only.

        d_k = r_k + g_t V(o_k+1) - V(o_k),   A_k = d_k + g_t l_t A_k+1,   every token of turn k gets A_k

    `V(o_k)` is read before the turn's first token, `r_k` is the turn's reward: as credit assignment this is
    `turn_level_gae`. What else the paper asks for (no gradient from the critic into the trunk) is the model's setting.
    """
    layout = inputs.checked()
    return _broadcast_turns(inputs, config, layout, "start")


def _turn_pass(
    inputs: AdvantageInputs, config: AdvantageConfig, layout: Layout, anchor: Anchor, log_ratio: Tensor | None
) -> tuple[Tensor, Tensor]:
    """`A` and `X` of every turn, float64 `[K]`, its value read at the turn's last or first token.

    Between end anchors the reward of a step is that of the token `e_k`, between start anchors the turn's sum.
    """
    rewards = inputs.rewards[layout.ends] if anchor == "end" else layout.sum_over_turns(inputs.rewards)
    values = inputs.values[layout.anchors(anchor)]
    td_error = _td_error(rewards, values, config.turn_discount, layout.last_turns, inputs.bootstrap_values)
    ratios = None
    if log_ratio is not None:
        ratios = span_ratios(log_ratio, layout, anchor, geometric=config.turn_ratio == "geometric")
    trace = config.turn_discount * config.turn_lambda
    return corrected_scan(td_error, trace, layout.last_turns, ratios, Caps(config.rho_bar, config.c_bar))


def _last_tokens(
    inputs: AdvantageInputs, config: AdvantageConfig, layout: Layout, correction: Tensor, log_ratio: Tensor | None
) -> tuple[Tensor, Tensor]:
    """`A` and `X` of every turn's last token, float64 `[K]`, from the corrections at the turns' first tokens."""
    next_values = shift_back(inputs.values[layout.starts], layout.last_turns, inputs.bootstrap_values)
    td_error = next_values.mul_(config.turn_discount).add_(inputs.rewards[layout.ends]).sub_(inputs.values[layout.ends])
    later = shift_back(correction, layout.last_turns).mul_(config.turn_discount * config.turn_lambda)
    advantage = td_error + later
    if log_ratio is None:
        return advantage, advantage
    rho, c = truncated_ratios(log_ratio[layout.ends], Caps(config.rho_bar, config.c_bar))
    return advantage, rho * td_error + c * later


def _broadcast_turns(
    inputs: AdvantageInputs, config: AdvantageConfig, layout: Layout, anchor: Anchor
) -> AdvantageOutputs:
    advantage, correction = _turn_pass(inputs, config, layout, anchor, _log_ratio(inputs, config))
    positions = layout.anchors(anchor)
    targets = inputs.values.double().index_add_(0, positions, correction)
    mask = torch.zeros_like(inputs.values, dtype=torch.bool).index_fill_(0, positions, True)
    return _outputs(advantage[layout.turn_of_token], targets, mask)


def _token_pass(inputs: AdvantageInputs, config: AdvantageConfig, rewards: Tensor, layout: Layout) -> AdvantageOutputs:
    ends = layout.segment_ends
    td_error = _td_error(rewards, inputs.values, config.token_discount, ends, inputs.bootstrap_values)
    trace = config.token_discount * config.token_lambda
    ratios, caps = _per_token(_log_ratio(inputs, config)), Caps(config.rho_bar, config.c_bar)
    advantage, correction = corrected_scan(td_error, trace, ends, ratios, caps)
    return _outputs(advantage, correction.add(inputs.values))


def _td_error(
    rewards: Tensor, values: Tensor, discount: float, ends: Tensor, bootstrap: Tensor | None = None
) -> Tensor:
    """`R + discount * V' - V`, float64, with `V'` the next state's value and `bootstrap` (or 0) at `ends`."""
    return shift_back(values, ends, bootstrap).mul_(discount).add_(rewards).sub_(values)


def _log_ratio(inputs: AdvantageInputs, config: AdvantageConfig) -> Tensor | None:
    if config.importance_correction == "none":
        return None
    return log_ratios(inputs.proximal_logprobs, inputs.behaviour_logprobs)


def _per_token(log_ratio: Tensor | None) -> SpanRatios | None:
    return None if log_ratio is None else SpanRatios(log_ratio)


def _outputs(advantages: Tensor, targets: Tensor, mask: Tensor | None = None) -> AdvantageOutputs:
    mask = torch.ones_like(targets, dtype=torch.bool) if mask is None else mask
    return AdvantageOutputs(advantages.float(), targets.float(), mask)
