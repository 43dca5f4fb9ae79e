"""What hostile bytes may cost: memory and time of decoding are bounded whatever a message says of itself."""

from __future__ import annotations

import json
import logging
import time
import tracemalloc

import msgpack
import msgspec
import numpy as np
import pytest
import xxhash
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from vagen.buffer.requests import BadPut, Beat, Malformed, Put, read_request
from vagen.common.wire import DECODE_ALLOWANCE_BYTES, MAX_EXPANSION, Kind, encode_message, encode_trajectory

CAPACITY = 1 << 30


def sealed(envelope, payload):
    """An envelope that fits the payload: its length and checksum in place (offsets 36 and 40)."""
    head = envelope[:36] + len(payload).to_bytes(4, "little") + xxhash.xxh3_64_intdigest(payload).to_bytes(8, "little")
    return head + envelope[48:]


def read(kind, *frames):
    return read_request([memoryview(frame) for frame in (b"peer", kind.value, *frames)], "run", CAPACITY)


def read_payload(envelope, payload):
    return read(Kind.PUT, sealed(envelope, payload), payload)


def cost(call):
    """What a call returns, and the most bytes that it held."""
    tracemalloc.start()
    try:
        return call(), tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def nested(header, depth, entry, count):
    """`depth` lists, each with `count` entries before the next one."""
    return b"".join(header + entry * count for _ in range(depth)) + b"\xc0"


def attacks():
    array = b"\xdc\x0f\xff"
    yield "lists that announce what never comes", array * 1020
    yield "lists that announce more than any may have", b"\xdc\xff\xff" * 1020
    yield "32-bit lengths", b"\xdd\xff\xff\xff\xff" * 1000
    yield "a map of 2^32", b"\xdf\xff\xff\xff\xff"
    yield "binary of 2^32", b"\xc6\xff\xff\xff\xff"
    yield "empty lists", nested(array, 100, b"\x90", 4094)
    yield "empty maps", nested(array, 100, b"\x80", 4094)
    yield "maps of one", nested(array, 50, b"\x81\xa1a\xc0", 4094)
    yield "short strings in open lists", nested(array, 30, b"\xa2\xc3\xa9", 4094)
    yield "distinct strings in open lists", (array + b"".join(b"\xa3%03d" % (i % 1000) for i in range(4094))) * 20
    yield "depth", b"\x91" * 100_000
    yield "timestamps", b"\x91\xd6\xff\x00\x00\x00\x00"
    yield "bad utf-8", b"\x81\xa1\xff\xc0"


@pytest.mark.parametrize(("name", "payload"), [pytest.param(*attack, id=attack[0]) for attack in attacks()])
def test_no_bytes_unpack_to_more_than_the_stated_multiple(make_trajectory, name, payload):
    envelope, _ = encode_trajectory(make_trajectory())
    started = time.monotonic()
    read_payload(envelope, payload)
    assert time.monotonic() - started < 5
    request, peak = cost(lambda: read_payload(envelope, payload))
    assert isinstance(request, BadPut) and request.field == "payload"
    allowance = DECODE_ALLOWANCE_BYTES if "announce" in name else 1 << 20
    assert peak <= MAX_EXPANSION * len(payload) + allowance
    request, peak = cost(lambda: read(Kind.HEARTBEAT, payload[: 1 << 20]))
    assert isinstance(request, Malformed)
    assert peak <= MAX_EXPANSION * len(payload) + allowance


def test_honest_trajectory_of_a_thousand_tiny_turns_is_within_the_limits(make_trajectory):
    replace = msgspec.structs.replace
    one = make_trajectory(num_bytes=10)
    turns, rewards, rows = [], [], []
    for index in range(1000):
        row = replace(one.rows[0], turn_index=np.where(one.rows[0].policy_mask, index, -1).astype(np.int16))
        rows.append(row)
        turns.append(replace(one.turns[0], index=index, row=index, metrics={"a": 1.0, "b": 2.0}))
        rewards += [replace(one.rewards[0], row=index), replace(one.rewards[0], row=index, component="format")]
    long = replace(one, rows=tuple(rows), turns=tuple(turns), rewards=tuple(rewards))
    assert isinstance(read(Kind.PUT, *encode_trajectory(long)), Put)


def test_images_that_claim_one_long_span_many_times_cost_nothing(make_trajectory):
    replace = msgspec.structs.replace
    trajectory = make_trajectory(num_bytes=10)
    row, length = trajectory.rows[0], 1 << 16
    image = replace(row.images[0], grid_thw=(1, 512, 512), num_tokens=1 << 16, start=0)
    ids = np.full(length + 3, 9, np.int32)
    ids[-3:] = 50
    mask = np.zeros(length + 3, np.uint8)
    mask[-3:] = 1
    row = replace(
        row,
        token_ids=ids,
        policy_mask=mask,
        behaviour_logprobs=np.zeros(length + 3, np.float32),
        policy_versions=np.where(mask, 1, -1).astype(np.int32),
        turn_index=np.where(mask, 0, -1).astype(np.int16),
        images=(image,) * 300,
    )
    turn = replace(trajectory.turns[0], start=length, end=length + 3)
    envelope, payload = encode_trajectory(replace(trajectory, rows=(row,), turns=(turn,)))
    request, peak = cost(lambda: read_payload(envelope, payload))
    assert isinstance(request, BadPut) and request.field == "rows[0].images[1].start"
    assert peak <= 8 * len(payload)


