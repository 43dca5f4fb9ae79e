"""FrozenLake against Gymnasium itself: dynamics, pictures, turns and rewards."""

from __future__ import annotations

import itertools
import math
import os
import random
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import gymnasium
import numpy as np
import pytest

from vagen.envs.base import encode_png
from vagen.envs.frozen_lake.config import FrozenLakeConfig
from vagen.envs.frozen_lake.core import FrozenLakeCore
from vagen.envs.frozen_lake.level import ACTION_NAMES, generate_level
from vagen.envs.frozen_lake.rendering import LakePainter, lake_painter
from vagen.envs.levels import stable_hash


def _core(**config: object) -> FrozenLakeCore:
    return FrozenLakeCore(FrozenLakeConfig(**config))  # type: ignore[arg-type]


def _answer(*actions: str) -> str:
    return f"<think>t</think><answer>{','.join(actions)}</answer>"


def _gymnasium(core: FrozenLakeCore, seed: int, is_slippery: bool) -> gymnasium.Env:
    lake = gymnasium.make("FrozenLake-v1", desc=list(core.level.rows), is_slippery=is_slippery, render_mode="rgb_array")
    lake.reset(seed=seed)
    return lake


def _picture(lake: gymnasium.Env, size: int, cell_pixels: int = 14) -> bytes:
    """Gymnasium's frame, each pixel taken where the centre of the small picture's pixel falls."""
    frame = np.asarray(lake.render())
    side = frame.shape[0] // size
    centres = [
        cell * side + math.ceil((i + 0.5) * side / cell_pixels) - 1 for cell in range(size) for i in range(cell_pixels)
    ]
    return frame[np.ix_(centres, centres)].tobytes()


@pytest.mark.parametrize("is_slippery", [False, True])
@pytest.mark.parametrize("size", [4, 5])
def test_episodes_equal_gymnasium_stepped_side_by_side(is_slippery: bool, size: int) -> None:
    core = _core(is_slippery=is_slippery, size=size, max_turns=20, hole_probability=0.15)
    ends = {"goal": 0, "hole": 0, "truncated": 0}
    for seed in range(25):
        rng = random.Random(seed)
        observation, info = core.reset(seed)
        lake = _gymnasium(core, seed, is_slippery)
        assert not info.success
        assert observation.images[0].tobytes() == _picture(lake, size)
        while True:
            action = rng.randrange(4)
            result = core.step(_answer(ACTION_NAMES[action]))
            _, reward, terminated, _, _ = lake.step(action)
            assert result.reward["task"] == reward
            assert result.terminated == terminated
            assert result.info.success == (reward == 1.0)
            assert result.observation.images[0].tobytes() == _picture(lake, size)
            if result.done:
                ends["truncated" if result.truncated else "goal" if result.info.success else "hole"] += 1
                break
    assert min(ends.values()) > 0, ends


def test_slippery_ice_slips_sideways_and_never_backwards() -> None:
    core = _core(is_slippery=True, observation="text", hole_probability=0.0, size=8, max_turns=50)
    seen = set()
    for seed in range(60):
        before = core.reset(seed)[0].text.split("\n")
        after = core.step(_answer("Right")).observation.text.split("\n")
        (row, column), (new_row, new_column) = (
            next((y, line.find(mark)) for y, line in enumerate(grid[:8]) for mark in "P*" if mark in line)
            for grid in (before, after)
        )
        seen.add((new_row - row, new_column - column))
    assert {(0, 1), (1, 0), (-1, 0)} <= seen <= {(0, 1), (1, 0), (-1, 0), (0, 0)}


def test_levels_are_solvable_with_distinct_start_and_goal() -> None:
    starts, goals = set(), set()
    for seed in range(300):
        level = generate_level(seed, 4, 0.4)
        assert level.tiles.count("S") == level.tiles.count("G") == 1
        assert level.tiles[level.start] == "S" and level.tiles[level.goal] == "G"
        assert level.distances[level.start] > 0
        starts.add(level.start)
        goals.add(level.goal)
    assert starts == goals == set(range(16))


def test_a_level_is_pinned_to_its_seed() -> None:
    assert generate_level(2, 4, 0.2).rows == ("FFHH", "FFFF", "GFFH", "FFFS")
    assert generate_level(0, 16, 1.0).tiles.count("H") == 254


def test_following_the_expert_reaches_the_goal_in_the_fewest_moves() -> None:
    core = _core(size=6, max_turns=40, hole_probability=0.3, observation="text")
    for seed in range(60):
        _, info = core.reset(seed)
        result = core.step(_answer(core.expert_actions()[-1]))
        while not result.done:
            result = core.step(_answer(core.expert_actions()[-1]))
        assert result.info.success and result.terminated
        assert result.info.metrics["num_actions"] == info.metrics["initial_distance"]
        assert core.expert_actions() == () and core.goal_direction() == ""


