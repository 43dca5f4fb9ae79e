"""Scripted episodes for the warm start."""

from __future__ import annotations

import pytest

from vagen.common.errors import ConfigError
from vagen.envs.base import encode_png
from vagen.envs.frozen_lake.config import FrozenLakeConfig
from vagen.envs.frozen_lake.core import FrozenLakeCore
from vagen.envs.parsing import FORMATS
from vagen.envs.scripted import ScriptedEpisode, scripted_episodes


def _core(**config: object) -> FrozenLakeCore:
    return FrozenLakeCore(FrozenLakeConfig(hole_probability=0.1, **config))  # type: ignore[arg-type]


def _shown(episode: ScriptedEpisode) -> list[tuple[str, bytes, str, dict[str, float]]]:
    return [
        (turn.observation.text, encode_png(turn.observation.images[0]), turn.response, dict(turn.reward))
        for turn in episode.turns
    ]


def test_an_episode_depends_on_its_seed_and_the_script_seed_only() -> None:
    several = list(scripted_episodes(_core(), range(20), script_seed=3))
    alone = next(scripted_episodes(_core(), [13], script_seed=3))
    assert _shown(several[13]) == _shown(alone)
    others = list(scripted_episodes(_core(), range(20), script_seed=4))
    assert [_shown(episode) for episode in several] != [_shown(episode) for episode in others]


def test_thoughts_state_the_true_direction_of_the_goal() -> None:
    core, replay = _core(), _core()
    for episode in scripted_episodes(core, range(20), script_seed=0):
        replay.reset(episode.seed)
        for turn in episode.turns:
            sections = FORMATS["free_think"].match(turn.response)
            assert sections is not None
            assert sections["think"] == replay.goal_direction() != ""
            result = replay.step(turn.response)
            assert result.parsed.action_valid and turn.reward == result.reward
        assert result.done and result.info.success == episode.success and result.terminated == episode.terminated


def test_the_share_of_expert_actions_is_the_asked_one() -> None:
    expert = list(scripted_episodes(_core(), range(40), script_seed=0, expert_probability=1.0))
    assert all(episode.success for episode in expert)
    mixed = list(scripted_episodes(_core(), range(300), script_seed=0))
    blind = list(scripted_episodes(_core(), range(300), script_seed=0, expert_probability=0.0))
    successes = [sum(episode.success for episode in episodes) / 300 for episodes in (blind, mixed)]
    assert 0.1 < successes[0] < successes[1] < 0.5


def test_every_thought_section_of_another_format_is_filled() -> None:
    episode = next(scripted_episodes(_core(response_format="wm"), [1], script_seed=0))
    sections = FORMATS["wm"].match(episode.turns[0].response)
    assert sections is not None and all(sections.values())


def test_a_probability_out_of_bounds_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"expert_probability: expected a number in \[0, 1\], got 1.5"):
        next(scripted_episodes(_core(), [1], script_seed=0, expert_probability=1.5))
