"""The benchmark of the buffer: its sides really carry everything, ratios are of one round, missing peers are named."""

from __future__ import annotations

import json
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest

from vagen.common.errors import ConfigError
from vagen.common.validation import validate_trajectory
from vagen.common.wire import decode_trajectory
from vagen.tools.bench import run_benchmark
from vagen.tools.bench.buffer import BufferOptions, Rounds, _measured, _notes, _ratios
from vagen.tools.bench.buffer_claim import claims
from vagen.tools.bench.buffer_peers import PEERS
from vagen.tools.bench.buffer_pool import POOL_SIZE, make_trajectory, write_pool
from vagen.tools.bench.buffer_sides import Setting
from vagen.tools.bench.peers.exchange import Task, padded, produced, stripped
from vagen.tools.bench.workers import Program, WorkerError, carry, carry_through

SMALL = ["--tokens", "200", "--images", "2", "--image-bytes", "500"]


def figures_of(*words: str) -> dict:
    return json.loads(run_benchmark("buffer", (), [*words, *SMALL], as_json=True))


@pytest.fixture
def pool(tmp_path) -> Path:
    folder = tmp_path / "pool"
    folder.mkdir()
    write_pool(folder, tokens=200, images=2, image_bytes=500)
    return folder


@pytest.mark.slow
def test_ours_against_redis_and_the_disk(tmp_path):
    document = tmp_path / "performance.md"
    document.write_text("above\n<!-- begin buffer -->old<!-- end buffer -->\n")
    words = ["--only", "memory,durable,durable_spool,redis,fsync", "--runs", "2", "--trajectories", "60"]
    answer = figures_of(*words, "--folder", str(tmp_path), "--docs", str(document))
    figures = answer["figures"]
    for side in ("memory", "durable", "durable_spool", "redis", "fsync"):
        low, high = figures[f"{side}_per_s"]["spread"]
        assert 0 < low <= figures[f"{side}_per_s"]["value"] <= high
    assert 1 <= figures["durable_batch_size"]["value"] <= 32
    assert 0 < figures["durable_vs_fsync_limit"]["value"] < 2
    assert "memory_vs_best_peer" not in figures
    assert "old" not in document.read_text() and "| memory_per_s |" in document.read_text()
    assert [path.name for path in tmp_path.iterdir()] == ["performance.md"]


def test_claims_are_measured_in_server_time(tmp_path):
    setting = Setting(pool=tmp_path, disk=tmp_path, memory=tmp_path, count=1, producers=1)
    for milliseconds in claims(setting, 600, 64, 2):
        assert 0 < milliseconds < 10_000


def test_missing_peers_are_named_with_the_reason(tmp_path):
    (tmp_path / "ray").mkdir()
    (tmp_path / "ray" / "failed").write_text("no matching distribution\n")
    broken = tmp_path / "transferqueue" / "bin" / "python"
    broken.parent.mkdir(parents=True)
    broken.write_text("#!/bin/sh\necho no torch here >&2\nexit 3\n")
    broken.chmod(0o755)
    (tmp_path / "transferqueue" / "installed").touch()
    words = ["--only", "redis,reverb,ray_queue,transferqueue", "--runs", "1", "--trajectories", "5"]
    answer = figures_of(*words, "--peers", str(tmp_path), "--folder", str(tmp_path))
    notes = "\n".join(answer["notes"])
    assert "reverb: missing" in notes and "make bench-peers" in notes
    assert "ray_queue: missing, could not be installed: no matching distribution" in notes
    assert "ended with status 3: no torch here" in notes
    assert "redis_per_s" in answer["figures"] and not any("vs" in key for key in answer["figures"])


def test_ratios_are_of_one_round_and_the_best_peer_is_named():
    rounds = Rounds()
    rounds.rates |= {"memory": [10.0, 20.0, 30.0], "reverb": [5.0, 40.0, 15.0], "ray_store": [1.0, 2.0, 3.0]}
    figures = _ratios(rounds)
    assert figures["memory_vs_best_peer"].value == 2.0
    assert figures["memory_vs_best_peer"].spread == (0.5, 2.0)
    assert figures["memory_vs_ray_store"].value == 10.0
    assert figures["memory_per_s"].value == 20.0
    assert "best peer: reverb, out of reverb, ray_store" in _notes(rounds)


