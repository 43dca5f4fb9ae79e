"""How actor and buffer talk: frames over a ZeroMQ DEALER/ROUTER pair, MessagePack inside, never pickle.

    actor -> buffer                                     buffer -> actor
    PUT        envelope (fixed 64 bytes), payload       ACK     concatenated 16-byte trajectory ids
    HEARTBEAT  Heartbeat                                STATUS  Status
    REQUEST    CreditRequest                            GRANT   Grant
    FAILED     EpisodeFailed                            REFUSE  Refusal

The first frame of a message is its one-byte kind. A payload is one msgpack map with the images inside. Decoding is
bounded: sizes are checked before anything is allocated, lists and maps are counted while they are made, then come types
against the schema, then `validate_trajectory`. Whatever the bytes are, decoding them allocates at most
`MAX_EXPANSION` times their number and `DECODE_ALLOWANCE_BYTES`.
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Callable
from typing import Any, TypeVar

import msgpack
import msgspec
import numpy as np
import xxhash
from ulid import ULID

from vagen.common.errors import TrajectoryError, WireError
from vagen.common.trajectory import SCHEMA_VERSION, Record, Trajectory
from vagen.common.validation import MAX_ITEMS

MAX_PAYLOAD_BYTES = 64 << 20
MAX_CONTROL_BYTES = 1 << 20
MAX_CONTROL_ITEMS = 1 << 14
"""The same of a control message; a heartbeat lists the tasks that run."""
MAX_ENGINES = 64
"""That one actor may announce."""
MAX_EXPANSION = 40
DECODE_ALLOWANCE_BYTES = 192 << 20
"""Mostly for lists that announce more entries than follow: `MAX_CONTROL_ITEMS` of 8 bytes at each level."""
_FREE_ENTRIES = 1 << 14
_BYTES_PER_ENTRY = 8
_MAX_ENTRIES = 1 << 20
"""A list or map costs a hundred bytes of memory for one of the message, so their entries are limited by its length.
The densest honest trajectories have 12 bytes an entry, the longest some 300,000 entries."""
_TOO_MANY = "too many lists, maps and entries for its length"

_ENVELOPE = struct.Struct("<4sHH16sQiIQ16x")
ENVELOPE_BYTES = _ENVELOPE.size
_MAGIC = b"VAGT"
_DTYPES: dict[str, np.dtype] = {code: np.dtype(f"<{code}") for code in ("i4", "u1", "f4", "i2")}
_CODES = {dtype: code for code, dtype in _DTYPES.items()}


class Kind(bytes, enum.Enum):
    """First frame of every message."""

    PUT = b"P"
    HEARTBEAT = b"H"
    REQUEST = b"C"
    FAILED = b"F"
    ACK = b"A"
    STATUS = b"S"
    GRANT = b"G"
    REFUSE = b"R"


class Envelope(Record, frozen=True, kw_only=True):
    """Fixed-size head of a put: what the ingest needs before it looks inside."""

    trajectory_id: bytes
    """16 bytes of the ULID."""
    actor_seq: int
    oldest_version: int
    num_bytes: int
    """Length of the payload."""
    checksum: int
    """xxh3-64 of the payload."""


class EngineAnnouncement(Record, frozen=True, kw_only=True):
    """An engine that an actor uses; the learner publishes weights to it."""

    url: str
    kind: str
    incarnation: str


class EngineStatus(Record, frozen=True, kw_only=True):
    """An engine that may take traffic: its weights' checksum matched at `policy_version`."""

    url: str
    incarnation: str
    policy_version: int
    is_late: bool = False
    """Its weights are so old that no new episode may be played on it."""


class Heartbeat(Record, frozen=True, kw_only=True):
    """Renews an actor's leases and reports its side of the accounting."""

    run_id: str
    actor_id: str
    incarnation: str
    """Changes with every start of the actor process."""
    journalled: int
    """Highest sequence number that the actor has journalled."""
    in_flight: int
    """Journalled and neither acked nor refused, counted by the actor."""
    running_tasks: tuple[int, ...] = ()
    """Task indices of the episodes that run now."""
    engines: tuple[EngineAnnouncement, ...] = ()
    closing: bool = False
    """True in the last heartbeat of an orderly stop: running tasks return at once."""


