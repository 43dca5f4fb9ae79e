"""torch.distributed and megatron's process groups for one learner process.

Owns start and end of both, the seeds, and the sentences for a world that does not divide. One process without
torchrun's environment is a world of its own (no port is opened). What ranks tell each other is `collectives.py`'s.
"""

from __future__ import annotations

import itertools
import os
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from torch.distributed.distributed_c10d import PrefixStore, Store, rendezvous  # type: ignore[attr-defined]

from vagen.learner.layout import ParallelLayout
from vagen.learner.model import cpu_compat

__all__ = ["ParallelTopology", "destroy", "init", "parallel_session", "topology"]

_GENERATIONS = itertools.count()
_ALONE = ParallelLayout()


@dataclass(frozen=True)
class ParallelTopology:
    """Where this process stands: global rank, and its coordinate on each axis of the layout."""

    rank: int
    world_size: int
    tp_rank: int
    tp_size: int
    pp_rank: int
    pp_size: int
    dp_rank: int
    dp_size: int
    cp_rank: int = 0
    cp_size: int = 1
    ep_size: int = 1
    """Ranks that experts are shared out to: an axis across those of `tp` and `dp`."""

    @property
    def sizes(self) -> dict[str, int]:
        """Ranks on each axis: what a checkpoint says it was saved by. Axes of later versions only where they are used,
        so that older checkpoints say the same."""
        later = {name: size for name, size in (("cp_size", self.cp_size), ("ep_size", self.ep_size)) if size > 1}
        return {"tp_size": self.tp_size, "pp_size": self.pp_size, "dp_size": self.dp_size, **later}


def init(layout: ParallelLayout = _ALONE, *, seed: int = 1, timeout_s: float = 600.0) -> ParallelTopology:
    """Start torch.distributed (NCCL on GPUs, gloo on CPU) and megatron's groups, then seed every generator.

    torchrun's RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT and LOCAL_RANK are used where set. Dropout-like streams are
    seeded alike on data-parallel and context-parallel ranks and apart on tensor-parallel and pipeline ranks, as
    megatron does.
    Raises ConfigError where the world does not divide into the layout.
    """
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    layout.require_world(world_size)
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    timeout = timedelta(seconds=timeout_s)
    store: Store
    if "RANK" in os.environ:
        store, rank, _ = next(rendezvous("env://", timeout=timeout))
        # torchrun's store outlives a process group, and processes that are started anew: without a prefix of its own, a
        # group reads the keys of the one before.
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        store = PrefixStore(f"learner-{attempt}-{next(_GENERATIONS)}", store)
    else:
        store, rank = dist.HashStore(), 0  # type: ignore[attr-defined]
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)
    cpu_compat.install()
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=layout.tensor,
        pipeline_model_parallel_size=layout.pipeline,
        context_parallel_size=layout.context,
        expert_model_parallel_size=layout.expert,
        # Shared out, experts are whole: their ranks may be those that cut everything else.
        expert_tensor_parallel_size=layout.tensor if layout.expert == 1 else 1,
    )
    _seed(seed)
    return topology()


def topology() -> ParallelTopology:
    """Coordinates of this process; `init` must have run."""
    return ParallelTopology(
        rank=dist.get_rank(),
        world_size=dist.get_world_size(),
        tp_rank=parallel_state.get_tensor_model_parallel_rank(),
        tp_size=parallel_state.get_tensor_model_parallel_world_size(),
        pp_rank=parallel_state.get_pipeline_model_parallel_rank(),
        pp_size=parallel_state.get_pipeline_model_parallel_world_size(),
        dp_rank=parallel_state.get_data_parallel_rank(),
        dp_size=parallel_state.get_data_parallel_world_size(),
        cp_rank=parallel_state.get_context_parallel_rank(),
        cp_size=parallel_state.get_context_parallel_world_size(),
        ep_size=parallel_state.get_expert_model_parallel_world_size(),
    )


def destroy() -> None:
    """End megatron's groups and torch.distributed; `init` may be called again."""
    parallel_state.destroy_model_parallel()
    if dist.is_initialized():
        dist.destroy_process_group()


@contextmanager
def parallel_session(
    layout: ParallelLayout = _ALONE, *, seed: int = 1, timeout_s: float = 600.0
) -> Iterator[ParallelTopology]:
    """`init` on entry, `destroy` on exit."""
    try:
        yield init(layout, seed=seed, timeout_s=timeout_s)
    finally:
        destroy()


def _seed(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
    tensor_parallel.model_parallel_cuda_manual_seed(seed, force_reset_rng=True)
