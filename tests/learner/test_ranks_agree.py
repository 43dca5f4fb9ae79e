"""What one rank of a learner is told, all do: a rank that left alone would leave the others in a collective."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from vagen.buffer.learner_store import LearnerStore

WORKER = Path(__file__).with_name("waiting_worker.py")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture
def ranks(valkey):
    """Two ranks that wait for data."""
    LearnerStore.connect(valkey.url, "run").register("learner", step=3, batch_size=4, max_staleness=2)
    place = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    started = [
        subprocess.Popen(
            [sys.executable, str(WORKER), valkey.url],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **place, "RANK": str(rank), "LOCAL_RANK": str(rank)},
        )
        for rank in range(2)
    ]
    try:
        assert [rank.stdout.readline() for rank in started] == ["waiting\n"] * 2
        yield started
    finally:
        for rank in started:
            rank.kill()
            rank.wait()


@pytest.mark.slow
@pytest.mark.parametrize("told", [0, 1])
def test_all_ranks_stop_when_one_is_told(ranks, told):
    ranks[told].terminate()
    assert [rank.communicate(timeout=120)[0] for rank in ranks] == ["stopped at 3\n"] * 2


@pytest.mark.slow
def test_a_rank_says_that_another_is_gone(ranks):
    ranks[0].kill()
    said, _ = ranks[1].communicate(timeout=60)
    assert re.fullmatch(
        r"the learner has lost one of its 2 ranks \(\w.*\); what ended it is in the output of that .*\n", said
    )
    assert "gloo" not in said and "GLHF" not in said


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_ranks_that_torchrun_starts_anew_find_each_other(torchrun, tmp_path):
    torchrun(2, "--max-restarts=1", WORKER.with_name("restart_worker.py"), tmp_path, timeout_s=500)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["0", "1"]
