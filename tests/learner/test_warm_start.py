"""`vagen sft`: rows as in reinforcement learning, a model that any part can load, the same bits for the same seed."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer, Qwen2_5_VLForConditionalGeneration

from vagen.actor.rendering import ChatRenderer
from vagen.common.config import read_recipe
from vagen.common.errors import ConfigError
from vagen.common.vision import ImageSpec
from vagen.envs.registry import make_core
from vagen.envs.scripted import scripted_episodes
from vagen.tools.sft import _record, _returns, run_sft
from vagen.tools.tiny_tokenizer import train_tokenizer

SETTINGS = ["sft.turns=120", "sft.steps=6", "sft.batch_rows=16"]


@pytest.fixture(scope="module")
def warm(tmp_path_factory):
    directory = tmp_path_factory.mktemp("sft") / "model"
    losses: list[float] = []
    stats = run_sft(read_recipe("frozenlake", SETTINGS), directory, lambda progress: losses.append(progress.loss))
    return directory, stats, losses


def test_the_model_directory_is_whole(warm):
    directory, stats, losses = warm
    assert len(losses) == 6 and losses[-1] < losses[0]
    assert json.loads((directory / "sft.json").read_text()) == stats
    assert stats["parameters"] == pytest.approx(0.69e6, rel=0.02)
    model = Qwen2_5_VLForConditionalGeneration.from_pretrained(directory)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    assert model.config.image_token_id == tokenizer.convert_tokens_to_ids("<|image_pad|>")
    for tag in ("<think>", "</answer>"):
        assert len(tokenizer(tag)["input_ids"]) == 1
    assert (directory / "value_head.safetensors").is_file()


def test_the_same_seed_gives_the_same_bits_and_another_seed_others(warm, tmp_path):
    directory = warm[0]
    weights = load_file(directory / "model.safetensors")
    for seed, is_same in ((0, True), (1, False)):
        again = tmp_path / str(seed)
        run_sft(read_recipe("frozenlake", [*SETTINGS, f"run.seed={seed}"]), again, lambda progress: None)
        other = load_file(again / "model.safetensors")
        assert all(torch.equal(weights[name], other[name]) for name in weights) == is_same


def test_pictures_are_normalised_by_their_own_statistics(warm):
    spec = ImageSpec.load(warm[0])
    core = make_core("frozen_lake", read_recipe("frozenlake")["env"]["config"])
    pixels = np.stack([np.asarray(core.reset(seed)[0].images[0]) for seed in range(40)]) / 255
    assert spec.mean == pytest.approx(pixels.mean((0, 1, 2)), abs=0.03)
    assert spec.std == pytest.approx(pixels.std((0, 1, 2)), abs=0.03)


def test_rows_hold_what_the_script_wrote_after_what_the_engine_would_see(warm):
    import asyncio

    from tokenizers import Tokenizer

    from vagen.actor.harness import NoConcatHarness

    directory = warm[0]
    renderer = ChatRenderer.load(directory)
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    core = make_core("frozen_lake", read_recipe("frozenlake")["env"]["config"])
    (episode,) = scripted_episodes(core, [5], script_seed=1)
    recorder = asyncio.run(_record(episode, core.system_prompt(), NoConcatHarness(), renderer))
    rows = recorder.rows()
    assert len(rows) == len(episode.turns)
    for row, turn in zip(rows, episode.turns, strict=True):
        written = row.token_ids[row.policy_mask != 0].tolist()
        assert renderer.decode(written) == turn.response
        assert written[-1] == renderer.end_of_turn_id
        assert tokenizer.decode(row.token_ids.tolist(), skip_special_tokens=False).count("<|image_pad|>") == 4


def test_returns_are_discounted_by_turn():
    class Turn:
        def __init__(self, **reward: float) -> None:
            self.reward = reward

    class Episode:
        turns = (Turn(task=0.0, format=0.5), Turn(format=-0.5), Turn(task=1.0, format=0.5))

    assert _returns(Episode(), 0.5).tolist() == [0.5 + 0.5 * (-0.5 + 0.5 * 1.5), -0.5 + 0.5 * 1.5, 1.5]


def test_an_existing_model_is_never_overwritten(warm):
    with pytest.raises(ConfigError, match="exists already"):
        run_sft(read_recipe("frozenlake", SETTINGS), warm[0], lambda progress: None)


def test_tokenizer_is_a_function_of_its_corpus():
    first, second = (train_tokenizer(["Move to the goal."] * 3, ["<think>"], 300) for _ in range(2))
    assert first.to_str() == second.to_str()
    assert first.decode(first.encode("<think>Move über").ids) == "<think>Move über"
