"""A checkpoint of another model, tokenizer or kind of training is refused before torch is imported, in one line that
says what differs and what to change.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from vagen.common.errors import CheckpointError
from vagen.learner.checkpoint_match import require_matching_checkpoint
from vagen.learner.checkpoints import CheckpointFolder
from vagen.learner.config import CriticConfig, LearnerConfig, LoRAConfig
from vagen.learner.losses.config import LossConfig, ReferenceConfig
from vagen.learner.model.checkpoint_io import load_checkpoint, save_checkpoint

WITHOUT_TORCH = "import sys; sys.modules['torch'] = None; from vagen.learner.cli import app; app()"
KINDS = {
    "plain": {},
    "adapters": {"lora": LoRAConfig(rank=4)},
    "bins": {"loss": LossConfig(value_loss="two_hot", value_bins=11)},
    "critic": {"critic": CriticConfig(trunk="separate")},
    "reference": {"reference": ReferenceConfig(model_dir="start", kl_in_loss=0.1, refresh_every=2)},
}

pytestmark = pytest.mark.usefixtures("one_process")


@pytest.fixture
def save(make_update, tmp_path):
    """Saves a checkpoint of a kind of training as the run's newest."""

    def run(kind: str = "plain") -> Path:
        path = CheckpointFolder.of_run(tmp_path / "run", 2).path_of(2)
        update, model, _ = make_update(**KINDS[kind])
        save_checkpoint(path, model, update.critic._policy, {"step": 2}, update.beside_policy())
        return path

    return run


@pytest.fixture
def other_model(model_dir, tmp_path):
    """A copy of the model's folder with a change in one of its json files."""

    def copy(file: str, change) -> Path:
        folder = tmp_path / "other"
        shutil.copytree(model_dir, folder)
        content = json.loads((folder / file).read_text())
        change(content)
        (folder / file).write_text(json.dumps(content))
        return folder

    return copy


def launch(run_dir: Path, model: Path) -> subprocess.CompletedProcess:
    words = ["run", "--config", "frozenlake", "--model", str(model), "--run-dir", str(run_dir)]
    return subprocess.run([sys.executable, "-c", WITHOUT_TORCH, *words], capture_output=True, text=True, timeout=60)


def test_the_command_refuses_another_models_checkpoint_without_torch(save, model_dir, other_model, tmp_path):
    save()
    other = other_model("config.json", lambda config: config["text_config"].update(num_hidden_layers=6))
    ended = launch(tmp_path / "run", other)
    assert ended.returncode == 1
    assert ended.stderr == (
        f"error: {tmp_path}/run/learner/checkpoints/step-00000002: is of another model than --model {other}, "
        "text_config.num_hidden_layers 2 and not 6; give the model that the run began with, or another --run-dir\n"
    )
    assert "expected --redis" in launch(tmp_path / "run", model_dir).stderr, "its own model's is not refused"


@pytest.mark.parametrize("kind", KINDS)
def test_a_checkpoint_goes_on_as_it_was_saved_and_not_otherwise(save, make_update, model_dir, kind):
    path = save(kind)
    for name, settings in KINDS.items():
        config = LearnerConfig(**settings)
        if name == kind:
            require_matching_checkpoint(path, model_dir, config)
            update, model, _ = make_update(**settings)
            assert load_checkpoint(path, model, update.critic._policy, update.beside_policy()) == {"step": 2}
        else:
            with pytest.raises(CheckpointError, match=r"other settings, \$\.learner\..*; set them as the run began"):
                require_matching_checkpoint(path, model_dir, config)


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"lora": LoRAConfig(rank=4, alpha=8.0)}, r"\$.learner.lora.alpha 32.0 and not 8.0"),
        ({}, r"\$.learner.lora.rank 4 and not 0"),
    ],
)
def test_other_settings_are_named(save, model_dir, settings, sentence):
    with pytest.raises(CheckpointError, match=sentence):
        require_matching_checkpoint(save("adapters"), model_dir, LearnerConfig(**settings))


def exchange_tokens(tokenizer: dict) -> None:
    ids = tokenizer["model"]["vocab"]
    ids["a"], ids["b"] = ids["b"], ids["a"]


def drop_a_merge(tokenizer: dict) -> None:
    tokenizer["model"]["merges"].pop()


def rename_family(config: dict) -> None:
    config["model_type"] = "qwen3_vl"
    config["text_config"]["hidden_size"] = 8


@pytest.mark.parametrize(
    ("file", "change", "sentence"),
    [
        ("config.json", rename_family, r'model_type "qwen2_5_vl" and not "qwen3_vl";'),
        ("config.json", lambda c: c["vision_config"].update(depth=9), "vision_config.depth 2 and not 9;"),
        ("tokenizer.json", exchange_tokens, r'another tokenizer than .*: "a" has id \d+ there and \d+ here'),
        ("tokenizer.json", drop_a_merge, "its merges are others"),
    ],
)
def test_another_model_or_tokenizer_is_named(save, other_model, file, change, sentence):
    with pytest.raises(CheckpointError, match=sentence):
        require_matching_checkpoint(save(), other_model(file, change), LearnerConfig())


def test_what_says_nothing_of_the_tensors_may_differ(save, other_model):
    other = other_model("config.json", lambda config: config.update(transformers_version="9", dtype="bfloat16"))
    (other / "tokenizer.json").write_text(json.dumps(json.loads((other / "tokenizer.json").read_text()), indent=7))
    require_matching_checkpoint(save(), other, LearnerConfig())
