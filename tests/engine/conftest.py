"""Engine processes on a tiny Qwen2.5-VL or Qwen2, a client for them, and transformers' own model as the reference.

Tests are no package to import from: what they need of this file comes through the fixture `lab`.
"""

from __future__ import annotations

import base64
import importlib.util
import json
import multiprocessing
import os
import runpy
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any
from urllib.parse import urlsplit

import psutil
import pytest
import torch
from transformers import PreTrainedModel, Qwen2_5_VLForConditionalGeneration, Qwen2ForCausalLM

from vagen.actor.engines.exchange import Exchange
from vagen.common.errors import ConfigError
from vagen.common.vocabulary import forbidding_bias
from vagen.learner.broadcast import Broadcaster, PublishReport
from vagen.learner.config import BroadcastConfig
from vagen.tools.launch import free_port
from vagen.tools.sglang_cpu.serve import sglang_python


def load_module(name: str) -> ModuleType:
    """A module beside this file."""
    spec = importlib.util.spec_from_file_location(f"vagen_test_{name}", Path(__file__).with_name(f"{name}.py"))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


tiny = load_module("tiny_models")
fleet = load_module("fleet")
fault_proxy = load_module("fault_proxy")
API_KEY, ADMIN_KEY = "generate-key", "admin-key"
BROADCAST_TIMEOUT_S = 4.0
SGLANG_PAUSE_TIMEOUT_S = 16.0

torch.set_num_threads(1)


os.environ.setdefault("OMP_NUM_THREADS", "1")
_FORKS = multiprocessing.get_context("forkserver")
_FORKS.set_forkserver_preload(["vagen.actor.local_engine.main", "vagen.learner.broadcast"])


class ForkedScript:
    """A script of this folder, forked from a process that has imported what takes long; as `subprocess.Popen`."""

    def __init__(self, script: str, arguments: Sequence[str], log: Path) -> None:
        here = Path(__file__).parent
        given = {"script": str(here / script), "arguments": list(arguments), "log": str(log)}
        launch = (str(here / "forked.py"), given, "__main__")
        # Daemons end with this process, whatever becomes of their test.
        self._process = _FORKS.Process(target=runpy.run_path, args=launch, daemon=True)
        self._process.start()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def poll(self) -> int | None:
        return self._process.exitcode

    def kill(self) -> None:
        self._process.kill()

    def wait(self, timeout_s: float | None = None) -> int:
        self._process.join(timeout_s)
        assert self._process.exitcode is not None, f"not ended within {timeout_s} s"
        return self._process.exitcode


@dataclass
class EngineHandle:
    """A running engine under test, and the model whose weights it should have."""

    url: str
    api_key: str | None
    admin_key: str | None
    reference: Any
    process: Any = None
    """A `subprocess.Popen` or a `ForkedScript`."""
    model_dir: Path = Path()
    config: dict[str, Any] = field(default_factory=dict)
    fault: Path = Path()
    """Where the engine looks for what is to happen to it."""
    forbidden: Sequence[int] = ()
    threads: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(64))

    def call(
        self, path: str, body: object = None, *, key: str | None = None, timeout_s: float = 120
    ) -> tuple[int, Any]:
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
        """Answer to a generation, which must succeed; `rid` apart, keywords are sampling parameters.

        Vision tokens are forbidden, as an actor does.
        """
        body: dict[str, Any] = {"input_ids": list(ids), "return_logprob": True}
        if "rid" in params:
            body["rid"] = params.pop("rid")
        if images:
            body["image_data"] = [base64.b64encode(image).decode() for image in images]
        body["sampling_params"] = {"max_new_tokens": 12, "temperature": 1.0, "ignore_eos": True} | params
        body["sampling_params"].setdefault("logit_bias", forbidding_bias(self.forbidden))
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

    def checksums(self) -> dict[str, str]:
        """Of the weights in force, by engine name."""
        checksums: dict[str, str] = self.admin("/weights_checker", {"action": "checksum"})["ranks"][0]["checksums"]
        return checksums

    def arm(self, point: str, number: int, pid: int | None = None) -> None:
        """Send a signal, to the engine itself unless told, when it next comes to a point of `engine_worker.py`."""
        partial = self.fault.with_suffix(".partial")
        partial.write_text(json.dumps({"point": point, "pid": pid or self.process.pid, "signal": number}))
        partial.replace(self.fault)

    def signal(self, number: int) -> None:
        """Send a signal to all processes that serve; a launcher of theirs is spared."""
        family = psutil.Process(self.process.pid).children(recursive=True)
        for process in family or [psutil.Process(self.process.pid)]:
            process.send_signal(number)

    def perturbed(self, scale: float = 0.05, only: str = "") -> Any:
        """A copy of the reference with other weights."""
        model = type(self.reference)(self.reference.config).float().eval()
        model.load_state_dict(self.reference.state_dict())
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if only in name:
                    parameter.add_(scale * torch.randn_like(parameter))
        return model


class Lab:
    """What tests use of this file."""

    image, video, vision_start, vision_end = tiny.IMAGE, tiny.VIDEO, tiny.VISION_START, tiny.VISION_END
    eos, vocab = tiny.EOS, tiny.VOCAB
    api_key, admin_key, broadcast_timeout_s = API_KEY, ADMIN_KEY, BROADCAST_TIMEOUT_S
    sglang_pause_timeout_s = SGLANG_PAUSE_TIMEOUT_S
    handle = EngineHandle
    png = staticmethod(tiny.make_png)
    weights = staticmethod(tiny.engine_weights)
    fork = ForkedScript
    fleet = fleet.Fleet
    proxy = fault_proxy.FaultProxy
    logprobs_of = staticmethod(tiny.logprobs_of)
    gather_logprobs = staticmethod(tiny.gather_logprobs)
    inputs = staticmethod(tiny.model_inputs)
    picture_inputs = staticmethod(tiny.picture_inputs)

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


