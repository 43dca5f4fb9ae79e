"""Groups between this process and each engine, and waiting for both ends of one at the same time.

Owns the store under the groups, their names and their lifetime. A group lives as long as one start of its engine, and
its name is never used again.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import uuid
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar
from urllib.parse import urlsplit

from torch._C._distributed_c10d import TCPStore
from torch.distributed import ProcessGroup

from vagen.common.engines import incarnation_of
from vagen.common.errors import EngineError, EngineUnavailableError
from vagen.common.weight_transfer import connect_store, join_group, leave_group
from vagen.learner.engine_control import EngineControl

__all__ = ["EngineLinks", "Link", "address_towards", "side_by_side"]

logger = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(frozen=True)
class Link:
    """A group with one start of one engine; this process is rank 0, the engine's tensor-parallel ranks follow."""

    name: str
    incarnation: str
    backend: str
    group: ProcessGroup


class EngineLinks:
    """The groups with all engines, by URL. `get` runs in the event loop of one publish at a time."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._store: TCPStore | None = None
        self._links: dict[str, Link] = {}
        self._token = uuid.uuid4().hex[:12]
        self._generation = 0

    async def get(
        self, engine: EngineControl, info: Mapping[str, Any], is_cuda: bool, threads: ThreadPoolExecutor
    ) -> Link:
        """The group with this engine and all its ranks, built anew when it is not the one that it was built with.

        Raises EngineError or RuntimeError when the engine does not join.
        """
        link = self._links.get(engine.url)
        incarnation = incarnation_of(info)
        if link is not None and link.incarnation == incarnation:
            return link
        self.drop(engine.url)
        self._generation += 1
        name = f"vagen-{self._token}-{self._generation}"
        backend = "nccl" if is_cuda and not str(info.get("device", "cuda")).startswith("cpu") else "gloo"
        address, port = address_towards(engine.url), self._listening_port()
        world_size = 1 + _num_ranks(engine.url, info)

        def join() -> ProcessGroup:
            store = connect_store(address, port, self._timeout_s)
            return join_group(store, name, rank=0, world_size=world_size, backend=backend, timeout_s=self._timeout_s)

        request = {
            "master_address": address,
            "master_port": port,
            "rank_offset": 1,
            "world_size": world_size,
            "group_name": name,
            "backend": backend,
        }
        group = await side_by_side(engine.post("/init_weights_update_group", request), threads, join)
        link = self._links[engine.url] = Link(name, incarnation, backend, group)
        logger.info("group %s with %s over %s", name, engine.url, backend)
        return link

    def drop(self, url: str) -> None:
        """Leave the group with an engine, if there is one."""
        link = self._links.pop(url, None)
        if link is not None:
            leave_group(link.group)

    def close(self) -> None:
        """Leave all groups and stop the store."""
        for url in list(self._links):
            self.drop(url)
        self._store = None

    def _listening_port(self) -> int:
        if self._store is None:
            # All interfaces, IPv4 and IPv6, at a port of the system's choice.
            self._store = TCPStore(
                "localhost", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=self._timeout_s)
            )
        return int(self._store.port)


async def side_by_side(
    request: Coroutine[Any, Any, object], threads: ThreadPoolExecutor, blocking: Callable[[], T]
) -> T:
    """Await the engine's answer and run our blocking end in a thread; the first failure of either is raised.

    A thread whose other end has failed is left alone: it ends at the time-out of its group.
    """
    ours = asyncio.wrap_future(threads.submit(blocking))
    theirs = asyncio.ensure_future(request)
    both: list[asyncio.Future[Any]] = [ours, theirs]
    try:
        await asyncio.wait(both, return_when=asyncio.FIRST_EXCEPTION)
        if theirs.done():
            theirs.result()
        return await ours
    finally:
        for end in both:
            end.cancel()
            end.add_done_callback(_retrieve)


def address_towards(url: str) -> str:
    """The address of this host that the engine at `url` can reach: the one that packets to it would leave from.

    Raises EngineUnavailableError where its name does not resolve.
    """
    parts = urlsplit(url)
    try:
        found = socket.getaddrinfo(parts.hostname, parts.port, type=socket.SOCK_DGRAM)
        family, kind, protocol, _, address = found[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0])
    except OSError as error:
        raise EngineUnavailableError(f"{url}: no route: {error}") from error


def _num_ranks(url: str, info: Mapping[str, Any]) -> int:
    """How many processes of the engine take part in an update. Raises EngineError for layouts that cannot be served."""
    for name in ("pp_size", "dp_size"):
        if info.get(name, 1) != 1:
            raise EngineError(f"{url}: {name} is {info[name]}; weights can be published to engines with {name} 1")
    return int(info.get("tp_size", 1))


def _retrieve(future: asyncio.Future[Any]) -> None:
    """Look at the result of a wait that nobody awaits any more, so that asyncio does not report it as forgotten."""
    if not future.cancelled():
        future.exception()
