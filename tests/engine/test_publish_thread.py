"""Publishing beside training, to real engines through the real store: nothing waits, nothing piles up, and what arrives
are the weights of the moment at which they were put down."""

from __future__ import annotations

import gc
import os
import signal
import time
from contextlib import closing, contextmanager

import pytest
import torch

from vagen.common.errors import ConfigError
from vagen.common.weight_transfer import tensor_checksum
from vagen.learner.config import BroadcastConfig
from vagen.learner.publish_thread import PublishThread
from vagen.learner.snapshot import SnapshotBuffer

TIMEOUT_S, PAUSE_TIMEOUT_S, MARGIN_S = 8.0, 5.0, 4.0
JOIN_S = 30.0


@pytest.fixture(scope="module")
def engines(start_engines):
    limits = {"max_context": 256, "max_new_tokens_limit": 200}
    return start_engines(2, pause_timeout_s=PAUSE_TIMEOUT_S, broadcast_timeout_s=TIMEOUT_S, **limits)


@pytest.fixture
def fleet(valkey, lab):
    made = lab.fleet(valkey.url, BroadcastConfig(broadcast_timeout_s=TIMEOUT_S, bucket_bytes=30_000))
    yield made
    made.publisher.close()


@pytest.fixture
def thread(fleet):
    def sample(probe, url, version):
        return [probe, url, version]

    with closing(PublishThread(fleet.publisher, sample, drain_timeout_s=5 * TIMEOUT_S)) as publishing:
        yield publishing


@contextmanager
def stopped_at(engine, point):
    """The engine stops when it comes to a point of a publish, and goes on at the end of the block."""
    engine.arm(point, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(engine.process.pid, signal.SIGCONT)


def wait_stopped(engine):
    engine.wait_until(lambda: not engine.fault.exists(), "the fault")


def change(weights):
    """As an optimizer step does: in place."""
    with torch.no_grad():
        for _, tensor in weights:
            tensor.add_(0.01)


def checksums(weights):
    return {name: tensor_checksum(tensor) for name, tensor in weights}


def test_an_engine_gets_the_weights_that_were_put_down_although_training_went_on(engines, lab, fleet, thread):
    engine = engines[0]
    fleet.announce(engine)
    _, weights = lab.new_weights(engine)
    for step in range(2):
        expected = checksums(weights)
        with stopped_at(engine, "/pause_generation"):
            thread.submit(weights, step)
            wait_stopped(engine)
            change(weights)
        assert thread.drain()
        (published,) = thread.finished()
        assert published.report.ok == (engine.url,) and published.step == step
        assert engine.checksums() == expected != checksums(weights)


def test_training_goes_on_while_an_engine_hangs_and_the_publish_ends_in_time(engines, lab, fleet, thread):
    survivor, victim = engines
    fleet.announce(*engines)
    model, weights = lab.new_weights(victim)
    thread.submit(weights, 0)
    assert thread.drain() and len(thread.finished()[0].report.ok) == 2
    before = fleet.serving()
    with stopped_at(victim, "receiving 2"):
        start = time.monotonic()
        thread.submit(weights, 1)
        wait_stopped(victim)
        assert thread.finished() == []
        # No engine is told to actors before all that is known of the publish.
        assert fleet.serving() == before
        assert thread.drain()
        assert time.monotonic() - start < TIMEOUT_S + MARGIN_S
        (published,) = thread.finished()
        assert published.report.ok == (survivor.url,) and list(published.report.failed) == [victim.url]
        assert fleet.serving() == {survivor.url: published.version}
        lab.assert_serves(survivor, model, published.version)
    # Back, it joins by itself.
    fleet.announce(*engines)
    survivor.wait_until(lambda: victim.url in fleet.serving(), "joined", JOIN_S)
    lab.assert_serves(victim, model, published.version)


def test_a_slow_engine_gets_the_newest_weights_in_order_and_copies_do_not_pile_up(engines, lab, fleet, thread):
    engine = engines[0]
    fleet.announce(engine)
    _, weights = lab.new_weights(engine)
    with stopped_at(engine, "/pause_generation"):
        thread.submit(weights, 0)
        wait_stopped(engine)
        assert thread.version == fleet.publisher.version >= 0
        for step in range(1, 6):
            change(weights)
            thread.submit(weights, step)
            assert thread.version == -1, "no engine can have the weights that wait"
        gc.collect()
        copies = [each for each in gc.get_objects() if type(each) is SnapshotBuffer and each.tensors]
        assert len({buffer.tensors[0][1].data_ptr() for buffer in copies}) == 2
    assert thread.drain()
    first, last = thread.finished()
    assert (first.step, last.step) == (0, 5) and first.version < last.version == thread.version
    assert first.report.ok == last.report.ok == (engine.url,)
    assert engine.checksums() == checksums(weights)
    tally = thread.take_tally()
    assert tally.num_replaced == 4 and tally.waited_s > 0
    assert thread.take_tally().num_replaced == 0


def test_a_joiner_gets_the_last_weights_while_training_goes_on(engines, lab, fleet, thread):
    engine = engines[0]
    _, weights = lab.new_weights(engine)
    expected = checksums(weights)
    thread.submit(weights, 0)
    assert thread.drain() and thread.finished()[0].report.ok == ()
    change(weights)
    fleet.announce(engine)
    engine.wait_until(lambda: engine.url in fleet.serving(), "joined", JOIN_S)
    assert fleet.serving() == {engine.url: thread.version}
    assert engine.checksums() == expected


def test_the_probe_is_asked_at_the_version_that_was_just_published(engines, lab, fleet, thread):
    engine = engines[0]
    fleet.announce(engine)
    _, weights = lab.new_weights(engine)
    thread.submit(weights, 0)
    thread.drain()
    thread.submit(weights, 1, "probe")
    thread.drain()
    first, second = thread.finished()
    assert first.answers is None and second.answers == ["probe", engine.url, second.version]


def test_waiting_for_a_publish_is_bounded(engines, lab, fleet):
    engine = engines[0]
    fleet.announce(engine)
    _, weights = lab.new_weights(engine)
    with closing(PublishThread(fleet.publisher, lambda *probe: [], drain_timeout_s=0.5)) as publishing:
        with stopped_at(engine, "/pause_generation"):
            publishing.submit(weights, 0)
            wait_stopped(engine)
            start = time.monotonic()
            assert not publishing.drain()
            assert time.monotonic() - start < TIMEOUT_S / 2
        engine.wait_until(publishing.drain, "published")
        assert publishing.finished()[0].report.ok == (engine.url,)


def test_what_ends_the_thread_reaches_the_loop(fleet):
    publishing = PublishThread(fleet.publisher, lambda *probe: [], drain_timeout_s=TIMEOUT_S)
    with closing(publishing):
        publishing.submit([("transformer.h.0", torch.zeros(2))], 0)
        for call in (publishing.drain, publishing.finished, publishing.check, lambda: publishing.submit([], 1)):
            with pytest.raises(ConfigError, match="not an engine's name"):
                call()