@pytest.fixture(scope="session")
def lab() -> type[Lab]:
    """Helpers and constants of this file."""
    return Lab


class EngineStarter:
    """Starts engine processes and ends them."""

    def __init__(self, model_dir: Path, reference: PreTrainedModel, folder: Path) -> None:
        self._model_dir = model_dir
        self._reference = reference
        self._folder = folder
        self._handles: list[EngineHandle] = []

    def __call__(self, count: int = 1, **config: Any) -> list[EngineHandle]:
        """So many engines, started at the same time."""
        first = len(list(self._folder.glob("*.log")))
        started = [self._start(f"{first + i}", config) for i in range(count)]
        for handle, ready, log in started:
            deadline = time.monotonic() + 120
            while not ready.exists():
                assert handle.process.poll() is None and time.monotonic() < deadline, log.read_text()
                time.sleep(0.02)
            told = json.loads(ready.read_text())
            assert told["pid"] == handle.process.pid
            handle.url = told["url"]
        return [handle for handle, _, _ in started]

    def again(self, handle: EngineHandle) -> EngineHandle:
        """An engine that has ended, started anew under its URL."""
        (started,) = self(**handle.config | {"port": urlsplit(handle.url).port})
        return started

    def _start(self, name: str, config: dict[str, Any]) -> tuple[EngineHandle, Path, Path]:
        ready, log = self._folder / f"{name}.json", self._folder / f"{name}.log"
        log.touch()
        defaults = {"max_context": 4096, "max_new_tokens_limit": 4000, "broadcast_timeout_s": BROADCAST_TIMEOUT_S}
        words = [str(self._model_dir), str(ready), json.dumps(defaults | config)]
        handle = EngineHandle(
            url="",
            api_key=config.get("api_key"),
            admin_key=config.get("admin_api_key"),
            reference=self._reference,
            process=ForkedScript("engine_worker.py", words, log),
            model_dir=self._model_dir,
            config=config,
            fault=ready.with_suffix(".fault"),
            forbidden=tiny.forbidden_of(self._reference),
        )
        self._handles.append(handle)
        return handle, ready, log

    def stop_all(self) -> None:
        """Kill what still runs."""
        for handle in self._handles:
            handle.process.kill()
            handle.process.wait()
            handle.threads.shutdown(wait=False)


class SGLangStarter:
    """Starts real SGLang from the environment of `make sglang-cpu`, each kind once, and ends it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._handles: dict[tuple[Any, ...], EngineHandle] = {}

    def __call__(self, model_dir: Path, reference: PreTrainedModel, *words: str) -> EngineHandle:
        """The engine, once it serves; `words` are options of `vagen sglang`. Skips the test where there is none."""
        try:
            sglang_python()
        except ConfigError as error:
            pytest.skip(str(error))
        key = (model_dir, *words)
        if key not in self._handles:
            self._handles[key] = self._start(model_dir, reference, words, free_port())
        return self._handles[key]

    def again(self, handle: EngineHandle) -> EngineHandle:
        """SGLang that has ended, started anew under its URL, as its supervisor does."""
        (key,) = [key for key, known in self._handles.items() if known is handle]
        port = urlsplit(handle.url).port
        assert port is not None
        self._handles[key] = self._start(handle.model_dir, handle.reference, key[1:], port)
        return self._handles[key]

    def forget(self, handle: EngineHandle) -> None:
        """An engine that has ended is started afresh for whoever needs one next."""
        self._handles = {key: known for key, known in self._handles.items() if known is not handle}

    def _start(self, model_dir: Path, reference: PreTrainedModel, words: Sequence[str], port: int) -> EngineHandle:
        place = self._folder / str(len(list(self._folder.glob("*.log"))))
        ready, log = place.with_suffix(".json"), place.with_suffix(".log")
        command = [sys.executable, "-m", "vagen.tools.cli", "sglang", "--model", str(model_dir)]
        command += ["--port", str(port), "--ready-file", str(ready), "--pause-timeout", str(SGLANG_PAUSE_TIMEOUT_S)]
        command += ["--api-key", API_KEY, "--admin-api-key", ADMIN_KEY, *words]
        with log.open("wb") as file:
            process = subprocess.Popen(command, stdout=file, stderr=file)
        while not ready.exists():
            # The launcher gives up by itself when SGLang does not come up in time.
            assert process.poll() is None, log.read_text()[-5000:]
            time.sleep(0.1)
        return EngineHandle(
            url=json.loads(ready.read_text())["url"],
            api_key=API_KEY,
            admin_key=ADMIN_KEY,
            reference=reference,
            process=process,
            model_dir=model_dir,
            forbidden=tiny.forbidden_of(reference),
        )

    def stop_all(self) -> None:
        """End what still runs; SGLang needs to be asked, or its schedulers stay."""
        for handle in self._handles.values():
            handle.process.terminate()
        for handle in self._handles.values():
            handle.process.wait(60)
            handle.threads.shutdown(wait=False)


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
