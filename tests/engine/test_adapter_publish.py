"""Publishes of which engines need only what has changed: factors of adapters, or what is not frozen."""

from __future__ import annotations

import signal
from contextlib import closing
from dataclasses import replace

import msgspec
import pytest
import torch

from vagen.actor.messages import Message, Picture
from vagen.actor.rendering import ChatRenderer
from vagen.common.weight_transfer import tensor_checksum
from vagen.learner.batching import RowPreparer
from vagen.learner.broadcast import Broadcaster, probe_engine
from vagen.learner.config import BroadcastConfig
from vagen.learner.model.actor_critic import VisionLanguageActorCritic
from vagen.learner.model.gpt import ModelOptions
from vagen.learner.model.lora import AdapterOptions, is_adapter
from vagen.learner.model.parallel import parallel_session
from vagen.learner.probe import Probe

ADAPTER = AdapterOptions(rank=4, alpha=8.0)
MISMATCH = 2e-5


@pytest.fixture(scope="module")
def engines(start_engines):
    return start_engines(2, max_context=256, max_new_tokens_limit=200)


@pytest.fixture(scope="module", autouse=True)
def one_process():
    with parallel_session():
        yield


class Adapted:
    """A learner's model whose adapters alone change, and the probe that compares it with an engine."""

    def __init__(self, folder, lab, options=None):
        self.model = VisionLanguageActorCritic.load_hf(folder, options or ModelOptions(adapter=ADAPTER))
        self.frozen = self.model.frozen_weights()
        self.preparer = RowPreparer.load(folder)
        renderer = ChatRenderer.load(folder)
        picture = Picture(lab.png(5, width=112, height=84), (112, 84))
        prompt = renderer.render((Message("user", (picture, "w20 w21")),))
        token_ids, images = renderer.expand(prompt.token_ids, prompt.pictures)
        plain = {
            "token_ids": token_ids,
            "images": msgspec.to_builtins(images),
            "encoded": {picture.content_hash: picture.base64},
        }
        self.probe = Probe.from_plain({"temperature": 0.7, "prompts": [plain]})

    @torch.no_grad()
    def step(self):
        """As an optimizer step does: in place."""
        for name, parameter in self.model.named_parameters():
            if is_adapter(name):
                parameter.add_(0.1 * torch.randn_like(parameter))

    @property
    def sent(self):
        """What changes with each step, copied."""
        return [(name, tensor.clone()) for name, tensor in self.model.engine_weights()]

    @property
    def factor_bytes(self):
        return sum(tensor.nbytes for _, tensor in self.sent)

    def weights(self):
        """All that an engine should have, as an export has it."""
        return dict(self.model.engine_named_tensors())

    def bytes_of(self, wanted):
        return sum(tensor.nbytes for name, tensor in self.weights().items() if wanted(name))

    def mismatch(self, engine, version):
        """Mean difference of log-probabilities that the engine sampled with, and of the model with adapters apart."""
        config = BroadcastConfig(api_key=engine.api_key)
        answers = probe_engine(engine.url, self.probe.requests(self.preparer.vision), version, config)
        return self.probe.mismatch(self.model, self.preparer, answers)

    def assert_served_by(self, engine, version):
        assert engine.version() == str(version)
        assert engine.checksums() == {name: tensor_checksum(tensor) for name, tensor in self.weights().items()}
        assert self.mismatch(engine, version) < MISMATCH


@pytest.fixture
def learner(tiny_model, lab):
    made = Adapted(tiny_model[0], lab)
    made.step()
    return made


@pytest.fixture
def publish(lab, learner):
    """Publishes what the learner's model has, in several buckets."""
    config = BroadcastConfig(broadcast_timeout_s=lab.broadcast_timeout_s, bucket_bytes=10_000)
    with closing(Broadcaster(config)) as broadcaster:

        def send(version, *engines):
            return broadcaster.publish(learner.sent, version, [e.url for e in engines], frozen=learner.frozen)

        yield send


