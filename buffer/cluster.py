"""Connections to the node of a Redis Cluster that serves one slot, wherever the slot is when they are made.

All keys of a shard live in one slot and its transactions run on one node, so what a shard needs of a cluster is a
plain client that finds that node again after a failover or a move of the slot. `redis.cluster` does not let scripts
into a pipeline; it is used for finding the node.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import redis
from redis.connection import Connection, SSLConnection, parse_url
from redis.crc import key_slot
from redis.exceptions import AskError, ClusterDownError, ConnectionError, RedisError, TryAgainError

CLUSTER_SCHEMES = ("redis+cluster", "rediss+cluster")
MOVED = (AskError, ClusterDownError, TryAgainError)
"""Answers of a node that does not serve the slot now: the same call may succeed on a new connection."""

Address = tuple[str, int]


def is_cluster_url(url: str) -> bool:
    """Whether the URL asks for a cluster."""
    return url.startswith(tuple(f"{scheme}://" for scheme in CLUSTER_SCHEMES))


def make_slot_pool(url: str, key: str, **options: Any) -> redis.ConnectionPool:
    """A pool whose connections reach the node that serves the slot of `key`; nothing is connected yet.

    Any of the cluster's nodes may stand in the URL; the others are learnt from it. `options` are those of a
    `redis.ConnectionPool`. Raises `ValueError` for a malformed URL.
    """
    settings = {**options, **parse_url(url.replace("+cluster", "", 1))}
    plain = settings.pop("connection_class", Connection)
    locate = _Locator(plain, settings, key_slot(key.encode()))
    following = _SlotSSLConnection if issubclass(plain, SSLConnection) else _SlotConnection
    return redis.ConnectionPool(connection_class=following, locate=locate, **settings)


class _Locator:
    """Which node serves a slot, asked of any node that answers."""

    def __init__(self, connection_class: type[Connection], options: dict[str, Any], slot: int) -> None:
        self._connection_class = connection_class
        self._options = options
        self._slot = slot
        self._nodes: list[Address] = [(options.get("host", "localhost"), int(options.get("port", 6379)))]

    def __call__(self) -> Address:
        """Raises a `ConnectionError` when no node answers or none serves the slot."""
        problem: Exception | None = None
        for node in list(self._nodes):
            try:
                ranges = self._ask(node)
            except RedisError as error:
                problem = error
                continue
            owners = [owner for low, high, owner in ranges if low <= self._slot <= high]
            if owners:
                seeds = [*owners, *(owner for *_, owner in ranges), *self._nodes]
                self._nodes = list(dict.fromkeys(seeds))
                return owners[0]
            problem = ConnectionError(f"no node of the cluster serves slot {self._slot}")
        raise ConnectionError(
            f"no node of the cluster at {self._nodes} tells who serves slot {self._slot}"
        ) from problem

    def _ask(self, node: Address) -> list[tuple[int, int, Address]]:
        options = {**self._options, "host": node[0], "port": node[1], "decode_responses": True}
        pool = redis.ConnectionPool(connection_class=self._connection_class, **options)
        client = redis.Redis(connection_pool=pool)
        try:
            answer = client.execute_command("CLUSTER SLOTS")
        finally:
            client.close()
            pool.disconnect()
        # A node that does not know its own name yet calls itself by an empty one.
        return [(low, high, (owner[0] or node[0], owner[1])) for low, high, owner, *_ in answer]


class _FollowsSlot:
    """Mixed into a connection class: connects to where the slot is, and leaves a node that serves it no more."""

    host: str
    port: int

    def __init__(self, *, locate: Callable[[], Address], **options: Any) -> None:
        self._locate = locate
        super().__init__(**options)

    def _connect(self) -> Any:
        self.host, self.port = self._locate()
        return super()._connect()  # type: ignore[misc]

    def read_response(self, *args: Any, **options: Any) -> Any:
        try:
            return super().read_response(*args, **options)  # type: ignore[misc]
        except MOVED:
            self.disconnect()  # type: ignore[attr-defined]
            raise


class _SlotConnection(_FollowsSlot, Connection):
    """Over TCP."""


class _SlotSSLConnection(_FollowsSlot, SSLConnection):
    """Over TLS."""
