"""What the ranks of a learner tell each other outside megatron: votes, sums, gathered tensors, what one stage holds.

Every function is collective over the ranks it names, and costs nothing where there is one. Tensors are taken and given
back on the CPU, where batches and losses live; NCCL sees copies of them on its device.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from vagen.common.errors import RankLostError
from vagen.learner.model.cpu_compat import compute_device

__all__ = [
    "add_losses",
    "broadcast_object",
    "count_votes",
    "from_stage",
    "gather_experts",
    "gather_objects",
    "gather_objects_over_data_parallel",
    "gather_over_data_parallel",
    "gather_over_stages",
    "is_first_stage",
    "is_last_stage",
    "last_stage",
    "most_of_all_ranks",
    "num_stages",
    "recognise_lost_ranks",
    "shares_experts",
    "sum_over_data_parallel",
]

Item = TypeVar("Item")


@contextmanager
def recognise_lost_ranks() -> Iterator[None]:
    """Raises RankLostError for what torch says, at whatever place, when another rank has ended or hangs.

    Who is missing is not known here: the ranks that remain only see a connection that broke.
    """
    try:
        yield
    except RuntimeError as error:
        broken = _broken_connection(error)
        if broken is None:
            raise
        raise RankLostError(
            f"the learner has lost one of its {dist.get_world_size()} ranks ({broken}); what ended it is in the "
            "output of that rank, and torchrun names the first that failed. The same command goes on from the newest "
            "checkpoint"
        ) from error


def _broken_connection(error: BaseException) -> str | None:
    """What NCCL or gloo said first, if it is behind an error; gloo has no class of its own, but names its source."""
    inner: BaseException | None = error
    while inner is not None:
        text = str(inner)
        if isinstance(inner, dist.DistError) or (isinstance(inner, RuntimeError) and "/gloo/" in text):
            return text.rpartition(".cc:")[2].partition("] ")[2].partition(". ")[0] or text.partition("\n")[0]
        inner = inner.__cause__ or inner.__context__
    return None


# All ranks -----------------------------------------------------------------------------------------------------------


def count_votes(*votes: bool) -> list[int]:
    """How many ranks say yes to each question; all must ask the same ones."""
    if dist.get_world_size() == 1:
        return [int(vote) for vote in votes]
    counts = torch.tensor(votes, dtype=torch.int64, device=compute_device())
    dist.all_reduce(counts)
    return [int(count) for count in counts]


def broadcast_object(item: Item) -> Item:
    """The first rank's `item`, on every rank."""
    if dist.get_world_size() == 1:
        return item
    content: list[Any] = [item]
    dist.broadcast_object_list(content, src=0)
    answer: Item = content[0]
    return answer


def gather_objects(item: Item) -> list[Item]:
    """Every rank's `item`, by rank, on every rank."""
    return _gathered(item, dist.group.WORLD)


def add_losses(totals: Mapping[str, float]) -> dict[str, float]:
    """Losses of the global batch from those that each rank's microbatches added up to, by name.

    The last stages know them, and tensor-parallel and context-parallel ranks know the same.
    """
    is_first_of_rows = parallel_state.get_context_parallel_rank() == 0
    speaks = is_last_stage() and is_first_of_rows and parallel_state.get_tensor_model_parallel_rank() == 0
    sums: dict[str, float] = {}
    for part in gather_objects(dict(totals) if speaks else {}):
        for name, value in part.items():
            sums[name] = sums.get(name, 0.0) + value
    return sums


def most_of_all_ranks(count: int) -> int:
    """The largest `count` of any rank."""
    most = torch.tensor(count, dtype=torch.int64, device=compute_device())
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    return int(most)


# Data-parallel ranks -------------------------------------------------------------------------------------------------


def sum_over_data_parallel(value: Tensor) -> Tensor:
    """The sum of a CPU tensor over the data-parallel ranks."""
    total = value.to(compute_device(), copy=True)
    dist.all_reduce(total, group=parallel_state.get_data_parallel_group())
    return total.cpu()


def gather_over_data_parallel(values: Tensor) -> Tensor:
    """CPU tensors [n] of the data-parallel ranks, one after another by rank; `n` may differ."""
    group = parallel_state.get_data_parallel_group()
    size = dist.get_world_size(group)
    if size == 1:
        return values
    device = compute_device()
    counts = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(size)]
    dist.all_gather(counts, torch.tensor([len(values)], device=device), group=group)
    sizes = [int(count) for count in counts]
    padded = torch.zeros(max(sizes), dtype=values.dtype, device=device)
    padded[: len(values)] = values.to(device)
    parts = [torch.empty_like(padded) for _ in range(size)]
    dist.all_gather(parts, padded, group=group)
    return torch.cat([part[:count] for part, count in zip(parts, sizes, strict=True)]).cpu()


def gather_objects_over_data_parallel(item: Item) -> list[Item]:
    """The `item` of each data-parallel rank, by rank."""
    return _gathered(item, parallel_state.get_data_parallel_group())


# Pipeline stages -----------------------------------------------------------------------------------------------------


def num_stages() -> int:
    """Pipeline stages; 1 without pipeline parallelism."""
    return int(parallel_state.get_pipeline_model_parallel_world_size())


def last_stage() -> int:
    """Number of the last stage."""
    return num_stages() - 1


def is_first_stage() -> bool:
    """Whether this rank has the embeddings and the vision tower."""
    return bool(parallel_state.is_pipeline_first_stage())


def is_last_stage() -> bool:
    """Whether this rank has the output projection and the value head."""
    return bool(parallel_state.is_pipeline_last_stage())


def gather_over_stages(item: Item) -> list[Item]:
    """Every stage's `item`, by stage, on every rank of the pipeline."""
    return _gathered(item, parallel_state.get_pipeline_model_parallel_group())


def from_stage(tensor: Tensor | None, stage: int) -> Tensor:
    """The tensor that the ranks of `stage` pass, on every rank of the pipeline and on its compute device; the others
    pass None."""
    if num_stages() == 1:
        assert tensor is not None
        return tensor
    group = parallel_state.get_pipeline_model_parallel_group()
    source = dist.get_global_rank(group, stage)
    header: list[Any] = [None if tensor is None else (tensor.shape, tensor.dtype)]
    dist.broadcast_object_list(header, src=source, group=group)
    if tensor is None:
        shape, dtype = header[0]
        tensor = torch.empty(shape, dtype=dtype, device=compute_device())
    else:
        tensor = tensor.detach().to(compute_device()).contiguous()
    dist.broadcast(tensor, src=source, group=group)
    return tensor


# Ranks that share out experts -----------------------------------------------------------------------------------------


def shares_experts() -> bool:
    """Whether ranks hold different experts, and so go through the layers together."""
    return bool(parallel_state.get_expert_model_parallel_world_size() > 1)


def gather_experts(tensor: Tensor) -> Tensor:
    """All experts' [E, ...] of those that each rank holds, of the same shape; on the compute device."""
    group = parallel_state.get_expert_model_parallel_group()
    if dist.get_world_size(group) == 1:
        return tensor
    parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, tensor.contiguous(), group=group)
    return torch.cat(parts)


def _gathered(item: Item, group: Any) -> list[Item]:
    size = dist.get_world_size(group)
    if size == 1:
        return [item]
    items: list[Any] = [None] * size
    dist.all_gather_object(items, item, group=group)
    return items
