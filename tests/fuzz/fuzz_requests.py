"""A coverage-guided fuzzer of `read_request`, run by `make fuzz SECONDS=60`.

An input is a payload or a control message behind one byte that says which; the envelope is made to fit, so that the
fuzzer need not guess checksums. Found is what ends in an exception, in a check that met a value which no earlier check
had seen, or in more memory than the stated multiple of the message. libFuzzer writes the input into the corpus folder.
"""

from __future__ import annotations

import logging
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import atheris
import msgpack

with atheris.instrument_imports(include=["vagen.buffer.requests", "vagen.common"]):
    from vagen.buffer.requests import BadPut, Put, Request, read_request
    from vagen.common.wire import Kind

import xxhash
from ulid import ULID

from vagen.common.wire import (
    CreditRequest,
    EngineAnnouncement,
    EpisodeFailed,
    Heartbeat,
    encode_message,
    encode_trajectory,
)

sys.path.append(str(Path(__file__).parents[1]))
from builders import make_trajectory

VALUES = (0, 1, -1, 2, 1 << 15, 1 << 31, 1 << 53, (1 << 64) - 1, -(1 << 63), 0.5, -0.0, float("nan"), float("inf"))
VALUES = (*VALUES, None, True, "", "x" * 300, "\0", b"", [], {}, ["i4", b"\xff" * 4], ["f4", b"\0\0\xc0\x7f"])
KINDS = (Kind.PUT, Kind.HEARTBEAT, Kind.REQUEST, Kind.FAILED)
ID = ULID.from_str("01ARZ3NDEKTSV4RRFFQ69G5FAV")


class Finding(Exception):
    """Something that must not happen."""


class _Complaints(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        raise Finding(record.getMessage()) from (record.exc_info[1] if record.exc_info else None)


ENVELOPE, PAYLOAD = encode_trajectory(make_trajectory(num_bytes=10, trajectory_id=str(ID)))


def seeds() -> list[bytes]:
    """Valid messages, one of each kind."""
    beat = Heartbeat(
        run_id="run",
        actor_id="a",
        incarnation="i",
        journalled=1,
        in_flight=0,
        running_tasks=(1, 2),
        engines=(EngineAnnouncement(url="http://h:1", kind="local", incarnation="e"),),
    )
    ask = CreditRequest(run_id="run", actor_id="a", want=1)
    failed = EpisodeFailed(run_id="run", actor_id="a", task_index=1, attempt=0, error="x")
    return [b"\0" + PAYLOAD, *(bytes([i]) + encode_message(m) for i, m in enumerate((beat, ask, failed), 1))]


def read(data: bytes) -> Request:
    """The request in one input."""
    kind, body = KINDS[data[0] % len(KINDS)] if data else Kind.PUT, data[1:]
    if kind is not Kind.PUT:
        return read_request([memoryview(frame) for frame in (b"peer", kind.value, body)], "run", 1 << 20)
    sealed = len(body).to_bytes(4, "little") + xxhash.xxh3_64_intdigest(body).to_bytes(8, "little")
    frames = (b"peer", kind.value, ENVELOPE[:36] + sealed + ENVELOPE[48:], body)
    return read_request([memoryview(frame) for frame in frames], "run", 1 << 20)


def check(data: bytes) -> None:
    """Raises `Finding`, or whatever `read_request` lets through."""
    request = read(data)
    if isinstance(request, BadPut) and len(request.field) > 200:
        raise Finding(f"a field of {len(request.field)} characters: {request.field[:80]}")
    if isinstance(request, Put) and request.trajectory_id != str(ID):
        raise Finding("stored under another id")


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every container inside plain data with each of its keys."""
    for key in list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
        yield value, key
        yield from places(value[key])


def mutate(data: bytes, max_size: int, seed: int) -> bytes:
    """Another value somewhere inside a message that still is msgpack; otherwise what libFuzzer does to bytes."""
    chance = random.Random(seed)
    try:
        found = list(places(plain := msgpack.unpackb(data[1:])))
    except (ValueError, RecursionError, msgpack.exceptions.UnpackException):
        found = []
    if not found or chance.random() < 0.3:
        return atheris.Mutate(data, max_size)
    container, key = chance.choice(found)
    container[key] = chance.choice([*VALUES, chance.getrandbits(32)])
    return (data[:1] + msgpack.packb(plain))[:max_size]


def main() -> None:
    """Arguments are libFuzzer's; the last one is the corpus folder, which gets the seeds."""
    corpus = Path(sys.argv[-1])
    corpus.mkdir(parents=True, exist_ok=True)
    for index, seed in enumerate(seeds()):
        (corpus / f"seed-{index}").write_bytes(seed)
        if not isinstance(read(seed), Request):
            raise Finding(f"seed {index} is not valid")
        check(seed)
    logging.getLogger("vagen").addHandler(_Complaints())
    options = [*sys.argv[:-1], f"-artifact_prefix={corpus}/", "-rss_limit_mb=1024", str(corpus)]
    atheris.Setup(options, check, custom_mutator=mutate)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
