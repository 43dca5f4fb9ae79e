"""The fuzzer runs, gets past the seeds and finds nothing; what it has found before stays mended."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

FUZZER = Path(__file__).with_name("fuzz_requests.py")

needs_atheris = pytest.mark.skipif(
    importlib.util.find_spec("atheris") is None, reason="atheris is there for Linux on x86-64 only"
)


@needs_atheris
@pytest.mark.slow
def test_twenty_seconds_find_nothing(tmp_path):
    corpus = tmp_path / "corpus"
    command = [sys.executable, FUZZER, "-max_total_time=20", "-max_len=4096", "-timeout=10", corpus]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    (count,) = re.findall(r"Done (\d+) runs", done.stderr)
    assert int(count) > 1000
    assert len(list(corpus.iterdir())) > 20, "coverage led it past the seeds"
