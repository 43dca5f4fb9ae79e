"""Low-rank adapters on megatron's linear layers (Hu et al. 2021, arXiv 2106.09685), tensor-parallel as these are.

    y = W x + (alpha / rank) B A x          W frozen, A [rank, in] random, B [out, rank] zero at the start

Owns the adapted layers, which parameters are trained, the merged weight, and the adapter as PEFT reads it. Does not
own what a base weight is called (see `families`) or who it is sent to: whoever asks for a layer's weight gets the
merged one.

A column-parallel layer shards B as its weight and has the whole of A on every rank, a row-parallel one shards A and has
the whole of B: what crosses ranks is [T, rank]. With sequence parallelism the whole factor sees a part of the tokens on
each rank. Layers of a fused weight (q, k, v; gate, up) share A.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import xxhash
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.transformer.mlp import apply_swiglu_sharded_factory
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from safetensors.torch import save_file
from torch import Tensor, nn

from vagen.common.errors import ConfigError
from vagen.common.weight_transfer import add_low_rank

__all__ = [
    "AdapterOptions",
    "adapt_layers",
    "adapted_layers",
    "start_adapters",
    "is_adapter",
    "layer_weight",
    "save_adapter",
]

_MODULES = {
    "qkv_proj": ("self_attention", "linear_qkv", ("q_proj", "k_proj", "v_proj")),
    "o_proj": ("self_attention", "linear_proj", ("o_proj",)),
    "gate_up_proj": ("mlp", "linear_fc1", ("gate_proj", "up_proj")),
    "down_proj": ("mlp", "linear_fc2", ("down_proj",)),
}
"""Target: (megatron's block, its layer, the parts' names in transformers)."""


@dataclass(frozen=True, kw_only=True)
class AdapterOptions:
    """`rank` of the update, which is multiplied by `alpha / rank`, of the layers named in `targets`."""

    rank: int
    alpha: float
    targets: tuple[str, ...] = tuple(_MODULES)

    @property
    def scale(self) -> float:
        return self.alpha / self.rank

    @classmethod
    def of_plain(cls, record: dict[str, Any]) -> AdapterOptions:
        """From `plain`."""
        return cls(**record | {"targets": tuple(record["targets"])})

    def plain(self) -> dict[str, Any]:
        """For a checkpoint's record."""
        return {"rank": self.rank, "alpha": self.alpha, "targets": list(self.targets)}


def adapt_layers(spec: Any, options: AdapterOptions, config: Any) -> None:
    """Put adapted layers into a layer spec of megatron's own modules. Raises `ConfigError` for what has no adapter."""
    unknown = sorted(set(options.targets) - set(_MODULES))
    if unknown or not options.targets:
        raise ConfigError(f"lora: targets must be among {', '.join(_MODULES)}, got {', '.join(unknown) or 'none'}")
    if config.num_moe_experts:
        raise ConfigError("lora: not available with mixture-of-experts layers")
    for target in options.targets:
        block, layer, _ = _MODULES[target]
        submodules = getattr(spec.submodules, block).submodules
        kind = _AdaptedRow if target in ("o_proj", "down_proj") else _AdaptedColumn
        setattr(submodules, layer, ModuleSpec(module=kind, params={"adapter": options}))


def is_adapter(name: str) -> bool:
    """Whether a parameter of this name belongs to an adapter."""
    return name.rpartition(".")[2] in ("lora_a", "lora_b")


class _Adapted:
    """What both kinds of adapted layers share; mixed into megatron's classes."""

    weight: Tensor
    lora_a: nn.Parameter
    lora_b: nn.Parameter
    adapter: AdapterOptions

    def _start(self, inputs: int, options: AdapterOptions, mine: slice) -> None:
        """`inputs` of the whole layer; `mine` are those of this rank. Call `draw` before use."""
        like = self.weight.detach()
        self.adapter, self._inputs, self._mine = options, inputs, mine
        self.lora_a = nn.Parameter(like.new_zeros(options.rank, len(range(inputs)[mine])))
        self.lora_b = nn.Parameter(like.new_zeros(like.shape[0], options.rank))

    @torch.no_grad()
    def draw(self, name: str) -> None:
        """Draw A: the same numbers for a name, whatever else was drawn and however many ranks share the layer."""
        generator = torch.Generator().manual_seed(xxhash.xxh3_64_intdigest(name.encode()) >> 1)
        whole = torch.empty(self.adapter.rank, self._inputs)
        # As PEFT's: uniform within 1 / sqrt(inputs).
        nn.init.kaiming_uniform_(whole, a=math.sqrt(5), generator=generator)
        self.lora_a.copy_(whole[:, self._mine])

    def merged_weight(self) -> Tensor:
        """This rank's shard of the weight with the update added, in the weight's dtype."""
        return next(add_low_rank([self.weight], self.lora_a, self.lora_b, self.adapter.scale))


