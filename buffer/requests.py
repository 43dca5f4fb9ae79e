"""Turns the frames of one message into a request that is checked completely, or into what is wrong with it.

Pure: knows neither sockets nor Redis. Whatever the frames hold, an answer comes back and no exception.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from typing import NamedTuple

import msgspec
from ulid import ULID

from vagen.buffer.selection.priority import NO_DRAW, NO_PRIORITIES, Draw, Prioritizer
from vagen.common.errors import TrajectoryError, WireError
from vagen.common.trajectory import Trajectory
from vagen.common.validation import MAX_NAME_LENGTH, validate_trajectory
from vagen.common.wire import (
    MAX_ENGINES,
    CreditRequest,
    Envelope,
    EpisodeFailed,
    Heartbeat,
    Kind,
    check_payload,
    decode_envelope,
    decode_message,
    decode_trajectory,
)

logger = logging.getLogger(__name__)

MAX_PROBLEM_LENGTH = 500
_ENGINE_URL = re.compile(r"https?://[!-~]{1,256}")
HOSTILE = (ArithmeticError, LookupError, MemoryError, TypeError, ValueError)
"""What numbers and lengths chosen by a hostile sender can raise inside numpy."""


class Origin(NamedTuple):
    """Whose trajectory of which task it is: all that is kept of one that is refused."""

    actor_id: str
    actor_seq: int
    task_index: int
    attempt: int

    @classmethod
    def of(cls, trajectory: Trajectory) -> Origin:
        """The origin that a trajectory states."""
        return cls(trajectory.actor_id, trajectory.actor_seq, trajectory.task_index, trajectory.attempt)


class Put(msgspec.Struct, frozen=True):
    """A trajectory that may be stored."""

    peer: bytes
    trajectory: Trajectory
    payload: memoryview
    envelope: Envelope
    draw: Draw = NO_DRAW
    """What it enters the drawing by priority with."""

    @property
    def trajectory_id(self) -> str:
        """ULID of the trajectory."""
        return self.trajectory.trajectory_id

    @property
    def origin(self) -> Origin:
        """Whose trajectory of which task it is."""
        return Origin.of(self.trajectory)


class BadPut(msgspec.Struct, frozen=True):
    """A trajectory that must be refused."""

    peer: bytes
    trajectory_id: str
    field: str
    problem: str
    origin: Origin | None
    """Present where the payload could be decoded and its identity is consistent."""
    payload: memoryview
    envelope: Envelope


class Beat(msgspec.Struct, frozen=True):
    """A heartbeat."""

    peer: bytes
    message: Heartbeat


class Ask(msgspec.Struct, frozen=True):
    """A request for start credits."""

    peer: bytes
    message: CreditRequest


class Failure(msgspec.Struct, frozen=True):
    """An episode that failed."""

    peer: bytes
    message: EpisodeFailed


class Malformed(msgspec.Struct, frozen=True):
    """A message that cannot be attributed to a trajectory."""

    peer: bytes
    kind: bytes
    problem: str


Request = Put | BadPut | Beat | Ask | Failure | Malformed

_CONTROL = (Kind.HEARTBEAT.value, Kind.REQUEST.value, Kind.FAILED.value)


def read_request(
    frames: Sequence[memoryview], run_id: str, capacity_bytes: int, prioritizer: Prioritizer = NO_PRIORITIES
) -> Request:
    """The request in the frames of one message: the peer's routing id, the kind and its parts."""
    peer = bytes(frames[0])
    kind = bytes(frames[1][:8]) if len(frames) > 1 else b""
    if kind == Kind.PUT.value and len(frames) == 4:
        return _read_put(peer, bytes(frames[2][:256]), frames[3], run_id, capacity_bytes, prioritizer)
    if kind in _CONTROL and len(frames) == 3:
        return _read_control(peer, kind, frames[2], run_id)
    return Malformed(peer, kind, f"kind {kind!r} with {len(frames) - 1} frames is no message of ours")


def _read_put(
    peer: bytes, head: bytes, payload: memoryview, run_id: str, capacity_bytes: int, prioritizer: Prioritizer
) -> Put | BadPut | Malformed:
    try:
        envelope = decode_envelope(head)
    except WireError as error:
        return Malformed(peer, Kind.PUT.value, str(error))
    trajectory_id = str(ULID.from_bytes(envelope.trajectory_id))
    origin = None
    try:
        check_payload(envelope, payload)
        decoded = decode_trajectory(payload)
        _check_envelope(decoded, envelope, trajectory_id)
        origin = Origin.of(decoded)
        validate_trajectory(decoded)
        _check_here(decoded, envelope, run_id)
        draw = prioritizer.draw(decoded)
    except TrajectoryError as error:
        field, problem = error.field, error.problem
    except WireError as error:
        field, problem = "payload", str(error)
    except HOSTILE as error:
        logger.exception("trajectory %s broke its own validation", trajectory_id)
        field, problem = "payload", f"{type(error).__name__}: {error}"
    else:
        return check_size(Put(peer, decoded, payload, envelope, draw), capacity_bytes)
    return BadPut(peer, trajectory_id, field, problem[:MAX_PROBLEM_LENGTH], origin, payload, envelope)


