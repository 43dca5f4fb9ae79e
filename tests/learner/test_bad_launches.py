"""A launch that cannot work is one line on every rank, said before torch is imported, that names what to change."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from vagen.common.errors import ConfigError
from vagen.learner.layout import ParallelLayout
from vagen.learner.model import spec

MODEL = {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 96, "num_hidden_layers": 6}
EXPERTS = MODEL | {"num_experts": 6, "moe_intermediate_size": 32}
LAUNCH = "import sys; sys.modules['torch'] = None; from vagen.learner.cli import app; app()"
"""With torch as if it were not installed."""


@pytest.fixture
def launch(tmp_path):
    def run(world_size: int, *settings: str, model: dict = MODEL) -> subprocess.CompletedProcess:
        (tmp_path / "config.json").write_text(json.dumps({"text_config": model, "image_token_id": 9}))
        options = [word for setting in settings for word in ("--set", f"learner.{setting}")]
        command = ["run", "--config", "frozenlake", "--model", tmp_path, "--run-dir", tmp_path / "run", *options]
        environment = os.environ | {"WORLD_SIZE": str(world_size)}
        return subprocess.run(
            [sys.executable, "-c", LAUNCH, *map(str, command)], env=environment, capture_output=True, text=True
        )

    return run


@pytest.mark.parametrize(
    ("world_size", "settings", "sentence"),
    [
        (
            6,
            ["tensor_parallel_size=2", "pipeline_parallel_size=2"],
            "tensor_parallel_size 2 * pipeline_parallel_size 2 * context_parallel_size 1 = 4 processes train the same "
            "rows and must divide the 6 that run; start `torchrun --nproc-per-node 4`",
        ),
        (
            6,
            ["tensor_parallel_size=2", "context_parallel_size=2"],
            "tensor_parallel_size 2 * pipeline_parallel_size 1 * context_parallel_size 2 = 4 processes train the same "
            "rows and must divide the 6 that run; start `torchrun --nproc-per-node 4`",
        ),
        (4, ["tensor_parallel_size=4"], "num_key_value_heads 2 does not divide by $.learner.tensor_parallel_size 4"),
        (4, ["pipeline_parallel_size=4"], "num_hidden_layers 6 does not divide by $.learner.pipeline_parallel_size 4"),
        (
            4,
            ["sequence_parallel=true"],
            "$.learner.sequence_parallel: expected false, or a tensor_parallel_size above 1",
        ),
        (
            2,
            ["expert_parallel_size=2"],
            "$.learner.expert_parallel_size: expected 1 for a model without experts",
        ),
        (4, ["batch_size=3"], "$.learner.batch_size: expected int >= 4, one trajectory for each copy of the model"),
    ],
)
def test_a_layout_that_does_not_fit_is_one_line(launch, world_size, settings, sentence):
    ended = launch(world_size, *settings)
    assert ended.returncode == 2, ended.stderr
    assert sentence in ended.stderr and len(ended.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("world_size", "settings", "sentence"),
    [
        (
            6,
            ["expert_parallel_size=2", "pipeline_parallel_size=2"],
            "$.learner.expert_parallel_size: expected a divisor of the 3 processes of a pipeline stage, "
            "which share out its experts, got 2",
        ),
        (4, ["expert_parallel_size=4"], "num_experts 6 does not divide by $.learner.expert_parallel_size 4"),
        (2, ["tensor_parallel_size=2"], "$.learner.sequence_parallel: expected true for a mixture of experts"),
    ],
)
def test_experts_that_cannot_be_shared_out_are_one_line(launch, world_size, settings, sentence):
    ended = launch(world_size, *settings, model=EXPERTS)
    assert ended.returncode == 2, ended.stderr
    assert sentence in ended.stderr and len(ended.stderr.splitlines()) == 1


def test_a_layout_that_fits_is_not_refused(launch):
    ended = launch(8, "tensor_parallel_size=2", "pipeline_parallel_size=2", "context_parallel_size=2")
    assert "expected --redis" in ended.stderr
    shards = ("tensor_parallel_size=2", "sequence_parallel=true", "expert_parallel_size=6")
    assert "expected --redis" in launch(6, *shards, model=EXPERTS).stderr


def test_a_config_without_sizes_says_nothing_about_the_layout():
    ParallelLayout(tensor=3).require_model({"model_type": "new"}, "config.json", sequence_parallel=False)


def test_a_gpu_without_fused_kernels_is_refused(monkeypatch):
    monkeypatch.setattr(spec.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(spec, "uses_transformer_engine", lambda: False)
    with pytest.raises(ConfigError, match="install the extra `gpu`, or set .*require_transformer_engine to false"):
        spec.require_transformer_engine()


def test_a_cpu_needs_none():
    spec.require_transformer_engine()