@pytest.mark.parametrize("words", [["--only", "fsync"], ["--only", "memory,reverbb"], ["--folder", "/nowhere/at/all"]])
def test_wrong_options_are_refused(words):
    with pytest.raises(ConfigError):
        figures_of(*words)


def test_all_sides_run_by_default():
    sides = _measured(BufferOptions())
    assert {"memory", "durable", "redis", "fsync", *(peer.name for peer in PEERS)} < set(sides)


def test_trajectories_are_valid_and_of_the_size_said(tmp_path):
    size = write_pool(tmp_path, tokens=2500, images=10, image_bytes=25_000)
    assert 280_000 < size < 300_000
    paths = sorted(tmp_path.iterdir())
    assert len(paths) == POOL_SIZE
    trajectory = decode_trajectory(paths[0].read_bytes())
    validate_trajectory(trajectory)
    assert (len(trajectory.images), len(trajectory.turns), trajectory.num_tokens) == (10, 10, 2500)


def test_a_producer_makes_each_trajectory_once(pool):
    made = list(produced(Task(pool=str(pool), folder="", count=2 * POOL_SIZE, index=3)))
    assert len({trajectory.trajectory_id for trajectory in made}) == 2 * POOL_SIZE
    assert [trajectory.actor_seq for trajectory in made] == list(range(1, 2 * POOL_SIZE + 1))
    assert {trajectory.actor_id for trajectory in made} == {"producer-3"}


@pytest.mark.parametrize("tokens", [16, 4093])
def test_padding_is_taken_off_again(tokens):
    trajectory = make_trajectory(np.random.default_rng(0), tokens=tokens, images=0, image_bytes=0)
    array = padded(trajectory)
    assert len(array) % 16384 == 0
    found = decode_trajectory(stripped(array))
    assert found.rows[0].token_ids.tolist() == trajectory.rows[0].token_ids.tolist()


PEER = """
import os, time
from pathlib import Path
from vagen.tools.bench.peers.exchange import Arrivals, Task, done, encoded, produced, ready, run_worker

def serve(task):
    ready("a folder")

def produce(task):
    trajectories = list(produced(task))
    ready()
    for trajectory in trajectories[LOST if task.index == 0 else 0:]:
        path = Path(task.folder) / trajectory.trajectory_id
        path.write_bytes(encoded(trajectory))
        os.replace(path, path.with_suffix(".whole"))
    done()

def consume(task):
    assert task.address in ("", "a folder")
    arrivals = Arrivals(task.count)
    ready()
    deadline = time.monotonic() + WAIT
    while arrivals.missing and time.monotonic() < deadline:
        for path in Path(task.folder).glob("*.whole"):
            arrivals.decode(path.read_bytes())
            path.unlink()
        time.sleep(0.005)
    arrivals.finish()

run_worker({"serve": serve, "produce": produce, "consume": consume})
"""


def peer(tmp_path: Path, lost: int = 0, wait_s: float = 60.0) -> Program:
    """A peer that carries trajectories in files."""
    code = textwrap.dedent(PEER).replace("LOST", str(lost)).replace("WAIT", str(wait_s))
    (tmp_path / "file_peer.py").write_text(code)
    path = f"{tmp_path}:{Path(sys.modules['vagen.tools'].__file__ or '').parents[2]}"
    return Program(python=Path(sys.executable), module="file_peer", env={"PYTHONPATH": path})


def test_everything_goes_from_producers_to_the_consumer(tmp_path, pool):
    folder = tmp_path / "through"
    folder.mkdir()
    task = Task(pool=str(pool), folder=str(folder), count=41)
    assert 0 < carry_through(peer(tmp_path), task, producers=2, timeout_s=60) < 60
    assert not list(folder.iterdir())


def test_a_lost_trajectory_is_an_error_and_not_a_rate(tmp_path, pool):
    folder = tmp_path / "through"
    folder.mkdir()
    task = Task(pool=str(pool), folder=str(folder), count=10)
    with pytest.raises(WorkerError, match="1 of 10 are missing"):
        carry(peer(tmp_path, lost=1, wait_s=0.5), task, producers=2, timeout_s=60)
