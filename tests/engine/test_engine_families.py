"""The local engine of each family against transformers, and a Qwen3-VL engine against the learner."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
import torch
from transformers import Qwen3_5TextConfig

from vagen.actor.local_engine.config import EngineConfig
from vagen.actor.local_engine.model import EngineModel
from vagen.actor.local_engine.weights import WeightReceiver
from vagen.actor.messages import Message, Picture
from vagen.actor.rendering import ChatRenderer
from vagen.common.errors import ConfigError
from vagen.common.towers import image_spec
from vagen.common.weight_transfer import tensor_checksum
from vagen.learner.batching import RowPreparer
from vagen.learner.engine_control import ProbeAnswer
from vagen.learner.model.actor_critic import VisionLanguageActorCritic
from vagen.learner.model.parallel import parallel_session
from vagen.learner.probe import Probe
from vagen.tools.engine_doctor import EngineDoctor

NUM_TOKENS = 6
TEMPERATURE = 0.7
TEXTS = [[40, 41, 42, 43, 44], [50, 51], [60, 61, 62, 63]]


def padded(rows):
    """Ids [n, L], and lengths."""
    ids = np.zeros((len(rows), max(map(len, rows))), np.int64)
    for i, row in enumerate(rows):
        ids[i, : len(row)] = row
    return ids, np.array([len(row) for row in rows])


def test_a_model_that_the_learner_refuses_is_refused_with_the_same_reason(tmp_path):
    settings = {"num_hidden_layers": 4, "hidden_size": 64, "vocab_size": 96, "intermediate_size": 64}
    Qwen3_5TextConfig(**settings).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="got model type qwen3_5_text: most of its layers are gated delta nets"):
        EngineModel(tmp_path, EngineConfig(max_running=1, max_context=64))
    with pytest.raises(ConfigError, match="'qwen3_5_text' is not supported: most of its layers are gated delta nets"):
        VisionLanguageActorCritic.load_hf(tmp_path)


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
@torch.no_grad()
def test_logits_of_a_text_model_are_those_of_transformers(lab, tmp_path, family):
    hf = lab.build(family, tmp_path)
    engine = EngineModel(tmp_path, EngineConfig(max_running=4, max_context=64))
    ids, lengths = padded(TEXTS)
    rows = [list(row) for row in TEXTS]
    positions = np.broadcast_to(np.arange(ids.shape[1]), (3, *ids.shape)).copy()
    logits = engine.prefill(0, ids, positions, lengths, [])
    for _ in range(NUM_TOKENS):
        for got, row in zip(logits, rows, strict=True):
            torch.testing.assert_close(got, hf(torch.tensor([row])).logits[0, -1], rtol=1e-4, atol=2e-5)
        sampled = logits.argmax(-1).numpy()
        logits = engine.decode(sampled, lengths, lengths)
        lengths = lengths + 1
        rows = [[*row, int(token)] for row, token in zip(rows, sampled, strict=True)]


@torch.no_grad()
def test_weights_written_into_parameters_reach_the_forward_pass(lab, tmp_path):
    """The engine computes with fused tensors, of which transformers' parameters must stay views."""
    hf = lab.build("qwen3", tmp_path)
    engine = EngineModel(tmp_path, EngineConfig(max_running=1, max_context=64))
    for parameter, written in zip(hf.parameters(), engine.hf.parameters(), strict=True):
        parameter.add_(0.05 * torch.randn_like(parameter))
        written.data.copy_(parameter)
    ids, lengths = padded(TEXTS[:1])
    positions = np.broadcast_to(np.arange(ids.shape[1]), (3, *ids.shape)).copy()
    logits = engine.prefill(0, ids, positions, lengths, [])
    torch.testing.assert_close(logits[0], hf(torch.tensor(TEXTS[:1])).logits[0, -1], rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("family", ["qwen2", "qwen2_5_vl", "qwen3", "qwen3_vl", "qwen3_vl_moe", "glm4v", "internvl"])
def test_a_saved_folder_holds_every_parameter_of_the_engine(lab, tmp_path, family):
    """Under the hub's names, which the engine's differ from."""
    lab.build(family, tmp_path)
    engine = EngineModel(tmp_path, EngineConfig(max_running=1, max_context=64))
    receiver = WeightReceiver(engine.hf, is_tied=engine.is_tied)
    receiver.begin()
    receiver.read_folder(tmp_path, "1")
    staged = receiver.end().tensors
    assert {name: tensor_checksum(tensor) for name, tensor in staged.items()} == receiver.checksums()


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "glm4v", "internvl"])
@torch.no_grad()
def test_logits_with_pictures_are_those_of_transformers(lab, tmp_path, family):
    hf = lab.build(family, tmp_path)
    engine = EngineModel(tmp_path, EngineConfig(max_running=2, max_context=128))
    spec = image_spec(tmp_path)
    shown = [[lab.png(7)], [lab.png(8, width=112, height=56), lab.png(9)]]
    pictures = [[spec.preprocess(png) for png in pngs] for pngs in shown]
    rows = []
    for row in pictures:
        spans = [[lab.vision_start, *[lab.image] * spec.num_tokens(grid), lab.vision_end] for _, grid in row]
        rows.append([10, *(token for span in spans for token in span), 30, 31])
    ids, lengths = padded(rows)
    positions = np.zeros((3, *ids.shape), np.int64)
    for i, (row, images) in enumerate(zip(rows, pictures, strict=True)):
        positions[:, i, : len(row)] = spec.positions(np.array(row), [grid for _, grid in images], lab.image)
    following = positions.max((0, 2)) + 1
    patches, grids = zip(*(image for images in pictures for image in images), strict=True)
    logits = engine.prefill(0, ids, positions, lengths, engine.image_features(patches, grids))
    for step in range(NUM_TOKENS):
        for got, row, images in zip(logits, rows, pictures, strict=True):
            torch.testing.assert_close(
                got, hf(**lab.picture_inputs(hf, row, images)).logits[0, -1], rtol=1e-4, atol=2e-5
            )
        sampled = np.array([50 + step, 60 + step])
        logits = engine.decode(sampled, following + step, lengths + step)
        rows = [[*row, int(token)] for row, token in zip(rows, sampled, strict=True)]


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "glm4v", "internvl"])
@torch.no_grad()
def test_logprobs_after_a_picture_are_the_learners(lab, tmp_path, family):
    """From the rendered prompt through the processors of both, at a temperature, without forbidden tokens."""
    lab.build(family, tmp_path)
    renderer = ChatRenderer.load(tmp_path)
    png = lab.png(5, width=112, height=84)
    picture = Picture(png, (112, 84))
    prompt = renderer.render((Message("user", (picture, "w20 w21")),))
    token_ids, images = renderer.expand(prompt.token_ids, prompt.pictures)
    forbidden = torch.tensor(renderer.vision.forbidden_token_ids)

    engine = EngineModel(tmp_path, EngineConfig(max_running=1, max_context=128))
    patches, grid = engine.image_spec.preprocess(png)
    positions = engine.image_spec.positions(np.array(token_ids), [grid], lab.image)
    ids, lengths = padded([token_ids])
    logits = engine.prefill(0, ids, positions[:, None], lengths, engine.image_features([patches], [grid]))
    sampled, logprobs, following = [], [], np.array([positions.max() + 1])
    for step in range(NUM_TOKENS):
        distribution = torch.log_softmax(logits[0].index_fill(0, forbidden, -torch.inf) / TEMPERATURE, -1)
        sampled.append(int(distribution.topk(step + 2).indices[-1]))
        logprobs.append(float(distribution[sampled[-1]]))
        logits = engine.decode(np.array(sampled[-1:]), following + step, lengths + step)

    plain = {
        "token_ids": token_ids,
        "images": msgspec.to_builtins(images),
        "encoded": {picture.content_hash: picture.base64},
    }
    probe = Probe.from_plain({"temperature": TEMPERATURE, "prompts": [plain]})
    answer = ProbeAnswer(token_ids=tuple(sampled), logprobs=tuple(logprobs), num_prompt_tokens=len(token_ids))
    with parallel_session():
        model = VisionLanguageActorCritic.load_hf(tmp_path)
        preparer = RowPreparer.load(tmp_path)
        assert probe.mismatch(model, preparer, [answer]) < 2e-5
        other = Probe.from_plain({"temperature": 1.0, "prompts": [plain]})
        assert other.mismatch(model, preparer, [answer]) > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "shown"),
    [
        ("qwen3_vl", {"pictures", "vision cache"}),
        ("qwen3_vl_moe", {"pictures", "vision cache"}),
        ("glm4v", {"pictures", "vision cache"}),
        ("internvl", {"pictures", "vision cache"}),
        ("qwen3", {"prompt", "update"}),
    ],
)
def test_an_engine_agrees_with_the_learner(lab, serve, tmp_path, family, shown):
    """Names, weights, tokens of a prompt, log-probabilities within 1e-4, and an update (of the vision tower)."""
    folder = tmp_path / "model"
    folder.mkdir()
    engine = serve(folder, lab.build(family, folder))
    doctor = EngineDoctor(
        url=engine.url, model_dir=folder, api_key=engine.api_key, admin_api_key=engine.admin_key, update=True
    )
    findings = {finding.name: finding for finding in doctor.examine()}
    assert all(finding.ok for finding in findings.values()), findings
    assert {"names", "weights", "logprobs"} | shown <= set(findings)
