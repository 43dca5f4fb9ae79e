"""Nothing acknowledged is lost and nothing is stored twice, whatever is killed in mid-stream."""

from __future__ import annotations

import random

import pytest

from vagen.buffer.connection import make_client
from vagen.buffer.keys import Key, Keys
from vagen.buffer.learner_store import LearnerStore

NUM = 240


@pytest.mark.parametrize("seed", [1, 2])
def test_kills_in_mid_stream(service, connect, make_trajectory, seed):
    running = service()
    learner = LearnerStore.connect(running.ready.redis_url, "run", timeout_s=30)
    learner.register("learner", step=0, batch_size=4, max_staleness=2)
    learner.record_version(learner.next_version(), "learner", 0, "checksum")
    trajectories = [make_trajectory(actor_seq=i + 1, task_index=i, num_bytes=20_000 + i) for i in range(NUM)]
    kills = [running.kill_valkey, kill_and_restart(running), running.kill_valkey, running.kill_valkey]
    rng = random.Random(seed)
    plan = [(int(NUM * (k + rng.uniform(0.2, 1)) / (len(kills) + 1)), kill) for k, kill in enumerate(kills)]

    def on_progress(acked):
        if plan and acked >= plan[0][0]:
            plan.pop(0)[1]()

    client = connect(running.ready.endpoint)
    client.stream(trajectories, on_progress)
    assert not plan, "every kill happened"
    running.kill_valkey()
    assert not set(client.refused)

    manifest = learner.claim(0, NUM, 20)
    ids = {t.trajectory_id for t in trajectories}
    assert set(client.acked) == ids
    assert sorted(manifest.ids) == sorted(ids), "each acknowledged one is there, once"
    accounting = learner.accounting()
    assert (accounting.claimed, accounting.pending, accounting.refused) == (NUM, NUM, 0)
    redis = make_client(running.ready.redis_url)
    payloads = list(redis.scan_iter(Keys("run").of(Key.PAYLOAD, "*")))
    assert len(payloads) == NUM, "no payload without its trajectory"
    assert sum(map(len, learner.fetch(manifest.ids))) == learner.status().num_bytes


def kill_and_restart(running):
    def act():
        running.kill()
        running.restart()

    return act


def test_no_ack_before_exec(service, connect, make_trajectory):
    """Redis reads but holds back every write: the batch is in, its EXEC is not, and nobody may be told."""
    running = service()
    learner = LearnerStore.connect(running.ready.redis_url, "run", timeout_s=30)
    learner.register("learner", step=0, batch_size=4, max_staleness=2)
    learner.record_version(learner.next_version(), "learner", 0, "checksum")
    redis = make_client(running.ready.redis_url)
    client = connect(running.ready.endpoint)
    for seq in range(1, 5):
        trajectory = make_trajectory(actor_seq=seq)
        redis.execute_command("CLIENT", "PAUSE", 20_000, "WRITE")
        client.put(trajectory)
        assert not client.poll(0.4), "acknowledged before EXEC"
        redis.execute_command("CLIENT", "UNPAUSE")
        client.wait_acked(trajectory.trajectory_id)
