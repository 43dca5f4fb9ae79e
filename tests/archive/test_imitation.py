"""`vagen sft --archive`: a model imitates imported conversations, whose behaviour policy nobody knows."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from vagen.buffer.archive.reader import open_archive
from vagen.learner.config import ModelConfig
from vagen.learner.model.tiny import save_tiny_model
from vagen.tools.cli import app
from vagen.tools.imitation import _returns
from vagen.tools.tiny_tokenizer import CHAT_TEMPLATE, train_tokenizer

SMALL = ModelConfig(
    hidden_size=64, intermediate_size=96, num_heads=2, num_kv_heads=1, vision_hidden_size=32, vision_num_heads=2
)
SETTINGS = (
    "sft.steps=60",
    "sft.optimizer.lr=1e-2",
    "sft.batch_rows=4",
    "sft.turns=8",
    "sft.optimizer.warmup_updates=1",
)


def run(*words) -> CliRunner:
    return CliRunner().invoke(app, [str(word) for word in words])


def make_model(folder, corpus: str):
    return save_tiny_model(SMALL, train_tokenizer([corpus] * 20, [], 384), folder, chat_template=CHAT_TEMPLATE)


@pytest.fixture
def imported(tmp_path, png):
    (tmp_path / "dot.png").write_bytes(png(3))
    picture = {"type": "image_url", "image_url": {"url": "dot.png"}}
    chat = {
        "messages": [
            {"role": "user", "content": [picture, {"type": "text", "text": "Where to?"}]},
            {"role": "assistant", "content": "Go left.", "reward": 1.0},
            {"role": "user", "content": "And then?"},
            {"role": "assistant", "content": "Go up.", "reward": {"task": 2.0, "format": 0.5}},
        ]
    }
    lines = [json.dumps({**chat, "id": str(number)}) for number in range(6)]
    (tmp_path / "chats.jsonl").write_text("\n".join(lines))
    make_model(tmp_path / "model", "Where to? Go left. And then? Go up.\n")
    done = run(
        *("buffer", "import", tmp_path / "chats.jsonl"),
        *("--model", tmp_path / "model", "--out", tmp_path / "imported"),
    )
    assert done.exit_code == 0, done.output
    return tmp_path / "imported"


def sft(archive, model, out, *settings):
    more = [word for setting in (*SETTINGS, *settings) for word in ("--set", setting)]
    return run("sft", "--config", "frozenlake", "--archive", archive, "--model", model, "--out", out, *more)


def test_a_model_learns_what_the_conversations_say(imported, tmp_path):
    done = sft(imported, tmp_path / "model", tmp_path / "imitated")
    assert done.exit_code == 0, done.output
    stats = json.loads((tmp_path / "imitated" / "sft.json").read_text())
    assert stats["trajectories"] == stats["rows"] == 6
    assert stats["policy_tokens"] == sum(r.trajectory.num_policy_tokens for r in open_archive(imported).iterate())
    # About ln(vocabulary) before it has seen them.
    assert stats["final_loss"] < 1.0
    assert sft(imported, tmp_path / "model", tmp_path / "imitated").exit_code == 2


def test_the_critics_target_is_the_discounted_return(imported):
    (trajectory, *_) = (record.trajectory for record in open_archive(imported).iterate())
    assert _returns(trajectory, 0.5).tolist() == [1.0 + 0.5 * 2.5, 2.5]


def test_tokens_of_another_tokenizer_are_refused(imported, tmp_path):
    make_model(tmp_path / "other", "Something else was said here, at length.\n")
    done = sft(imported, tmp_path / "other", tmp_path / "out")
    assert done.exit_code == 2 and "has tokens of tokenizer" in done.stderr
    done = run("sft", "--config", "frozenlake", "--out", tmp_path / "out", "--model", tmp_path / "model")
    assert done.exit_code == 2 and "expected --archive and --model together" in done.stderr


def test_adapters_alone_can_imitate(imported, tmp_path):
    settings = ("learner.lora.rank=4", "learner.lora.targets=[o_proj]")
    done = sft(imported, tmp_path / "model", tmp_path / "imitated", *settings)
    assert done.exit_code == 0, done.output
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("model", "imitated"))
    moved = {name for name, tensor in before.items() if not torch.equal(tensor, after[name])}
    assert moved == {name for name in before if name.startswith("model.") and "o_proj" in name} and moved
    assert json.loads((tmp_path / "imitated" / "adapter" / "adapter_config.json").read_text())["r"] == 4