class _AdaptedColumn(_Adapted, ColumnParallelLinear):
    def __init__(self, *args: Any, adapter: AdapterOptions, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._start(self.input_size, adapter, slice(None))
        self._is_gated = kwargs.get("tp_comm_buffer_name") == "fc1"
        set_tensor_model_parallel_attributes(self.lora_b, True, 0, 1)
        _sums_over_ranks(self.lora_a, self.sequence_parallel)

    def forward(self, input_: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        """As `ColumnParallelLinear.forward`."""
        output, bias = super().forward(input_, *args, **kwargs)
        spread = (
            gather_from_sequence_parallel_region if self.sequence_parallel else copy_to_tensor_model_parallel_region
        )
        low = spread(F.linear(input_, self.lora_a), group=self.tp_group)
        return output + self.adapter.scale * F.linear(low, self.lora_b), bias

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None) -> ShardedStateDict:
        """As `ColumnParallelLinear.sharded_state_dict`, which takes a parameter that it does not know for a replica."""
        state = make_sharded_tensors_for_checkpoint(
            self.state_dict(prefix="", keep_vars=True),
            prefix,
            {"weight": 0, "bias": 0, "lora_b": 0},
            sharded_offsets,
            tp_group=self.tp_group,
            dp_cp_group=metadata["dp_cp_group"],
        )
        if self._is_gated:
            # The gate's rows and the up projection's are sharded apart, as megatron does with the weight itself.
            name = f"{prefix}lora_b"
            state[name] = apply_swiglu_sharded_factory(state[name], sharded_offsets)
        return state


class _AdaptedRow(_Adapted, RowParallelLinear):
    def __init__(self, *args: Any, adapter: AdapterOptions, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        first = self.tp_group.rank() * self.input_size_per_partition
        self._start(self.input_size, adapter, slice(first, first + self.input_size_per_partition))
        set_tensor_model_parallel_attributes(self.lora_a, True, 1, 1)
        _sums_over_ranks(self.lora_b, self.sequence_parallel)

    def forward(self, input_: Tensor) -> tuple[Tensor, Tensor | None]:
        """As `RowParallelLinear.forward`."""
        output, bias = super().forward(input_)
        is_spread = self.sequence_parallel
        collect = reduce_scatter_to_sequence_parallel_region if is_spread else reduce_from_tensor_model_parallel_region
        low = collect(F.linear(input_, self.lora_a), group=self.tp_group)
        return output + self.adapter.scale * F.linear(low, self.lora_b), bias

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None) -> ShardedStateDict:
        """As `RowParallelLinear.sharded_state_dict`, which takes a parameter that it does not know for a replica."""
        return make_sharded_tensors_for_checkpoint(
            self.state_dict(prefix="", keep_vars=True),
            prefix,
            {"weight": 1, "lora_a": 1},
            sharded_offsets,
            tp_group=self.tp_group,
            dp_cp_group=metadata["dp_cp_group"],
        )


def _sums_over_ranks(factor: nn.Parameter, sequence_parallel: bool) -> None:
    """Mark a factor that all ranks have, for megatron to sum the gradients that their tokens give it."""
    if sequence_parallel:
        factor.sequence_parallel = True  # type: ignore[attr-defined]


def start_adapters(model: nn.Module, gpt: GPTModel, trained: Sequence[nn.Module]) -> None:
    """Draw the adapters, and leave nothing to training but them and `trained`, such as the value head."""
    for layer in gpt.decoder.layers:
        for path, module in layer.named_modules():
            if isinstance(module, _Adapted):
                module.draw(f"{layer.layer_number}.{path}")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(is_adapter(name))
    for module in trained:
        module.requires_grad_(True)
    if gpt.config.recompute_granularity == "full" and gpt.pre_process:
        # A layer that is recomputed gets no gradient unless its input asks for one, and nothing before it does.
        gpt.embedding.register_forward_hook(_ask_for_gradient)


def _ask_for_gradient(module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
    return output.requires_grad_() if torch.is_grad_enabled() else output


def layer_weight(gpt: GPTModel, name: str, parameter: Tensor) -> Tensor:
    """A parameter as others should see it: merged where its layer has an adapter."""
    path, _, kind = name.rpartition(".")
    module = gpt.get_submodule(path)
    return module.merged_weight() if kind == "weight" and isinstance(module, _Adapted) else parameter.detach()


def adapted_layers(gpt: GPTModel) -> Iterator[tuple[str, Tensor, Tensor]]:
    """(megatron name of the weight, this rank's A, this rank's B) of every adapted layer."""
    for path, module in gpt.named_modules():
        if isinstance(module, _Adapted):
            yield f"{path}.weight", module.lora_a.detach(), module.lora_b.detach()


def save_adapter(
    folder: Path, tensors: dict[str, Tensor], options: AdapterOptions, base_model: str, layers_prefix: str
) -> None:
    """Write what `peft.PeftModel.from_pretrained` reads: `tensors` are A and B by the HF name of the layer, see
    `weights.adapter_tensors`; `layers_prefix` is the HF name of the decoder's layers.
    """
    folder.mkdir()
    parts = [part for target in options.targets for part in _MODULES[target][2]]
    content = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_model,
        "r": options.rank,
        "lora_alpha": options.alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        # A pattern of whole names: a vision tower has layers that are called the same.
        "target_modules": rf"{re.escape(layers_prefix)}\d+\.(self_attn|mlp)\.({'|'.join(parts)})",
    }
    (folder / "adapter_config.json").write_text(json.dumps(content, indent=2) + "\n")
    save_file({f"base_model.model.{name}": x for name, x in tensors.items()}, folder / "adapter_model.safetensors")
