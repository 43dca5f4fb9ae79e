"""Engine processes on a tiny Qwen2.5-VL, a client for them, and transformers' own model as the reference.

Tests are no package to import from: what they need of this file comes through the fixture `lab`.
"""

from __future__ import annotations

import base64
import io
import json
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

from vagen.common.vision import ImageSpec, preprocess_image
from vagen.learner.broadcast import Broadcaster, PublishReport
from vagen.learner.config import BroadcastConfig

IMAGE, VIDEO, VISION_START, VISION_END, EOS = 1, 2, 3, 4, 5
VOCAB = 96
API_KEY, ADMIN_KEY = "generate-key", "admin-key"
BROADCAST_TIMEOUT_S = 4.0

torch.set_num_threads(1)


def build_model(folder: Path, seed: int = 0) -> Qwen2_5_VLForConditionalGeneration:
    """A tiny model with random biases and norms (transformers would leave them 0 and 1) and one windowed block."""
    torch.manual_seed(seed)
    config = Qwen2_5_VLConfig(
        text_config=dict(
            vocab_size=VOCAB,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=4096,
            rope_parameters=dict(rope_type="default", rope_theta=10000.0, mrope_section=[2, 3, 3]),
            initializer_range=0.08,
            bos_token_id=None,
            eos_token_id=EOS,
            pad_token_id=None,
        ),
        vision_config=dict(
            depth=2,
            hidden_size=32,
            intermediate_size=64,
            num_heads=2,
            out_hidden_size=64,
            patch_size=14,
            window_size=56,
            fullatt_block_indexes=[1],
            initializer_range=0.08,
        ),
        image_token_id=IMAGE,
        video_token_id=VIDEO,
        vision_start_token_id=VISION_START,
        vision_end_token_id=VISION_END,
        tie_word_embeddings=True,
    )
    model = Qwen2_5_VLForConditionalGeneration(config).float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    ImageSpec(max_pixels=56 * 56 * 8).save(folder)
    return model


def make_png(seed: int, width: int = 56, height: int = 56) -> bytes:
    """An encoded image of random blocks."""
    blocks = np.random.default_rng(seed).integers(0, 256, (height // 14, width // 14, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(blocks.repeat(14, 0).repeat(14, 1)).save(file, "PNG")
    return file.getvalue()


def engine_weights(model: torch.nn.Module) -> list[tuple[str, torch.Tensor]]:
    """Parameters under SGLang's names, spelt out here a second time on purpose."""
    return [
        (name.replace("model.language_model.", "model.").replace("model.visual.", "visual."), parameter.data)
        for name, parameter in model.named_parameters()
    ]


@dataclass
class EngineHandle:
    """A running engine under test, and the model whose weights it should have."""

    url: str
    api_key: str | None
    admin_key: str | None
    reference: Qwen2_5_VLForConditionalGeneration
    process: subprocess.Popen[bytes] | None = None
    forbidden: Sequence[int] = ()
    threads: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(64))

    def call(self, path: str, body: object = None, *, key: str | None = None, timeout_s: float = 60) -> tuple[int, Any]:
        """Status and parsed body; POST where there is a body."""
        headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
        data = None if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, headers)
        try:
            with urllib.request.urlopen(request, timeout=timeout_s) as answer:
                status, text = answer.status, answer.read()
        except urllib.error.HTTPError as error:
            status, text = error.code, error.read()
        return status, json.loads(text) if text[:1] in (b"{", b"[") else text.decode()

    def admin(self, path: str, body: object) -> Any:
        """Body of an administrative call, which must succeed."""
        status, answer = self.call(path, body, key=self.admin_key)
        assert status == 200, answer
        return answer

    def generate(self, ids: Sequence[int], images: Sequence[bytes] = (), **params: Any) -> dict[str, Any]:
        """Answer to a generation, which must succeed; `rid` apart, keywords are sampling parameters."""
        body: dict[str, Any] = {"input_ids": list(ids), "return_logprob": True}
        if "rid" in params:
            body["rid"] = params.pop("rid")
        if images:
            body["image_data"] = [base64.b64encode(image).decode() for image in images]
        body["sampling_params"] = {"max_new_tokens": 12, "temperature": 1.0, "ignore_eos": True} | params
        status, answer = self.call("/generate", body, key=self.api_key)
        assert status == 200, answer
        return answer

    def submit(self, *args: Any, **params: Any) -> Future[dict[str, Any]]:
        """`generate` in a thread."""
        return self.threads.submit(self.generate, *args, **params)

    def metric(self, *names: str) -> float:
        """Value of the first of these metrics that the engine has, summed over its labels."""
        lines = self.call("/metrics")[1].splitlines()
        for name in names:
            values = [float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith((name + "{", name + " "))]
            if values:
                return sum(values)
        return 0.0

    def wait_until(self, holds: Callable[[], bool], what: str, timeout_s: float = 30) -> None:
        """Poll the engine until it says so."""
        deadline = time.monotonic() + timeout_s
        while not holds():
            assert time.monotonic() < deadline, f"not within {timeout_s} s: {what}"
            time.sleep(0.005)

    def wait_running(self, count: int = 1) -> None:
        """Until so many requests generate."""
        names = ("vagen_engine_running_requests", "sglang:num_running_reqs")
        self.wait_until(lambda: self.metric(*names) >= count, f"{count} running")

    def version(self) -> str:
        """Version of the weights that the engine reports."""
        return str(self.call("/model_info", key=self.api_key)[1]["weight_version"])

    def perturbed(self, scale: float = 0.05, only: str = "") -> Qwen2_5_VLForConditionalGeneration:
        """A copy of the reference with other weights."""
        model = Qwen2_5_VLForConditionalGeneration(self.reference.config).float().eval()
        model.load_state_dict(self.reference.state_dict())
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if only in name:
                    parameter.add_(scale * torch.randn_like(parameter))
        return model