class CreditRequest(Record, frozen=True, kw_only=True):
    """Asks for up to `want` episodes to start."""

    run_id: str
    actor_id: str
    want: int
    engines: tuple[str, ...] = ()
    """URLs that they would be played on; none: any engine of the run."""


class TaskGrant(Record, frozen=True, kw_only=True):
    """Leave to run one task of the run's global sequence."""

    task_index: int
    attempt: int


class Grant(Record, frozen=True, kw_only=True):
    """Start credits, each a lease on one task."""

    tasks: tuple[TaskGrant, ...]
    lease_s: float
    status: Status


class Status(Record, frozen=True, kw_only=True):
    """What an actor learns from every answer of the buffer."""

    learner_step: int
    """-1 until a learner has registered."""
    policy_version: int
    """-1 until one was published."""
    engines: tuple[EngineStatus, ...]
    """Engines admitted to take traffic."""
    reason: str = ""
    """Why no credit was granted, empty when some was."""
    shard: int = 0
    """Of `num_shards` parts of the run's buffer, the one that answers."""
    num_shards: int = 1


class EpisodeFailed(Record, frozen=True, kw_only=True):
    """An episode ended by an infrastructure failure: counted apart, its task is granted again."""

    run_id: str
    actor_id: str
    task_index: int
    attempt: int
    error: str


class Refusal(Record, frozen=True, kw_only=True):
    """A trajectory that will never be accepted; the actor drops it."""

    trajectory_id: bytes
    field: str
    problem: str


M = TypeVar("M", Heartbeat, CreditRequest, Grant, Status, EpisodeFailed, Refusal)


def encode_trajectory(trajectory: Trajectory) -> tuple[bytes, bytes]:
    """The two frames of a put after its kind: envelope and payload."""
    plain = msgspec.to_builtins(trajectory, builtin_types=(bytes,), enc_hook=_encode_array)
    payload: bytes = msgpack.packb(plain, use_bin_type=True)
    if len(payload) > MAX_PAYLOAD_BYTES:
        raise TrajectoryError("payload", f"expected at most {MAX_PAYLOAD_BYTES} bytes, got {len(payload)}")
    envelope = _ENVELOPE.pack(
        _MAGIC,
        SCHEMA_VERSION,
        0,
        ULID.from_str(trajectory.trajectory_id).bytes,
        trajectory.actor_seq,
        trajectory.oldest_version,
        len(payload),
        xxhash.xxh3_64_intdigest(payload),
    )
    return envelope, payload


def decode_envelope(frame: bytes) -> Envelope:
    """Parse the fixed head of a put. Raises `WireError`."""
    if len(frame) != _ENVELOPE.size:
        raise WireError(f"envelope: expected {_ENVELOPE.size} bytes, got {len(frame)}")
    magic, schema, _, trajectory_id, seq, oldest, num_bytes, checksum = _ENVELOPE.unpack(frame)
    if magic != _MAGIC:
        raise WireError(f"envelope: expected magic {_MAGIC!r}, got {magic!r}")
    if schema != SCHEMA_VERSION:
        raise WireError(f"envelope: expected schema version {SCHEMA_VERSION}, got {schema}")
    return Envelope(
        trajectory_id=trajectory_id, actor_seq=seq, oldest_version=oldest, num_bytes=num_bytes, checksum=checksum
    )


def check_payload(envelope: Envelope, payload: bytes | memoryview) -> None:
    """Length and checksum of a payload against its envelope. Raises `WireError`."""
    if len(payload) != envelope.num_bytes or len(payload) > MAX_PAYLOAD_BYTES:
        raise WireError(
            f"payload: envelope says {envelope.num_bytes} bytes (at most {MAX_PAYLOAD_BYTES}), got {len(payload)}"
        )
    if xxhash.xxh3_64_intdigest(payload) != envelope.checksum:
        raise WireError("payload: checksum differs from the envelope's")


