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


COLLECTIONS = """
import gc
from vagen.common.memory import collect_rarely
imported = [[number] for number in range(100_000)]
if {rarely}:
    collect_rarely()
started = gc.get_stats()[0]["collections"]
for _ in range(300):
    trajectory = [[] for _ in range(300)]
print(gc.get_stats()[0]["collections"] - started, len(gc.get_objects()))
"""


def test_the_collector_leaves_alone_what_was_imported_and_trajectories_that_end_without_it():
    def run(rarely: bool) -> list[int]:
        command = [sys.executable, "-c", COLLECTIONS.format(rarely=rarely)]
        output = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
        return [int(word) for word in output.split()]

    collections, objects = run(rarely=True)
    assert collections == 0 and objects < 10_000
    collections, objects = run(rarely=False)
    assert objects > 100_000
