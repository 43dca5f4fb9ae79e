"""Low-rank updates in a local engine: the arithmetic, what becomes of the base, and what is refused before it comes."""

from __future__ import annotations

from contextlib import closing

import pytest
import torch
from torch.distributed import TCPStore

from vagen.actor.local_engine.adapters import AdaptedWeights
from vagen.actor.local_engine.weights import WeightReceiver, WeightUpdateError
from vagen.common.weight_transfer import LowRankUpdate, add_low_rank, tensor_checksum

UPDATE = LowRankUpdate(weights=("model.q.weight", "model.k.weight"), a="model.q.lora_A", b="model.q.lora_B", scale=0.5)


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.model = torch.nn.ModuleDict({"q": torch.nn.Linear(6, 4), "k": torch.nn.Linear(6, 2)})


@pytest.fixture
def model():
    torch.manual_seed(0)
    return Model()


@pytest.fixture
def factors():
    return {UPDATE.a: torch.randn(3, 6), UPDATE.b: torch.randn(6, 3)}


def parameters_of(model):
    return dict(model.named_parameters())


def test_the_sum_is_that_of_float64_and_in_half_precision_rounded_once():
    base, a, b = torch.randn(5, 7), torch.randn(2, 7), torch.randn(5, 2)
    expected = base.double() + 3.0 * b.double() @ a.double()
    (whole,) = add_low_rank([base], a, b, 3.0)
    torch.testing.assert_close(whole.double(), expected, rtol=0, atol=1e-5)
    (half,) = add_low_rank([base.bfloat16()], a, b, 3.0)
    expected = base.bfloat16().double() + 3.0 * b.double() @ a.double()
    torch.testing.assert_close(half, expected.bfloat16(), rtol=0, atol=0)
    upper, lower = add_low_rank([base[:2], base[2:]], a, b, 3.0)
    torch.testing.assert_close(torch.cat([upper, lower]), whole, rtol=0, atol=1e-6)


def test_each_update_is_of_the_base_whatever_was_in_force(model, factors):
    weights = parameters_of(model)
    base = {name: weights[name].detach().clone() for name in UPDATE.weights}
    adapted = AdaptedWeights(weights)
    for times in (1.0, 5.0):
        changed = {UPDATE.a: factors[UPDATE.a], UPDATE.b: times * factors[UPDATE.b]}
        adapted.apply(changed, [UPDATE])
        update = 0.5 * changed[UPDATE.b] @ factors[UPDATE.a]
        torch.testing.assert_close(weights["model.q.weight"].data, base["model.q.weight"] + update[:4])
        torch.testing.assert_close(weights["model.k.weight"].data, base["model.k.weight"] + update[4:])
        assert adapted.base_checksums() == {name: tensor_checksum(x) for name, x in base.items()}
    whole = {"model.q.weight": torch.ones(4, 6), "model.k.weight": torch.zeros(2, 6)}
    adapted.apply({**whole, **factors}, [UPDATE])
    torch.testing.assert_close(weights["model.q.weight"].data, 1 + (0.5 * factors[UPDATE.b] @ factors[UPDATE.a])[:4])
    adapted.apply({"model.q.weight": torch.ones(4, 6)}, [])
    assert torch.equal(weights["model.q.weight"].data, torch.ones(4, 6))
    assert list(adapted.base_checksums()) == ["model.k.weight"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weights": ()}, "of no weight"),
        ({"weights": ("model.v.weight",)}, "no parameter model.v.weight"),
        ({"weights": ("model.q.bias",)}, "no matrix"),
        ({"weights": ("model.q.weight",) * 2}, "named twice"),
        ({"a": "model.k.bias"}, "or is a parameter's name"),
        ({"b": UPDATE.a}, "named twice"),
    ],
)
def test_an_update_that_fits_no_weights_is_refused_at_once(model, change, message):
    receiver = WeightReceiver(model, is_tied=False)
    fields = {name: getattr(UPDATE, name) for name in UPDATE.__struct_fields__}
    with pytest.raises(WeightUpdateError, match=message):
        receiver.begin([LowRankUpdate(**fields | change)])


@pytest.mark.parametrize(
    ("name", "dtype", "shape", "message"),
    [
        (UPDATE.a, "float32", [3, 5], r"\[3, 6\] with rank >= 1, got \[3, 5\]"),
        (UPDATE.a, "float32", [0, 6], "rank >= 1"),
        (UPDATE.b, "float32", [5, 3], r"\[6, 3\] with rank >= 1, got \[5, 3\]"),
        (UPDATE.b, "float32", [6], "rank >= 1"),
        (UPDATE.a, "int64", [3, 6], "expected one of float32, bfloat16, float16, got int64"),
        ("model.k.lora_A", "float32", [3, 6], "no parameter model.k.lora_A"),
    ],
)
def test_a_factor_that_does_not_fit_is_refused_before_it_is_received(model, name, dtype, shape, message):
    receiver = WeightReceiver(model, is_tied=False)
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    with closing(receiver):
        receiver.init_group(
            "group", host="localhost", port=store.port, rank=0, world_size=1, backend="gloo", timeout_s=20
        )
        receiver.begin([UPDATE])
        with pytest.raises(WeightUpdateError, match=message):
            receiver.receive([name], [dtype], [shape], group_name="group", flattened=True, version=None)


def test_an_update_without_its_factors_cannot_end(model):
    receiver = WeightReceiver(model, is_tied=False)
    receiver.begin([UPDATE])
    with pytest.raises(WeightUpdateError, match="did not both arrive"):
        receiver.end("3")
