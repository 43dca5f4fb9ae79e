"""Two real gloo ranks, each with half of every layer, of the layers, of every row, or of the rows: as one process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.model import rank_worker
from vagen.common.errors import ConfigError
from vagen.learner.layout import ParallelLayout
from vagen.learner.model import parallel
from vagen.learner.model.actor_critic import VisionLanguageActorCritic
from vagen.learner.model.batch import PackedBatch
from vagen.learner.model.checkpoint_io import load_checkpoint
from vagen.learner.model.optimizer import AdamOptions, Trainer

WORKER = Path(rank_worker.__file__)
LAYOUTS = ("tp2-pp1-cp1-dp1-ep1", "tp1-pp2-cp1-dp1-ep1", "tp1-pp1-cp2-dp1-ep1", "tp1-pp1-cp1-dp2-ep1")
EXPERT_LAYOUTS = (
    "tp2-pp1-cp1-dp1-ep1",
    "tp1-pp2-cp1-dp1-ep1",
    "tp1-pp1-cp2-dp1-ep1",
    "tp1-pp1-cp1-dp2-ep2",
    "tp2-pp1-cp1-dp1-ep2",
    "tp1-pp1-cp2-dp1-ep2",
)
"""The last three share experts out, over two copies of the rest, two shards of it and two parts of each row."""


def _assert_close(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor], atol: float) -> None:
    assert set(got) == set(want)
    for name, tensor in want.items():
        torch.testing.assert_close(got[name], tensor, rtol=1e-5, atol=atol)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["vl", "qwen3_vl", "glm4v", "qwen3_vl_moe"])
def test_two_ranks_equal_one(
    request: pytest.FixtureRequest,
    vl_rows: Any,
    pack: Callable[..., PackedBatch],
    torchrun: Callable[..., None],
    tmp_path: Path,
    family: str,
) -> None:
    hf, _ = request.getfixturevalue(f"save_{family}")(tied=True, name="vl", num_layers=4)
    # Of two copies one has a pack more than the other.
    batches = [pack(vl_rows[:2]), pack(vl_rows[2:3]), pack(vl_rows[3:])]
    torch.save(batches, tmp_path / "batches.pt")
    one = rank_worker.run(tmp_path, batches, parallel.topology())
    torchrun(2, WORKER, tmp_path)

    for layout in EXPERT_LAYOUTS if family == "qwen3_vl_moe" else LAYOUTS:
        two = torch.load(tmp_path / f"result-{layout}.pt", weights_only=False)
        _assert_close(two["loaded"], one["loaded"], atol=0.0)
        for got, want in zip(two["outputs"], one["outputs"], strict=True):
            for x, y in zip(got, want, strict=True):
                torch.testing.assert_close(x, y, rtol=1e-5, atol=5e-6)
        assert two["norms"] == pytest.approx(one["norms"], rel=1e-4)
        for name in ("trained", "engine", "resumed_trained"):
            _assert_close(two[name], one[name], atol=2e-5)
        # The checkpoint of one process, loaded by two.
        _assert_close(two["resumed"], one["trained"], atol=0.0)
        assert two["resumed_norms"] == pytest.approx(one["resumed_norms"], rel=1e-4)
        assert two["again"] == two["going_on"], "a checkpoint written beside training resumes with the same bits"
        # And the other way round.
        model = VisionLanguageActorCritic.load_hf(tmp_path / "vl")
        load_checkpoint(tmp_path / f"own-{layout}", model, Trainer(model, AdamOptions()))
        _assert_close(model.export_hf_state(), two["trained"], atol=0.0)
        saved = load_file(tmp_path / f"saved-{layout}" / "model.safetensors")
        _assert_close(saved, _disk_names(two["resumed_trained"], hf.config.model_type), atol=0.0)


def _disk_names(state: dict[str, torch.Tensor], model_type: str) -> dict[str, torch.Tensor]:
    """Qwen3-VL's and GLM's files keep transformers' names, Qwen2.5-VL's have shorter ones."""
    state = {name: tensor for name, tensor in state.items() if name != "lm_head.weight"}
    if model_type != "qwen2_5_vl":
        return state
    return {k.replace(".language_model", "").replace("model.visual", "visual"): v for k, v in state.items()}


def test_worlds_that_do_not_divide_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"tensor_parallel_size 2 \* .* = 2 processes .* must divide the 1 that run"):
        parallel.init(ParallelLayout(tensor=2))
