"""Publishes to several engines of which one fails, at each step, in each way; and engines whose trainer fails."""

from __future__ import annotations

import base64
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from vagen.common.errors import BroadcastError, ConfigError, EngineError, EngineUnavailableError
from vagen.learner.broadcast import Broadcaster, ProbePrompt, checksum, probe_engine
from vagen.learner.config import BroadcastConfig
from vagen.learner.engine_control import EngineControl
from vagen.learner.engine_links import address_towards

STEPS = (
    "/init_weights_update_group",
    "/update_weights_from_distributed",
    "/end_weight_update",
    "/continue_generation",
    pytest.param("/pause_generation", marks=pytest.mark.slow),
    pytest.param("/begin_weight_update", marks=pytest.mark.slow),
    pytest.param("/weights_checker", marks=pytest.mark.slow),
)
PAUSE_TIMEOUT_S = 2.0


@pytest.fixture(scope="module")
def engines(start_engines):
    """A survivor, one that is stopped and goes on, and two to kill."""
    return start_engines(4, pause_timeout_s=PAUSE_TIMEOUT_S, max_context=256, max_new_tokens_limit=200)


@pytest.fixture
def broadcaster(lab):
    trainer = Broadcaster(BroadcastConfig(broadcast_timeout_s=lab.broadcast_timeout_s, bucket_bytes=30_000))
    yield trainer
    trainer.close()


@pytest.fixture
def fault(monkeypatch):
    """Calls a function once, just before a path is posted to an engine."""

    def install(engine, path, function):
        post, armed = EngineControl.post, [function]

        async def post_after_fault(self, posted, body=None):
            if armed and self.url == engine.url and posted == path:
                armed.pop()()
            return await post(self, posted, body)

        monkeypatch.setattr(EngineControl, "post", post_after_fault)

    return install


def new_weights(engine, lab):
    model = engine.perturbed(0.02)
    return model, lab.weights(model)


def assert_serves(engine, lab, model, version):
    """The engine generates, with these weights and under this version."""
    ids, image = lab.image_prompt(30), lab.png(6)
    answer = engine.generate(ids, [image])
    assert lab.spans(answer) == [(str(version), 0, 12)]
    expected = lab.logprobs_of(model, ids, [image], answer["output_ids"], forbidden=engine.forbidden)
    assert max(abs(a - b) for a, b in zip(lab.reported(answer), expected, strict=True)) < 2e-5


def test_all_engines_get_the_weights_and_groups_are_kept(engines, lab, broadcaster):
    urls = [engine.url for engine in engines]
    joined = "vagen_engine_weight_updates_total"
    before = [engine.metric(joined) for engine in engines]
    for version in (1, 2):
        model, weights = new_weights(engines[0], lab)
        report = broadcaster.publish(weights, version, urls)
        assert report.ok == tuple(urls) and not report.failed
        assert report.checksum == checksum(list(reversed(weights)))
        assert 0 < report.stall_s < report.seconds
    assert [engine.metric(joined) for engine in engines] == [count + 2 for count in before]
    for engine in engines:
        assert_serves(engine, lab, model, 2)


def test_a_head_tied_to_the_embedding_may_come_along(engines, lab, broadcaster):
    model, weights = new_weights(engines[0], lab)
    weights.append(("lm_head.weight", model.lm_head.weight.data))
    assert broadcaster.publish(weights, 3, [engines[0].url]).ok
    assert_serves(engines[0], lab, model, 3)


@pytest.mark.parametrize("step", STEPS)
def test_a_hung_engine_costs_the_time_out_and_comes_back(engines, lab, broadcaster, fault, step):
    survivor, victim = engines[:2]
    urls = [survivor.url, victim.url]
    model, weights = new_weights(survivor, lab)
    if step != STEPS[0]:
        assert broadcaster.publish(weights, 10, urls).ok == tuple(urls)
    fault(victim, step, lambda: os.kill(victim.process.pid, signal.SIGSTOP))
    model, weights = new_weights(survivor, lab)
    start = time.monotonic()
    report = broadcaster.publish(weights, 11, urls)
    seconds = time.monotonic() - start
    try:
        assert report.ok == (survivor.url,) and list(report.failed) == [victim.url]
        assert seconds < lab.broadcast_timeout_s + 1
        assert report.stall_s < 1
        assert_serves(survivor, lab, model, 11)
    finally:
        os.kill(victim.process.pid, signal.SIGCONT)
    victim.wait_until(lambda: not victim.call("/server_info")[1]["paused"], "resumed", 3 * PAUSE_TIMEOUT_S)
    model, weights = new_weights(survivor, lab)
    # It may still be at what it had begun: that ends at its own time-out.
    failures = []
    while failed := broadcaster.publish(weights, 12, urls).failed:
        failures.append(failed)
        assert len(failures) < 3, failures
    assert_serves(victim, lab, model, 12)


