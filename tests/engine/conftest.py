"""Engine processes on a tiny Qwen2.5-VL or Qwen2, publishes to them, and transformers' own model as the reference."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel, Qwen2_5_VLForConditionalGeneration, Qwen2ForCausalLM

from tests.engine import tiny_models as tiny
from tests.engine.engine_handle import EngineHandle
from tests.engine.lab import Lab
from tests.engine.starters import ADMIN_KEY, API_KEY, EngineStarter, SGLangStarter
from vagen.actor.engines.exchange import Exchange
from vagen.learner.broadcast import Broadcaster, PublishReport
from vagen.learner.config import BroadcastConfig

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def lab() -> type[Lab]:
    """Helpers and constants of this folder."""
    return Lab


@pytest.fixture(scope="session")
def start_sglang(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SGLangStarter]:
    """Starts SGLang; it ends with the session."""
    starter = SGLangStarter(tmp_path_factory.mktemp("sglang"))
    yield starter
    starter.stop_all()


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Qwen2_5_VLForConditionalGeneration]:
    """Folder and model."""
    folder = tmp_path_factory.mktemp("tiny")
    return folder, tiny.build_model(folder)


@pytest.fixture(scope="session")
def tiny_text_model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Qwen2ForCausalLM]:
    """Folder and model."""
    folder = tmp_path_factory.mktemp("tiny-text")
    return folder, tiny.build_text_model(folder)


@pytest.fixture(scope="session")
def start_engines(
    tiny_model: tuple[Path, Qwen2_5_VLForConditionalGeneration], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[EngineStarter]:
    """Starts engines on the tiny model; all end with the session."""
    starter = EngineStarter(*tiny_model, tmp_path_factory.mktemp("engines"))
    yield starter
    starter.stop_all()


@pytest.fixture(scope="session")
def start_text_engines(
    tiny_text_model: tuple[Path, Qwen2ForCausalLM], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[EngineStarter]:
    """Starts engines on the tiny text model; all end with the session."""
    starter = EngineStarter(*tiny_text_model, tmp_path_factory.mktemp("text-engines"))
    yield starter
    starter.stop_all()


class Endless(Exchange):
    """Requests for exactly so many tokens: an end of turn might end them before anything happens to the engine."""

    def _body(self, *args: Any) -> dict[str, Any]:
        body = super()._body(*args)
        body["sampling_params"]["ignore_eos"] = True
        return body


@pytest.fixture
def endless(monkeypatch: pytest.MonkeyPatch) -> None:
    """An actor's responses do not end by themselves."""
    for module in ("vagen.actor.client", "vagen.actor.engines.member"):
        monkeypatch.setattr(f"{module}.Exchange", Endless)


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable[[Path, PreTrainedModel], EngineHandle]]:
    """Starts an engine with keys on a folder and its model; it ends with the test."""
    starters: list[EngineStarter] = []

    def start(model_dir: Path, reference: PreTrainedModel) -> EngineHandle:
        starters.append(EngineStarter(model_dir, reference, tmp_path))
        return starters[-1](api_key=API_KEY, admin_api_key=ADMIN_KEY)[0]

    yield start
    for starter in starters:
        starter.stop_all()


@pytest.fixture
def publish_to() -> Iterator[Callable[..., PublishReport]]:
    """Publishes a model's weights to one engine in a given pause mode, which must succeed."""
    trainers: dict[str, Broadcaster] = {}

    def publish(engine: EngineHandle, model: torch.nn.Module, version: str, mode: str = "retract") -> PublishReport:
        config = BroadcastConfig(
            pause_mode=mode, broadcast_timeout_s=60.0, api_key=engine.api_key, admin_api_key=engine.admin_key
        )
        trainer = trainers.setdefault(mode, Broadcaster(config))
        report = trainer.publish(tiny.engine_weights(model), version, [engine.url])
        assert report.ok == (engine.url,), report.failed
        return report

    yield publish
    for trainer in trainers.values():
        trainer.close()