def check_size(put: Put, capacity_bytes: int) -> Put | BadPut:
    """The put, or its refusal when it and the rest of its group could never be held at once."""
    trajectory, num_bytes = put.trajectory, len(put.payload)
    if num_bytes * trajectory.group_size <= capacity_bytes:
        return put
    problem = (
        f"a group of {trajectory.group_size} of {num_bytes} bytes exceeds $.buffer.capacity_bytes = {capacity_bytes}"
    )
    return BadPut(put.peer, put.trajectory_id, "payload", problem, Origin.of(trajectory), put.payload, put.envelope)


def _check_envelope(trajectory: Trajectory, envelope: Envelope, trajectory_id: str) -> None:
    if trajectory.trajectory_id != trajectory_id:
        raise TrajectoryError("trajectory_id", f"envelope says {trajectory_id}")
    if trajectory.actor_seq != envelope.actor_seq:
        raise TrajectoryError("actor_seq", f"envelope says {envelope.actor_seq}, payload {trajectory.actor_seq}")
    if not 0 < len(trajectory.actor_id) <= MAX_NAME_LENGTH:
        raise TrajectoryError("actor_id", f"expected 1-{MAX_NAME_LENGTH} characters, got {len(trajectory.actor_id)}")
    if not all(0 <= number < 1 << 53 for number in (trajectory.task_index, trajectory.attempt, trajectory.actor_seq)):
        raise TrajectoryError("task_index", "task_index, attempt and actor_seq must be in [0, 2^53)")


def _check_here(trajectory: Trajectory, envelope: Envelope, run_id: str) -> None:
    """What a valid trajectory must satisfy to be stored in this buffer."""
    if trajectory.run_id != run_id:
        raise TrajectoryError("run_id", f"this buffer serves run {run_id!r}, got {trajectory.run_id!r}")
    if trajectory.oldest_version != envelope.oldest_version:
        raise TrajectoryError(
            "policy_versions", f"envelope says oldest {envelope.oldest_version}, payload {trajectory.oldest_version}"
        )


def _read_control(peer: bytes, kind: bytes, body: memoryview, run_id: str) -> Beat | Ask | Failure | Malformed:
    request: Beat | Ask | Failure
    try:
        if kind == Kind.HEARTBEAT.value:
            request = Beat(peer, decode_message(bytes(body), Heartbeat))
        elif kind == Kind.REQUEST.value:
            request = Ask(peer, decode_message(bytes(body), CreditRequest))
        else:
            request = Failure(peer, decode_message(bytes(body), EpisodeFailed))
        _check_control(request.message, run_id)
    except WireError as error:
        return Malformed(peer, kind, str(error)[:MAX_PROBLEM_LENGTH])
    return request


def _check_control(message: Heartbeat | CreditRequest | EpisodeFailed, run_id: str) -> None:
    if message.run_id != run_id:
        raise WireError(f"run_id: this buffer serves run {run_id!r}, got {message.run_id[:64]!r}")
    if not 0 < len(message.actor_id) <= MAX_NAME_LENGTH:
        raise WireError(f"actor_id: expected 1-{MAX_NAME_LENGTH} characters, got {len(message.actor_id)}")
    numbers: tuple[int, ...]
    match message:
        case Heartbeat():
            _check_engines([engine.url for engine in message.engines])
            _check_names(message)
            numbers = (message.journalled, message.in_flight, *message.running_tasks)
        case CreditRequest():
            _check_engines(message.engines)
            numbers = (message.want,)
        case EpisodeFailed():
            numbers = (message.task_index, message.attempt)
    if not all(0 <= number < 1 << 53 for number in numbers):
        raise WireError("expected every number in [0, 2^53)")


def _check_engines(urls: Sequence[str]) -> None:
    if len(urls) > MAX_ENGINES:
        raise WireError(f"engines: expected at most {MAX_ENGINES}, got {len(urls)}")
    for url in urls:
        if _ENGINE_URL.fullmatch(url) is None:
            raise WireError(f"engines: expected http://HOST:PORT, got {url[:64]!r}")


def _check_names(message: Heartbeat) -> None:
    names = [message.incarnation, *(name for engine in message.engines for name in (engine.kind, engine.incarnation))]
    if max(map(len, names)) > MAX_NAME_LENGTH:
        raise WireError(f"incarnation and kind: expected at most {MAX_NAME_LENGTH} characters")
