"""Runs the unmodified megatron-core 0.16 on a machine without CUDA; does nothing where CUDA is there.

Owns the replacements of CUDA calls that megatron-core makes unconditionally: `install()` for the process-wide ones
(current device, RNG), `cuda_as_cpu()` for tensors that megatron-core creates on "cuda" inside the optimizer, the
gradient reduction and checkpoints. Does not own any numerical code.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from megatron.core.tensor_parallel import random as megatron_random
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher
from torch.overrides import TorchFunctionMode

__all__ = ["compute_device", "cuda_as_cpu", "install"]

_CPU = torch.device("cpu")


def compute_device() -> torch.device:
    """The device of this rank: its current CUDA device, else the CPU."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else _CPU


def install() -> None:
    """Replace megatron-core's unconditional CUDA calls. Call once, before model parallelism is initialised."""
    if not hasattr(moe_utils, "te_general_gemm"):
        # A router asks whether it is None, and it is not even that without Transformer Engine.
        moe_utils.te_general_gemm = None
    if torch.cuda.is_available():
        return
    replacements: list[tuple[Any, str, Any]] = [
        (torch.cuda, "current_device", lambda: _CPU),
        (torch.cuda, "synchronize", lambda *_, **__: None),
        (torch.cuda, "current_stream", lambda *_, **__: None),
        (megatron_random, "_get_cuda_rng_state", lambda *_, **__: torch.get_rng_state()),
        (megatron_random, "_set_cuda_rng_state", lambda state, *_, **__: torch.set_rng_state(state)),
        (megatron_random.CudaRNGStatesTracker, "add", _tracker_add),
        (megatron_random.CudaRNGStatesTracker, "fork", contextlib.contextmanager(_tracker_fork)),
        # A stream is made where there is none yet, and used by what follows alone.
        (MoEAlltoAllTokenDispatcher, "cuda_dtoh_stream", _CPU),
        (MoEAlltoAllTokenDispatcher, "_maybe_dtoh_and_synchronize", _splits_on_host),
    ]
    for owner, name, replacement in replacements:
        setattr(owner, name, replacement)


def cuda_as_cpu() -> AbstractContextManager[object]:
    """Tensors that megatron-core asks for on "cuda" land on the CPU inside this context; a no-op with CUDA."""
    return nullcontext() if torch.cuda.is_available() else _CudaAsCpu()


class _CudaAsCpu(TorchFunctionMode):
    """Maps `device="cuda"` to the CPU, `.cuda()` to itself and `.type()` to the CUDA names megatron-core asserts."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            return func(*args).replace("torch.", "torch.cuda.", 1)
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = _CPU
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        return func(*args, **kwargs)


def _splits_on_host(self: Any, point: str, tokens_per_expert: torch.Tensor) -> torch.Tensor:
    """`MoEAlltoAllTokenDispatcher._maybe_dtoh_and_synchronize` where all tensors are on the host: split sizes become
    numbers, as its copies from a GPU do."""
    if point == self.cuda_dtoh_point:
        for name in ("input_splits", "output_splits"):
            splits = getattr(self, name)
            if splits is not None:
                setattr(self, name, splits.tolist())
    return tokens_per_expert


def _tracker_add(self: Any, name: str, seed: int) -> None:
    """`CudaRNGStatesTracker.add` on CPU generators; equal seeds are allowed, equal names are not."""
    assert name not in self.states_, f"RNG state {name} is already registered"
    self._is_initialized = True
    self.seeds_.add(seed)
    self.states_[name] = torch.Generator().manual_seed(seed).get_state()


def _tracker_fork(self: Any, name: str = "model-parallel-rng") -> Iterator[None]:
    """`CudaRNGStatesTracker.fork` on the CPU generator."""
    outer_state, outer_name = torch.get_rng_state(), self._current_state_name
    torch.set_rng_state(self.states_[name])
    self._current_state_name = name
    try:
        yield
    finally:
        self.states_[name] = torch.get_rng_state()
        torch.set_rng_state(outer_state)
        self._current_state_name = outer_name
