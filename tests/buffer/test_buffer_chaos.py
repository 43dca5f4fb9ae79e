"""kill -9 of everything around the buffer, 20 times each, in mid-stream: nothing is lost and nothing trained twice."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from vagen.buffer.connection import make_client
from vagen.buffer.keys import Key, Keys
from vagen.buffer.learner_store import LearnerStore

KILLS = 20
HERE = Path(__file__).parent


class Notes:
    """What a worker has noted so far."""

    def __init__(self, path):
        self._path = path
        self._read = 0
        self.lines: list[list[str]] = []

    def update(self):
        if self._path.exists():
            with self._path.open("rb") as file:
                file.seek(self._read)
                complete, _, _ = file.read().rpartition(b"\n")
            self._read += len(complete)
            self.lines += [line.split(" ", 3) for line in complete.decode().split("\n") if line]
        return self

    def count(self, *kinds):
        return sum(line[0] in kinds for line in self.update().lines)


class Chaos:
    """The four processes under load, and how far each has come."""

    def __init__(self, service, folder):
        self.folder = folder
        self.service = service
        self.actor_notes, self.learner_notes = Notes(folder / "actor.notes"), Notes(folder / "learner" / "notes")
        self.children: dict[str, subprocess.Popen] = {}

    def start(self, name):
        if name == "actor":
            args = [self.service.ready.endpoint, str(self.folder / "actor"), str(self.folder / "actor.notes"), "60000"]
        else:
            args = [self.service.ready.redis_url, str(self.folder / "learner")]
        with (self.folder / f"{name}.log").open("ab") as log:
            command = [sys.executable, str(HERE / f"chaos_{name}.py"), *args]
            self.children[name] = subprocess.Popen(command, stdout=log, stderr=log)

    def kill(self, name):
        if name == "buffer":
            self.service.kill()
            self.service.restart()
        elif name == "valkey":
            self.service.kill_valkey()
        else:
            assert self.children[name].poll() is None, (self.folder / f"{name}.log").read_text()[-2000:]
            self.children[name].kill()
            self.children[name].wait()
            self.start(name)

    def stop(self, name, timeout_s=240):
        self.children[name].send_signal(signal.SIGTERM)
        assert self.children[name].wait(timeout_s) == 0, (self.folder / f"{name}.log").read_text()[-2000:]

    def progress(self, name):
        """Moves on at each stage of the learner, and with each journalled or acknowledged trajectory of the others."""
        if name == "learner":
            return self.learner_notes.count("claimed", "fetched", "trained", "saved", "done")
        return self.actor_notes.count("journalled" if name == "actor" else "acked")


@pytest.fixture
def chaos(service, tmp_path):
    chaos = Chaos(service(capacity_bytes=4 << 20, group_timeout_s=3, lease_s=3, max_running=48), tmp_path)
    yield chaos
    for child in chaos.children.values():
        child.kill()
        child.wait()


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_nothing_is_lost_or_trained_twice_whatever_is_killed(chaos, eventually):
    seed = int(os.environ.get("CHAOS_SEED", random.randrange(1 << 32)))
    print(f"CHAOS_SEED={seed}")
    rng = random.Random(seed)
    victims = KILLS * ["actor", "buffer", "valkey", "learner"]
    rng.shuffle(victims)
    chaos.start("actor")
    chaos.start("learner")
    for number, victim in enumerate(victims):
        target = chaos.progress(victim) + rng.randint(1, 25)
        eventually(lambda v=victim, t=target: chaos.progress(v) >= t, f"progress before kill {number}: {victim}", 120)
        chaos.kill(victim)
    for name in ("actor", "learner"):
        target = chaos.progress(name) + 25
        eventually(lambda n=name, t=target: chaos.progress(n) >= t, f"progress of {name} after the kills", 120)
    chaos.stop("actor")
    chaos.stop("learner")
    assert_nothing_lost_or_repeated(chaos)


def assert_nothing_lost_or_repeated(chaos):
    by_kind: dict[str, list] = {}
    for kind, *words in chaos.actor_notes.update().lines:
        by_kind.setdefault(kind, []).append(words)
    journalled = {int(seq): (name, checksum) for seq, name, checksum in by_kind["journalled"]}
    assert "refused" not in by_kind
    assert sorted(journalled) == list(range(1, len(journalled) + 1))
    acked = {name for (name,) in by_kind["acked"]}

    manifests: dict[int, set[str]] = {}
    claims = [" ".join(words) for kind, *words in chaos.learner_notes.update().lines if kind == "claimed"]
    for claim in claims:
        manifests.setdefault(json.loads(claim)["step"], set()).add(claim)
    assert all(len(seen) == 1 for seen in manifests.values()), "a step is claimed again identically"
    steps: dict[int, list] = {}
    for file in sorted((chaos.folder / "learner" / "checkpoints").glob("*.json")):
        for step, entries in json.loads(file.read_text()).items():
            assert int(step) not in steps, "in two checkpoints"
            steps[int(step)] = entries
    assert sorted(steps) == list(range(len(steps)))
    for step, entries in steps.items():
        (claim,) = manifests[step]
        assert [name for name, _ in entries] == [entry["trajectory_id"] for entry in json.loads(claim)["entries"]]

    trained = Counter(name for entries in steps.values() for name, _ in entries)
    assert max(trained.values()) == 1, "trained twice"
    assert acked <= trained.keys(), "acknowledged and lost"
    found = {name: checksum for entries in steps.values() for name, checksum in entries}
    assert found == dict(journalled.values()), "what is trained is what was journalled, byte by byte"
    assert len(claims) > len(manifests), "some kill fell between a claim and its checkpoint"

    store = LearnerStore.connect(chaos.service.ready.redis_url, "run")
    accounting, status = store.accounting(), store.status()
    assert accounting.identity_holds, accounting
    assert (accounting.produced, accounting.trained) == (len(journalled), len(trained))
    assert (accounting.in_flight, accounting.pending) == (0, 0)
    assert (status.num_bytes, status.room_bytes, status.claimed_bytes, status.untrained) == (0, 0, 0, 0)
    keys, redis = Keys("run"), make_client(chaos.service.ready.redis_url)
    left = [key for name in (Key.PAYLOAD, Key.GROUP, Key.MANIFEST) for key in redis.scan_iter(keys.of(name, "*"))]
    assert left == []
    print(
        f"{len(trained)} trajectories in {len(steps)} steps, {len(claims) - len(manifests)} claimed again, "
        f"{accounting.duplicates} resends"
    )
