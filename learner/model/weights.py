"""Moves decoder weights between transformers' layout and megatron's shards of stages, exactly.

Owns fusing, splitting, sharding and gathering under the rules of a family. Knows no file format and no model family.

Rules name layers and experts as the whole decoder counts them; a rank has some of the rules' parameters, and one of the
last stage a copy of the embedding where the output projection is tied to it.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from torch import Tensor

from vagen.common.errors import CheckpointError
from vagen.learner.model.collectives import from_stage, gather_experts, gather_over_stages, num_stages, shares_experts
from vagen.learner.model.families.base import Layout, WeightRule
from vagen.learner.model.lora import adapted_layers, is_adapter, layer_weight

__all__ = ["adapter_tensors", "hf_tensors", "layer_adapters", "load_decoder"]

_EMBEDDING = "embedding.word_embeddings.weight"
_LAYER = re.compile(r"^(decoder\.layers\.)(\d+)\.")
_EXPERT = re.compile(r"(\.local_experts\.)(\d+)\.")
_TRANSFORMER_ENGINE_NAMES = {
    "input_layernorm.weight": "self_attention.linear_qkv.layer_norm_weight",
    "pre_mlp_layernorm.weight": "mlp.linear_fc1.layer_norm_weight",
}
"""Transformer Engine fuses these norms into the linear layer behind them."""
_HALVES = (Layout.GATE_UP, Layout.FUSED_GATE_UP)


def load_decoder(gpt: GPTModel, rules: Sequence[WeightRule], state: Mapping[str, Tensor]) -> None:
    """Copy this rank's shards of HF tensors into `gpt`, cast to its dtype.

    Raises CheckpointError naming a tensor that is missing or has another shape, and where a parameter has no rule.
    """
    parameters = {name: parameter for name, (_, parameter) in _parameters(gpt).items()}
    for rule in rules:
        name = _local_name(rule.megatron, parameters)
        is_elsewhere = num_stages() > 1 or (rule.expert is not None and shares_experts())
        if name not in parameters and is_elsewhere:
            continue
        parameter = parameters.pop(name)
        missing = [name for name in rule.hf if name not in state]
        if missing:
            raise CheckpointError(f"weights lack {missing[0]}")
        shard = _shard(rule, _fuse(rule, [state[name] for name in rule.hf], gpt.config), _cut_by(rule))
        if shard.shape != parameter.shape:
            raise CheckpointError(f"{rule.hf[0]}: {list(shard.shape)} does not fit config.json {list(parameter.shape)}")
        with torch.no_grad():
            parameter.copy_(shard)
    if parameters:
        raise CheckpointError(f"no weights for {sorted(parameters)}")
    head = _tied_copy(gpt)
    if head is not None:
        whole = next(state[name] for rule in rules for name in rule.hf if rule.megatron == _EMBEDDING)
        with torch.no_grad():
            group = parallel_state.get_tensor_model_parallel_group()
            head.copy_(whole.chunk(group.size())[group.rank()])


def hf_tensors(gpt: GPTModel, rules: Sequence[WeightRule], *, merged: bool = True) -> Iterator[tuple[str, Tensor]]:
    """(HF name, whole tensor) of the decoder, layer by layer, gathered one after the other; adapters are `merged`, or
    left out.

    Collective over the tensor-parallel, the expert-parallel and the pipeline group: every rank must iterate to the end.
    Tensors may share memory with the parameters: clone what outlives the next step.
    """
    parameters = _parameters(gpt)
    names = {rule.megatron: _local_name(rule.megatron, parameters) for rule in rules}
    held = gather_over_stages([rule.hf for rule in rules if names[rule.megatron] in parameters])
    stage_of = {hf: stage for stage, found in enumerate(held) for hf in found}
    for hf, run in itertools.groupby(rules, key=lambda rule: rule.hf):
        members = list(run)
        mine: list[Tensor] = []
        for rule in members:
            if names[rule.megatron] in parameters:
                own_name, parameter = parameters[names[rule.megatron]]
                mine.append(_gather(rule, layer_weight(gpt, own_name, parameter) if merged else parameter.detach()))
        whole: Tensor | None = None
        if mine:
            whole = mine[0] if members[0].expert is None else gather_experts(torch.stack(mine))
        yield from zip(hf, _split(members[0], from_stage(whole, stage_of[hf]), gpt.config), strict=True)


def adapter_tensors(gpt: GPTModel, rules: Sequence[WeightRule]) -> Iterator[tuple[str, Tensor]]:
    """(PEFT's name, whole tensor) of A and B of every adapted layer; collective as `hf_tensors`."""
    for names, a, parts in layer_adapters(gpt, rules):
        for name, part in zip(names, parts, strict=True):
            layer = name.removesuffix(".weight")
            yield f"{layer}.lora_A.weight", a
            yield f"{layer}.lora_B.weight", part


def layer_adapters(
    gpt: GPTModel, rules: Sequence[WeightRule]
) -> Iterator[tuple[tuple[str, ...], Tensor, Sequence[Tensor]]]:
    """(HF names of the weights of an adapted layer, the whole A that they share, the whole B of each).

    Collective as `hf_tensors`.
    """
    layers = {_whole_name(gpt, name): (a, b) for name, a, b in adapted_layers(gpt)}
    stage_of = {name: stage for stage, names in enumerate(gather_over_stages(list(layers))) for name in names}
    for rule in rules:
        if rule.megatron not in stage_of:
            continue
        stage = stage_of[rule.megatron]
        a, b = layers.get(rule.megatron, (None, None))
        # B is sharded as the rows of a weight, A as its columns.
        a = _gather(rule, a) if a is not None and rule.tp_dim == 1 else a
        b = _gather(rule, b) if b is not None and rule.tp_dim == 0 else b
        yield rule.hf, from_stage(a, stage), _split(rule, from_stage(b, stage), gpt.config)


def _whole_name(gpt: GPTModel, name: str) -> str:
    """What rules call a parameter of this rank."""
    first_layer, first_expert = get_transformer_layer_offset(gpt.config), 0
    if shares_experts():
        ranks = parallel_state.get_expert_model_parallel_group()
        first_expert = ranks.rank() * (gpt.config.num_moe_experts or 0) // ranks.size()
    name = _LAYER.sub(lambda match: f"{match[1]}{int(match[2]) + first_layer}.", name)
    return _EXPERT.sub(lambda match: f"{match[1]}{int(match[2]) + first_expert}.", name)


def _parameters(gpt: GPTModel) -> dict[str, tuple[str, Tensor]]:
    """Parameters of this rank that rules name, by those names, with the rank's own."""
    copy = _tied_copy(gpt)
    return {
        _whole_name(gpt, name): (name, parameter)
        for name, parameter in gpt.named_parameters()
        if parameter is not copy and not is_adapter(name)
    }


def _tied_copy(gpt: GPTModel) -> Tensor | None:
    """The last stage's copy of an embedding that the output projection is tied to."""
    if gpt.share_embeddings_and_output_weights and gpt.post_process and not gpt.pre_process:
        return gpt.shared_embedding_or_output_weight()
    return None


def _local_name(name: str, parameters: Mapping[str, Any]) -> str:
    """`name`, or what it is called where Transformer Engine built the layer."""
    if name in parameters:
        return name
    for plain, fused in _TRANSFORMER_ENGINE_NAMES.items():
        if name.endswith("." + plain):
            return name.removesuffix(plain) + fused
    return name


def _heads(config: TransformerConfig) -> tuple[int, int, int]:
    """(key/value groups, query heads of each, head width)."""
    groups = config.num_query_groups
    assert groups is not None and config.kv_channels is not None
    return groups, config.num_attention_heads // groups, config.kv_channels


def _fuse(rule: WeightRule, parts: Sequence[Tensor], config: TransformerConfig) -> Tensor:
    if rule.layout in (Layout.COPY, Layout.FUSED_GATE_UP):
        return parts[0] if rule.expert is None else parts[0][rule.expert]
    if rule.layout is Layout.GATE_UP:
        return torch.cat(list(parts))
    groups, queries, width = _heads(config)
    shaped = [x.reshape(groups, heads, width, *x.shape[1:]) for x, heads in zip(parts, (queries, 1, 1), strict=True)]
    if rule.layout is Layout.PAIRED_QKV:
        order = _apart(rule, width)
        shaped = [*(x[:, :, order] for x in shaped[:2]), shaped[2]]
    return torch.cat(shaped, 1).flatten(0, 2)


def _split(rule: WeightRule, whole: Tensor, config: TransformerConfig) -> Sequence[Tensor]:
    if rule.layout in (Layout.COPY, Layout.FUSED_GATE_UP):
        return [whole]
    if rule.layout is Layout.GATE_UP:
        return whole.chunk(2)
    groups, queries, width = _heads(config)
    shaped = whole.reshape(groups, queries + 2, width, *whole.shape[1:])
    parts = list(shaped.split([queries, 1, 1], 1))
    if rule.layout is Layout.PAIRED_QKV:
        order = _apart(rule, width).argsort()
        parts = [*(x[:, :, order] for x in parts[:2]), parts[2]]
    return [x.flatten(0, 2) for x in parts]


def _apart(rule: WeightRule, width: int) -> Tensor:
    """int64 [width]: which channel of HF's head stands at each place of megatron's, for PAIRED_QKV."""
    assert rule.rotary_dim is not None
    channels = torch.arange(width)
    pairs, others = channels[: rule.rotary_dim].unflatten(0, (-1, 2)).T, channels[rule.rotary_dim :].chunk(2)
    return torch.cat([part for half in zip(pairs, others, strict=True) for part in half])


def _cut_by(rule: WeightRule) -> dist.ProcessGroup:
    """The ranks that shards of a tensor lie on."""
    group: dist.ProcessGroup = (
        parallel_state.get_tensor_model_parallel_group()
        if rule.expert is None
        else parallel_state.get_expert_tensor_parallel_group()
    )
    return group


def _shard(rule: WeightRule, whole: Tensor, group: dist.ProcessGroup) -> Tensor:
    size = group.size()
    if rule.tp_dim is None or size == 1:
        return whole
    halves = whole.chunk(2, rule.tp_dim) if rule.layout in _HALVES else [whole]
    return torch.cat([half.chunk(size, rule.tp_dim)[group.rank()] for half in halves], rule.tp_dim)


def _gather(rule: WeightRule, shard: Tensor) -> Tensor:
    group = _cut_by(rule)
    size = dist.get_world_size(group)
    if rule.tp_dim is None or size == 1:
        return shard
    shards = [torch.empty_like(shard) for _ in range(size)]
    dist.all_gather(shards, shard.contiguous(), group=group)
    if rule.layout not in _HALVES:
        return torch.cat(shards, rule.tp_dim)
    pairs = [shard.chunk(2, rule.tp_dim) for shard in shards]
    return torch.cat([torch.cat([pair[half] for pair in pairs], rule.tp_dim) for half in (0, 1)], rule.tp_dim)
