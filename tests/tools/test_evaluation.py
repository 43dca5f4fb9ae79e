"""`vagen eval` and `vagen sft` with a real engine and a small model made from nothing."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import os
import signal
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from PIL import Image

from vagen.actor.client import HttpEngineClient
from vagen.actor.messages import Message, Picture, Response
from vagen.actor.rendering import ChatRenderer
from vagen.common.config import read_recipe
from vagen.common.trajectory import SamplingParams
from vagen.envs.base import encode_png
from vagen.envs.registry import make_core
from vagen.tools.child import ProcessSpec
from vagen.tools.evaluate import FIRST_SEED
from vagen.tools.launch import ENVIRONMENT, console_script
from vagen.tools.supervisor import Supervisor

SMALL = ("sft.turns=300", "sft.steps=20", "sft.batch_rows=16", "model.num_layers=1", "model.vision_num_layers=1")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("warm") / "model"
    words = [word for setting in SMALL for word in ("--set", setting)]
    done = subprocess.run(
        [console_script("vagen"), "sft", "--config", "frozenlake", "--out", str(folder), *words],
        env={**os.environ, **ENVIRONMENT},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(scope="module")
def engine(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("engine")
    supervisor = Supervisor(restart_grace_s=1, stop_timeout_s=10)
    argv = (console_script("vagen-actor"), "engine", "--model", str(model), "--config", "frozenlake")
    supervisor.start(
        ProcessSpec(
            name="engine",
            argv=(*argv, "--ready-file", str(folder / "ready.json")),
            log=folder / "engine.log",
            ready=folder / "ready.json",
            env=ENVIRONMENT,
        )
    )
    try:
        supervisor.wait_ready("engine", 120)
        yield json.loads((folder / "ready.json").read_text())["url"]
    finally:
        supervisor.stop_all()


def run_eval(engine: str, model: Path, *words: str) -> subprocess.CompletedProcess[str]:
    argv = [console_script("vagen"), "eval", "--engine", engine, "--model", str(model), "--config", "frozenlake"]
    return subprocess.run([*argv, *words], capture_output=True, text=True, timeout=120, check=False)


def test_result_file_and_transcripts_of_held_out_levels(engine, model, tmp_path):
    out = tmp_path / "result.json"
    done = run_eval(engine, model, "--levels", "24", "--transcripts", "2", "--out", str(out))
    assert done.returncode == 0, done.stderr
    result = json.loads(out.read_text())
    low, high = result["interval"]
    assert 0 <= low <= result["success"] <= high <= 1
    assert result["levels"] == 24 and 1 <= result["turns_mean"] <= 8 and 0 <= result["format_rate"] <= 1
    assert result["policy_versions"] == [0, 0]
    assert f"success {result['success']:.3f}" in done.stdout

    core = make_core("frozen_lake", {**read_recipe("frozenlake")["env"]["config"], "split": "validation"})
    assert [transcript["seed"] for transcript in result["transcripts"]] == [FIRST_SEED, FIRST_SEED + 1]
    for transcript in result["transcripts"]:
        observation, _ = core.reset(transcript["seed"])
        shown = base64.b64decode(transcript["turns"][0]["image_png_b64"])
        assert shown == encode_png(observation.images[0])
        assert transcript["closing_png_b64"]
        assert all(set(turn) == {"image_png_b64", "response", "reward", "actions"} for turn in transcript["turns"])


def test_greedy_evaluation_is_repeatable(engine, model, tmp_path):
    results = []
    for name in ("a.json", "b.json"):
        words = ("--levels", "16", "--greedy", "--transcripts", "16", "--out", str(tmp_path / name))
        assert run_eval(engine, model, *words).returncode == 0
        results.append(json.loads((tmp_path / name).read_text())["transcripts"])
    assert results[0] == results[1]


def test_no_engine_is_one_line(model):
    done = run_eval("http://127.0.0.1:1", model, "--levels", "2", "--set", "actor.connect_timeout_s=0.5")
    assert done.returncode == 1
    assert done.stderr.startswith("error: no engine answers at http://127.0.0.1:1 within 0.5 s")
    assert done.stderr.count("\n") == 1


def test_an_environment_without_a_validation_split_is_refused(engine, model):
    done = run_eval(engine, model, "--set", "env.name=nothing")
    assert done.returncode == 2 and "nothing" in done.stderr


def test_an_engine_that_dies_fails_the_evaluation_instead_of_shortening_it(model, tmp_path):
    ready = tmp_path / "ready.json"
    argv = [console_script("vagen-actor"), "engine", "--model", str(model), "--ready-file", str(ready)]
    supervisor = Supervisor(restart_grace_s=30, stop_timeout_s=10)
    supervisor.start(ProcessSpec(name="engine", argv=tuple(argv), log=tmp_path / "log", ready=ready, env=ENVIRONMENT))
    try:
        supervisor.wait_ready("engine", 120)
        url = json.loads(ready.read_text())["url"]
        out = tmp_path / "out.json"
        settings = ("actor.engine_retries=0", "actor.connect_timeout_s=0.5")
        words = [word for setting in settings for word in ("--set", setting)]
        playing = subprocess.Popen(
            [console_script("vagen"), "eval", "--engine", url, "--model", str(model), "--config", "frozenlake"]
            + ["--levels", "100000", "--out", str(out), *words],
            stderr=subprocess.PIPE,
            text=True,
        )
        engine_process = supervisor.processes["engine"]
        supervisor.wait(lambda: engine_process.cpu_seconds > 3, 120, "the engine generates")
        engine_process.signal(signal.SIGKILL)
        _, errors = playing.communicate(timeout=60)
        assert playing.returncode == 1
        assert errors.splitlines()[-1].startswith("error: ")
        assert not out.exists()
    finally:
        supervisor.stop_all()


def test_a_local_engine_is_started_for_the_evaluation_alone(model):
    done = run_eval("local", model, "--levels", "4")
    assert done.returncode == 0, done.stderr
    assert "on 4 held-out levels" in done.stdout


def test_a_local_engine_that_cannot_start_says_why(tmp_path):
    done = run_eval("local", tmp_path / "nothing", "--levels", "4")
    assert done.returncode == 1
    assert "Fatal Python error" not in done.stderr
    assert done.stderr.startswith("error: ") and str(tmp_path / "nothing") in done.stderr


@contextmanager
def openai_server(engine: str, model: Path) -> Iterator[str]:
    """A server of chat completions over the engine: it renders the messages itself, as vLLM does."""
    renderer = ChatRenderer.load(model)

    async def models(request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": "policy", "object": "model"}]})

    async def complete(request: web.Request) -> web.Response:
        body = await request.json()
        assert body["model"] == "policy" and request.headers["Authorization"] == "Bearer secret"
        conversation = [item_of(message) for message in body["messages"]]
        client = HttpEngineClient(engine, renderer)
        try:
            await client.connect(10)
            answer = await client.generate(
                renderer.render(tuple(conversation)),
                sampling=SamplingParams(temperature=body["temperature"]),
                max_new_tokens=body["max_tokens"],
                rid="openai",
                timeout_s=60,
            )
        finally:
            await client.close()
        said = {"role": "assistant", "content": renderer.decode(answer.token_ids)}
        return web.json_response({"choices": [{"index": 0, "message": said, "finish_reason": answer.finish_reason}]})

    def item_of(message: dict[str, Any]) -> Message | Response:
        content = message["content"]
        if message["role"] == "assistant":
            return Response(tuple(renderer.encode_response(content)))
        parts = [content] if isinstance(content, str) else [part_of(part) for part in content]
        return Message(message["role"], tuple(parts))

    def part_of(part: dict[str, Any]) -> str | Picture:
        if part["type"] == "text":
            return str(part["text"])
        encoded = base64.b64decode(part["image_url"]["url"].removeprefix("data:image/png;base64,"))
        return Picture(encoded, Image.open(io.BytesIO(encoded)).size)

    loop = asyncio.new_event_loop()
    app = web.Application(client_max_size=1 << 24)
    app.add_routes([web.get("/v1/models", models), web.post("/v1/chat/completions", complete)])
    runner = web.AppRunner(app)
    loop.run_until_complete(runner.setup())
    loop.run_until_complete(web.TCPSite(runner, "127.0.0.1", 0).start())
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result(30)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


def test_a_server_of_chat_completions_evaluates_as_the_engine_behind_it(engine, model, tmp_path):
    results = []
    with openai_server(engine, model) as url:
        for name, words in (
            ("engine", [engine]),
            ("openai", [url + "/v1", "--api", "openai", "--set", "actor.engine_api_key=secret"]),
        ):
            out = tmp_path / f"{name}.json"
            words += ["--levels", "12", "--transcripts", "12", "--greedy", "--out", str(out)]
            done = run_eval(words[0], model, *words[1:])
            assert done.returncode == 0, done.stderr
            results.append(json.loads(out.read_text()))
    ours, theirs = results
    assert theirs["transcripts"] == ours["transcripts"], "the same pictures, responses and actions"
    assert (theirs["success"], theirs["turns_mean"]) == (ours["success"], ours["turns_mean"])
    assert theirs["policy_versions"] == [-1, -1] and "policy version unknown" in done.stdout
