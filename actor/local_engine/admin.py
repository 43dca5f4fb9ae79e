"""Bodies of the administrative requests, with SGLang's field names and defaults."""

from __future__ import annotations

from typing import Literal

import msgspec

from vagen.actor.local_engine.engine import PauseMode
from vagen.common.weight_transfer import LowRankUpdate

__all__ = [
    "AbortBody",
    "BeginUpdateBody",
    "CheckerBody",
    "DestroyGroupBody",
    "DiskUpdateBody",
    "EmptyBody",
    "EndUpdateBody",
    "InitGroupBody",
    "PauseBody",
    "UpdateBody",
]


class Body(msgspec.Struct, forbid_unknown_fields=True):
    """Base of all of them: unknown fields are refused."""


class EmptyBody(Body):
    """`{}`."""


class PauseBody(Body):
    """`/pause_generation`."""

    mode: PauseMode = "abort"


class AbortBody(Body):
    """`/abort_request`: all requests whose id begins with `rid`, or all."""

    rid: str = ""
    abort_all: bool = False


class InitGroupBody(Body):
    """`/init_weights_update_group`; this engine is the member `rank_offset`."""

    master_address: str
    master_port: int
    rank_offset: int
    world_size: int
    group_name: str = "weight_update_group"
    backend: Literal["gloo", "nccl"] = "nccl"
    timeout_s: float | None = None
    """Not in SGLang: bounds the waits of this group where it is less than `engine.broadcast_timeout_s`."""


class DestroyGroupBody(Body):
    """`/destroy_weights_update_group`."""

    group_name: str = "weight_update_group"


class BeginUpdateBody(Body):
    """`/begin_weight_update`."""

    updates: list[LowRankUpdate] = []
    """Not in SGLang: low-rank updates whose factors are among the tensors that follow."""


class UpdateBody(Body):
    """`/update_weights_from_distributed`: what rank 0 broadcasts next, in this order."""

    names: list[str]
    dtypes: list[str]
    shapes: list[list[int]]
    group_name: str = "weight_update_group"
    flush_cache: bool = True
    """There is no prefix cache to flush, and image features never outlive the weights."""
    weight_version: str | None = None
    load_format: Literal["flattened_bucket"] | None = None


class EndUpdateBody(Body):
    """`/end_weight_update`; a version here outranks those of the single updates."""

    weight_version: str | None = None


class DiskUpdateBody(Body):
    """`/update_weights_from_disk`: a whole model folder, begun and ended in one request."""

    model_path: str
    load_format: Literal["auto", "safetensors"] | None = None
    """Only safetensors are read, whatever it says."""
    weight_version: str | None = None
    flush_cache: bool = True


class CheckerBody(Body):
    """`/weights_checker`."""

    action: Literal["checksum"]
