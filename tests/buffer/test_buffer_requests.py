"""Bytes from anybody become a request or a reason, and never an exception."""

from __future__ import annotations

import msgpack
import msgspec
import numpy as np
import pytest
import xxhash
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from vagen.buffer.requests import Ask, BadPut, Beat, Malformed, Put, read_request
from vagen.common.wire import CreditRequest, Kind, encode_message, encode_trajectory

CAPACITY = 1 << 20


def read(*frames, run="run"):
    return read_request([memoryview(frame) for frame in (b"peer", *frames)], run, CAPACITY)


def with_payload(envelope, payload):
    """The envelope of another payload: its length and checksum in place of the old ones (offsets 36 and 40)."""
    head = envelope[:36] + len(payload).to_bytes(4, "little") + xxhash.xxh3_64_intdigest(payload).to_bytes(8, "little")
    return head + envelope[48:], payload


def test_good_messages(make_trajectory, heartbeat):
    assert isinstance(read(Kind.PUT.value, *encode_trajectory(make_trajectory())), Put)
    assert isinstance(read(Kind.HEARTBEAT.value, encode_message(heartbeat())), Beat)
    ask = CreditRequest(run_id="run", actor_id="a", want=3)
    assert read(Kind.REQUEST.value, encode_message(ask)).message.want == 3


def test_envelope_must_agree_with_the_payload(make_trajectory):
    envelope, payload = encode_trajectory(make_trajectory())
    _, other_payload = encode_trajectory(make_trajectory(actor_seq=2))
    same_id = msgpack.unpackb(payload)
    same_id["actor_seq"] = 2
    for frames, field in [
        ((envelope, other_payload), "payload"),
        (with_payload(envelope, other_payload), "trajectory_id"),
        (with_payload(envelope, msgpack.packb(same_id)), "actor_seq"),
        ((envelope, payload[:-1]), "payload"),
        ((envelope, payload[:-1] + b"\1"), "payload"),
        (with_payload(envelope, b"\xc1"), "payload"),
        (with_payload(envelope, b"\x91" * 100000), "payload"),
        (with_payload(envelope, msgpack.packb({"rows": []})), "payload"),
    ]:
        bad = read(Kind.PUT.value, *frames)
        assert isinstance(bad, BadPut), frames
        assert bad.field == field
        assert bad.origin is None


def test_oldest_version_of_the_envelope(make_trajectory):
    envelope, payload = encode_trajectory(make_trajectory(version=5))
    wrong, _ = encode_trajectory(make_trajectory(version=6))
    mixed = envelope[:24] + wrong[24:36] + envelope[36:]
    bad = read(Kind.PUT.value, mixed, payload)
    assert (type(bad), bad.field) == (BadPut, "policy_versions")
    assert bad.origin is not None, "the identity is known, so the lease may end"


def test_what_this_buffer_cannot_hold(make_trajectory):
    bad = read(Kind.PUT.value, *encode_trajectory(make_trajectory(group_size=1000)))
    assert (bad.field, "capacity_bytes" in bad.problem) == ("payload", True)
    bad = read(Kind.PUT.value, *encode_trajectory(make_trajectory()), run="other")
    assert bad.field == "run_id"


@pytest.mark.parametrize(
    "frames",
    [
        (),
        (b"",),
        (b"P",),
        (b"P", b"short", b""),
        (b"P", b"x" * 64, b""),
        (b"Z", b"", b""),
        (b"H", b"\xc1"),
        (b"H", msgpack.packb({"run_id": 3})),
        (b"C", msgpack.packb({"run_id": "run", "actor_id": "a", "want": -1})),
        (b"C", msgpack.packb({"run_id": "run", "actor_id": "", "want": 1})),
        (b"C", msgpack.packb({"run_id": "other", "actor_id": "a", "want": 1})),
        (b"C", msgpack.packb({"run_id": "run", "actor_id": "a", "want": 1 << 63})),
        (b"A", b"x" * 16),
    ],
)
def test_malformed(frames):
    assert isinstance(read(*frames), Malformed)


def plain_values():
    leaves = st.one_of(
        st.none(), st.booleans(), st.integers(-(1 << 63), (1 << 64) - 1), st.floats(), st.text(max_size=8), st.binary()
    )
    return st.recursive(leaves, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner))


def paths(value, at=()):
    """Paths to everything inside plain data."""
    yield at
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield from paths(inner, (*at, key))


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_value_anywhere_is_refused_or_valid(make_trajectory, data):
    envelope, payload = encode_trajectory(make_trajectory(num_bytes=10))
    plain = msgpack.unpackb(payload)
    path = data.draw(st.sampled_from([path for path in paths(plain) if path]))
    inner = plain
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = data.draw(plain_values())
    request = read(Kind.PUT.value, *with_payload(envelope, msgpack.packb(plain)))
    assert isinstance(request, Put | BadPut)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.binary(max_size=200), max_size=5))
def test_any_frames(frames):
    assert isinstance(read(*frames), Malformed | BadPut | Ask | Beat)


def test_hostile_array_is_named(make_trajectory):
    trajectory = make_trajectory()
    logprobs = trajectory.rows[0].behaviour_logprobs.copy()
    logprobs[8] = np.nan
    row = msgspec.structs.replace(trajectory.rows[0], behaviour_logprobs=logprobs)
    bad = read(Kind.PUT.value, *encode_trajectory(msgspec.structs.replace(trajectory, rows=(row,))))
    assert bad.field == "rows[0].behaviour_logprobs"
