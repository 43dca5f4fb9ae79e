"""What Redis keeps of what was acknowledged when the power goes: with `fsync: always` all of it.

The controls show that the cut is real: the weaker settings lose what they are said to lose.
"""

from __future__ import annotations

import random

import pytest

from vagen.buffer.connection import make_client
from vagen.buffer.keys import Key, Keys
from vagen.buffer.learner_store import LearnerStore
from vagen.common.wire import encode_trajectory

KEYS = Keys("run")


@pytest.fixture
def stream_and_cut(service, connect, make_trajectory, power_cut):
    """Streams into a service, cuts the power in mid-stream, starts it again, `cuts` times.

    Yields after each cut the acknowledged trajectories, and what Redis has of them.
    """

    def run(fsync, cuts, seed):
        print(f"seed {seed}")
        rng = random.Random(seed)
        running = service(power_cut.environment, fsync=fsync)
        client = connect(running.ready.endpoint)
        sent = []
        for _ in range(cuts):
            register(running)
            if rng.random() < 0.5:
                make_client(running.ready.redis_url).bgrewriteaof()
            sizes = [rng.randrange(1000, 60_000) for _ in range(120)]
            first = len(sent)
            sent += [make_trajectory(actor_seq=first + i + 1, num_bytes=size) for i, size in enumerate(sizes)]
            client.stream(sent, until=first + rng.randint(20, 100))
            running.kill_all()
            while client.poll(0.1):
                pass
            power_cut.apply(running.run_dir / "buffer")
            running.restart()
            acked = [t for t in sent if t.trajectory_id in set(client.acked)]
            redis = make_client(running.ready.redis_url)
            found = redis.mget([KEYS.of(Key.PAYLOAD, t.trajectory_id) for t in acked])
            live = {name.decode() for name in redis.hkeys(KEYS[Key.LIVE])}
            yield acked, [payload if t.trajectory_id in live else None for t, payload in zip(acked, found, strict=True)]

    return run


def register(running):
    store = LearnerStore.connect(running.ready.redis_url, "run", timeout_s=30)
    store.register("learner", step=0, batch_size=4, max_staleness=2)
    store.record_version(1, "learner", 0, "checksum")
    store.close()


@pytest.mark.slow
def test_nothing_acknowledged_is_lost_to_a_power_cut(stream_and_cut):
    for acked, found in stream_and_cut("always", cuts=8, seed=random.randrange(1 << 32)):
        assert len(acked) >= 20
        assert found == [encode_trajectory(t)[1] for t in acked]


@pytest.mark.parametrize("fsync", ["everysec", "none"])
def test_weaker_settings_lose_what_was_acknowledged(stream_and_cut, fsync):
    """The control. A cut that happens to follow an fsync of the second loses nothing, so there may be several."""
    assert any(None in found for _, found in stream_and_cut(fsync, cuts=8, seed=1))
