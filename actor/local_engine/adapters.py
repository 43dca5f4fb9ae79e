"""Low-rank updates of the model's weights: what they are added to is kept, and they are added as the learner adds them.

Owns the base weights, copies of what was in force when the first update of a weight came. A weight that arrives whole
is a base itself: alone it is in force as it is, and with an update the update is added to it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from vagen.common.weight_transfer import LowRankUpdate, add_low_rank, tensor_checksum

__all__ = ["AdaptedWeights", "floating_dtype"]


class AdaptedWeights:
    """The updated ones of a model's parameters, by engine name."""

    def __init__(self, parameters: Mapping[str, Tensor]) -> None:
        self._parameters = parameters
        self._base: dict[str, Tensor] = {}

    def check(self, updates: Sequence[LowRankUpdate]) -> None:
        """Raises ValueError unless each update names weights that it fits, and no tensor is named twice."""
        named: set[str] = set()
        for update in updates:
            if not update.weights:
                raise ValueError(f"updates: {update.a} is of no weight")
            inputs = {self._matrix(name).shape[1] for name in update.weights}
            if len(inputs) > 1:
                raise ValueError(f"updates: {', '.join(update.weights)} have different numbers of inputs")
            for name in (*update.weights, update.a, update.b):
                if name in named or (name in self._parameters and name not in update.weights):
                    raise ValueError(f"updates: {name} is named twice, or is a parameter's name")
                named.add(name)

    def shapes(self, update: LowRankUpdate, rank: int) -> dict[str, tuple[int, int]]:
        """Those of an update's two tensors."""
        rows = sum(self._matrix(name).shape[0] for name in update.weights)
        return {update.a: (rank, self._matrix(update.weights[0]).shape[1]), update.b: (rows, rank)}

    def apply(self, tensors: Mapping[str, Tensor], updates: Sequence[LowRankUpdate]) -> None:
        """Write whole weights, and updates of these or of the bases, into the parameters.

        Weights that neither concerns stay as they are.
        """
        updated = {name for update in updates for name in update.weights}
        for name, tensor in tensors.items():
            if name in updated:
                self._keep(name, tensor)
            elif name in self._parameters:
                self._parameters[name].data.copy_(tensor)
                self.forget(name)
        for update in updates:
            for name in update.weights:
                if name not in self._base:
                    self._keep(name, self._parameters[name])
            bases = [self._base[name] for name in update.weights]
            merged = add_low_rank(bases, tensors[update.a], tensors[update.b], update.scale)
            for name, weight in zip(update.weights, merged, strict=True):
                self._parameters[name].data.copy_(weight)

    def forget(self, name: str) -> None:
        """A whole weight is in force: the next update of it is added to that."""
        self._base.pop(name, None)

    def base_checksums(self) -> dict[str, str]:
        """`tensor_checksum` of the base of each weight that has an update in force."""
        return {name: tensor_checksum(base) for name, base in self._base.items()}

    def _keep(self, name: str, tensor: Tensor) -> None:
        if name in self._base:
            self._base[name].copy_(tensor)
        else:
            self._base[name] = tensor.detach().clone()

    def _matrix(self, name: str) -> Tensor:
        weight = self._parameters.get(name)
        if weight is None:
            raise ValueError(f"updates: the model has no parameter {name}")
        if weight.ndim != 2 or not weight.is_floating_point():
            raise ValueError(f"updates: {name} is no matrix of real numbers")
        return weight


def floating_dtype(name: str) -> torch.dtype:
    """A dtype that factors may have. Raises ValueError for others."""
    dtypes = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    if name not in dtypes:
        raise ValueError(f"dtypes: expected one of {', '.join(dtypes)}, got {name}")
    return dtypes[name]
