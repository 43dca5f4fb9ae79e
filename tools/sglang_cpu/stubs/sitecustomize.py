"""Lets SGLang be imported without triton, and torchvision beside a torch that it was not built for.

Triton's kernels are only declared, never launched, on a CPU: every name under `triton` is answered with a placeholder
that decorates, subclasses and nests, and a kernel stays the plain function that it decorates, which cannot be launched.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


class _Placeholder(ModuleType):
    """A module of names that nobody calls for their value; called itself, it is a decorator that changes nothing."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        # Class names are subclassed and used in isinstance.
        made = type(name, (_Anything,), {}) if name[0].isupper() else _Placeholder(f"{self.__name__}.{name}")
        setattr(self, name, made)
        return made

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        if len(arguments) == 1 and callable(arguments[0]) and not options:
            return arguments[0]
        return lambda decorated: decorated


class _Anything:
    """Base of every class that a placeholder has: takes any arguments."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        self.arguments, self.options = arguments, options


class _TritonFinder(MetaPathFinder, Loader):
    """Answers for `triton` and all below it."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return ModuleSpec(fullname, self, is_package=True) if fullname.split(".")[0] == "triton" else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        parent, _, name = spec.name.rpartition(".")
        # What an attribute access has made already stays the same object.
        made = vars(sys.modules[parent]).get(name) if parent else None
        return made if isinstance(made, _Placeholder) else _Placeholder(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        fill = _CONTENTS.get(module.__name__)
        if fill is not None:
            fill(module)


def _fill_triton(module: Any) -> None:
    module.__version__ = "3.0.0"
    module.cdiv = lambda a, b: -(a // -b)
    module.next_power_of_2 = lambda n: 1 << (n - 1).bit_length() if n > 0 else 1


def _fill_language(module: Any) -> None:
    # An annotation of kernels' parameters, and of constants that Python code reads.
    module.constexpr = type("constexpr", (), {"__init__": lambda self, value=None: setattr(self, "value", value)})
    module.dtype = type("dtype", (_Anything,), {})


def _fill_autotuner(module: Any) -> None:
    # torch's inductor names these in `except`.
    module.OutOfResources = type("OutOfResources", (Exception,), {})
    module.PTXASError = type("PTXASError", (Exception,), {})


_CONTENTS: dict[str, Callable[[Any], None]] = {
    "triton": _fill_triton,
    "triton.language": _fill_language,
    "triton.runtime.autotuner": _fill_autotuner,
}


class _TorchvisionFinder(MetaPathFinder):
    """Declares, before torchvision is imported, the operators that its C++ part would have declared.

    torchvision's C++ part does not load beside a torch of another build, and its Python part refers to these at import.
    """

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname == "torchvision":
            sys.meta_path.remove(self)
            _declare_torchvision_operators()
        return None


def _declare_torchvision_operators() -> None:
    import torch

    if hasattr(torch.ops.torchvision, "nms"):
        return
    library = torch.library.Library("torchvision", "DEF")
    for name in ("nms", "qnms"):
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    # The operators go with the object.
    _TorchvisionFinder.library = library  # type: ignore[attr-defined]


if os.environ.get("SGLANG_USE_CPU_ENGINE") == "1":
    if importlib.util.find_spec("triton") is None:
        sys.meta_path.insert(0, _TritonFinder())
    sys.meta_path.insert(0, _TorchvisionFinder())
