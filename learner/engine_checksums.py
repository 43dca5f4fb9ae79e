"""Proof that an engine has the published weights: its checksums against those of the tensors that were sent.

The local engine hashes each parameter under its own name with the learner's hash. SGLang hashes, on every
tensor-parallel rank, what that rank holds: query, key and value in one tensor, gate and up in one, each cut among the
ranks. Here the same is cut out of the published tensors. SGLang's hash on a GPU is a kernel of its own: there nothing
can be compared.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from vagen.common.errors import BroadcastError

__all__ = ["can_compare", "differing_names", "missing_names", "require_equal"]

_TIED_HEAD = "lm_head.weight"
_FUSED = {
    ".qkv_proj.": (".q_proj.", ".k_proj.", ".v_proj."),
    ".gate_up_proj.": (".gate_proj.", ".up_proj."),
}
_VISION_QKV = (".attn.qkv_proj.", ".attn.qkv.")
"""Name in SGLang, and in the export, where it is fused too."""
_VOCABULARY_MULTIPLE = 64
"""SGLang pads the rows of the embedding with zeros."""


def can_compare(info: Mapping[str, Any]) -> bool:
    """Whether an engine of this `/server_info` has checksums that can be computed here."""
    return info.get("kind") == "local" or str(info.get("device", "")).startswith("cpu")


def require_equal(
    info: Mapping[str, Any],
    answer: Mapping[str, Any],
    tensors: Sequence[tuple[str, Tensor]],
    checksums: Mapping[str, str],
) -> None:
    """Compare the answer of `/weights_checker` with what was published; `checksums` are the learner's own.

    Raises BroadcastError naming the first tensor that differs, or that the engine does not have.
    """
    differing = differing_names(info, answer, tensors, checksums)
    if differing:
        raise BroadcastError(f"{len(differing)} of {len(checksums)} tensors differ, first {differing[0]}")


def differing_names(
    info: Mapping[str, Any],
    answer: Mapping[str, Any],
    tensors: Sequence[tuple[str, Tensor]],
    checksums: Mapping[str, str],
    *,
    without_updates: bool = False,
) -> list[str]:
    """Names of those of `tensors` that the engine of an answer of `/weights_checker` does not have, or has otherwise.

    `checksums` are the learner's own. A local engine may be compared as it was before it added low-rank updates.
    """
    if info.get("kind") != "local":
        by_name = dict(tensors)
        return sorted({name for rank in answer["ranks"] for name in _differing(rank, by_name)})
    (rank,) = answer["ranks"]
    theirs = rank["checksums"] | (rank["base_checksums"] if without_updates else {})
    return sorted(
        name
        for name, digest in checksums.items()
        if theirs.get(name) != digest and not (name == _TIED_HEAD and name not in theirs)
    )


def missing_names(answer: Mapping[str, Any], names: Collection[str]) -> list[str]:
    """Published names for which an engine of any kind has no tensor, by its answer of `/weights_checker`."""
    known = {part for rank in answer["ranks"] for name in rank["checksums"] for part in _parts(name, names)}
    return sorted(name for name in names if name not in known and name != _TIED_HEAD)


def _differing(rank: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Iterator[str]:
    """Names of published tensors that one rank of SGLang does not hold, or holds otherwise."""
    place = rank["parallelism_info"][0]
    index, size = int(place["tp_rank"]), int(place["tp_size"])
    seen: set[str] = set()
    for name, digest in rank["checksums"].items():
        parts = _parts(name, tensors)
        if not parts:
            continue  # a buffer, made from the configuration
        seen.update(parts)
        held = [tensors[part] for part in parts]
        if not any(_digest(shard) == digest for shard in _shards(held, index, size, "qkv" in name)):
            yield from parts
    for name in tensors:
        if name not in seen and name != _TIED_HEAD:
            yield name


def _parts(name: str, published: Collection[str]) -> list[str]:
    """The published tensors that an engine's tensor `name` is made of; none for one that was not published.

    The vision tower's fused projection counts as one: it is cut by `_shards`.
    """
    if name in published:
        return [name]
    vision = name.replace(*_VISION_QKV)
    if vision in published:
        return [vision]
    for fused, single in _FUSED.items():
        parts = [name.replace(fused, part) for part in single]
        if fused in name and all(part in published for part in parts):
            return parts
    return []


def _shards(parts: Sequence[Tensor], index: int, size: int, is_qkv: bool) -> Iterator[Tensor]:
    """What rank `index` of `size` may hold of these: all, or its share of rows, or of columns.

    Which of them depends on the layer, and on whether SGLang shards the vision tower; each is the whole content of that
    rank, so that a match proves it.
    """
    yield torch.cat(list(parts))
    if is_qkv and len(parts) == 1:
        parts = parts[0].chunk(3)
    if size > 1:
        # With fewer key/value heads than ranks, several ranks hold the same ones.
        for copies in range(1, size + 1):
            if size % copies == 0 and all(part.shape[0] % size == 0 for part in parts):
                shared = [part.chunk(size // copies)[index // copies] for part in parts[1:]]
                yield torch.cat([parts[0].chunk(size)[index], *shared])
    if len(parts) == 1 and parts[0].ndim == 2:
        (whole,) = parts
        if whole.shape[1] % size == 0:
            yield whole.chunk(size, 1)[index]
        rows = -whole.shape[0] % _VOCABULARY_MULTIPLE
        padded = torch.cat([whole, whole.new_zeros(rows, whole.shape[1])])
        yield padded.chunk(size)[index]


def _digest(tensor: Tensor) -> str:
    """SGLang's hash of a tensor on the CPU: the first 8 bytes of SHA-256 over the raw bytes."""
    flat: Any = tensor.detach().contiguous().view(-1).view(torch.uint8).cpu().numpy()
    return hashlib.sha256(flat).hexdigest()[:16]