def test_vision_vocabulary_that_would_take_minutes_is_refused(make_trajectory):
    vision = msgspec.structs.replace(make_trajectory().vision, forbidden_token_ids=tuple(range(9, 4000)))
    request = read(Kind.PUT, *encode_trajectory(make_trajectory(vision=vision)))
    assert request.field == "vision.forbidden_token_ids"


def test_duplicate_key_is_refused(make_trajectory):
    envelope, payload = encode_trajectory(make_trajectory(num_bytes=10))
    twice = bytes([payload[0], payload[1], payload[2] + 1]) + msgpack.packb("success") + b"\xc2" + payload[3:]
    assert payload[0] == 0xDE, "a 16-bit map"
    request = read_payload(envelope, twice)
    assert isinstance(request, BadPut) and "twice" in request.problem


@pytest.mark.parametrize(
    "name", ["images[x", "a]b", "[", "\n", "x" * 5000, "é" * 32, "%", "../p:", "}:stat", "\x00", "*", "vagen:{other}:"]
)
def test_names_of_images_cannot_become_labels(make_trajectory, name):
    envelope, payload = encode_trajectory(make_trajectory(num_bytes=10))
    plain = msgpack.unpackb(payload)
    plain["images"] = {name: b"x"}
    plain["rows"][0]["images"][0]["content_hash"] = name
    request = read_payload(envelope, msgpack.packb(plain))
    assert isinstance(request, BadPut) and request.field == "images"


@pytest.mark.parametrize(
    "fields",
    [
        {"url": "file:///etc/passwd"},
        {"url": "http://" + "x" * 5000},
        {"url": "http://h\nX: y"},
        {"kind": "x" * 5000},
        {"incarnation": "x" * 5000},
    ],
)
def test_engines_that_nobody_could_use_are_refused(heartbeat, fields):
    engine = msgspec.structs.replace(heartbeat().engines[0], **fields)
    assert isinstance(read(Kind.HEARTBEAT, encode_message(heartbeat(engines=(engine,)))), Malformed)
    assert isinstance(read(Kind.HEARTBEAT, encode_message(heartbeat(engines=heartbeat().engines * 65))), Malformed)
    assert isinstance(read(Kind.HEARTBEAT, encode_message(heartbeat())), Beat)


def paths(value, at=()):
    """Paths to everything inside plain data."""
    yield at
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield from paths(inner, (*at, key))


NUMBERS = st.one_of(
    st.sampled_from([-1, 0, 1, 1 << 15, 1 << 31, (1 << 53) - 1, 1 << 53, (1 << 63) - 1, (1 << 64) - 1, -(1 << 63)]),
    st.floats(),
    st.integers(-(1 << 63), (1 << 64) - 1),
)
ARRAYS = st.builds(
    lambda code, raw: [code, raw],
    st.sampled_from(["i4", "u1", "f4", "i2", "f8", "O", "", "<i4"]),
    st.one_of(st.binary(max_size=64), st.sampled_from([b"\xff" * 40, b"\x00\x00\xc0\x7f" * 10, b"\x00" * 20])),
)
VALUES = st.one_of(NUMBERS, ARRAYS, st.none(), st.booleans(), st.text(max_size=300), st.binary(max_size=64))


@st.composite
def damage(draw, payload):
    """A payload with something wrong at one to three places: values of other types, lists that grow, bits, cuts."""
    plain = msgpack.unpackb(payload)
    for _ in range(draw(st.integers(1, 3))):
        path = draw(st.sampled_from([path for path in paths(plain) if path]))
        inner = plain
        for key in path[:-1]:
            inner = inner[key]
        match draw(st.sampled_from(["replace", "repeat", "remove", "move"])):
            case "repeat" if isinstance(inner, list):
                inner[path[-1] : path[-1] + 1] = [inner[path[-1]]] * draw(st.integers(2, 50))
            case "remove":
                del inner[path[-1]]
            case "move":
                inner[path[-1]] = inner[draw(st.sampled_from(list(inner) if isinstance(inner, dict) else [0]))]
            case _:
                inner[path[-1]] = draw(VALUES)
    raw = bytearray(msgpack.packb(plain))
    for _ in range(draw(st.integers(0, 3))):
        raw[draw(st.integers(0, len(raw) - 1))] ^= 1 << draw(st.integers(0, 7))
    return bytes(raw[: draw(st.one_of(st.just(len(raw)), st.integers(0, len(raw))))])


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_damaged_trajectory_is_refused_or_valid_and_never_breaks_its_validation(make_trajectory, caplog, data):
    envelope, payload = encode_trajectory(make_trajectory(num_bytes=10))
    payload = data.draw(damage(payload))
    with caplog.at_level(logging.ERROR):
        request, peak = cost(lambda: read_payload(envelope, payload))
    assert isinstance(request, Put | BadPut)
    assert not caplog.records, "numpy or the interpreter met a value that no check had seen"
    assert peak <= 2 << 20
    if isinstance(request, BadPut):
        assert len(request.field) <= 200 and json.dumps(request.problem)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_damaged_control_message_is_refused_or_valid(heartbeat, data):
    body = data.draw(damage(encode_message(heartbeat(running_tasks=(1, 2, 3)))))
    kind = data.draw(st.sampled_from([Kind.HEARTBEAT, Kind.REQUEST, Kind.FAILED]))
    request, peak = cost(lambda: read(kind, body))
    assert isinstance(request, Beat | Malformed)
    assert peak <= 1 << 20
