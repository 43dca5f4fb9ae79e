"""The codec: what goes in comes out, and nothing else gets in."""

from __future__ import annotations

import msgpack
import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vagen.common import wire
from vagen.common.errors import TrajectoryError, WireError
from vagen.common.trajectory import Trajectory
from vagen.common.validation import validate_trajectory


def same(a: object, b: object) -> bool:
    if isinstance(a, np.ndarray):
        return isinstance(b, np.ndarray) and a.dtype == b.dtype and np.array_equal(a, b)
    if hasattr(a, "__struct_fields__"):
        return all(same(getattr(a, name), getattr(b, name)) for name in a.__struct_fields__)
    if isinstance(a, tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b


def test_round_trip_keeps_every_field(make_trajectory):
    trajectory = make_trajectory()
    turns = (msgspec.structs.replace(trajectory.turns[0], state="the goal is\nnear"),)
    trajectory = msgspec.structs.replace(trajectory, turns=turns)
    envelope_frame, payload = wire.encode_trajectory(trajectory)
    envelope = wire.decode_envelope(envelope_frame)
    wire.check_payload(envelope, payload)
    back = wire.decode_trajectory(payload)
    assert isinstance(back, Trajectory)
    assert same(trajectory, back)
    assert envelope.oldest_version == trajectory.oldest_version
    validate_trajectory(back)


def test_checksum_and_length_are_checked(make_trajectory):
    frame, payload = wire.encode_trajectory(make_trajectory())
    envelope = wire.decode_envelope(frame)
    broken = bytearray(payload)
    broken[len(broken) // 2] ^= 1
    for bad in (payload[:-1], payload + b"x", bytes(broken)):
        with pytest.raises(WireError):
            wire.check_payload(envelope, bad)


@pytest.mark.parametrize("frame", [b"", b"VAGT", b"x" * 64, b"VAGT" + b"\xff" * 60])
def test_envelopes_that_are_none(frame):
    with pytest.raises(WireError):
        wire.decode_envelope(frame)


@pytest.mark.parametrize(
    ("path", "value", "field"),
    [
        (("rows", 0, "token_ids"), ["i8", b"12345678"], "rows[0].token_ids"),
        (("rows", 0, "token_ids"), ["i4", b"12345"], "rows[0].token_ids"),
        (("rows", 0, "token_ids"), [1, 2, 3], "rows[0].token_ids"),
        (("actor_seq",), "one", "actor_seq"),
        (("end",), "finished", "end"),
        (("surprise",), 1, "payload"),
        (("turns", 0, "row"), None, "turns[0].row"),
    ],
)
def test_wrong_types_name_the_field(make_trajectory, path, value, field):
    plain = msgpack.unpackb(wire.encode_trajectory(make_trajectory())[1])
    node = plain
    for key in path[:-1]:
        node = node[key]
    node[path[-1]] = value
    with pytest.raises(TrajectoryError) as caught:
        wire.decode_trajectory(msgpack.packb(plain))
    assert caught.value.field == field


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=400))
def test_garbage_never_gets_past_the_decoder(garbage):
    with pytest.raises((WireError, TrajectoryError)):
        wire.decode_trajectory(garbage)
    with pytest.raises(WireError):
        wire.decode_message(garbage, wire.Heartbeat)


def test_deeply_nested_and_oversized_bodies_are_refused():
    with pytest.raises(WireError):
        wire.decode_trajectory(b"\x91" * 200_000)
    with pytest.raises(WireError, match="at most"):
        wire.decode_message(b"\xc0" * (wire.MAX_CONTROL_BYTES + 1), wire.Status)
    with pytest.raises(WireError):
        wire.decode_trajectory(b"\xdd\xff\xff\xff\xff")