@pytest.fixture
def others(lab):
    """Publishes whole weights, as another learner does."""
    config = BroadcastConfig(broadcast_timeout_s=lab.broadcast_timeout_s)
    with closing(Broadcaster(config)) as broadcaster:
        yield lambda engine, model, version: broadcaster.publish(lab.weights(model), version, [engine.url])


def test_engines_add_adapters_to_the_same_weights_as_the_learner(engines, learner, publish, others):
    for engine in engines:
        assert others(engine, engine.reference, 1).ok
    for version in (2, 3):
        report = publish(version, *engines)
        assert not report.failed and report.sent_bytes == len(engines) * learner.factor_bytes
        for engine in engines:
            learner.assert_served_by(engine, version)
        learner.step()
        assert learner.mismatch(engines[0], version) > 100 * MISMATCH


def test_an_engine_gets_whole_what_it_has_otherwise_and_nothing_else(engines, lab, learner, publish, others):
    engine = engines[0]
    for only in ("visual.blocks", "q_proj.weight", ""):
        assert others(engine, engine.perturbed(only=only), 10).ok
        # A learner that has begun anew knows nothing of the engine.
        report = publish(11, engine)
        whole = learner.bytes_of(lambda name, only=only: only in name)
        assert report.ok and report.sent_bytes == whole + learner.factor_bytes
        learner.assert_served_by(engine, 11)
    assert publish(12, engine).sent_bytes == learner.factor_bytes
    with closing(Broadcaster(BroadcastConfig(broadcast_timeout_s=lab.broadcast_timeout_s))) as begun_anew:
        report = begun_anew.publish(learner.sent, 13, [engine.url], frozen=learner.frozen)
        assert report.ok and report.sent_bytes == learner.factor_bytes


def test_weights_that_somebody_changed_under_the_same_version_are_noticed_and_mended(engines, learner, publish, others):
    engine = engines[0]
    assert publish(20, engine).ok
    assert others(engine, engine.perturbed(only="visual.blocks"), 20).ok
    report = publish(21, engine)
    assert "tensors differ" in report.failed[engine.url] and report.sent_bytes == learner.factor_bytes
    report = publish(21, engine)
    assert report.ok and report.sent_bytes == learner.factor_bytes + learner.bytes_of(lambda n: "visual.blocks" in n)
    learner.assert_served_by(engine, 21)


def test_an_engine_whose_checksums_say_nothing_gets_what_is_frozen_once(engines, learner, publish, others, monkeypatch):
    """As SGLang on a GPU."""
    engine = engines[0]
    assert others(engine, engine.perturbed(), 80).ok
    monkeypatch.setattr("vagen.learner.engine_visit.can_compare", lambda info: False)
    for version, whole in ((81, learner.bytes_of(lambda name: True)), (82, 0), (83, 0)):
        report = publish(version, engine)
        assert report.ok and report.sent_bytes == whole + learner.factor_bytes
        learner.assert_served_by(engine, version)


def test_an_engine_that_adds_otherwise_gets_the_sum(start_engines, learner, publish, monkeypatch):
    (engine,) = start_engines(max_context=256)
    with monkeypatch.context() as patch:
        patch.setattr("vagen.learner.weight_buckets.flatten_bucket", flatten_with_one_bit_wrong)
        assert "tensors differ" in publish(30, engine).failed[engine.url]
    changing = learner.bytes_of(lambda name: name in learner.frozen.updated)
    for version in (31, 32):
        report = publish(version, engine)
        assert report.ok and report.sent_bytes == changing > 2 * learner.factor_bytes
        learner.assert_served_by(engine, version)


def flatten_with_one_bit_wrong(tensors):
    flat = torch.cat([tensor.flatten().view(torch.uint8) for tensor in tensors])
    flat[0] ^= 1
    return flat


