"""With a learner ten times too slow, the memory of every process stays under the bound that `docs/buffer.md` states."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from vagen.buffer.connection import make_client
from vagen.buffer.learner_store import LearnerStore

MB = 1 << 20
CAPACITY = 64 * MB
IMAGE_BYTES = 200_000
PAYLOAD_BYTES = IMAGE_BYTES + 2000
NUM_ACTORS = 2
WINDOW = 16
BATCH = 8
DURATION_S = float(os.environ.get("MEMORY_DURATION_S", "330"))
WORKER = Path(__file__).with_name("chaos_actor.py")

BOUNDS = {
    "valkey used": 1.1 * CAPACITY + 100 * MB,
    "valkey resident": 1.25 * CAPACITY + 160 * MB,
    "ingest resident": 160 * MB + (4 + 8 * NUM_ACTORS) * PAYLOAD_BYTES,
    "actor resident": 150 * MB + 4 * WINDOW * PAYLOAD_BYTES,
}


@pytest.fixture
def actors(tmp_path):
    """Starts actors that produce as fast as they may."""
    children = []

    def start(url):
        for index in range(NUM_ACTORS):
            folder = tmp_path / f"actor-{index}"
            args = [url, str(folder), str(tmp_path / f"notes-{index}"), str(IMAGE_BYTES)]
            with (tmp_path / f"actor-{index}.log").open("ab") as log:
                children.append(subprocess.Popen([sys.executable, str(WORKER), *args], stdout=log, stderr=log))
        return children

    yield start
    for child in children:
        child.kill()
        child.wait()


@pytest.mark.nightly
@pytest.mark.timeout(1800)
def test_memory_stays_bounded_with_a_learner_ten_times_too_slow(service, actors, eventually):
    running = service(capacity_bytes=CAPACITY, group_timeout_s=5)
    store = LearnerStore.connect(running.ready.redis_url, "run", timeout_s=60)
    store.register("learner", step=0, batch_size=BATCH, max_staleness=1_000_000)
    store.record_version(1, "learner", 0, "checksum")
    children = actors(running.ready.endpoint)
    redis = make_client(running.ready.redis_url)
    processes = {
        "ingest resident": [psutil.Process(running.process.pid)],
        "valkey resident": [psutil.Process(running.valkey.pid)],
        "actor resident": [psutil.Process(child.pid) for child in children],
    }

    def stored():
        for engine in store.engines():
            store.admit_engine(engine.url, engine.incarnation, 1)
        return store.status().num_bytes

    eventually(lambda: stored() > CAPACITY / 8, "some are stored", 120)
    started, before = time.monotonic(), stored()
    eventually(lambda: stored() > CAPACITY * 0.8, "the buffer is nearly full", 240)
    fill_rate = (stored() - before) / (time.monotonic() - started)
    peaks = dict.fromkeys(BOUNDS, 0)
    started, step, consumed = time.monotonic(), 0, 0
    while (now := time.monotonic() - started) < DURATION_S:
        assert all(child.poll() is None for child in children)
        if consumed < now * fill_rate / 10:
            manifest = store.claim(step, BATCH, 60)
            assert manifest is not None, "the slow learner starves"
            store.mark_trained(step)
            store.done([step])
            consumed += manifest.num_bytes
            step += 1
        stored()
        sample = {name: max(p.memory_info().rss for p in group) for name, group in processes.items()}
        sample["valkey used"] = redis.info("memory")["used_memory"]
        peaks = {name: max(peak, sample[name]) for name, peak in peaks.items()}
        assert store.status().num_bytes + store.status().room_bytes <= CAPACITY
        time.sleep(0.2)
    print(f"filled at {fill_rate / MB:.1f} MB/s, consumed {consumed / MB:.0f} MB in {now:.0f} s, {step} steps")
    for name, peak in peaks.items():
        print(f"{name}: peak {peak / MB:.1f} MB, bound {BOUNDS[name] / MB:.1f} MB")
    assert consumed > 10 * BATCH * IMAGE_BYTES
    assert all(peak <= BOUNDS[name] for name, peak in peaks.items()), peaks
