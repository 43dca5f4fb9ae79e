"""Runs microbatches through a model, on one stage or over several: megatron's 1F1B schedule around our loss.

Owns the order of forward and backward passes, and that scores reach every stage. Neither knows losses nor optimizers.

A stage hands on hidden states of its own length for each microbatch; shapes travel ahead of them. The loss is computed
by the last stage alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Protocol, TypeVar

import torch
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from vagen.learner.model.batch import PackedBatch, TokenOutputs
from vagen.learner.model.collectives import from_stage, last_stage, num_stages
from vagen.learner.model.cpu_compat import compute_device, cuda_as_cpu

__all__ = ["Microbatches", "add_gradients", "outputs_of"]

Key = TypeVar("Key")
KeyOfBatch = TypeVar("KeyOfBatch", covariant=True)
Loss = Callable[[Key, TokenOutputs], Tensor]


class Microbatches(Protocol[KeyOfBatch]):
    """Packs, each with what its user knows it by; every rank of a copy of the model has the same ones."""

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[tuple[PackedBatch, KeyOfBatch]]: ...


def add_gradients(model: Any, microbatches: Microbatches[Key], loss: Loss[Key], **options: Any) -> None:
    """Add the gradient of the sum of `loss(key, outputs)` over the microbatches.

    `loss` is called by ranks of the last stage, microbatch by microbatch in order. `options` are those of
    `VisionLanguageActorCritic.forward`, which `model` is, or wraps.
    """
    if num_stages() == 1:
        for packed, key in microbatches:
            loss(key, _on_cpu(model(packed.to(compute_device()), **options))).backward()
        return

    def last(key: Key, outputs: TokenOutputs) -> tuple[Tensor, None]:
        # The stage before waits for a gradient, also of a loss that reaches none of its hidden states.
        return loss(key, outputs) + 0.0 * outputs.logprobs.sum(), None

    _run_schedule(model, microbatches, last, options, forward_only=False)


@torch.no_grad()
def outputs_of(model: Any, microbatches: Microbatches[Key], **options: Any) -> Iterator[tuple[Key, TokenOutputs]]:
    """The outputs of each microbatch, on the CPU, for every rank. Options as for `add_gradients`."""
    if num_stages() == 1:
        for packed, key in microbatches:
            yield key, _on_cpu(model(packed.to(compute_device()), **options))
        return

    def last(key: Key, outputs: TokenOutputs) -> tuple[Tensor, TokenOutputs]:
        return outputs.values.sum(), outputs

    keys, results = _run_schedule(model, microbatches, last, options, forward_only=True)
    values_only = bool(options.get("values_only"))
    for index, key in enumerate(keys):
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
