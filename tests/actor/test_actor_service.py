"""The command line: the real actor process, against the real buffer and the real local engine."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from vagen.actor.rendering import ChatRenderer, collapse
from vagen.buffer.learner_store import LearnerStore
from vagen.buffer.service import read_ready
from vagen.common.validation import validate_trajectory
from vagen.common.wire import decode_trajectory

ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}
ACTOR = [sys.executable, "-m", "vagen.actor.cli"]


@pytest.fixture(scope="module")
def weights_dir(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model folder with a tiny random Qwen2.5-VL in it."""
    import torch
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    folder = tmp_path_factory.mktemp("weights") / "model"
    shutil.copytree(model_dir, folder)
    ids = json.loads((model_dir / "config.json").read_text())
    eos = json.loads((model_dir / "generation_config.json").read_text())["eos_token_id"]
    torch.manual_seed(0)
    config = Qwen2_5_VLConfig(
        text_config={
            "vocab_size": 320,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 1,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 512,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]},
            "bos_token_id": None,
            "eos_token_id": eos[0],
            "pad_token_id": None,
        },
        vision_config={
            "depth": 1,
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_heads": 2,
            "out_hidden_size": 64,
            "patch_size": 14,
            "window_size": 56,
            "fullatt_block_indexes": [0],
        },
        image_token_id=ids["image_token_id"],
        video_token_id=319,
        vision_start_token_id=ids["vision_start_token_id"],
        vision_end_token_id=ids["vision_end_token_id"],
        tie_word_embeddings=True,
    )
    Qwen2_5_VLForConditionalGeneration(config).float().save_pretrained(folder)
    return folder


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "recipe.yaml"
    content = {
        "run": {"name": "actor-test"},
        "env": {"name": "frozen_lake", "config": {"system_prompt": "none", "max_turns": 3}},
        "harness": {"name": "concat"},
        "actor": {
            "concurrency": 8,
            "max_new_tokens": 12,
            "max_context": 256,
            "heartbeat_s": 0.1,
            "credit_retry_s": 0.1,
            "connect_timeout_s": 3.0,
            "group_size": 2,
            "drain_s": 5.0,
        },
        "engine": {"max_running": 8, "max_context": 256, "max_new_tokens_limit": 64},
        "buffer": {"endpoint": "tcp://127.0.0.1:*", "lease_s": 5.0, "max_running": 16},
    }
    path.write_text(yaml.safe_dump(content))
    return path


