"""Low-rank adapters: the gradient is the dense one's, projected; merged and apart they are one model; ranks agree."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.model import lora_worker
from vagen.common.errors import CheckpointError, ConfigError
from vagen.learner.model import parallel
from vagen.learner.model.actor_critic import VisionLanguageActorCritic
from vagen.learner.model.batch import TokenOutputs
from vagen.learner.model.checkpoint_io import load_checkpoint, load_model, save_checkpoint
from vagen.learner.model.gpt import ModelOptions
from vagen.learner.model.lora import AdapterOptions, adapted_layers, is_adapter
from vagen.learner.model.optimizer import AdamOptions, Trainer

WORKER = Path(lora_worker.__file__)
ADAPTER = AdapterOptions(rank=4, alpha=8.0)
OPTIONS = ModelOptions(adapter=ADAPTER)
HEAD = ["value_head.weight", "value_head.bias"]


def _load(directory: Path, options: ModelOptions = OPTIONS) -> VisionLanguageActorCritic:
    return VisionLanguageActorCritic.load_hf(directory, options).train()


def _disturb(model: VisionLanguageActorCritic) -> None:
    """Give every B something to say."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("lora_b"):
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))


def _steps(trainer: Trainer, batch: Any, count: int) -> list[float]:
    losses: list[float] = []

    def loss_of(_: None, out: TokenOutputs) -> torch.Tensor:
        loss = -out.logprobs.mean() + (out.values - 1).square().mean()
        losses.append(loss.item())
        return loss

    for _ in range(count):
        trainer.zero_grad()
        trainer.accumulate([(batch, None)], loss_of)
        trainer.step(1e-2)
    return losses


@pytest.mark.parametrize("family", ["vl", "qwen3"])
def test_an_adapter_starts_as_the_model_itself(request: Any, vl_rows: Any, pack: Any, family: str) -> None:
    _, directory = request.getfixturevalue(f"save_{family}")()
    rows = vl_rows if family == "vl" else [(list(range(5, 30)), [])]
    plain, adapted = _load(directory, ModelOptions()), _load(directory)
    torch.testing.assert_close(adapted(pack(rows)).logprobs, plain(pack(rows)).logprobs, rtol=0, atol=0)
    assert all(
        torch.equal(x, y)
        for x, y in zip(plain.export_hf_state().values(), adapted.export_hf_state().values(), strict=True)
    )


def test_adapters_and_the_value_head_alone_are_trained(save_vl: Any, vl_rows: Any, pack: Any) -> None:
    _, directory = save_vl(tied=True)
    trainer = Trainer(_load(directory), AdamOptions())
    before = {name: x.detach().clone() for name, x in trainer.model.named_parameters()}
    losses = _steps(trainer, pack(vl_rows), 5)
    assert losses[-1] < losses[0]
    moved = {name for name, x in trainer.model.named_parameters() if not torch.equal(before[name], x)}
    assert moved == {name for name in before if is_adapter(name) or name in HEAD} and len(moved) == 2 + 3 * 4 * 2


