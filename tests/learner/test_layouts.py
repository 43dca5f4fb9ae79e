"""A learner on several ranks is the learner on one: the demo's recipe over the same batches, with pictures, distributed
optimizer, importance correction and gain, says the same in its journal and ends with the same weights.
"""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest
import torch
from safetensors.torch import load_file

from tests.learner import layout_worker
from vagen.learner.config import ModelConfig
from vagen.learner.model.tiny import save_tiny_model
from vagen.tools.tiny_tokenizer import train_tokenizer

WORKER = Path(layout_worker.__file__)
NUM_STEPS = 5
SETTINGS = (
    "learner.batch_size=10",
    "learner.minibatch_rows=8",
    "learner.max_tokens_per_microbatch=64",
    "learner.total_steps=20",
    "learner.checkpoint_every=100",
    "learner.optimizer.warmup_updates=4",
)
OF_A_WHOLE_BATCH = ("learner.advantage.whiten_per=task", "learner.loss.behaviour_weight=m2po")
"""Statistics that no rank knows from its own rows."""
BF16_TOLERANCE = 0.02
"""Of a loss near 0.2: sums of another order round otherwise, and each step starts from the weights of the last."""
CLOCKS = ("time", "wall_s", "seconds")


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    """The demo's model, untrained."""
    directory = tmp_path_factory.mktemp("model") / "demo"
    return save_tiny_model(ModelConfig(), train_tokenizer(["Move to the goal."], [], 384), directory)


def of_two_tasks(record):
    """Sorted otherwise by name than by their first place in a batch."""
    task = "bb" if record.position < 6 else "aa"
    return msgspec.structs.replace(record, trajectory=msgspec.structs.replace(record.trajectory, task=task))


def layout(**sizes: int) -> list[str]:
    return [*SETTINGS, *(f"learner.{axis}_parallel_size={size}" for axis, size in sizes.items())]


def one_process(run_dir: Path, archive: Path, model_dir: Path, *settings: str) -> None:
    torch.set_num_threads(1)
    layout_worker.replay(run_dir, archive, [*layout(), *settings], model_dir)


def documented_command(torchrun, model_dir: Path, run_dir: Path, archive: Path, settings: list[str]) -> None:
    """What docs/parallelism.md starts on two processes."""
    options = [word for setting in settings for word in ("--set", setting)]
    command = ["-m", "vagen.learner", "run", "--config", "frozenlake", "--model", model_dir, "--run-dir", run_dir]
    torchrun(2, *command, "--replay", archive, *options)


def journal(run_dir: Path) -> list[dict]:
    lines = (run_dir / "learner" / "metrics.jsonl").read_text().splitlines()
    return [{name: value for name, value in json.loads(line).items() if name not in CLOCKS} for line in lines]


def assert_same_training(run_dir: Path, expected: Path, atol: float = 1e-5) -> None:
    lines, wanted = journal(run_dir), journal(expected)
    assert [line["step"] for line in lines] == [line["step"] for line in wanted] == list(range(NUM_STEPS))
    for line, want in zip(lines, wanted, strict=True):
        assert line["num_updates"] > 2, "several optimizer steps a batch"
        _assert_close(line, want, f"step {line['step']}", atol)
    for file in ("model.safetensors", "value_head.safetensors"):
        name = Path("learner") / f"export-step-{NUM_STEPS:08d}" / file
        got, want = load_file(run_dir / name), load_file(expected / name)
        assert set(got) == set(want)
        for tensor in want:
            torch.testing.assert_close(got[tensor], want[tensor], rtol=1e-4, atol=10 * atol)


def _assert_close(got, want, path: str, atol: float) -> None:
    """Everything in a line of the journal, however deep."""
    if isinstance(want, dict):
        assert got.keys() == want.keys(), path
        for name in want:
            _assert_close(got[name], want[name], f"{path}.{name}", atol)
    elif isinstance(want, float):
        assert got == pytest.approx(want, abs=atol, rel=1e-4), path
    else:
        assert got == want, path


@pytest.mark.slow
def test_every_layout_trains_as_one_process(make_archive, model_dir, torchrun, tmp_path):
    archive = make_archive(num_steps=NUM_STEPS, batch_size=10, change=of_two_tasks)
    beginning = make_archive(num_steps=2, batch_size=10, name="beginning")
    middle = make_archive(num_steps=4, batch_size=10, name="middle")
    one_process(tmp_path / "one", archive, model_dir)
    jobs = {
        "tp2-dp2": [*layout(tensor=2), "learner.sequence_parallel=true"],
        "tp2-pp2": [*layout(tensor=2, pipeline=2), "learner.recompute=true"],
        "cp2-tp2": [*layout(context=2, tensor=2), "learner.sequence_parallel=true"],
        "cp2-pp2": [*layout(context=2, pipeline=2), "learner.recompute=true"],
    }
    reshards = [(beginning, layout(pipeline=2)), (middle, layout(context=2))]
    rounded = "learner.bf16=true"
    jobs["bf16"] = [*jobs["tp2-pp2"], rounded]
    jobs["dp4"] = [*layout(), *OF_A_WHOLE_BATCH]
    content = [(tmp_path / name, archive, settings) for name, settings in jobs.items()]
    content += [(tmp_path / "resharded", part, settings) for part, settings in reshards]
    (tmp_path / "jobs.json").write_text(json.dumps(content, default=str))
    torchrun(4, WORKER, tmp_path / "jobs.json", model_dir)
    one_process(tmp_path / "resharded", archive, model_dir)
    documented_command(torchrun, model_dir, tmp_path / "dp2", archive, layout())
    for name in ("dp2", "tp2-dp2", "tp2-pp2", "cp2-tp2", "cp2-pp2", "resharded"):
        assert_same_training(tmp_path / name, tmp_path / "one")
    one_process(tmp_path / "one-bf16", archive, model_dir, rounded)
    one_process(tmp_path / "one-whole", archive, model_dir, *OF_A_WHOLE_BATCH)
    assert_same_training(tmp_path / "dp4", tmp_path / "one-whole")
    losses = [[line["loss"]["total"] for line in journal(tmp_path / name)] for name in ("bf16", "one-bf16")]
    assert losses[0] == pytest.approx(losses[1], abs=BF16_TOLERANCE)


@pytest.mark.slow
def test_the_documented_command_trains_on_two_stages(make_archive, model_dir, torchrun, tmp_path):
    archive = make_archive(num_steps=2, batch_size=10)
    documented_command(torchrun, model_dir, tmp_path, archive, layout(pipeline=2))
    assert [line["step"] for line in journal(tmp_path)] == [0, 1]