def test_expert_lists_all_optimal_actions_and_the_direction_of_the_goal() -> None:
    level = generate_level(2, 4, 0.2)
    assert level.optimal_actions(level.start) == ("Left",)
    assert level.goal_direction(level.start) == "up left"
    assert level.optimal_actions(0) == ("Down",) and level.goal_direction(0) == "down"
    assert level.optimal_actions(5) == ("Left", "Down") and level.goal_direction(5) == "down left"
    assert level.optimal_actions(2) == (), "a hole"


def test_rewards_are_named_components() -> None:
    core = _core(hole_probability=0.0, success_reward=2.0, format_reward=0.1, invalid_penalty=-0.3, max_turns=50)
    core.reset(0)
    assert core.level.rows[3] == "FFSG"
    assert core.step(_answer("Up")).reward == {"task": 0.0, "format": 0.1}
    assert core.step("Up").reward == {"task": 0.0, "format": -0.3}
    assert core.step(_answer("Jump")).reward == {"task": 0.0, "format": -0.3}
    core.step(_answer("Down"))
    assert core.step(_answer("Right")).reward == {"task": 2.0, "format": 0.1}


def test_salvaged_actions_are_played_without_format_reward() -> None:
    core = _core(hole_probability=0.0, strict_format=False)
    core.reset(0)
    result = core.step("I go <answer>Right</answer>")
    assert result.reward == {"task": 1.0, "format": 0.0}
    assert result.info.success and not result.parsed.format_ok and result.parsed.actions == ("Right",)


def test_several_actions_a_turn_stop_at_the_end_of_the_episode() -> None:
    core = _core(hole_probability=0.0, max_actions_per_turn=3)
    core.reset(0)
    result = core.step(_answer("Down", "Right", "Left"))
    assert result.terminated and result.info.success
    assert result.parsed.actions == ("Down", "Right")
    assert result.info.metrics == {
        "num_turns": 1,
        "num_actions": 2,
        "num_effective_actions": 1,
        "initial_distance": 1,
    }


def test_actions_before_an_unknown_one_stay_executed() -> None:
    core = _core(hole_probability=0.0, max_actions_per_turn=3)
    core.reset(0)
    result = core.step(_answer("Right", "Jump"))
    assert result.terminated and result.reward == {"task": 1.0, "format": -0.5}


def test_max_turns_truncates_and_the_goal_on_the_last_turn_terminates() -> None:
    core = _core(hole_probability=0.0, max_turns=3)
    for last, terminated in (("Down", False), ("Right", True), ("nonsense", False)):
        core.reset(0)
        assert not core.step(_answer("Down")).done
        assert not core.step("malformed turns count, too").done
        result = core.step(_answer(last))
        assert (result.terminated, result.truncated) == (terminated, not terminated)


def test_turns_are_limited_by_the_config_alone() -> None:
    core = _core(hole_probability=0.0, max_turns=150, observation="text")
    core.reset(0)
    results = [core.step(_answer("Down")) for _ in range(150)]
    assert [result.done for result in results] == [False] * 149 + [True]


def test_a_fall_terminates_without_success() -> None:
    core = _core(observation="text", split="train")
    core.reset(2)
    assert core.level.rows == ("FFHH", "FFFF", "GFFH", "FFFS")
    result = core.step(_answer("Up"))
    assert result.terminated and not result.info.success and result.reward["task"] == 0.0
    assert result.observation.text == "FFHH\nFFFF\nGFFX\nFFFS\nMove to the goal."


def test_observations_of_both_kinds() -> None:
    text, _ = _core(observation="text", instruction="Go.").reset(2)
    assert text.text == "FFHH\nFFFF\nGFFH\nFFFP\nGo." and text.images == ()
    assert text.state == "FFHH\nFFFF\nGFFH\nFFFP"
    image, _ = _core(cell_pixels=14).reset(2)
    assert image.state == text.state
    assert image.text == "<image>Move to the goal." and image.images[0].size == (56, 56)
    assert _core(cell_pixels=20, size=6).reset(2)[0].images[0].size == (120, 120)


@pytest.mark.parametrize("name", ["no_think", "free_think", "wm"])
@pytest.mark.parametrize("is_slippery", [False, True])
def test_the_full_system_prompt_shows_an_answer_that_it_accepts(name: str, is_slippery: bool) -> None:
    core = _core(response_format=name, is_slippery=is_slippery, max_actions_per_turn=2)
    prompt = core.system_prompt()
    assert ("is slippery" in prompt) == is_slippery and ("is not slippery" in prompt) != is_slippery
    core.reset(0)
    parsed = core.step(prompt.split("Example: ")[1]).parsed
    assert parsed.format_ok and parsed.action_valid
    assert _core(system_prompt="none").system_prompt() == ""


