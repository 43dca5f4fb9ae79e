"""The learner's forward and backward against transformers' own models, row by row."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from megatron.core.models.common.embeddings.rotary_pos_embedding import MultimodalRotaryEmbedding

from vagen.common.errors import TrajectoryError
from vagen.learner.model.actor_critic import VisionLanguageActorCritic
from vagen.learner.model.batch import ImageBatch, PackedBatch, TokenOutputs
from vagen.learner.model.gpt import ModelOptions
from vagen.learner.model.rotary import InterleavedRotaryEmbedding

IMAGE = 500
FORBIDDEN = torch.tensor([500, 501, 502])
VISION_FAMILIES = ["vl", "qwen3_vl", "qwen3_vl_moe", "glm4v"]
Pack = Callable[..., PackedBatch]
_ROUNDING = 1e-9
"""What a gradient that is 0 comes to: that of a bias of keys which are not rotated."""


def _reference(
    hf: Any, batch: PackedBatch, value: torch.nn.Linear, *, temperature: float = 1.0, forbidden: bool = False
) -> TokenOutputs:
    """Each row alone through transformers, with its own position logic."""
    logprobs, entropies, values, first_patch, first_image = [], [], [], 0, 0
    bounds = batch.cu_seqlens.tolist()
    for start, end in zip(bounds, bounds[1:], strict=False):
        ids = batch.token_ids[None, start:end]
        inputs: dict[str, Any] = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        needed = 4 * int((ids == IMAGE).sum())
        if needed:
            assert batch.images is not None
            last = first_image
            while int(batch.images.grids[first_image : last + 1].prod(-1).sum()) <= needed:
                last += 1
                if last == len(batch.images.grids):
                    break
            patches = batch.images.patches[first_patch : first_patch + needed]
            inputs |= _image_inputs(hf, ids, patches, batch.images.grids[first_image:last])
            first_patch, first_image = first_patch + needed, last
        out = hf(**inputs, output_hidden_states=True)
        mine = batch.score_positions[(batch.score_positions >= start) & (batch.score_positions < end)] - start
        logits = out.logits[0, mine - 1] / temperature
        targets = ids[0, mine]
        if forbidden:
            logits = logits.index_fill(1, FORBIDDEN, -1e30)
        log_p = F.log_softmax(logits.float(), -1)
        logprobs.append(log_p.gather(1, targets[:, None])[:, 0])
        entropies.append(-(log_p.exp() * log_p).sum(-1))
        values.append(value(out.hidden_states[-1][0, mine - 1])[:, 0])
    return TokenOutputs(logprobs=torch.cat(logprobs), entropy=torch.cat(entropies), values=torch.cat(values))


def _image_inputs(hf: Any, ids: torch.Tensor, patches: torch.Tensor, grids: torch.Tensor) -> dict[str, Any]:
    """As transformers' model takes images: patches and grids, or the pixels of tiles."""
    if hf.config.model_type == "internvl":
        tiles = patches.unflatten(0, (-1, 4, 4)).unflatten(-1, (3, 14, 14)).permute(0, 3, 1, 4, 2, 5)
        return {"pixel_values": tiles.reshape(-1, 3, 56, 56)}
    return {"pixel_values": patches, "image_grid_thw": grids, "mm_token_type_ids": (ids == IMAGE).int()}


def _load(directory: Any) -> VisionLanguageActorCritic:
    model = VisionLanguageActorCritic.load_hf(directory)
    torch.manual_seed(9)
    torch.nn.init.normal_(model.value_head.weight, std=0.1)
    torch.nn.init.normal_(model.value_head.bias)
    return model


def _assert_same(got: TokenOutputs, want: TokenOutputs, atol: float = 3e-6) -> None:
    for field in ("logprobs", "entropy", "values"):
        torch.testing.assert_close(getattr(got, field), getattr(want, field), rtol=1e-5, atol=atol)


def _gradients(model: VisionLanguageActorCritic) -> dict[str, torch.Tensor]:
    """Gradients under HF names: the mapping is linear, so it maps gradients as it maps weights."""
    with torch.no_grad():
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.copy_(parameter.grad)
    return model.export_hf_state()