@pytest.mark.parametrize(("index", "step"), [(2, "/update_weights_from_distributed"), (3, "/end_weight_update")])
def test_a_killed_engine_costs_next_to_nothing(engines, lab, broadcaster, fault, index, step):
    survivor, victim = engines[0], engines[index]
    urls = [victim.url, survivor.url]
    model, weights = new_weights(survivor, lab)
    assert broadcaster.publish(weights, 20, urls).ok == tuple(urls)
    fault(victim, step, lambda: (victim.process.kill(), victim.process.wait()))
    model, weights = new_weights(survivor, lab)
    report = broadcaster.publish(weights, 21, urls)
    assert report.ok == (survivor.url,) and victim.url in report.failed
    assert report.seconds < lab.broadcast_timeout_s
    assert_serves(survivor, lab, model, 21)
    with pytest.raises(BroadcastError, match="reached none of 1 engines"):
        broadcaster.publish(weights, 22, [victim.url], require_one=True)
    assert broadcaster.publish(weights, 22, [victim.url]).ok == ()


def test_a_refused_update_leaves_the_engine_as_it_was_and_running(engines, lab, broadcaster):
    engine = engines[0]
    model, weights = new_weights(engine, lab)
    assert broadcaster.publish(weights, 30, [engine.url]).ok
    _, others = new_weights(engine, lab)
    others[-1] = (others[-1][0], others[-1][1][:-1].clone())
    start = time.monotonic()
    report = broadcaster.publish(others, 31, [engine.url])
    assert "shapes" in report.failed[engine.url]
    assert time.monotonic() - start < PAUSE_TIMEOUT_S
    assert not engine.call("/server_info")[1]["paused"]
    assert_serves(engine, lab, model, 30)
    assert broadcaster.publish(weights, 32, [engine.url]).ok


def test_weights_that_arrive_changed_are_not_counted(engines, lab, broadcaster, monkeypatch):
    monkeypatch.setattr("vagen.learner.broadcast.flatten_bucket", lambda tensors: flatten_with_one_bit_wrong(tensors))
    _, weights = new_weights(engines[0], lab)
    report = broadcaster.publish(weights, 40, [engines[0].url])
    assert "tensors differ" in report.failed[engines[0].url]


def flatten_with_one_bit_wrong(tensors):
    flat = torch.cat([tensor.flatten().view(torch.uint8) for tensor in tensors])
    flat[0] ^= 1
    return flat


@pytest.mark.parametrize(
    "path", ["/begin_weight_update", "/update_weights_from_distributed", "/end_weight_update", "/continue_generation"]
)
def test_an_engine_whose_trainer_dies_goes_on(engines, lab, broadcaster, tiny_model, path):
    engine = engines[0]
    model, weights = new_weights(engine, lab)
    assert broadcaster.publish(weights, 6, [engine.url]).ok
    worker = Path(__file__).with_name("trainer_worker.py")
    ended = subprocess.run([sys.executable, worker, engine.url, tiny_model[0], path], capture_output=True, timeout=90)
    assert ended.returncode == -signal.SIGKILL, ended.stderr.decode()
    assert engine.call("/server_info")[1]["paused"]
    start = time.monotonic()
    answer = engine.generate(lab.image_prompt(30), [lab.png(6)])
    assert time.monotonic() - start < PAUSE_TIMEOUT_S + lab.broadcast_timeout_s
    applied = path == "/continue_generation"
    assert lab.spans(answer)[0][0] == ("7" if applied else "6")
    if not applied:
        assert_serves(engine, lab, model, 6)
    assert broadcaster.publish(weights, 8, [engine.url]).ok
    assert_serves(engine, lab, model, 8)


def test_probe_is_of_one_version(engines, lab, broadcaster):
    engine = engines[0]
    model, weights = new_weights(engine, lab)
    assert broadcaster.publish(weights, 50, [engine.url]).ok
    image = lab.png(6)
    prompts = [
        ProbePrompt(token_ids=tuple(lab.image_prompt(30)), images=(base64.b64encode(image).decode(),), temperature=0.7),
        ProbePrompt(token_ids=(10, 11)),
    ]
    config = BroadcastConfig(broadcast_timeout_s=lab.broadcast_timeout_s)
    with_image, text = probe_engine(engine.url, prompts, 50, config)
    for answer, images, prompt in ((with_image, [image], prompts[0]), (text, [], prompts[1])):
        expected = lab.logprobs_of(
            model,
            prompt.token_ids,
            images,
            answer.token_ids,
            temperature=prompt.temperature,
            forbidden=engine.forbidden,
        )
        assert max(abs(a - b) for a, b in zip(answer.logprobs, expected, strict=True)) < 2e-5
    with pytest.raises(EngineError, match="probe of version 51 was sampled by"):
        probe_engine(engine.url, prompts, 51, config)
    with pytest.raises(EngineUnavailableError):
        probe_engine("http://127.0.0.1:9", prompts, 50, config)


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ([], "no tensors"),
        (["model.norm.weight"] * 2, "twice"),
        (["model.language_model.norm.weight"], "not an engine's name"),
        (["transformer.h.0"], "not an engine's name"),
    ],
)
def test_names_that_no_engine_has_are_refused_before_any_call(broadcaster, names, message):
    with pytest.raises(ConfigError, match=message):
        broadcaster.publish([(name, torch.zeros(1)) for name in names], 1, ["http://127.0.0.1:9"])


@pytest.mark.parametrize(("url", "address"), [("http://127.0.0.1:80", "127.0.0.1"), ("http://[::1]:80", "::1")])
def test_address_that_an_engine_can_reach(url, address):
    assert address_towards(url) == address
    with pytest.raises(EngineUnavailableError):
        address_towards("http://no.such.host.invalid:80")