def logprobs_of(
    model: Qwen2_5_VLForConditionalGeneration,
    ids: Sequence[int],
    images: Sequence[bytes],
    output: Sequence[int],
    *,
    temperature: float = 1.0,
    forbidden: Sequence[int] = (),
) -> list[float]:
    """Log-probabilities of `output` after the prompt, by transformers' own forward pass."""
    with torch.no_grad():
        inputs = model_inputs(model, ids, images, output)
        logits = model(**inputs).logits[0]
    return gather_logprobs(logits[-len(output) - 1 : -1], output, temperature, forbidden)


def gather_logprobs(
    logits: torch.Tensor, output: Sequence[int], temperature: float, forbidden: Sequence[int]
) -> list[float]:
    """Of the tokens `output` [T] under logits [T, V]."""
    logits = logits.clone()
    logits[:, list(forbidden)] = -torch.inf
    scored = torch.log_softmax(logits / temperature, -1)
    return scored.gather(1, torch.tensor(output)[:, None])[:, 0].tolist()


def model_inputs(
    model: Qwen2_5_VLForConditionalGeneration, ids: Sequence[int], images: Sequence[bytes], output: Sequence[int]
) -> dict[str, Any]:
    spec = ImageSpec(max_pixels=56 * 56 * 8)
    decoded = [preprocess_image(image, spec) for image in images]
    expanded: list[int] = []
    grids = iter(grid for _, grid in decoded)
    for token in ids:
        expanded += [token] * (spec.num_tokens(next(grids)) if token == IMAGE else 1)
    row = torch.tensor([[*expanded, *output]])
    inputs: dict[str, Any] = {"input_ids": row, "mm_token_type_ids": (row == IMAGE).int()}
    if images:
        inputs["pixel_values"] = torch.cat([patches for patches, _ in decoded])
        inputs["image_grid_thw"] = torch.tensor([grid for _, grid in decoded])
    return inputs


