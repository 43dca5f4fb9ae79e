"""New weights for the engine: names, checks, groups with the trainer, and a staging area.

An update is `begin`, any number of `receive` or `read_folder`, `end`. Tensors are checked by name, type and shape
before a byte of them is received, and arrive in tensors of their own; the model changes only when the engine applies
what `end` returned, between two of its steps. An update that fails or is given up therefore needs no undoing. The
price is memory for a second copy. It is kept from one update to the next: on a CPU, receiving into fresh pages takes
nearly twice as long. Of low-rank updates, which `begin` is told of, the factors alone arrive.

All methods but `discard` run on one thread, the engine's administration thread, and may block up to the time-out.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from vagen.actor.local_engine.adapters import AdaptedWeights, floating_dtype
from vagen.common.block_fp8 import SCALE_SUFFIX, dequantise, is_quantised, scale_shape
from vagen.common.weight_transfer import (
    LowRankUpdate,
    broadcast,
    connect_store,
    dtype_name,
    join_group,
    leave_group,
    split_bucket,
    tensor_checksum,
)

__all__ = ["StagedWeights", "WeightReceiver", "WeightUpdateError", "engine_name"]

logger = logging.getLogger(__name__)

_HEAD = "lm_head.weight"
_RENAMED = {
    "model.language_model.": "model.",
    "model.visual.": "visual.",
    "model.vision_tower.": "visual.vision_tower.",
    "model.multi_modal_projector.": "visual.multi_modal_projector.",
    "language_model.model.": "model.",
    "language_model.lm_head.": "lm_head.",
    "vision_tower.": "visual.vision_tower.",
    "multi_modal_projector.": "visual.multi_modal_projector.",
}
"""Prefixes: transformers' state dict, then where the hub's differ from both."""
_MAX_GROUPS = 4
"""Trainers that died leave their groups behind: the oldest makes room."""
_JOIN_MARGIN_S = 0.5
_EMBEDDING = "model.embed_tokens.weight"
_INDEX = "model.safetensors.index.json"


class WeightUpdateError(Exception):
    """An update that cannot go on; answered with 400, and the weights in force stay in force."""


@dataclass
class StagedWeights:
    """What an update has received so far."""

    tensors: dict[str, Tensor] = field(default_factory=dict)
    """By engine name, or the name of a factor."""
    scales: dict[str, Tensor] = field(default_factory=dict)
    """Of those in float8, by their names."""
    updates: Sequence[LowRankUpdate] = ()
    """Whose factors are among the tensors."""
    version: str | None = None
    """None keeps the version."""
    buffers: list[Tensor] = field(default_factory=list)
    """uint8, what flattened buckets were received into: the memory behind `tensors`."""
    failure: str | None = None
    """Why this update can only be begun anew."""

    @property
    def factors(self) -> dict[str, LowRankUpdate]:
        """The updates by the names of both of their factors."""
        return {name: update for update in self.updates for name in (update.a, update.b)}


def engine_name(name: str) -> str:
    """transformers' name of a parameter, or the hub's -> the engine's (SGLang's): `visual.*`, `model.*`,
    `lm_head.weight`.
    """
    for prefix, renamed in _RENAMED.items():
        if name.startswith(prefix):
            return renamed + name.removeprefix(prefix)
    return name


def _weight_files(folder: Path) -> list[Path]:
    """The safetensors of a model folder: those of its index where it has one. Raises WeightUpdateError."""
    if not folder.is_dir():
        raise WeightUpdateError(f"model_path: no folder {folder}")
    index = folder / _INDEX
    files = sorted(folder.glob("*.safetensors"))
    if index.is_file():
        try:
            named = msgspec.json.decode(index.read_bytes(), type=_WeightIndex).weight_map.values()
        except (OSError, msgspec.DecodeError) as error:
            raise WeightUpdateError(f"model_path: {index}: {error}") from error
        files = [folder / name for name in sorted(set(named))]
    if not files:
        raise WeightUpdateError(f"model_path: no *.safetensors in {folder}")
    return files


class _WeightIndex(msgspec.Struct):
    """`model.safetensors.index.json`: name of a tensor -> file."""

    weight_map: dict[str, str]


def _within(timeout_s: float, join: Callable[[], ProcessGroup]) -> ProcessGroup:
    """The group that `join` makes, within a little more than its own time-out. Raises TimeoutError, or what it raises.

    The store's time-outs hold against a trainer that is gone. One that hangs keeps the connection open, and giving up a
    wait asks it for an answer: that thread is left alone until the trainer goes on or ends.
    """
    future: Future[ProcessGroup] = Future()

    def run() -> None:
        try:
            future.set_result(join())
        except Exception as error:  # raised below, by whoever waits
            future.set_exception(error)

    threading.Thread(target=run, name="join", daemon=True).start()
    try:
        return future.result(timeout_s + _JOIN_MARGIN_S)
    except TimeoutError:
        future.add_done_callback(lambda late: None if late.exception() else leave_group(late.result()))
        raise TimeoutError(f"the trainer did not answer in {timeout_s:g} s") from None


class WeightReceiver:
    """Receives weights into a staging area."""

    def __init__(self, model: nn.Module, *, is_tied: bool) -> None:
        self._parameters = {engine_name(name): parameter for name, parameter in model.named_parameters()}
        self._is_tied = is_tied
        self._adapted = AdaptedWeights(self._parameters)
        self._groups: dict[str, ProcessGroup] = {}
        self._staged: StagedWeights | None = None
        self._spare: list[Tensor] = []
        """uint8 buffers of the update applied last."""

    def init_group(
        self, name: str, *, host: str, port: int, rank: int, world_size: int, backend: str, timeout_s: float
    ) -> None:
        """Join the trainer's group, whose waits `timeout_s` bounds.

        Raises WeightUpdateError when it does not come by then.
        """
        if name in self._groups:
            raise WeightUpdateError(f"group_name: {name} exists; destroy it first")
        while len(self._groups) >= _MAX_GROUPS:
            self.destroy_group(next(iter(self._groups)))

        def join() -> ProcessGroup:
            store = connect_store(host, port, timeout_s)
            return join_group(store, name, rank=rank, world_size=world_size, backend=backend, timeout_s=timeout_s)

        try:
            self._groups[name] = _within(timeout_s, join)
        except (RuntimeError, ValueError, TimeoutError) as error:
            raise WeightUpdateError(f"group {name} at {host}:{port}: {error}") from error
        logger.info("joined group %s at %s:%d as %d of %d", name, host, port, rank, world_size)

    def destroy_group(self, name: str) -> None:
        """Leave a group. Raises WeightUpdateError where there is none of that name."""
        group = self._groups.pop(name, None)
        if group is None:
            raise WeightUpdateError(f"group_name: no group {name}; known are {sorted(self._groups)}")
        leave_group(group)

    def begin(self, updates: Sequence[LowRankUpdate] = ()) -> None:
        """Start an update, of which the factors of low-rank `updates` will be part; one that was not ended is dropped.

        Raises WeightUpdateError for updates that do not fit the model.
        """
        try:
            self._adapted.check(updates)
        except ValueError as error:
            raise WeightUpdateError(str(error)) from error
        self._staged = StagedWeights(updates=tuple(updates))

    def discard(self) -> None:
        """Give up the update that runs, if any. Any thread may call this."""
        self._staged = None

    def receive(
        self,
        names: Sequence[str],
        dtypes: Sequence[str],
        shapes: Sequence[Sequence[int]],
        *,
        group_name: str,
        flattened: bool,
        version: str | None,
    ) -> None:
        """Receive tensors from rank 0, one by one or as one flattened bucket. Raises WeightUpdateError."""
        staged = self._open()
        group = self._groups.get(group_name)
        if group is None:
            raise WeightUpdateError(f"group_name: no group {group_name}; known are {sorted(self._groups)}")
        kinds = self._check(names, dtypes, shapes, staged.factors)
        device = next(iter(self._parameters.values())).device
        try:
            if flattened:
                size = sum(kind.itemsize * torch.Size(shape).numel() for kind, shape in zip(kinds, shapes, strict=True))
                flat = self._take_buffer(size, device)
                broadcast(group, flat)
                staged.buffers.append(flat)
                tensors = split_bucket(flat, kinds, shapes)
            else:
                tensors = [torch.empty(tuple(s), dtype=k, device=device) for k, s in zip(kinds, shapes, strict=True)]
                for tensor in tensors:
                    broadcast(group, tensor)
        except RuntimeError as error:
            staged.failure = f"receiving {len(names)} tensors over {group_name}: {error}"
            self.destroy_group(group_name)
            raise WeightUpdateError(staged.failure) from error
        self._stage(staged, dict(zip(names, tensors, strict=True)), version)

    def read_folder(self, folder: Path, version: str | None) -> None:
        """Stage every parameter of a model folder's safetensors. Raises WeightUpdateError naming the file."""
        staged = self._open()
        for file in _weight_files(folder):
            try:
                read = load_file(file)
            except (OSError, SafetensorError) as error:
                raise WeightUpdateError(f"model_path: {file}: {error}") from error
            tensors = {engine_name(name): tensor for name, tensor in read.items()}
            twice = sorted(tensors.keys() & staged.tensors.keys())
            if twice or len(tensors) < len(read):
                raise WeightUpdateError(f"model_path: {file}: {twice or 'one of its tensors'} is there twice")
            names, values = list(tensors), list(tensors.values())
            try:
                kinds = self._check(names, [dtype_name(t.dtype) for t in values], [t.shape for t in values], {})
            except WeightUpdateError as error:
                raise WeightUpdateError(f"model_path: {file}: {error}") from error
            self._stage(staged, dict(zip(names, self._copied(staged, kinds, values), strict=True)), version)
        missing = sorted(set(self._parameters) - set(staged.tensors))
        if missing:
            raise WeightUpdateError(f"model_path: {folder} lacks {len(missing)} parameters, first {missing[0]}")

    def end(self, version: str | None = None) -> StagedWeights:
        """Close the update and hand over what it received. Raises WeightUpdateError when it had failed."""
        staged = self._open()
        self._staged = None
        quantised = {name for name, tensor in staged.tensors.items() if tensor.dtype == torch.float8_e4m3fn}
        alone = sorted(quantised ^ staged.scales.keys())
        if alone:
            what = "its float8 weights" if alone[0] in staged.scales else alone[0] + SCALE_SUFFIX
            raise WeightUpdateError(f"names: {alone[0]} came without {what}")
        for update in staged.updates:
            a, b = staged.tensors.get(update.a), staged.tensors.get(update.b)
            if a is None or b is None or len(a) != b.shape[1]:
                raise WeightUpdateError(f"updates: {update.a} and {update.b} did not both arrive, with one rank")
        if version is not None:
            staged.version = version
        return staged

    def apply(self, staged: StagedWeights) -> None:
        """Write staged tensors into the model. Only the engine's thread may call this, between two steps."""
        plain = {name: tensor for name, tensor in staged.tensors.items() if name not in staged.scales}
        for name, scale in staged.scales.items():
            parameter = self._parameters[name].data
            parameter.copy_(dequantise(staged.tensors[name], scale, parameter.dtype))
            self._adapted.forget(name)
        self._adapted.apply(plain, staged.updates)
        # Nothing refers to them any more, and the next update has buckets of the same sizes.
        self._spare = staged.buffers

    def checksums(self) -> dict[str, str]:
        """`tensor_checksum` of every parameter in force, by engine name; a tied head is not a parameter."""
        return {name: tensor_checksum(parameter) for name, parameter in self._parameters.items()}

    def base_checksums(self) -> dict[str, str]:
        """`tensor_checksum` of what the low-rank updates in force were added to, by engine name."""
        return self._adapted.base_checksums()

    def close(self) -> None:
        """Leave all groups."""
        for name in list(self._groups):
            self.destroy_group(name)

    def _open(self) -> StagedWeights:
        if self._staged is None:
            raise WeightUpdateError(
                "no update runs: call /begin_weight_update first (a pause that ran out ends it too)"
            )
        if self._staged.failure is not None:
            raise WeightUpdateError(f"this update failed, begin anew: {self._staged.failure}")
        return self._staged

    def _copied(self, staged: StagedWeights, kinds: Sequence[torch.dtype], tensors: Sequence[Tensor]) -> list[Tensor]:
        """Out of the pages of a file, which the disk may bring late or not at all, into memory of the engine's."""
        device = next(iter(self._parameters.values())).device
        flat = self._take_buffer(sum(tensor.nbytes for tensor in tensors), device)
        staged.buffers.append(flat)
        copies = split_bucket(flat, kinds, [tensor.shape for tensor in tensors])
        for copy, tensor in zip(copies, tensors, strict=True):
            copy.copy_(tensor)
        return copies

    def _take_buffer(self, size: int, device: torch.device) -> Tensor:
        """uint8 [size]: one that is spare, or a new one. A buffer whose update fails is not used again."""
        spare = self._spare
        for index, buffer in enumerate(spare):
            if buffer.numel() == size:
                return spare.pop(index)
        # Of an update with other buckets: there is room for one copy of the weights, not for two.
        spare.clear()
        return torch.empty(size, dtype=torch.uint8, device=device)

    def _stage(self, staged: StagedWeights, tensors: Mapping[str, Tensor], version: str | None) -> None:
        if self._staged is not staged:
            raise WeightUpdateError("the update was given up while it received")
        known = self._parameters.keys() | staged.factors.keys()
        staged.tensors.update((name, tensor) for name, tensor in tensors.items() if name in known)
        for name, tensor in tensors.items():
            if name.endswith(SCALE_SUFFIX):
                staged.scales[name.removesuffix(SCALE_SUFFIX)] = tensor
        if version is not None:
            staged.version = version

    def _check(
        self,
        names: Sequence[str],
        dtypes: Sequence[str],
        shapes: Sequence[Sequence[int]],
        factors: Mapping[str, LowRankUpdate],
    ) -> list[torch.dtype]:
        """The dtypes, once names, dtypes and shapes are those of the model, or of factors of updates."""
        if not len(names) == len(dtypes) == len(shapes) or not names:
            raise WeightUpdateError(f"names, dtypes, shapes: {len(names)}, {len(dtypes)} and {len(shapes)} entries")
        if len(set(names)) != len(names):
            raise WeightUpdateError("names: the same name twice")
        kinds = []
        for name, dtype, shape in zip(names, dtypes, shapes, strict=True):
            if name in factors:
                kinds.append(self._check_factor(name, dtype, shape, factors[name]))
                continue
            # A trainer may send a tied head along: it is received, as the bucket contains it, and left out.
            parameter = self._parameters.get(_EMBEDDING if name == _HEAD and self._is_tied else name)
            scaled = self._parameters.get(name.removesuffix(SCALE_SUFFIX))
            if parameter is not None:
                is_float8 = dtype == "float8_e4m3fn" and is_quantised(name, parameter.shape)
                kind, wanted = torch.float8_e4m3fn if is_float8 else parameter.dtype, tuple(parameter.shape)
            elif scaled is not None and is_quantised(name.removesuffix(SCALE_SUFFIX), scaled.shape):
                kind, wanted = torch.float32, scale_shape(scaled.shape)
            else:
                raise WeightUpdateError(f"names: the model has no parameter {name}")
            if dtype != dtype_name(kind):
                raise WeightUpdateError(f"dtypes: {name} is {dtype_name(kind)}, got {dtype}")
            if tuple(shape) != wanted:
                raise WeightUpdateError(f"shapes: {name} is {list(wanted)}, got {list(shape)}")
            kinds.append(kind)
        return kinds

    def _check_factor(self, name: str, dtype: str, shape: Sequence[int], update: LowRankUpdate) -> torch.dtype:
        rank = shape[0 if name == update.a else -1] if len(shape) == 2 else 0
        expected = self._adapted.shapes(update, rank)[name]
        if rank < 1 or tuple(shape) != expected:
            raise WeightUpdateError(f"shapes: {name} is {list(expected)} with rank >= 1, got {list(shape)}")
        try:
            return floating_dtype(dtype)
        except ValueError as error:
            raise WeightUpdateError(str(error)) from error