def decode_trajectory(payload: bytes | memoryview) -> Trajectory:
    """Decode a payload within limits; arrays are read-only views of it.

    Raises `WireError` when it is not msgpack within the limits and `TrajectoryError` when a field is missing, unknown
    or of the wrong type. Says nothing of the content: see `validate_trajectory`.
    """
    plain = _unpack(payload, MAX_PAYLOAD_BYTES, MAX_ITEMS)
    try:
        return msgspec.convert(plain, Trajectory, builtin_types=(bytes,), dec_hook=_decode_array)
    except msgspec.ValidationError as error:
        problem, _, path = str(error).partition(" - at `$.")
        raise TrajectoryError(path.rstrip("`") or "payload", problem) from None


def encode_message(message: Heartbeat | CreditRequest | Grant | Status | EpisodeFailed | Refusal) -> bytes:
    """The body frame of a control message."""
    packed: bytes = msgpack.packb(msgspec.to_builtins(message, builtin_types=(bytes,)), use_bin_type=True)
    return packed


def decode_message(body: bytes, kind: type[M]) -> M:
    """Decode the body frame of a control message as `kind`. Raises `WireError` naming the field."""
    try:
        return msgspec.convert(_unpack(body, MAX_CONTROL_BYTES, MAX_CONTROL_ITEMS), kind, builtin_types=(bytes,))
    except msgspec.ValidationError as error:
        raise WireError(f"{kind.__name__}: {error}") from None


def _counted(num_bytes: int) -> tuple[Callable[..., list[Any]], Callable[..., dict[Any, Any]]]:
    """What makes the lists and the maps of one message, and stops when they become too many.

    Closures, since they are called for each of the hundred lists and maps of a trajectory.
    """
    left = min(_FREE_ENTRIES + num_bytes // _BYTES_PER_ENTRY, _MAX_ENTRIES)

    def make_list(items: list[Any]) -> list[Any]:
        nonlocal left
        left -= 1 + len(items)
        if left < 0:
            raise ValueError(_TOO_MANY)
        return items

    def make_map(pairs: list[tuple[Any, Any]]) -> dict[Any, Any]:
        nonlocal left
        num_entries = len(pairs)
        left -= 1 + num_entries
        if left < 0:
            raise ValueError(_TOO_MANY)
        found = dict(pairs)
        if len(found) != num_entries:
            raise ValueError("a key comes twice in one map")
        return found

    return make_list, make_map


def _unpack(body: bytes | memoryview, limit: int, max_items: int) -> Any:
    if len(body) > limit:
        raise WireError(f"expected at most {limit} bytes, got {len(body)}")
    make_list, make_map = _counted(len(body))
    most = min(max_items, len(body))
    try:
        return msgpack.unpackb(
            body,
            raw=False,
            max_array_len=most,
            max_map_len=most,
            max_ext_len=0,
            list_hook=make_list,
            object_pairs_hook=make_map,
        )
    except (ValueError, msgpack.exceptions.UnpackException, msgpack.exceptions.StackError, RecursionError) as error:
        raise WireError(f"not msgpack within the limits: {error}") from None


def _encode_array(value: object) -> object:
    if isinstance(value, np.ndarray) and value.ndim == 1 and value.dtype in _CODES:
        return [_CODES[value.dtype], np.ascontiguousarray(value).tobytes()]
    raise NotImplementedError(f"no wire format for {type(value).__name__} {getattr(value, 'dtype', '')}")


def _decode_array(kind: type, value: object) -> object:
    if kind is not np.ndarray:
        raise NotImplementedError(f"no wire format for {kind.__name__}")
    if not (isinstance(value, list) and len(value) == 2 and isinstance(value[0], str) and isinstance(value[1], bytes)):
        raise ValueError("Expected [dtype, bytes]")
    dtype = _DTYPES.get(value[0])
    if dtype is None:
        raise ValueError(f"Expected a dtype of {', '.join(_DTYPES)}, got {value[0][:16]!r}")
    if len(value[1]) % dtype.itemsize:
        raise ValueError(f"{len(value[1])} bytes are not a whole number of {value[0]}")
    return np.frombuffer(value[1], dtype=dtype)
