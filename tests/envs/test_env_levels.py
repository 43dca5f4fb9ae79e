"""Stable hashes and the split by content."""

from __future__ import annotations

import pytest

from vagen.common.errors import ConfigError
from vagen.envs.frozen_lake.level import Level, generate_level
from vagen.envs.levels import next_seed, select_level, split_of, stable_hash


def test_stable_hash_is_xxh3_of_the_text() -> None:
    assert stable_hash("") == 0x2D06800538D394C2
    assert stable_hash("a") == 0xE6C632B61E964E1F


def _lake(seed: int, split: str) -> Level:
    return select_level(seed, split, lambda s: generate_level(s, 4, 0.1), lambda level: level.content)  # type: ignore[arg-type]


def test_training_and_validation_share_no_level() -> None:
    train = [_lake(seed, "train").content for seed in range(3000)]
    validation = [_lake(seed, "validation").content for seed in range(3000)]
    assert not set(train) & set(validation)
    assert len(set(train)) < len(train), "levels of this size recur, so seeds alone could not keep the splits apart"
    assert len(set(validation)) > 500


def test_the_split_takes_one_level_in_ten() -> None:
    contents = {generate_level(seed, 4, 0.2).content for seed in range(4000)}
    share = sum(split_of(content) == "validation" for content in contents) / len(contents)
    assert 0.08 < share < 0.12


def test_a_seed_on_its_own_side_is_not_advanced() -> None:
    for seed in range(50):
        level = generate_level(seed, 4, 0.1)
        assert _lake(seed, split_of(level.content)) == level


def test_advancing_is_a_fixed_chain_of_seeds() -> None:
    assert next_seed(0) == stable_hash("next-seed:0")
    assert len({next_seed(seed) for seed in range(1000)}) == 1000


def test_a_negative_seed_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"seed: expected int >= 0, got -1"):
        _lake(-1, "train")


def test_a_split_that_no_level_reaches_is_an_error_and_not_a_hang() -> None:
    other = {"train": "validation", "validation": "train"}[split_of("the only level")]
    with pytest.raises(ConfigError, match=rf"no {other} level in 2000 attempts from seed 7"):
        select_level(7, other, lambda seed: seed, lambda level: "the only level")  # type: ignore[arg-type]