@contextmanager
def process(command: list[str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    with log.open("ab") as output:
        child = subprocess.Popen(command, stdout=output, stderr=output, env=ENVIRONMENT)
    try:
        yield child
    finally:
        child.terminate()
        try:
            child.wait(30)
        except subprocess.TimeoutExpired:
            child.kill()
            raise


def wait_for(holds: Callable[[], Any], child: subprocess.Popen[bytes], log: Path, timeout_s: float = 60.0) -> Any:
    """What `holds` returns once it is true; fails with the log when `child` ends first."""
    deadline = time.monotonic() + timeout_s
    while not (found := holds()):
        assert child.poll() is None and time.monotonic() < deadline, log.read_text()[-4000:]
        time.sleep(0.05)
    return found


def ready_of(actor: subprocess.Popen[bytes], path: Path) -> dict[str, Any] | None:
    """What this process said when it was ready; a killed one leaves its file behind."""
    said = json.loads(path.read_text()) if path.is_file() else {}
    return said if said.get("pid") == actor.pid else None


def test_episodes_reach_the_learner_through_kill_and_restart(weights_dir: Path, recipe: Path, tmp_path: Path) -> None:
    run_dir, log = tmp_path / "run", tmp_path / "log"
    buffer = [
        str(Path(sys.executable).with_name("vagen-buffer")),
        "serve",
        "--config",
        str(recipe),
        "--run-dir",
        str(run_dir),
    ]
    buffer_ready, actor_ready = run_dir / "buffer" / "ready.json", run_dir / "actor-0" / "ready.json"
    renderer = ChatRenderer.load(weights_dir)
    with process(buffer, log) as ingest:
        wait_for(buffer_ready.is_file, ingest, log)
        ready = read_ready(run_dir)
        store = LearnerStore.connect(ready.redis_url, "actor-test")
        store.register("learner", step=0, batch_size=16, max_staleness=4)
        store.record_version(0, "learner", 0, "sum")
        command = [*ACTOR, "run", "--engine", "local", "--buffer", ready.endpoint, "--config", str(recipe)]
        command += ["--model", str(weights_dir), "--run-dir", str(run_dir)]

        def admit(url: str) -> bool:
            leases = [lease for lease in store.engines() if lease.url == url]
            return bool(leases) and store.admit_engine(url, leases[0].incarnation, 0)

        actor_ids = set()
        for step, ends_by in enumerate((signal.SIGKILL, signal.SIGTERM)):
            with process(command, log) as actor:
                said = wait_for(lambda actor=actor: ready_of(actor, actor_ready), actor, log)
                actor_ids.add(said["actor_id"])
                engine = json.loads((run_dir / "actor-0" / "engine" / "ready.json").read_text())
                wait_for(lambda url=engine["url"]: admit(url), actor, log)
                manifest = wait_for(lambda step=step: store.claim(step, 16, 1.0), actor, log)
                payloads = store.fetch(manifest.ids)
                trajectories = [decode_trajectory(payload) for payload in payloads]
                assert len(trajectories) == 16
                for trajectory in trajectories:
                    validate_trajectory(trajectory)
                    assert trajectory.env_name == "frozen_lake" and trajectory.engine.kind == "local"
                    (row,) = trajectory.rows
                    assert len(collapse(row.token_ids, row.images)) < len(row.token_ids)
                groups: dict[str, set[int]] = {}
                for trajectory in trajectories:
                    groups.setdefault(trajectory.group_id, set()).add(trajectory.seed)
                assert all(len(seeds) == 1 for seeds in groups.values())
                assert renderer.vision is not None
                actor.send_signal(ends_by)
                status = actor.wait(40)
            assert status == (-signal.SIGKILL if ends_by is signal.SIGKILL else 0), log.read_text()[-4000:]
            # The engine ends with its actor, also when that is killed.
            psutil.wait_procs([psutil.Process(engine["pid"])] if psutil.pid_exists(engine["pid"]) else [], timeout=15)
            assert not psutil.pid_exists(engine["pid"])
            store.mark_trained(step)
            store.done([step])
        assert not actor_ready.exists()
        assert len(actor_ids) == 1
        accounting = store.accounting()
        store.close()
    assert accounting.identity_holds and accounting.in_flight == 0, accounting
    assert accounting.trained == 32 and accounting.malformed == 0 and accounting.refused == 0, accounting


def requests_of(engine: str) -> float:
    """Requests that an engine has ended."""
    with urllib.request.urlopen(f"{engine}/metrics", timeout=30) as answer:
        lines = answer.read().decode().splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith("vagen_engine_requests_total{"))


@pytest.mark.slow
def test_an_engine_that_is_written_into_the_list_plays_episodes_until_it_is_taken_off(
    weights_dir: Path, recipe: Path, tmp_path: Path
) -> None:
    run_dir, log, listed = tmp_path / "run", tmp_path / "log", tmp_path / "engines.txt"
    buffer = [str(Path(sys.executable).with_name("vagen-buffer")), "serve", "--config", str(recipe)]
    with ExitStack() as processes:

        def start(command: list[str]) -> subprocess.Popen[bytes]:
            return processes.enter_context(process(command, log))

        ingest = start([*buffer, "--run-dir", str(run_dir), "--set", "buffer.heartbeat_timeout_s=3"])
        files = [tmp_path / "first.json", tmp_path / "second.json"]
        words = ["engine", "--model", str(weights_dir), "--config", str(recipe), "--ready-file"]
        engines = [start([*ACTOR, *words, str(file)]) for file in files]
        for engine, file in zip(engines, files, strict=True):
            wait_for(file.is_file, engine, log)
        urls = [json.loads(file.read_text())["url"] for file in files]
        wait_for((run_dir / "buffer" / "ready.json").is_file, ingest, log)
        ready = read_ready(run_dir)
        store = LearnerStore.connect(ready.redis_url, "actor-test")
        store.register("learner", step=0, batch_size=1 << 20, max_staleness=4)
        store.record_version(0, "learner", 0, "sum")
        listed.write_text(f"{urls[0]}\n")
        command = [*ACTOR, "run", "--engines", str(listed), "--buffer", ready.endpoint, "--config", str(recipe)]
        actor = start([*command, "--model", str(weights_dir), "--run-dir", str(run_dir)])

        def announced() -> list[str]:
            return sorted(lease.url for lease in store.engines())

        def admit() -> bool:
            leases = store.engines()
            return bool(leases) and all(store.admit_engine(e.url, e.incarnation, 0) for e in leases)

        wait_for(admit, actor, log)
        wait_for(lambda: requests_of(urls[0]) > 0, actor, log)
        assert requests_of(urls[1]) == 0
        listed.write_text("\n".join(urls))
        actor.send_signal(signal.SIGHUP)
        wait_for(lambda: announced() == sorted(urls) and admit(), actor, log)
        wait_for(lambda: requests_of(urls[1]) > 0, actor, log, timeout_s=30)
        listed.write_text(f"{urls[1]}\n")
        wait_for(lambda: announced() == [urls[1]], actor, log)
        before, played = requests_of(urls[0]), requests_of(urls[1])
        wait_for(lambda: requests_of(urls[1]) > played + 10, actor, log)
        assert requests_of(urls[0]) == before
        assert store.accounting().refused == 0
        store.close()


@pytest.fixture
def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def run_actor(*arguments: str, timeout_s: float = 30.0) -> tuple[int, str, float]:
    started = time.monotonic()
    done = subprocess.run(
        [*ACTOR, "run", *arguments], capture_output=True, text=True, env=ENVIRONMENT, timeout=timeout_s
    )
    return done.returncode, done.stderr, time.monotonic() - started


def test_a_missing_buffer_is_one_clear_line_within_seconds(
    model_dir: Path, recipe: Path, tmp_path: Path, free_port: int
) -> None:
    status, text, seconds = run_actor(
        *("--engine", "local", "--buffer", f"tcp://127.0.0.1:{free_port}", "--config", str(recipe)),
        *("--model", str(model_dir), "--run-dir", str(tmp_path / "run"), "--set", "actor.connect_timeout_s=1"),
    )
    assert status == 1 and seconds < 10
    assert f"no buffer answers at tcp://127.0.0.1:{free_port} within 1 s; start one with `vagen-buffer serve`" in text
    assert "Traceback" not in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--set", "actor.sampling.top_p=0.9"], "$.actor.sampling.top_p: expected 1.0 (truncated sampling changes"),
        (["--set", "actor.concurrency=0"], "$.actor.concurrency: expected int >= 1, got 0"),
        (["--set", "actor.concurency=1"], "$.actor.concurency: unknown key"),
        (["--set", "env.name=chess"], "chess"),
        (["--set", "harness.window=2", "--set", "harness.name=no_concat"], "$.harness.window"),
        (
            ["--set", "actor.engines.conversations=server", "--set", "harness.window=2"],
            "$.actor.engines.conversations: expected client with harness concat, window 2",
        ),
        (
            ["--set", "actor.engines.conversations=server", "--set", "actor.engines.router_url=http://x"],
            "$.actor.engines.conversations: expected client with router_url",
        ),
        (["--engine", "ftp://x"], "--engine: expected http://HOST:PORT or local"),
        (["--engine", "local", "--engine", "http://x"], "--engine local: expected no other engine"),
        (["--engines", "/nowhere.txt"], "/nowhere.txt: cannot read the list of engines"),
        (["--model", "/nowhere"], "/nowhere: no such model folder"),
        (["--buffer", "localhost"], "--buffer localhost: expected tcp://HOST:PORT"),
    ],
)
def test_bad_input_is_one_line_before_anything_starts(
    model_dir: Path, recipe: Path, tmp_path: Path, arguments: list[str], message: str
) -> None:
    status, text, _ = run_actor(
        *("--buffer", "tcp://127.0.0.1:9", "--config", str(recipe), "--model", str(model_dir)),
        *("--run-dir", str(tmp_path / "run"), *arguments),
    )
    assert status == 1
    assert message in text
    assert "Traceback" not in text and "no buffer answers" not in text


def test_help_answers_at_once_and_shows_examples() -> None:
    started = time.monotonic()
    done = subprocess.run([*ACTOR, "run", "--help"], capture_output=True, text=True, env=ENVIRONMENT, timeout=30)
    assert time.monotonic() - started < 3  # under a second on an idle machine
    assert done.returncode == 0 and "vagen-actor run --engine local" in done.stdout
