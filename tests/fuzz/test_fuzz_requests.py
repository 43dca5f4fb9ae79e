"""The fuzzer runs, gets past the seeds and finds nothing; what it has found before stays mended."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import msgpack
import pytest
import xxhash

from vagen.buffer.requests import BadPut, read_request
from vagen.common.wire import encode_trajectory

FUZZER = Path(__file__).with_name("fuzz_requests.py")

needs_atheris = pytest.mark.skipif(
    importlib.util.find_spec("atheris") is None, reason="atheris is there for Linux on x86-64 only"
)


@needs_atheris
@pytest.mark.slow
def test_twenty_seconds_find_nothing(tmp_path):
    corpus = tmp_path / "corpus"
    # libFuzzer bounds the peak of a process, which Linux lets a child begin with: a shell's is small, pytest's is not.
    shell = ["sh", "-c", '"$@"; exit $?', "sh"]
    command = [*shell, sys.executable, FUZZER, "-max_total_time=20", "-max_len=4096", "-timeout=10", corpus]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    (count,) = re.findall(r"Done (\d+) runs", done.stderr)
    assert int(count) > 1000
    assert len(list(corpus.iterdir())) > 20, "coverage led it past the seeds"


@pytest.mark.parametrize(
    ("path", "value", "field"),
    [
        (("turns", 0, "index"), (1 << 64) - 1, "turns[0].index"),
        (("turns", 0, "index"), -(1 << 63), "turns[0].index"),
        (("vision", "image_token_id"), (1 << 64) - 1, "vision"),
        (("vision", "merge_size"), 0, "vision.merge_size"),
    ],
)
def test_what_was_found_stays_mended(make_trajectory, caplog, path, value, field):
    """Numbers that once reached numpy, which raised: refused, but with a traceback in the log for each message."""
    envelope, payload = encode_trajectory(make_trajectory(num_bytes=10))
    plain = inner = msgpack.unpackb(payload)
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    damaged = msgpack.packb(plain)
    sealed = len(damaged).to_bytes(4, "little") + xxhash.xxh3_64_intdigest(damaged).to_bytes(8, "little")
    frames = (b"peer", b"P", envelope[:36] + sealed + envelope[48:], damaged)
    refused = read_request([memoryview(frame) for frame in frames], "run", 1 << 20)
    assert isinstance(refused, BadPut) and refused.field == field
    assert not caplog.records
