"""What the tests of engines share, as the fixture `lab`: prompts, readings of an answer, models and their weights."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.engine import tiny_models as tiny
from tests.engine.engine_handle import EngineHandle
from tests.engine.fault_proxy import FaultProxy
from tests.engine.fleet import Fleet
from tests.engine.starters import ADMIN_KEY, API_KEY, BROADCAST_TIMEOUT_S, FOLDER, SGLANG_PAUSE_TIMEOUT_S
from tests.forks import ForkedScript


class Lab:
    """What tests use of this folder."""

    image, video, vision_start, vision_end = tiny.IMAGE, tiny.VIDEO, tiny.VISION_START, tiny.VISION_END
    eos, vocab = tiny.EOS, tiny.VOCAB
    api_key, admin_key, broadcast_timeout_s = API_KEY, ADMIN_KEY, BROADCAST_TIMEOUT_S
    sglang_pause_timeout_s = SGLANG_PAUSE_TIMEOUT_S
    handle = EngineHandle
    png = staticmethod(tiny.make_png)
    weights = staticmethod(tiny.engine_weights)
    fleet = Fleet
    proxy = FaultProxy
    logprobs_of = staticmethod(tiny.logprobs_of)
    gather_logprobs = staticmethod(tiny.gather_logprobs)
    inputs = staticmethod(tiny.model_inputs)
    picture_inputs = staticmethod(tiny.picture_inputs)

    @staticmethod
    def fork(script: str, arguments: Sequence[str], log: Path) -> ForkedScript:
        """Starts a script of this folder."""
        return ForkedScript(FOLDER / script, arguments, log)

    @staticmethod
    def build(family: str, folder: Path) -> Any:
        """transformers' tiny model of a family, saved in `folder`."""
        builders = {
            "glm4v": tiny.build_glm4v,
            "internvl": tiny.build_internvl,
            "qwen2": tiny.build_text_model,
            "qwen2_5_vl": tiny.build_model,
            "qwen3": tiny.build_qwen3,
            "qwen3_vl": tiny.build_qwen3_vl,
            "qwen3_vl_moe": tiny.build_qwen3_vl_moe,
        }
        return builders[family](folder)

    @staticmethod
    def image_prompt(*text: int) -> list[int]:
        """A prompt with one image."""
        return [10, 20, tiny.VISION_START, tiny.IMAGE, tiny.VISION_END, *text]

    @staticmethod
    def reported(answer: dict[str, Any]) -> list[float]:
        """Log-probabilities in an answer, whose ids must be those of the output."""
        entries = answer["meta_info"]["output_token_logprobs"]
        assert [entry[1] for entry in entries] == answer["output_ids"]
        return [entry[0] for entry in entries]

    @staticmethod
    def spans(answer: dict[str, Any]) -> list[tuple[str, int, int]]:
        """Spans of versions, which must cover the output without gaps."""
        spans = [(str(s["version"]), s["start"], s["end"]) for s in answer["meta_info"]["weight_versions"]]
        edges = [0, *(end for _, _, end in spans)]
        assert [start for _, start, _ in spans] == edges[:-1] and edges[-1] == len(answer["output_ids"])
        return spans

    @staticmethod
    def new_weights(engine: EngineHandle) -> tuple[Any, Any]:
        """A changed model, and its weights as they are published."""
        model = engine.perturbed(0.02)
        return model, Lab.weights(model)

    @staticmethod
    def assert_serves(engine: EngineHandle, model: Any, version: object) -> None:
        """The engine generates, with these weights and under this version."""
        ids, image = Lab.image_prompt(30), Lab.png(6)
        answer = engine.generate(ids, [image])
        assert Lab.spans(answer) == [(str(version), 0, 12)]
        expected = Lab.logprobs_of(model, ids, [image], answer["output_ids"], forbidden=engine.forbidden)
        assert max(abs(a - b) for a, b in zip(Lab.reported(answer), expected, strict=True)) < 2e-5