def _loss(out: TokenOutputs) -> torch.Tensor:
    weights = torch.randn(3, len(out.logprobs), generator=torch.Generator().manual_seed(1))
    return (weights[0] * out.logprobs + weights[1] * out.entropy + weights[2] * out.values).sum()


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("vl", {"windows": True}),
        ("vl", {"windows": False}),
        ("qwen3_vl", {}),
        ("qwen3_vl_moe", {}),
        ("glm4v", {}),
        ("glm4v", {"newer": True}),
        ("internvl", {"decoder": "qwen3"}),
        ("internvl", {"decoder": "qwen2"}),
    ],
    ids=["windows", "no windows", "deepstack", "experts", "sandwich norms", "GLM-4.6V", "tiles", "tiles, qwen2"],
)
@pytest.mark.parametrize("tied", [True, False])
def test_vision_language_outputs_and_gradients(
    request: pytest.FixtureRequest, pack: Pack, tied: bool, family: str, options: dict[str, Any]
) -> None:
    hf, directory = request.getfixturevalue(f"save_{family}")(tied=tied, **options)
    tiled = family == "internvl"
    model, batch = _load(directory), pack(request.getfixturevalue("tile_rows" if tiled else "vl_rows"), tiled=tiled)
    got = model(batch, temperature=0.8, forbidden_token_ids=FORBIDDEN)
    want = _reference(hf, batch, model.value_head, temperature=0.8, forbidden=True)
    _assert_same(got, want)
    _loss(want).backward()
    value_gradient = model.value_head.weight.grad
    assert value_gradient is not None
    value_gradient = value_gradient.clone()
    model.zero_grad()
    _loss(got).backward()
    torch.testing.assert_close(model.value_head.weight.grad, value_gradient, rtol=1e-4, atol=1e-5)
    gradients = _gradients(model)
    for name, parameter in hf.named_parameters():
        assert parameter.grad is not None and parameter.grad.abs().max() > 0, name
        atol = max(_ROUNDING, 2e-5 * float(parameter.grad.abs().max()))
        torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-3, atol=atol)


TEXT_ROWS: list[tuple[list[int], list[Any]]] = [
    (list(range(3, 30)), []),
    (list(range(100, 109)), []),
    (list(range(50, 99)), []),
]


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_text_outputs_and_gradients(request: pytest.FixtureRequest, pack: Pack, family: str, tied: bool) -> None:
    hf, directory = request.getfixturevalue(f"save_{family}")(tied=tied)
    model = _load(directory)
    batch = pack(TEXT_ROWS)
    got, want = model(batch), _reference(hf, batch, model.value_head)
    _assert_same(got, want)
    _loss(got).backward()
    _loss(want).backward()
    gradients = _gradients(model)
    for name, parameter in hf.named_parameters():
        assert parameter.grad is not None and parameter.grad.abs().max() > 0, name
        atol = max(_ROUNDING, 2e-5 * float(parameter.grad.abs().max()))
        torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-3, atol=atol)


def test_text_parity_notices_a_wrong_mapping(save_qwen3: Any, pack: Pack) -> None:
    hf, directory = save_qwen3()
    model, batch = _load(directory), pack(TEXT_ROWS)
    want = _reference(hf, batch, model.value_head)
    attention = model.language_model.decoder.layers[0].self_attention
    parts = [hf.state_dict()[f"model.layers.0.self_attn.{x}_proj.weight"] for x in "qkv"]
    for tensor, wrong in (
        (attention.q_layernorm.weight, attention.k_layernorm.weight),
        (attention.k_layernorm.weight, torch.ones(32)),
        (attention.linear_qkv.weight, torch.cat(parts)),
    ):
        right = tensor.detach().clone()
        with torch.no_grad():
            tensor.copy_(wrong)
            assert (model(batch).logprobs - want.logprobs).abs().max() > 1e-3
            tensor.copy_(right)
    _assert_same(model(batch), want)


