"""Memory that messages have used is used again, rather than given back and faulted in anew."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import resource
from vagen.common.memory import keep_freed_memory
if {keep}:
    keep_freed_memory()
for _ in range(3):
    messages = [bytes(300_000) for _ in range(32)]
    del messages
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(20):
    messages = [bytearray(300_000) for _ in range(32)]
    for message in messages:
        message[::4096] = b"x" * len(message[::4096])
    del messages
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def page_faults(keep: bool) -> int:
    command = [sys.executable, "-c", PROGRAM.format(keep=keep)]
    return int(subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="mallopt is glibc's")
def test_payloads_do_not_fault_their_pages_in_again():
    assert page_faults(keep=True) < page_faults(keep=False) / 10
