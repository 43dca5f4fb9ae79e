"""The types of the exchange, the registry, and PNG encoding."""

from __future__ import annotations

import io
import math
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import msgspec
import pytest
from PIL import Image

from vagen.common.errors import ConfigError, EnvironmentFailure, InfrastructureError, ObservationError
from vagen.envs import registry
from vagen.envs.base import Environment, EnvironmentCore, Info, Observation, ParsedResponse, StepResult, encode_png
from vagen.envs.frozen_lake.config import FrozenLakeConfig
from vagen.envs.frozen_lake.core import FrozenLakeCore
from vagen.envs.registry import known_environments, make_environment, parse_environment_config, register

PICTURE = Image.new("RGB", (4, 4))
PARSED = ParsedResponse(format_ok=True, action_valid=True, actions=("Up",))


@pytest.mark.parametrize(
    ("text", "images", "numbers"),
    [("<image>go", (), ("1", "0")), ("go", (PICTURE,), ("0", "1")), ("<image><image>", (PICTURE,), ("2", "1"))],
)
def test_observation_refuses_placeholders_that_do_not_match_its_images(
    text: str, images: tuple[Image.Image, ...], numbers: tuple[str, str]
) -> None:
    with pytest.raises(ObservationError) as caught:
        Observation(text, images)
    assert f"{numbers[0]} <image> placeholders and {numbers[1]} images" in str(caught.value)


def test_observation_keeps_matching_text_and_images() -> None:
    assert Observation("a<image>b<image>", (PICTURE, PICTURE)).images == (PICTURE, PICTURE)
    assert Observation("only words").images == ()


def _result(**changes: object) -> StepResult:
    fields = dict(observation=Observation(""), reward={}, terminated=False, truncated=False, info=Info(), parsed=PARSED)
    return StepResult(**{**fields, **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_step_result_refuses_a_reward_that_is_not_finite(value: float) -> None:
    with pytest.raises(ObservationError, match="'task'"):
        _result(reward={"format": 0.0, "task": value})


def test_step_result_ends_in_one_way() -> None:
    with pytest.raises(ObservationError, match="both terminated and truncated"):
        _result(terminated=True, truncated=True)
    assert _result(terminated=True).done and _result(truncated=True).done and not _result().done


def test_png_holds_the_pixels_and_nothing_else() -> None:
    picture = Image.frombytes("RGB", (5, 3), bytes(range(45)))
    tagged = picture.copy()
    tagged.info.update(dpi=(300, 300), icc_profile=b"profile", transparency=(0, 0, 0))
    encoded = encode_png(picture)
    assert encode_png(tagged) == encoded
    assert Image.open(io.BytesIO(encoded)).tobytes() == picture.tobytes()
    assert Image.open(io.BytesIO(encode_png(picture.convert("RGBA")))).mode == "RGB"


def test_an_unknown_environment_is_refused_with_the_known_names() -> None:
    with pytest.raises(ConfigError, match=r"'sokobam' is unknown.*frozen_lake"):
        parse_environment_config("sokobam", {})


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"sise": 4}, "sise"),
        ({"size": 1}, r"size: expected int >= 2, got 1"),
        ({"size": "4"}, r"size: expected int"),
        ({"hole_probability": 1.5}, r"hole_probability: expected float <= 0.9, got 1.5"),
        ({"response_format": "xml"}, r"response_format: expected one of no_think, free_think"),
        ({"invalid_penalty": 0.5}, r"invalid_penalty: expected float <= 0.0"),
        ({"success_reward": math.nan}, r"success_reward: expected a finite number"),
        ({"instruction": "see <image>"}, r"instruction: expected text without <image>"),
        ({"split": "test"}, "split"),
    ],
)
def test_a_bad_setting_is_refused_with_its_path(config: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=r"\$\.env\.config\." + message):
        parse_environment_config("frozen_lake", config)


def test_made_environments_satisfy_the_contract() -> None:
    with ThreadPoolExecutor(1) as executor:
        assert isinstance(make_environment("frozen_lake", {"size": 4}, executor), Environment)
    assert isinstance(FrozenLakeCore(FrozenLakeConfig()), EnvironmentCore)
    assert "frozen_lake" in known_environments()


def test_a_registered_environment_gets_its_typed_config(monkeypatch: pytest.MonkeyPatch) -> None:
    class Config(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
        level: int

    made: list[Config] = []

    def factory(config: Config, executor: object) -> Environment:
        made.append(config)
        return make_environment("frozen_lake", {}, executor)  # type: ignore[arg-type]

    monkeypatch.setattr(registry, "_ENTRIES", dict(registry._ENTRIES))
    register("custom", Config, factory)
    with ThreadPoolExecutor(1) as executor:
        make_environment("custom", {"level": 3}, executor)
    assert made == [Config(level=3)]
    with pytest.raises(ConfigError, match="registered already"):
        register("custom", Config, factory)


def test_environment_failure_is_an_infrastructure_failure() -> None:
    assert issubclass(EnvironmentFailure, InfrastructureError)
    assert not issubclass(EnvironmentFailure, ValueError)


def test_the_folder_imports_without_torch_and_simulators() -> None:
    code = (
        "import sys, vagen.envs.registry, vagen.envs.scripted, vagen.envs.threaded\n"
        "print([m for m in ('torch', 'transformers', 'gymnasium', 'pygame') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"