def test_text_and_images_in_one_pack_equal_rows_alone(save_vl: Any, vl_rows: Any, pack: Pack) -> None:
    _, directory = save_vl()
    model, batch = _load(directory), pack(vl_rows)
    assert batch.images is not None
    together = model(batch)
    first = 0
    for i, (ids, grids) in enumerate(vl_rows):
        count = 4 * ids.count(IMAGE)
        alone = model(pack([(ids, grids)], patches=batch.images.patches[first : first + count]))
        first += count
        part = slice(6 * i, 6 * i + 6)
        _assert_same(
            TokenOutputs(
                logprobs=together.logprobs[part], entropy=together.entropy[part], values=together.values[part]
            ),
            alone,
        )


@pytest.mark.parametrize("family", VISION_FAMILIES)
def test_recomputation_changes_nothing(request: pytest.FixtureRequest, vl_rows: Any, pack: Pack, family: str) -> None:
    _, directory = request.getfixturevalue(f"save_{family}")()
    batch, results = pack(vl_rows), []
    for recompute in (False, True):
        model = VisionLanguageActorCritic.load_hf(directory, ModelOptions(recompute=recompute)).train()
        out = model(batch)
        _loss(out).backward()
        results.append((out, _gradients(model)))
    _assert_same(results[0][0], results[1][0], atol=0.0)
    for name, gradient in results[0][1].items():
        assert torch.equal(gradient, results[1][1][name]), name


def test_negative_controls(save_vl: Any, vl_rows: Any, pack: Pack) -> None:
    """What the parity tests would not notice if inputs did not matter."""
    hf, directory = save_vl()
    model, batch = _load(directory), pack(vl_rows)
    want = _reference(hf, batch, model.value_head)
    lengths = batch.cu_seqlens.diff().tolist()
    flat = torch.cat([torch.arange(n) for n in lengths]).expand(3, -1)
    assert (model(replace(batch, position_ids=flat)).logprobs - want.logprobs).abs().max() > 1e-2
    one_row = replace(batch, cu_seqlens=batch.cu_seqlens[[0, -1]])
    assert (model(one_row).logprobs - want.logprobs).abs().max() > 1e-2
    assert batch.images is not None
    other = replace(batch, images=replace(batch.images, patches=batch.images.patches.flip(0)))
    assert (model(other).logprobs - want.logprobs).abs().max() > 1e-2
    layer = model.language_model.decoder.layers[0].self_attention.linear_qkv
    parts = [hf.state_dict()[f"model.language_model.layers.0.self_attn.{x}_proj.weight"] for x in "qkv"]
    with torch.no_grad():
        layer.weight.copy_(torch.cat(parts))
    assert (model(batch).logprobs - want.logprobs).abs().max() > 1e-2


def test_qwen3_vl_parity_notices_a_wrong_mapping(save_qwen3_vl: Any, vl_rows: Any, pack: Pack) -> None:
    hf, directory = save_qwen3_vl()
    model, batch = _load(directory), pack(vl_rows)
    want = _reference(hf, batch, model.value_head)

    def distance() -> float:
        return float((model(batch).logprobs - want.logprobs).abs().max())

    assert distance() < 3e-6
    # Axes of positions one after the other, as Qwen2.5-VL has them.
    rotary = model.language_model.rotary_pos_emb
    rotary.__class__ = MultimodalRotaryEmbedding
    assert distance() > 1e-3
    rotary.__class__ = InterleavedRotaryEmbedding
    # The features of one inner block where those of another belong, then none.
    assert model.visual is not None
    first, second = model.visual.deepstack_merger_list
    model.visual.deepstack_merger_list = torch.nn.ModuleList([second, first])
    assert distance() > 1e-3
    model.visual.deepstack_merger_list = torch.nn.ModuleList([first, second])
    with torch.no_grad():
        for parameter in (*first.linear_fc2.parameters(), *second.linear_fc2.parameters()):
            parameter.zero_()
    assert distance() > 1e-3


