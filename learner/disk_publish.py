"""One publish to engines that read files: each form of the weights is written once, then every engine loads it.

    all: /server_info -> files (`vagen.learner.weight_folders`) -> pause -> load -> continue -> compare checksums

Files are complete before any engine is paused. An engine that is lost or refuses costs the others nothing.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from vagen.learner.engine_links import retrieve
from vagen.learner.engine_visit import EngineVisit
from vagen.learner.weight_buckets import Deliveries, Delivery
from vagen.learner.weight_folders import WeightFolders

__all__ = ["publish_by_disk"]


async def publish_by_disk(
    visits: Sequence[EngineVisit], deliveries: Deliveries, folders: WeightFolders | None
) -> list[str | None]:
    """Stage and reason of each one's failure, or None, in the order given; needs `folders` where there are visits."""
    if not visits:
        return []
    assert folders is not None
    files = _Files(folders, deliveries.threads)
    try:
        return await asyncio.gather(*(_visit(visit, deliveries, files, folders) for visit in visits))
    finally:
        files.give_up()


class _Files:
    """Each delivery of one publish, written when the first engine wants it."""

    def __init__(self, folders: WeightFolders, threads: ThreadPoolExecutor) -> None:
        self._folders = folders
        self._threads = threads
        self._given_up = threading.Event()
        self._writing: dict[Delivery, asyncio.Future[Path]] = {}

    async def of(self, delivery: Delivery) -> Path:
        """The folder. Raises BroadcastError where it cannot be written."""
        if delivery not in self._writing:
            write = self._threads.submit(
                self._folders.write, delivery.version, delivery.form, delivery.buckets, self._given_up
            )
            self._writing[delivery] = asyncio.wrap_future(write)
            self._writing[delivery].add_done_callback(retrieve)
        return await asyncio.shield(self._writing[delivery])

    def give_up(self) -> None:
        """The tensors may change from here on: what is not complete never will be."""
        self._given_up.set()


async def _visit(visit: EngineVisit, deliveries: Deliveries, files: _Files, folders: WeightFolders) -> str | None:
    folder: Path | None = None

    async def transfer() -> None:
        nonlocal folder
        await visit.inform()
        visit.stage = "files"
        visit.delivery = await deliveries.whole(visit.info)
        folder = await files.of(visit.delivery)
        await visit.pause()
        with folders.reading(visit.engine.url, folder):
            await visit.load(folder)

    failure = await visit.make(transfer())
    if failure is not None and folder is not None and visit.stage == "checksum":
        folders.distrust(folder)
    return failure