class Lab:
    """What tests use of this file."""

    image, video, vision_start, vision_end, eos, vocab = IMAGE, VIDEO, VISION_START, VISION_END, EOS, VOCAB
    api_key, admin_key, broadcast_timeout_s = API_KEY, ADMIN_KEY, BROADCAST_TIMEOUT_S
    handle = EngineHandle
    png = staticmethod(make_png)
    weights = staticmethod(engine_weights)
    logprobs_of = staticmethod(logprobs_of)
    gather_logprobs = staticmethod(gather_logprobs)
    inputs = staticmethod(model_inputs)

    @staticmethod
    def image_prompt(*text: int) -> list[int]:
        """A prompt with one image."""
        return [10, 20, VISION_START, IMAGE, VISION_END, *text]

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


@pytest.fixture(scope="session")
def lab() -> type[Lab]:
    """Helpers and constants of this file."""
    return Lab


class EngineStarter:
    """Starts engine processes and ends them."""

    def __init__(self, model_dir: Path, reference: Qwen2_5_VLForConditionalGeneration, folder: Path) -> None:
        self._model_dir = model_dir
        self._reference = reference
        self._folder = folder
        self._handles: list[EngineHandle] = []

    def __call__(self, count: int = 1, **config: Any) -> list[EngineHandle]:
        """So many engines, started at the same time."""
        first = len(list(self._folder.glob("*.log")))
        started = [self._start(f"{first + i}", config) for i in range(count)]
        handles = []
        for process, ready, log in started:
            deadline = time.monotonic() + 120
            while not ready.exists():
                assert process.poll() is None and time.monotonic() < deadline, log.read_text()
                time.sleep(0.02)
            told = json.loads(ready.read_text())
            assert told["pid"] == process.pid
            handle = EngineHandle(
                url=told["url"],
                api_key=config.get("api_key"),
                admin_key=config.get("admin_api_key"),
                reference=self._reference,
                process=process,
                forbidden=(IMAGE, VIDEO, VISION_START, VISION_END),
            )
            self._handles.append(handle)
            handles.append(handle)
        return handles

    def _start(self, name: str, config: dict[str, Any]) -> tuple[subprocess.Popen[bytes], Path, Path]:
        ready, log = self._folder / f"{name}.json", self._folder / f"{name}.log"
        worker = Path(__file__).with_name("engine_worker.py")
        defaults = {"max_context": 4096, "max_new_tokens_limit": 4000, "broadcast_timeout_s": BROADCAST_TIMEOUT_S}
        command = [sys.executable, str(worker), str(self._model_dir), str(ready), json.dumps(defaults | config)]
        with log.open("wb") as file:
            environment = os.environ | {"OMP_NUM_THREADS": "1"}
            return subprocess.Popen(command, stdout=file, stderr=file, env=environment), ready, log

    def stop_all(self) -> None:
        """Kill what still runs."""
        for handle in self._handles:
            assert handle.process is not None
            handle.process.kill()
            handle.process.wait()
            handle.threads.shutdown(wait=False)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Qwen2_5_VLForConditionalGeneration]:
    """Folder and model."""
    folder = tmp_path_factory.mktemp("tiny")
    return folder, build_model(folder)


@pytest.fixture(scope="session")
def start_engines(
    tiny_model: tuple[Path, Qwen2_5_VLForConditionalGeneration], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[EngineStarter]:
    """Starts engines on the tiny model; all end with the session."""
    starter = EngineStarter(*tiny_model, tmp_path_factory.mktemp("engines"))
    yield starter
    starter.stop_all()


@pytest.fixture
def publish_to() -> Iterator[Callable[..., PublishReport]]:
    """Publishes a model's weights to one engine in a given pause mode, which must succeed."""
    trainers: dict[str, Broadcaster] = {}

    def publish(engine: EngineHandle, model: torch.nn.Module, version: str, mode: str = "retract") -> PublishReport:
        config = BroadcastConfig(pause_mode=mode, broadcast_timeout_s=20.0, admin_api_key=engine.admin_key)
        trainer = trainers.setdefault(mode, Broadcaster(config))
        report = trainer.publish(engine_weights(model), version, [engine.url])
        assert report.ok == (engine.url,), report.failed
        return report

    yield publish
    for trainer in trainers.values():
        trainer.close()