def test_gymnasium_draws_only_cells_that_were_not_seen() -> None:
    level = generate_level(2, 4, 0.2)
    lake = gymnasium.make("FrozenLake-v1", desc=list(level.rows), is_slippery=False, render_mode="rgb_array")
    lake.reset(seed=0)
    num_frames = 0

    def render() -> np.ndarray:
        nonlocal num_frames
        num_frames += 1
        return np.asarray(lake.render())

    painter = LakePainter(4, 14)
    pictures = [painter.paint(level, level.start, render).tobytes() for _ in range(3)]
    assert num_frames == 1 and len(set(pictures)) == 1
    lake.step(ACTION_NAMES.index("Left"))
    painter.paint(level, level.start - 1, render)
    assert num_frames == 2


@pytest.mark.parametrize("size", [2, 8, 9])
def test_pictures_of_other_sizes_are_gymnasiums_cells(size: int) -> None:
    core = _core(size=size)
    picture = core.reset(1)[0].images[0]
    assert picture.size == (size * 14, size * 14)
    assert picture.tobytes() == _picture(_gymnasium(core, 1, False), size)


def test_player_goal_hole_and_ice_stay_apart_at_fourteen_pixels() -> None:
    core = _core(hole_probability=0.3)
    core.reset(2)
    picture = np.asarray(core.step("stay").observation.images[0], dtype=float) / 255
    cells = picture.reshape(4, 14, 4, 14, 3).swapaxes(1, 2).reshape(16, 14, 14, 3)
    tiles = core.level.tiles
    kinds = [cells[tiles.index(tile)] for tile in "SGHF"]
    for one, other in itertools.combinations(kinds, 2):
        assert np.sqrt(((one - other) ** 2).mean()) > 0.18


def _play(seed: int) -> str:
    """A digest of everything that an episode shows."""
    core = _core(is_slippery=True, size=4 + seed % 3, max_turns=6)
    rng = random.Random(seed)
    observation, _ = core.reset(seed)
    parts = [core.level.content, encode_png(observation.images[0]).hex()]
    while True:
        result = core.step(_answer(rng.choice(ACTION_NAMES)))
        parts += [encode_png(result.observation.images[0]).hex(), str(dict(result.reward))]
        if result.done:
            return f"{stable_hash(''.join(parts)):x}"


def test_threads_that_paint_at_once_get_the_pictures_of_one_thread() -> None:
    alone = [_play(seed) for seed in range(48)]
    lake_painter.cache_clear()
    with ThreadPoolExecutor(8) as executor:
        assert list(executor.map(_play, range(48), timeout=60)) == alone


_EPISODES = """
from vagen.envs.base import encode_png
from vagen.envs.frozen_lake.config import FrozenLakeConfig
from vagen.envs.frozen_lake.core import FrozenLakeCore
from vagen.envs.levels import stable_hash
for split in ("train", "validation"):
    core = FrozenLakeCore(FrozenLakeConfig(split=split, is_slippery=True))
    for seed in range(20):
        parts = [str(core.reset(seed)), core.level.content]
        for action in ("Left", "Down", "Right"):
            result = core.step(f"<think></think><answer>{action}</answer>")
            parts += [encode_png(result.observation.images[0]).hex(), str(result.reward)]
            if result.done:
                break
        print(seed, core.level.content.replace(chr(10), "/"), f"{stable_hash(''.join(parts[1:])):x}")
"""


def _run_python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, **environment}, capture_output=True, text=True, timeout=60
    )


def test_episodes_do_not_depend_on_the_process() -> None:
    first, second = (_run_python(_EPISODES, PYTHONHASHSEED=seed) for seed in ("1", "2"))
    assert first.returncode == second.returncode == 0, first.stderr
    assert len(first.stdout.splitlines()) == 40
    assert first.stdout == second.stdout


_DRAW = """
import os, signal, sys
from vagen.envs.frozen_lake.config import FrozenLakeConfig
from vagen.envs.frozen_lake.core import FrozenLakeCore
FrozenLakeCore(FrozenLakeConfig()).reset(0)
import pygame
print(pygame.display.get_driver(), os.environ.get("SDL_VIDEODRIVER"), flush=True)
if len(sys.argv) == 1:
    os.kill(os.getpid(), signal.SIGTERM)
    signal.sigtimedwait([signal.SIGUSR1], 10)
"""


def test_drawing_needs_no_display_and_leaves_sigterm_alone() -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("SDL_", "DISPLAY"))}
    done = subprocess.run([sys.executable, "-c", _DRAW], env=environment, capture_output=True, text=True, timeout=60)
    assert done.stdout == "dummy None\n", done.stderr
    assert done.returncode == -15, "a process that has drawn must still die of SIGTERM"


def test_the_users_video_driver_is_kept() -> None:
    assert _run_python(_DRAW, SDL_VIDEODRIVER="offscreen").stdout == "offscreen offscreen\n"
