"""Publishes to several engines that all live; those that do not are in `test_publish_faults.py`."""

from __future__ import annotations

import base64
import time
from contextlib import closing

import pytest
import torch

from vagen.common.errors import BroadcastError, ConfigError, EngineError, EngineUnavailableError
from vagen.common.weight_transfer import tensor_checksum
from vagen.learner.broadcast import Broadcaster, ProbePrompt, checksum, probe_engine
from vagen.learner.config import BroadcastConfig
from vagen.learner.engine_links import address_towards

PAUSE_TIMEOUT_S = 2.0


@pytest.fixture(scope="module")
def engines(start_engines):
    return start_engines(2, pause_timeout_s=PAUSE_TIMEOUT_S, max_context=256, max_new_tokens_limit=200)


@pytest.fixture
def broadcaster(lab):
    trainer = Broadcaster(BroadcastConfig(broadcast_timeout_s=lab.broadcast_timeout_s, bucket_bytes=30_000))
    yield trainer
    trainer.close()


def test_all_engines_get_the_weights_and_groups_are_kept(engines, lab, broadcaster):
    urls = [engine.url for engine in engines]
    joined = "vagen_engine_weight_updates_total"
    before = [engine.metric(joined) for engine in engines]
    for version in (1, 2):
        model, weights = lab.new_weights(engines[0])
        report = broadcaster.publish(weights, version, urls)
        assert report.ok == tuple(urls) and not report.failed
        assert report.checksum == checksum(list(reversed(weights)))
        assert 0 < report.stall_s < report.seconds
    assert [engine.metric(joined) for engine in engines] == [count + 2 for count in before]
    for engine in engines:
        lab.assert_serves(engine, model, 2)


def test_a_head_tied_to_the_embedding_may_come_along(engines, lab, broadcaster):
    model, weights = lab.new_weights(engines[0])
    weights.append(("lm_head.weight", model.lm_head.weight.data))
    assert broadcaster.publish(weights, 3, [engines[0].url]).ok
    lab.assert_serves(engines[0], model, 3)


def test_a_publish_that_must_reach_one_says_so_when_it_reached_none(engines, lab, broadcaster):
    _, weights = lab.new_weights(engines[0])
    assert broadcaster.publish(weights, 22, ["http://127.0.0.1:9"]).ok == ()
    with pytest.raises(BroadcastError, match="reached none of 1 engines"):
        broadcaster.publish(weights, 22, ["http://127.0.0.1:9"], require_one=True)


def test_a_refused_update_leaves_the_engine_as_it_was_and_running(engines, lab, broadcaster):
    engine = engines[0]
    model, weights = lab.new_weights(engine)
    assert broadcaster.publish(weights, 30, [engine.url]).ok
    _, others = lab.new_weights(engine)
    others[-1] = (others[-1][0], others[-1][1][:-1].clone())
    start = time.monotonic()
    report = broadcaster.publish(others, 31, [engine.url])
    assert "shapes" in report.failed[engine.url]
    assert time.monotonic() - start < PAUSE_TIMEOUT_S
    assert not engine.call("/server_info")[1]["paused"]
    lab.assert_serves(engine, model, 30)
    assert broadcaster.publish(weights, 32, [engine.url]).ok


def test_weights_that_arrive_changed_are_not_counted(engines, lab, broadcaster, monkeypatch):
    monkeypatch.setattr(
        "vagen.learner.weight_buckets.flatten_bucket", lambda tensors: flatten_with_one_bit_wrong(tensors)
    )
    _, weights = lab.new_weights(engines[0])
    report = broadcaster.publish(weights, 40, [engines[0].url])
    assert "tensors differ" in report.failed[engines[0].url]


def flatten_with_one_bit_wrong(tensors):
    flat = torch.cat([tensor.flatten().view(torch.uint8) for tensor in tensors])
    flat[0] ^= 1
    return flat


def test_probe_is_of_one_version(engines, lab, broadcaster):
    engine = engines[0]
    model, weights = lab.new_weights(engine)
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


@pytest.fixture(scope="module")
def half(start_engines):
    """An engine in bfloat16."""
    return start_engines(1, dtype="bfloat16")[0]


def test_each_engine_gets_its_own_dtype(engines, half, lab, broadcaster):
    model, weights = lab.new_weights(engines[0])
    for version in (60, 61):
        assert broadcaster.publish(weights, version, [engines[0].url, half.url]).ok == (engines[0].url, half.url)
    rounded = {name: tensor_checksum(tensor.to(torch.bfloat16)) for name, tensor in weights}
    assert half.checksums() == rounded != engines[0].checksums()
    assert lab.spans(half.generate([10, 11])) == [("61", 0, 12)]
    lab.assert_serves(engines[0], model, 61)


def test_one_group_has_one_dtype(engines, half, lab):
    config = BroadcastConfig(broadcast_topology="group", broadcast_timeout_s=lab.broadcast_timeout_s)
    with closing(Broadcaster(config)) as broadcaster:
        _, weights = lab.new_weights(engines[0])
        report = broadcaster.publish(weights, 70, [engines[0].url, half.url])
        assert "dtypes bfloat16, float32" in report.failed[half.url] and not report.ok
        assert not half.call("/server_info")[1]["paused"]
