"""An exported checkpoint of each family in transformers, the local engine and SGLang: the learner's logprobs."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import AutoImageProcessor, AutoModelForCausalLM, AutoModelForImageTextToText, AutoTokenizer

from vagen.common.towers import image_spec
from vagen.learner.config import LearnerConfig
from vagen.learner.model.batch import ImageBatch, PackedBatch
from vagen.learner.model.checkpoint_io import load_checkpoint, save_checkpoint
from vagen.learner.model.files import read_weights
from vagen.learner.model.optimizer import AdamOptions, Trainer
from vagen.learner.model.parallel import parallel_session
from vagen.learner.models import load_models
from vagen.tools.export import ExportOptions, export

TEXT, VISION = ("qwen2", "qwen3"), ("qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "glm4v", "internvl")
BOUND = 1e-4
OUTPUT = [40, 41, 42, 43, 44, 45]


@pytest.fixture
def exported(lab, tmp_path):
    """Trains a family's tiny model a little, saves a checkpoint and exports it; returns the exported folder and
    transformers' model as it was before."""

    def run(family, **options):
        (source := tmp_path / "source").mkdir()
        hf = lab.build(family, source)
        with parallel_session():
            model, _ = load_models(source, LearnerConfig())
            trainer = Trainer(model, AdamOptions())
            trainer.zero_grad()
            batch = packed(lab, source, family, OUTPUT)
            trainer.accumulate([(batch, None)], lambda _, out: -out.logprobs.sum())
            assert not trainer.step(3e-2).skipped
            save_checkpoint(tmp_path / "checkpoint", model, trainer, {"step": 7})
        export(ExportOptions(source=tmp_path / "checkpoint", out=tmp_path / "exported", **options))
        return tmp_path / "exported", hf

    return run


@pytest.fixture
def learner_logprobs(lab, tmp_path):
    """Of tokens after the prompt, by the learner that goes on from the checkpoint."""

    def score(family, output=OUTPUT):
        with parallel_session():
            model, _ = load_models(tmp_path / "source", LearnerConfig())
            load_checkpoint(tmp_path / "checkpoint", model, Trainer(model, AdamOptions()))
            batch = packed(lab, tmp_path / "source", family, output)
            never = torch.tensor(forbidden(lab, family), dtype=torch.int64)
            return model(batch, forbidden_token_ids=never).logprobs.detach()

    return score


def forbidden(lab, family):
    return [] if family in TEXT else [lab.image, lab.video, lab.vision_start, lab.vision_end]


def prompt(lab, family):
    return [10, 11, 12] if family in TEXT else lab.image_prompt(30)


def picture_row(lab, folder, family, output):
    """The prompt with its placeholders expanded and the output, patches and grids of its picture, and positions."""
    ids, pictures = [*prompt(lab, family), *output], []
    if family in TEXT:
        return ids, pictures, np.broadcast_to(np.arange(len(ids)), (3, len(ids))).copy()
    spec = image_spec(folder)
    pictures = [spec.preprocess(lab.png(6))]
    grids = [grid for _, grid in pictures]
    ids = [i for token in ids for i in ([token] * spec.num_tokens(grids[0]) if token == lab.image else [token])]
    return ids, pictures, spec.positions(np.array(ids), grids, lab.image)


def packed(lab, folder, family, output):
    """As the learner scores the output after the prompt."""
    ids, pictures, positions = picture_row(lab, folder, family, output)
    images = None
    if pictures:
        ((patches, grid),) = pictures
        images = ImageBatch(patches=patches, grids=torch.tensor([grid]))
    return PackedBatch(
        token_ids=torch.tensor(ids),
        position_ids=torch.from_numpy(positions),
        cu_seqlens=torch.tensor([0, len(ids)], dtype=torch.int32),
        score_positions=torch.arange(len(ids) - len(output), len(ids)),
        images=images,
    )


@torch.no_grad()
def transformers_logprobs(lab, model, folder, family):
    ids, pictures, _ = picture_row(lab, folder, family, OUTPUT)
    inputs = lab.picture_inputs(model, ids, pictures)
    logits = model(**inputs).logits[0, -len(OUTPUT) - 1 : -1]
    return torch.tensor(lab.gather_logprobs(logits, OUTPUT, 1.0, forbidden(lab, family)))


@pytest.mark.parametrize("family", [*TEXT, *VISION])
def test_transformers_gives_the_learners_logprobs(lab, exported, learner_logprobs, family):
    folder, before = exported(family)
    expected = learner_logprobs(family)
    auto = AutoModelForCausalLM if family in TEXT else AutoModelForImageTextToText
    model = auto.from_pretrained(folder)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    got = transformers_logprobs(lab, model, folder, family)
    torch.testing.assert_close(got, expected, rtol=0, atol=BOUND)
    old = transformers_logprobs(lab, before, folder, family)
    assert (old - expected).abs().max() > 100 * BOUND, "training changed what is compared"


@pytest.mark.parametrize("family", VISION)
def test_tokenizer_template_and_picture_processor_are_those_of_the_model(exported, tmp_path, family):
    folder, _ = exported(family)
    text = "<|im_start|> w20 w21 <|vision_start|> <|image_pad|> <|vision_end|> w30 <|im_end|>"
    chat = [{"role": "user", "content": "w20 w21"}]
    ours, theirs = (AutoTokenizer.from_pretrained(path) for path in (folder, tmp_path / "source"))
    assert ours(text)["input_ids"] == theirs(text)["input_ids"]
    assert ours.apply_chat_template(chat) == theirs.apply_chat_template(chat)
    assert ours.eos_token == theirs.eos_token
    ours, theirs = (AutoImageProcessor.from_pretrained(path) for path in (folder, tmp_path / "source"))
    assert ours.to_dict() == theirs.to_dict()
    names = {path.name for path in (tmp_path / "source").iterdir()} | {"README.md", "learner.step"}
    assert names <= {path.name for path in folder.iterdir()}


def test_a_model_in_several_files_and_in_bfloat16_loads_as_such(lab, exported, learner_logprobs):
    folder, _ = exported("qwen2_5_vl", max_shard_bytes=40_000, dtype="bfloat16")
    assert len(list(folder.glob("model-*.safetensors"))) > 2 and not (folder / "model.safetensors").exists()
    model = AutoModelForImageTextToText.from_pretrained(folder)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    got = transformers_logprobs(lab, model.float(), folder, "qwen2_5_vl")
    assert BOUND < (got - learner_logprobs("qwen2_5_vl")).abs().max() < 0.2, "of the rounding of bfloat16"
    tensors = read_weights(folder)
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}


@pytest.mark.parametrize("family", [*TEXT, *VISION])
def test_the_local_engine_samples_with_the_learners_logprobs(lab, exported, learner_logprobs, serve, family):
    assert_engine_agrees(lab, serve(*exported(family)), learner_logprobs, family)


@pytest.mark.sglang
@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("family", ["qwen2", "qwen2_5_vl"])
def test_sglang_samples_with_the_learners_logprobs(lab, exported, learner_logprobs, start_sglang, family):
    assert_engine_agrees(lab, start_sglang(*exported(family)), learner_logprobs, family)


def assert_engine_agrees(lab, engine, learner_logprobs, family):
    images = [lab.png(6)] if family in VISION else []
    answer = engine.generate(prompt(lab, family), images)
    expected = learner_logprobs(family, answer["output_ids"])
    torch.testing.assert_close(torch.tensor(lab.reported(answer)), expected, rtol=0, atol=BOUND)
