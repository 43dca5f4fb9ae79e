"""Runs microbatches through a model, on one stage or over several: megatron's 1F1B schedule around our loss.

Owns the order of forward and backward passes, and that scores reach every stage. Neither knows losses nor optimizers.

A stage hands on hidden states of its own length for each microbatch; shapes travel ahead of them. The loss is computed
by the last stage alone.

Ranks that share out experts go through the layers together: all run as many microbatches as the one that has most, and
the backward pass of each reaches every layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Generic, Protocol, TypeVar

import torch
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.utils import unwrap_model
from torch import Tensor

from vagen.learner.model.batch import PackedBatch, TokenOutputs
from vagen.learner.model.collectives import from_stage, last_stage, most_of_all_ranks, num_stages, shares_experts
from vagen.learner.model.cpu_compat import compute_device, cuda_as_cpu

__all__ = ["Microbatches", "add_gradients", "outputs_of"]

Key = TypeVar("Key")
KeyOfBatch = TypeVar("KeyOfBatch", covariant=True)
Loss = Callable[[Key, TokenOutputs], Tensor]


class Microbatches(Protocol[KeyOfBatch]):
    """Packs, each with what its user knows it by; every rank of a copy of the model has the same ones."""

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[tuple[PackedBatch, KeyOfBatch]]: ...


class _Filler:
    """What stands for a microbatch where a rank has no more of its own."""


_FILLER = _Filler()


class _InStep(Generic[Key]):
    """This rank's microbatches, and behind them what it runs because other ranks have more."""

    def __init__(self, own: Microbatches[Key], model: Any, options: dict[str, Any]) -> None:
        """`options` of the model's forward pass. Collective over all ranks where they share out experts."""
        self._own, self._model, self._forbidden = own, model, options.get("forbidden_token_ids")
        self._total = most_of_all_ranks(len(own)) if shares_experts() else len(own)

    def __len__(self) -> int:
        return self._total

    def __iter__(self) -> Iterator[tuple[PackedBatch, Key | _Filler]]:
        yield from self._own
        for _ in range(self._total - len(self._own)):
            yield unwrap_model(self._model).filler(self._forbidden), _FILLER


def _anchored(loss: Loss[Key], key: Key | _Filler, outputs: TokenOutputs) -> Tensor:
    """The loss, with a gradient of 0 to all outputs: others wait for one, also of a loss that reaches none of them."""
    nothing = 0.0 * (outputs.logprobs.sum() + outputs.values.sum())
    return nothing if isinstance(key, _Filler) else loss(key, outputs) + nothing


def add_gradients(model: Any, microbatches: Microbatches[Key], loss: Loss[Key], **options: Any) -> None:
    """Add the gradient of the sum of `loss(key, outputs)` over the microbatches.

    `loss` is called by ranks of the last stage, microbatch by microbatch in order. `options` are those of
    `VisionLanguageActorCritic.forward`, which `model` is, or wraps.
    """
    if num_stages() == 1 and not shares_experts():
        for packed, key in microbatches:
            loss(key, _on_cpu(model(packed.to(compute_device()), **options))).backward()
        return
    padded = _InStep(microbatches, model, options)
    if num_stages() == 1:
        for packed, key_or_filler in padded:
            _anchored(loss, key_or_filler, _on_cpu(model(packed.to(compute_device()), **options))).backward()
        return

    def last(key: Key | _Filler, outputs: TokenOutputs) -> tuple[Tensor, None]:
        return _anchored(loss, key, outputs), None

    _run_schedule(model, padded, last, options, forward_only=False)


@torch.no_grad()
def outputs_of(model: Any, microbatches: Microbatches[Key], **options: Any) -> Iterator[tuple[Key, TokenOutputs]]:
    """The outputs of each microbatch, on the CPU, for every rank. Options as for `add_gradients`."""
    padded = _InStep(microbatches, model, options)
    if num_stages() == 1:
        for packed, key in padded:
            outputs = _on_cpu(model(packed.to(compute_device()), **options))
            if not isinstance(key, _Filler):
                yield key, outputs
        return

    def last(_: Key | _Filler, outputs: TokenOutputs) -> tuple[Tensor, TokenOutputs]:
        return outputs.values.sum(), outputs

    keys, results = _run_schedule(model, padded, last, options, forward_only=True)
    values_only = bool(options.get("values_only"))
    for index, key in enumerate(keys):
        if isinstance(key, _Filler):
            continue
        mine = results[index].packed(values_only=values_only) if results else None
        content = from_stage(mine, last_stage()).cpu()
        yield key, TokenOutputs.unpacked(content, values_only=values_only)


def _run_schedule(
    model: Any,
    microbatches: Microbatches[Key],
    last: Callable[[Key, TokenOutputs], tuple[Tensor, Any]],
    options: dict[str, Any],
    *,
    forward_only: bool,
) -> tuple[list[Key], list[Any]]:
    """The keys of all microbatches, and what `last` returns second for each; on other stages than the last nothing."""
    keys: list[Key] = []
    if len(microbatches) == 0:
        return keys, []

    def forward_step(data: Iterator[tuple[PackedBatch, Key]], stage: Any) -> tuple[Any, Callable[[Any], Any]]:
        packed, key = next(data)
        keys.append(key)

        def reduce(outputs: TokenOutputs) -> tuple[Tensor, Tensor, Any]:
            # With a number of tokens, megatron takes the loss as it is.
            value, result = last(key, _on_cpu(outputs))
            return value, torch.zeros((), dtype=torch.int), result

        return stage(packed.to(compute_device()), **options), reduce

    with cuda_as_cpu():
        results: list[Any] = get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=iter(microbatches),
            model=[model],
            num_microbatches=len(microbatches),
            # Of no account: shapes are sent ahead of tensors (`variable_seq_lengths`).
            seq_length=1,
            micro_batch_size=1,
            forward_only=forward_only,
        )
    return keys, results


def _on_cpu(outputs: TokenOutputs) -> TokenOutputs:
    """Where batches and losses live; a gradient finds its way back."""
    return outputs.to(torch.device("cpu"))