def test_an_update_that_is_refused_or_lost_half_way_changes_nothing(start_engines, learner, publish):
    (engine,) = start_engines(max_context=256)
    assert publish(40, engine).ok
    served = engine.checksums()
    engine.admin("/begin_weight_update", {"updates": msgspec.to_builtins(learner.frozen.updates)})
    status, refusal = engine.call("/end_weight_update", {})
    assert status == 400 and "did not both arrive, with one rank" in refusal["message"]
    assert (engine.version(), engine.checksums()) == ("40", served)
    assert learner.mismatch(engine, 40) < MISMATCH
    learner.step()
    engine.arm("receiving 2", signal.SIGKILL)
    assert engine.url in publish(42, engine).failed
    engine.process.wait(30)
    engine = start_engines.again(engine)
    # It has what it was started with, and lacks nothing that does not change.
    report = publish(42, engine)
    assert report.ok and report.sent_bytes == learner.factor_bytes
    learner.assert_served_by(engine, 42)


def test_one_group_gets_what_one_of_it_lacks(engines, lab, learner, others):
    for engine in engines:
        assert others(engine, engine.reference, 1).ok
    assert others(engines[1], engines[1].perturbed(only="visual.blocks"), 1).ok
    config = BroadcastConfig(broadcast_topology="group", broadcast_timeout_s=lab.broadcast_timeout_s)
    with closing(Broadcaster(config)) as broadcaster:
        lacking = learner.bytes_of(lambda name: "visual.blocks" in name)
        for version, more in ((50, lacking), (51, 0)):
            learner.step()
            urls = [engine.url for engine in engines]
            report = broadcaster.publish(learner.sent, version, urls, frozen=learner.frozen)
            assert not report.failed and report.sent_bytes == learner.factor_bytes + more
            for engine in engines:
                learner.assert_served_by(engine, version)


def test_files_have_the_sum_and_the_base_comes_back_with_the_next_factors(engines, lab, learner, publish, tmp_path):
    engine = engines[0]
    config = BroadcastConfig(broadcast_topology="disk", disk_dir=str(tmp_path), broadcast_timeout_s=20.0)
    with closing(Broadcaster(config)) as broadcaster:
        assert broadcaster.publish(learner.sent, 90, [engine.url], frozen=learner.frozen).ok
    learner.assert_served_by(engine, 90)
    report = publish(91, engine)
    base = learner.bytes_of(lambda name: name in learner.frozen.updated)
    assert report.ok and report.sent_bytes == learner.factor_bytes + base
    learner.assert_served_by(engine, 91)


def test_an_engine_of_another_dtype_gets_the_sum_in_it(start_engines, learner, publish):
    (engine,) = start_engines(1, dtype="bfloat16")
    for version in (60, 61):
        report = publish(version, engine)
        changing = learner.bytes_of(lambda name: name in learner.frozen.updated)
        assert report.ok and report.sent_bytes == changing // 2
        rounded = {name: tensor_checksum(tensor.to(torch.bfloat16)) for name, tensor in learner.weights().items()}
        assert engine.checksums() == rounded
        learner.step()


@pytest.mark.parametrize("frozen", ["tower", "projector", True])
def test_frozen_vision_is_sent_once(engines, tiny_model, lab, others, frozen):
    engine = engines[0]
    assert others(engine, engine.perturbed(), 70).ok
    learner = Adapted(tiny_model[0], lab, replace(ModelOptions(), freeze_vision=frozen))
    whole = sum(tensor.nbytes for tensor in learner.weights().values())
    kept = {
        "tower": learner.bytes_of(lambda name: name.startswith("visual.") and "merger" not in name),
        "projector": learner.bytes_of(lambda name: "merger" in name),
        True: learner.bytes_of(lambda name: name.startswith("visual.")),
    }[frozen]
    config = BroadcastConfig(broadcast_timeout_s=lab.broadcast_timeout_s, bucket_bytes=30_000)
    with closing(Broadcaster(config)) as broadcaster:
        for version, size in ((71, whole), (72, whole - kept)):
            report = broadcaster.publish(learner.sent, version, [engine.url], frozen=learner.frozen)
            assert report.ok and report.sent_bytes == size
            learner.assert_served_by(engine, version)
