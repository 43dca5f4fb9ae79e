"""Every wrong setting gets an error that names path, value and bound."""

from __future__ import annotations

from typing import Annotated

import msgspec
import pytest

from vagen.common.config import RunConfig, Section, convert, read_recipe, require, section, to_plain
from vagen.common.errors import ConfigError


class Inner(Section, frozen=True, kw_only=True):
    rate: Annotated[float, msgspec.Meta(gt=0)] = 0.1


class Outer(Section, frozen=True, kw_only=True):
    batch_size: Annotated[int, msgspec.Meta(ge=1)] = 4
    inner: Inner = Inner()
    names: tuple[str, ...] = ()
    even: int = 2

    def __post_init__(self) -> None:
        require(self.even % 2 == 0, "learner.even", self.even, "an even int")


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ({"batch_size": "many"}, '$.learner.batch_size: expected int, got "many"'),
        ({"batch_size": 0}, "$.learner.batch_size: expected int >= 1, got 0"),
        ({"batch_size": 1.5}, "$.learner.batch_size: expected int, got 1.5"),
        ({"inner": {"rate": 0}}, "$.learner.inner.rate: expected float > 0"),
        ({"inner": {"speed": 1}}, "$.learner.inner.speed: unknown key"),
        ({"inner": 3}, "$.learner.inner: expected object, got 3"),
        ({"names": ["a", 2]}, "$.learner.names[1]: expected str, got 2"),
        ({"even": 3}, "$.learner.even: expected an even int, got 3"),
        ({"batchsize": 3}, "$.learner.batchsize: unknown key"),
    ],
)
def test_errors_name_path_value_and_bound(raw, message):
    with pytest.raises(ConfigError) as caught:
        convert(raw, Outer, "$.learner")
    assert message in str(caught.value)


def test_overrides_are_applied_as_yaml(tmp_path):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("run: {name: one}\n")
    raw = read_recipe(recipe, ["run.seed=7", "learner.inner.rate=25e-2", "learner.names=[a, b]"])
    assert section(raw, "run", RunConfig) == RunConfig(name="one", seed=7)
    outer = section(raw, "learner", Outer)
    assert (outer.inner.rate, outer.names) == (0.25, ("a", "b"))
    assert convert(to_plain(outer), Outer) == outer


@pytest.mark.parametrize(
    ("text", "overrides", "message"),
    [
        ("trainer: {}", [], "$.trainer: unknown section; known are run,"),
        ("learner: 3", [], "$.learner: expected a mapping, got 3"),
        ("- a", [], "expected a mapping of sections"),
        ("a: [", [], "not valid yaml"),
        ("", ["seed=3"], "expected section.key=value"),
        ("", ["run.seed"], "expected section.key=value"),
        ("run: {seed: 3}", ["run.seed.low=1"], "$.run.seed is not a mapping but 3"),
    ],
)
def test_bad_recipes_and_overrides(tmp_path, text, overrides, message):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(text)
    with pytest.raises(ConfigError) as caught:
        read_recipe(recipe, overrides)
    assert message in str(caught.value)


def test_missing_recipe_lists_those_shipped():
    with pytest.raises(ConfigError, match="no such file.*frozenlake"):
        read_recipe("no-such-recipe")


def test_run_section_bounds():
    for raw, path in (
        ({"name": "a b"}, "run.name"),
        ({"seed": -1}, "run.seed"),
        ({"log_level": "LOUD"}, "run.log_level"),
    ):
        with pytest.raises(ConfigError, match=path):
            convert(raw, RunConfig, "$.run")
