"""Publishes to real SGLang, with one and with two tensor-parallel ranks, as the learner makes them."""

from __future__ import annotations

import base64

import pytest
import torch

from vagen.common.errors import EngineError
from vagen.learner.broadcast import Broadcaster, ProbePrompt, checksum, probe_engine
from vagen.learner.config import BroadcastConfig
from vagen.learner.model.actor_critic import VisionLanguageActorCritic
from vagen.learner.model.gpt import ModelOptions
from vagen.learner.model.lora import AdapterOptions
from vagen.learner.model.parallel import parallel_session

pytestmark = [pytest.mark.sglang, pytest.mark.slow, pytest.mark.timeout(900)]
MISMATCH = 1e-4


@pytest.fixture(scope="module")
def engines(start_sglang, tiny_model):
    """One rank, and two ranks."""
    return [start_sglang(*tiny_model), start_sglang(*tiny_model, "--tp-size", "2")]


@pytest.fixture
def topology():
    """Overridden by the test that holds in both."""
    return "star"


@pytest.fixture
def config(lab, topology, tmp_path):
    """In several buckets, or files."""
    keys = {"api_key": lab.api_key, "admin_api_key": lab.admin_key, "disk_dir": str(tmp_path / "weights")}
    return BroadcastConfig(broadcast_topology=topology, broadcast_timeout_s=60.0, bucket_bytes=100_000, **keys)


@pytest.fixture
def broadcaster(config):
    trainer = Broadcaster(config)
    yield trainer
    trainer.close()


def next_version(engines):
    return 1 + max(int(engine.version()) if engine.version().isdecimal() else 0 for engine in engines)


def publish(engines, lab, broadcaster, version):
    """New weights for all, which must arrive."""
    model = engines[0].perturbed(0.05)
    report = broadcaster.publish(lab.weights(model), version, [engine.url for engine in engines])
    assert not report.failed
    assert report.checksum == checksum(lab.weights(model))
    for engine in engines:
        engine.reference = model
    return model


def mismatch(engine, lab, config, model, version):
    """Mean difference of the probe's log-probabilities, with and without an image."""
    image = lab.png(6)
    prompts = [
        ProbePrompt(
            token_ids=tuple(lab.image_prompt(30)),
            images=(base64.b64encode(image).decode(),),
            forbidden_token_ids=tuple(engine.forbidden),
            temperature=0.7,
        ),
        ProbePrompt(token_ids=(10, 11), forbidden_token_ids=tuple(engine.forbidden), temperature=0.7),
    ]
    differences = []
    for prompt, images, answer in zip(
        prompts, [[image], []], probe_engine(engine.url, prompts, version, config), strict=True
    ):
        expected = lab.logprobs_of(
            model, prompt.token_ids, images, answer.token_ids, temperature=0.7, forbidden=engine.forbidden
        )
        differences += [abs(a - b) for a, b in zip(answer.logprobs, expected, strict=True)]
    return sum(differences) / len(differences)


def assert_goes_on(engine, lab, config, broadcaster):
    """Not paused, and the next publish succeeds."""
    assert len(engine.generate([10, 11])["output_ids"]) == 12
    version = next_version([engine])
    model = publish([engine], lab, broadcaster, version)
    assert mismatch(engine, lab, config, model, version) < MISMATCH


@pytest.mark.parametrize("topology", ["star", "group", "disk"])
def test_a_publish_reaches_one_and_two_ranks_at_once(engines, lab, config, broadcaster):
    for _ in range(2):
        version = next_version(engines)
        model = publish(engines, lab, broadcaster, version)
        for engine in engines:
            assert mismatch(engine, lab, config, model, version) < MISMATCH


@pytest.fixture
def one_process():
    with parallel_session():
        yield


def test_adapters_reach_all_ranks_in_the_tensors_that_they_change(
    one_process, engines, lab, config, broadcaster, tiny_model
):
    publish(engines, lab, broadcaster, next_version(engines))
    urls = [engine.url for engine in engines]
    options = ModelOptions(adapter=AdapterOptions(rank=4, alpha=8.0))
    model = VisionLanguageActorCritic.load_hf(tiny_model[0], options)
    frozen, merged = model.frozen_weights(), engines[0].perturbed()
    whole = dict(model.engine_named_tensors())
    changing = {name: tensor for name, tensor in whole.items() if name in frozen.updated}
    # What the engines have is not what the adapters belong to: the first time they get all of it.
    for sent in (whole, changing, changing):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.1 * torch.randn_like(parameter) if parameter.requires_grad else 0)
        version = next_version(engines)
        report = broadcaster.publish(list(model.engine_weights()), version, urls, frozen=frozen)
        assert not report.failed
        assert report.sent_bytes == len(engines) * sum(tensor.nbytes for tensor in sent.values())
        merged.load_state_dict(model.export_hf_state())
        for engine in engines:
            engine.reference = merged
            assert mismatch(engine, lab, config, merged, version) < MISMATCH


@pytest.mark.parametrize("index", [0, 1])
def test_a_bit_that_changed_on_the_way_is_noticed(engines, lab, config, broadcaster, monkeypatch, index):
    def flatten_with_one_bit_wrong(tensors):
        flat = torch.cat([tensor.flatten().view(torch.uint8) for tensor in tensors])
        flat[0] ^= 1
        return flat

    engine = engines[index]
    with monkeypatch.context() as patch:
        patch.setattr("vagen.learner.weight_buckets.flatten_bucket", flatten_with_one_bit_wrong)
        report = broadcaster.publish(lab.weights(engine.perturbed(0.05)), next_version([engine]), [engine.url])
    assert "tensors differ" in report.failed[engine.url]
    assert_goes_on(engine, lab, config, broadcaster)


def test_a_tensor_that_the_engine_ignores_is_noticed(engines, lab, config, broadcaster):
    engine = engines[0]
    weights = [*lab.weights(engine.reference), ("model.no_such.weight", torch.zeros(3))]
    report = broadcaster.publish(weights, next_version([engine]), [engine.url])
    assert report.failed[engine.url].endswith("1 of 57 tensors differ, first model.no_such.weight")
    assert_goes_on(engine, lab, config, broadcaster)


@pytest.mark.parametrize("index", [0, 1])
def test_an_update_that_fails_half_way_leaves_no_trainable_tokens_and_no_pause(
    engines, lab, config, broadcaster, index
):
    engine = engines[index]
    weights = lab.weights(engine.perturbed(0.5))
    name, last = weights[-1]
    weights[-1] = (name, last[:-1].clone())
    version = next_version([engine])
    report = broadcaster.publish(weights, version, [engine.url])
    assert report.failed[engine.url].startswith("bucket ")
    # Some weights are new and some are not: what is sampled now is of no version.
    assert engine.version() == "incomplete"
    assert [span for span, _, _ in lab.spans(engine.generate([10, 11]))] == ["incomplete"]
    with pytest.raises(EngineError, match="was sampled by"):
        probe_engine(engine.url, [ProbePrompt(token_ids=(10, 11))], version, config)
    assert_goes_on(engine, lab, config, broadcaster)