def test_internvl_parity_notices_a_wrong_mapping(save_internvl: Any, tile_rows: Any, pack: Pack) -> None:
    hf, directory = save_internvl()
    model, batch = _load(directory), pack(tile_rows, tiled=True)
    want = _reference(hf, batch, model.value_head)

    def distance(batch: PackedBatch = batch) -> float:
        return float((model(batch).logprobs - want.logprobs).abs().max())

    assert distance() < 3e-6
    # Patches block by block, as Qwen's processor lays them out, in place of row by row.
    assert batch.images is not None
    blocks = batch.images.patches.unflatten(0, (-1, 2, 2, 2, 2)).transpose(2, 3).flatten(0, 4)
    assert distance(replace(batch, images=replace(batch.images, patches=blocks))) > 1e-3
    assert model.visual is not None
    embeddings: Any = model.visual.vision_tower.embeddings
    layer: Any = model.visual.vision_tower.encoder.layer[0]
    for tensor, wrong in (
        (embeddings.cls_token, 0.0),
        (embeddings.position_embeddings, embeddings.position_embeddings.roll(1, 1)),
        (layer.lambda_1, layer.lambda_2),
        (model.visual.multi_modal_projector.layer_norm.weight, 1.0),
    ):
        right = tensor.detach().clone()
        with torch.no_grad():
            tensor.copy_(torch.as_tensor(wrong))
            assert distance() > 1e-4
            tensor.copy_(right)


@pytest.mark.parametrize("family", VISION_FAMILIES)
def test_an_image_used_twice_is_encoded_once(
    request: pytest.FixtureRequest, vl_rows: Any, pack: Pack, family: str
) -> None:
    _, directory = request.getfixturevalue(f"save_{family}")()
    model = _load(directory)
    single = pack([vl_rows[1], vl_rows[0]])
    assert single.images is not None
    wide, small = single.images.patches.split([96, 32])
    twice = replace(single, images=replace(single.images, patches=torch.cat([wide, small[:16], small[:16]])))
    assert twice.images is not None
    shared = replace(
        single,
        images=ImageBatch(
            patches=torch.cat([small[:16], wide]),
            grids=torch.tensor([[1, 4, 4], [1, 8, 12]]),
            index=torch.tensor([1, 0, 0]),
        ),
    )
    a, b = model(twice), model(shared)
    _assert_same(a, b, atol=1e-6)
    assert model.visual is not None
    ga = torch.autograd.grad(_loss(a), list(model.visual.parameters()))
    gb = torch.autograd.grad(_loss(b), list(model.visual.parameters()))
    for x, y in zip(ga, gb, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-3, atol=1e-5 * float(y.abs().max()))


def test_detached_value_leaves_the_trunk_alone(save_vl: Any, vl_rows: Any, pack: Pack) -> None:
    _, directory = save_vl()
    model = _load(directory)
    model(pack(vl_rows), detach_value=True).values.sum().backward()
    touched = {name for name, parameter in model.named_parameters() if parameter.grad is not None}
    assert touched == {"value_head.weight", "value_head.bias"}
    model(pack(vl_rows)).values.sum().backward()
    assert model.language_model.embedding.word_embeddings.weight.grad is not None


def test_frozen_vision_gets_no_gradient(save_vl: Any, vl_rows: Any, pack: Pack) -> None:
    _, directory = save_vl()
    model = VisionLanguageActorCritic.load_hf(directory, ModelOptions(freeze_vision=True))
    _loss(model(pack(vl_rows))).backward()
    assert model.visual is not None and all(p.grad is None for p in model.visual.parameters())


def test_contradicting_batches_are_refused(save_vl: Any, vl_rows: Any, pack: Pack) -> None:
    _, directory = save_vl()
    model, batch = _load(directory), pack(vl_rows)
    assert batch.images is not None
    bad: dict[str, PackedBatch] = {
        "token_ids": replace(batch, token_ids=batch.token_ids[None]),
        "position_ids": replace(batch, position_ids=batch.position_ids[:, :-1]),
        "cu_seqlens": replace(batch, cu_seqlens=batch.cu_seqlens[:-1]),
        "score_positions": replace(batch, score_positions=batch.cu_seqlens[:-1].long()),
        "images": replace(batch, images=None),
        "images.index": replace(batch, images=replace(batch.images, index=torch.tensor([0, 1, 2, 9]))),
    }
    for field, broken in bad.items():
        with pytest.raises(TrajectoryError, match=f"^{field}:"):
            model(broken)
    too_few = replace(batch.images, index=torch.tensor([0, 1, 2]))
    with pytest.raises(TrajectoryError, match="image placeholders"):
        model(replace(batch, images=too_few))
    with pytest.raises(TrajectoryError, match="can never sample"):
        model(batch, forbidden_token_ids=batch.token_ids[-1:])
