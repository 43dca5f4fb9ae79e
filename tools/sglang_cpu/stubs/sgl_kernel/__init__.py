"""SGLang's kernels, of which PyPI has builds for GPUs only: names that can be imported, and raise when called.

With `--attention-backend torch_native` a CPU calls none of them but those that are implemented here in torch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch

__version__ = "0.4.10"

_READ_AT_IMPORT = (
    "fused_dual_residual_rmsnorm_cpu",
    "fused_moe_router_cpu",
    "fused_qk_gemma_rmsnorm_cpu",
    "fused_qk_gemma_rmsnorm_with_gate_cpu",
    "fused_qkvzba_split_reshape_cat_contiguous_cpu",
    "rmsnorm_cpu",
)
"""What modules of SGLang read off `torch.ops.sgl_kernel` while they are imported, called or not."""


def __getattr__(name: str) -> Callable[..., NoReturn]:
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*arguments: Any, **options: Any) -> NoReturn:
        raise NotImplementedError(f"sgl_kernel.{name}: this is a stand-in without kernels")

    return missing


def _fused_sigmoid_mul(x: torch.Tensor, gate: torch.Tensor) -> None:
    x.mul_(torch.sigmoid(gate.reshape(x.shape).to(x.dtype)))


_library = torch.library.Library("sgl_kernel", "DEF")
_library.define("fused_sigmoid_mul_cpu(Tensor(a!) x, Tensor gate) -> ()")
_library.impl("fused_sigmoid_mul_cpu", _fused_sigmoid_mul, "CompositeExplicitAutograd")
for _name in _READ_AT_IMPORT:
    if not hasattr(torch.ops.sgl_kernel, _name):
        setattr(torch.ops.sgl_kernel, _name, __getattr__(_name))