def test_gradients_are_those_of_the_merged_weight_projected(
    save_vl: Any, vl_rows: Any, pack: Any, tmp_path: Path
) -> None:
    _, directory = save_vl()
    adapted, batch = _load(directory), pack(vl_rows)
    _disturb(adapted)
    adapted.save_hf(tmp_path / "merged")
    dense = _load(tmp_path / "merged", ModelOptions())
    for model in (adapted, dense):
        out = model(batch)
        (out.logprobs.sum() + out.entropy.sum()).backward()
    weights, layers = dict(dense.language_model.named_parameters()), dict(adapted.language_model.named_modules())
    names = [name for name, _, _ in adapted_layers(adapted.language_model)]
    assert len(names) == 3 * 4
    for name in names:
        layer, gradient = layers[name.removesuffix(".weight")], weights[name].grad
        torch.testing.assert_close(layer.lora_b.grad, 2.0 * gradient @ layer.lora_a.T, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(layer.lora_a.grad, 2.0 * layer.lora_b.T @ gradient, rtol=1e-4, atol=1e-4)


def test_recomputed_layers_get_the_same_gradients(save_vl: Any, vl_rows: Any, pack: Any) -> None:
    _, directory = save_vl()
    found = []
    for recompute in (False, True):
        model = _load(directory, replace(OPTIONS, recompute=recompute))
        _disturb(model)
        model(pack(vl_rows)).logprobs.sum().backward()
        found.append({name: x.grad for name, x in model.named_parameters() if is_adapter(name)})
    for name, expected in found[0].items():
        assert expected.abs().sum() > 0
        torch.testing.assert_close(found[1][name], expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("family", ["vl", "qwen3_vl"])
def test_merged_apart_and_published_are_one_model(
    request: Any, vl_rows: Any, pack: Any, tmp_path: Path, family: str
) -> None:
    hf, directory = request.getfixturevalue(f"save_{family}")(tied=True)
    model, batch = _load(directory), pack(vl_rows)
    _disturb(model)
    model.save_hf(tmp_path / "merged")

    merged = _load(tmp_path / "merged", ModelOptions())
    torch.testing.assert_close(merged(batch).logprobs, model(batch).logprobs, rtol=1e-4, atol=2e-5)
    published = dict(model.engine_named_tensors())
    for name, expected in merged.engine_named_tensors():
        assert torch.equal(published[name], expected), name

    # PEFT's arithmetic, by the names that it looks for.
    folder = tmp_path / "merged" / "adapter"
    tensors, settings = (
        load_file(folder / "adapter_model.safetensors"),
        json.loads((folder / "adapter_config.json").read_text()),
    )
    base, expected = hf.state_dict(), merged.export_hf_state()
    layers = {name.rpartition(".lora_")[0].removeprefix("base_model.model.") for name in tensors}
    modules = dict(hf.named_modules())
    assert layers == {name for name in modules if re.fullmatch(settings["target_modules"], name)}
    assert len(layers) == 3 * 7 and settings["lora_alpha"] / settings["r"] == 2.0
    for name in layers:
        a, b = (tensors[f"base_model.model.{name}.lora_{x}.weight"] for x in "AB")
        torch.testing.assert_close(
            base[f"{name}.weight"] + 2.0 * b @ a, expected[f"{name}.weight"], rtol=1e-5, atol=1e-6
        )


def test_only_the_targets_are_adapted(save_qwen3: Any) -> None:
    model = _load(save_qwen3()[1], ModelOptions(adapter=replace(ADAPTER, targets=("o_proj",))))
    names = [name for name, _, _ in adapted_layers(model.language_model)]
    assert names == [f"decoder.layers.{i}.self_attention.linear_proj.weight" for i in range(3)]
    with pytest.raises(
        ConfigError, match="targets must be among qkv_proj, o_proj, gate_up_proj, down_proj, got lm_head"
    ):
        _load(save_qwen3()[1], ModelOptions(adapter=replace(ADAPTER, targets=("lm_head",))))


def test_a_mixture_of_experts_takes_no_adapters(save_qwen3_vl_moe: Any) -> None:
    with pytest.raises(ConfigError, match="lora: not available with mixture-of-experts layers"):
        _load(save_qwen3_vl_moe()[1])


def _load_trained(directory: Path, checkpoint: Path) -> dict[str, torch.Tensor]:
    trainer = Trainer(_load(directory), AdamOptions())
    load_checkpoint(checkpoint, trainer.model, trainer)
    return trainer.model.export_hf_state()


def test_a_resumed_adapter_goes_on_to_the_bit(save_vl: Any, vl_rows: Any, pack: Any, tmp_path: Path) -> None:
    _, directory = save_vl()
    trainer, batch = Trainer(_load(directory), AdamOptions()), pack(vl_rows)
    _steps(trainer, batch, 2)
    save_checkpoint(tmp_path / "c", trainer.model, trainer, {})
    expected = _steps(trainer, batch, 3)
    again = Trainer(_load(directory), AdamOptions())
    load_checkpoint(tmp_path / "c", again.model, again)
    assert _steps(again, batch, 3) == expected
    exported, _ = load_model(tmp_path / "c")
    for name, expected in _load_trained(directory, tmp_path / "c").items():
        assert torch.equal(exported.export_hf_state()[name], expected)
    exported.save_hf(tmp_path / "exported")
    settings = json.loads((tmp_path / "exported" / "adapter" / "adapter_config.json").read_text())
    assert settings["base_model_name_or_path"] == str(directory)
    for options in (ModelOptions(), ModelOptions(adapter=replace(ADAPTER, alpha=9.0))):
        other = Trainer(_load(directory, options), AdamOptions())
        with pytest.raises(CheckpointError, match="does not match the model"):
            load_checkpoint(tmp_path / "c", other.model, other)


def test_two_ranks_equal_one(save_vl: Any, vl_rows: Any, pack: Any, tmp_path: Path, torchrun: Any) -> None:
    save_vl(tied=True, name="vl", num_layers=4)
    batch = pack(vl_rows)
    torch.save(batch, tmp_path / "batch.pt")
    assert parallel.topology().tp_size == 1
    one = lora_worker.run(tmp_path, batch)
    torchrun(2, WORKER, tmp_path)
    for layout in lora_worker.LAYOUTS:
        two = torch.load(tmp_path / f"result-{layout}.pt", weights_only=False)
        assert two["norms"] == pytest.approx(one["norms"], rel=1e-4)
        assert two["resumed_norms"] == pytest.approx(one["resumed_norms"], rel=1e-4)
        for key in ("merged", "adapter", "published"):
            assert set(two[key]) == set(one[key])
            for name, expected in one[key].items():
                torch.testing.assert_close(two[key][name], expected, rtol=1e-4, atol=5e-5)
        for name, expected in one["merged"].items():
            torch.testing.assert_close(two["resumed"][name], expected, rtol=1e-5, atol=1e-6)
        model = _load(tmp_path / "vl", lora_worker.OPTIONS)
        load_checkpoint(tmp_path / f"own-{layout}", model, Trainer(model, AdamOptions()))
        for name, found in model.export_hf_state().items():
            torch.testing.assert_close(found, two["merged"][name], rtol=1e-5, atol=1e-6)
