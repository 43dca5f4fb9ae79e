"""Memory that messages have used is used again rather than faulted in anew, and goes back when it must."""

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


FRAGMENTED = """
import psutil
from vagen.common.memory import keep_freed_memory, release_freed_memory
keep_freed_memory()
messages, small = [], []
for _ in range(400):
    messages.append(bytearray(b"x" * (1 << 20)))
    small.append(bytearray(b"x" * 10_000))
del messages
before = psutil.Process().memory_info().rss
release_freed_memory()
print(before - psutil.Process().memory_info().rss)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="malloc_trim is glibc's")
def test_freed_memory_between_blocks_in_use_goes_back_on_demand():
    command = [sys.executable, "-c", FRAGMENTED]
    released = int(subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout)
    assert released > 200 << 20, "of 400 MB"
