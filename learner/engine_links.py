"""Groups between this process and engines, one or several in each, and waiting for both ends of one at the same time.

Owns the store under the groups, their names and their lifetime. A group lives as long as one start of each of its
engines, and its name is never used again.
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

__all__ = ["EngineLinks", "Link", "LinkPlan", "address_towards", "num_ranks", "retrieve", "side_by_side"]

logger = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Link:
    """A group with one start of each of its engines; this process is rank 0, the engines' ranks follow."""

    name: str
    incarnations: Mapping[str, str]
    """By URL."""
    backend: str
    group: ProcessGroup


@dataclass(frozen=True, kw_only=True)
class LinkPlan:
    """A group that is to be built, by all of its members at the same time."""

    name: str
    incarnations: Mapping[str, str]
    backend: str
    requests: Mapping[str, dict[str, Any]]
    """Bodies of `/init_weights_update_group`, by URL."""
    abandoned: Mapping[str, tuple[str, ...]]
    """Groups that this process has left and the engine perhaps not, by URL."""
    join: Callable[[], ProcessGroup]
    """Our side: blocks until all have joined, or raises RuntimeError."""


class EngineLinks:
    """All groups that there are. Used in the event loop of one publish at a time."""

    def __init__(self, timeout_s: float) -> None:
        """`timeout_s` bounds each wait for a member, where `plan` is not told otherwise."""
        self._timeout_s = timeout_s
        self._store: TCPStore | None = None
        self._links: list[Link] = []
        self._abandoned: dict[str, tuple[str, ...]] = {}
        self._token = uuid.uuid4().hex[:12]
        self._generation = 0

    def find(self, infos: Mapping[str, Mapping[str, Any]]) -> Link | None:
        """The group of exactly these engines; `infos` are their `/server_info` by URL."""
        wanted = {url: incarnation_of(info) for url, info in infos.items()}
        return next((link for link in self._links if link.incarnations == wanted), None)

    def plan(
        self, infos: Mapping[str, Mapping[str, Any]], is_cuda: bool, *, timeout_s: float | None = None
    ) -> LinkPlan:
        """A group of these engines, with ranks in this order; the groups that they are in are left.

        A `timeout_s` bounds the waits of local engines too. Raises EngineError where no group can reach an engine.
        """
        for url in infos:
            self.drop(url)
        timeout = self._timeout_s if timeout_s is None else timeout_s
        self._generation += 1
        name = f"vagen-{self._token}-{self._generation}"
        backend = _backend(infos, is_cuda)
        port = self._listening_port()
        ranks = {url: num_ranks(url, info) for url, info in infos.items()}
        world_size = 1 + sum(ranks.values())
        requests: dict[str, dict[str, Any]] = {}
        offset = 1
        for url, info in infos.items():
            requests[url] = {
                "master_address": address_towards(url),
                "master_port": port,
                "rank_offset": offset,
                "world_size": world_size,
                "group_name": name,
                "backend": backend,
            }
            if timeout_s is not None and info.get("kind") == "local":
                requests[url]["timeout_s"] = timeout_s
            offset += ranks[url]

        def join() -> ProcessGroup:
            store = connect_store("localhost", port, timeout)
            return join_group(store, name, rank=0, world_size=world_size, backend=backend, timeout_s=timeout)

        return LinkPlan(
            name=name,
            incarnations={url: incarnation_of(info) for url, info in infos.items()},
            backend=backend,
            requests=requests,
            abandoned={url: self._abandoned.pop(url, ()) for url in infos},
            join=join,
        )

    def keep(self, plan: LinkPlan, group: ProcessGroup) -> Link:
        """The group that was built by a plan."""
        link = Link(name=plan.name, incarnations=plan.incarnations, backend=plan.backend, group=group)
        self._links.append(link)
        logger.info("group %s with %s over %s", link.name, ", ".join(link.incarnations), link.backend)
        return link

    def drop(self, url: str) -> None:
        """Leave the groups that an engine is in."""
        for link in [link for link in self._links if url in link.incarnations]:
            self._leave(link)

    def forget(self, url: str) -> None:
        """Leave the groups of an engine that does not come back."""
        self.drop(url)
        self._abandoned.pop(url, None)

    def drop_shared(self) -> None:
        """Leave the groups that several engines are in."""
        for link in [link for link in self._links if len(link.incarnations) > 1]:
            self._leave(link)

    def close(self) -> None:
        """Leave all groups and stop the store."""
        for link in list(self._links):
            self._leave(link)
        self._store = None

    def _leave(self, link: Link) -> None:
        self._links.remove(link)
        for url in link.incarnations:
            self._abandoned[url] = (*self._abandoned.get(url, ()), link.name)
        leave_group(link.group)

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
            end.add_done_callback(retrieve)


def retrieve(future: asyncio.Future[Any]) -> None:
    """Look at the result of a wait that nobody awaits any more, so that asyncio does not report it as forgotten."""
    if not future.cancelled():
        future.exception()


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


def _backend(infos: Mapping[str, Mapping[str, Any]], is_cuda: bool) -> str:
    """NCCL where all members are on GPUs, gloo where all engines are on CPUs. Raises EngineError for a mixture."""
    on_cpu = {url for url, info in infos.items() if str(info.get("device", "cuda")).startswith("cpu")}
    if on_cpu and len(on_cpu) < len(infos):
        raise EngineError(f"{min(on_cpu)} is on a CPU and others are not: they share no group; use topology star")
    return "nccl" if is_cuda and not on_cpu else "gloo"


def num_ranks(url: str, info: Mapping[str, Any]) -> int:
    """How many processes of the engine take part in an update. Raises EngineError for layouts that cannot be served."""
    for name in ("pp_size", "dp_size"):
        if info.get(name, 1) != 1:
            raise EngineError(f"{url}: {name} is {info[name]}; weights can be published to engines with {name} 1")
    return int(info.get("tp_size", 1))
