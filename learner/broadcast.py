"""Publishing weights: from tensors under the engines' names to every engine that takes them.

For each engine within `broadcast_timeout_s`:

    /server_info -> (frozen weights, and no proof that it has them: compare checksums, send what differs along)
    -> (new engine or new incarnation: build a group) -> pause -> begin
    -> for each bucket: announcement over HTTP and broadcast, side by side -> end -> continue -> compare checksums

`broadcast_topology` star: each engine for itself, all at the same time (`_Alone`). One group per engine (this process
and the engine's ranks), kept between publishes, each over a connection of its own to the one store of this process, so
that an engine that is dead or hangs blocks nothing but itself. Topology group: `vagen.learner.group_publish`. Engines
that no group reaches: `vagen.learner.disk_publish`.

Whatever fails, an engine that was asked to pause is asked to continue; the local engine resumes by itself when
it cannot even be asked (`engine.pause_timeout_s`). An engine that fails is dropped with its group. What counts as
published is a checksum, never the return of a send (`vagen.learner.engine_checksums`). Does not know which engines
exist, who may take traffic, or where the tensors come from.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import aiohttp
from torch import Tensor

from vagen.common.errors import BroadcastError, ConfigError
from vagen.common.weight_transfer import combined_checksum, tensor_checksum
from vagen.learner.config import BroadcastConfig
from vagen.learner.disk_publish import publish_by_disk
from vagen.learner.engine_control import EngineControl, ProbeAnswer, ProbePrompt, open_session, probe_engine
from vagen.learner.engine_links import EngineLinks, Link, side_by_side
from vagen.learner.engine_quantisation import PlainEngines
from vagen.learner.engine_visit import EngineVisit
from vagen.learner.frozen_weights import FrozenWeights
from vagen.learner.group_publish import publish_together
from vagen.learner.holdings import Holdings
from vagen.learner.weight_buckets import Deliveries, Delivery
from vagen.learner.weight_folders import WeightFolders

__all__ = ["Broadcaster", "ProbeAnswer", "ProbePrompt", "PublishReport", "checksum", "probe_engine"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class PublishReport:
    """What became of one publish."""

    version: str
    ok: tuple[str, ...]
    """URLs of the engines whose weights are proven to be these."""
    failed: Mapping[str, str]
    """URL -> stage and reason."""
    checksum: str
    """Of all weights that the engines have after it."""
    seconds: float
    stall_s: float
    """Longest time that an engine of `ok` was paused."""
    transfer_s: float
    """Longest time from the first announcement to an engine of `ok` until it had the last bucket."""
    sent_bytes: int
    """Of tensors that left this process, each as often as it did."""


def checksum(tensors: Sequence[tuple[str, Tensor]]) -> str:
    """One checksum of named tensors, whatever their order."""
    return combined_checksum({name: tensor_checksum(tensor) for name, tensor in tensors})


class Broadcaster:
    """Publishes to a set of engines that may differ from one publish to the next. One thread uses it."""

    def __init__(self, config: BroadcastConfig) -> None:
        """Raises ConfigError where `disk_dir` cannot be written to."""
        self._config = config
        self._links = EngineLinks(config.broadcast_timeout_s)
        self._plain = PlainEngines(takes_float8=config.quantise)
        self._folders = WeightFolders(Path(config.disk_dir), config.disk_keep) if config.disk_dir else None
        self._holdings = Holdings()

    def publish(
        self,
        tensors: Sequence[tuple[str, Tensor]],
        version: int | str,
        engines: Sequence[str],
        *,
        frozen: FrozenWeights | None = None,
        require_one: bool = False,
    ) -> PublishReport:
        """Bring `tensors`, by engine name, to all engines (base URLs) as `version`. Blocks; no engine makes it raise.

        What is `frozen`, the same object at each publish, goes to engines that lack it; factors of its low-rank updates
        are among `tensors`. The tensors must not change until this returns. Raises ConfigError for names that no engine
        has, and BroadcastError when `require_one` and none took the weights.
        """
        frozen = frozen or FrozenWeights()
        _check_names([name for name, _ in (*tensors, *frozen.tensors)])
        report = asyncio.run(self._publish(tensors, frozen, str(version), list(dict.fromkeys(engines))))
        logger.info(
            "version %s: %d of %d engines in %.3f s, %d bytes sent, stall %.3f s, failed: %s",
            version,
            len(report.ok),
            len(report.ok) + len(report.failed),
            report.seconds,
            report.sent_bytes,
            report.stall_s,
            dict(report.failed) or "none",
        )
        if require_one and not report.ok:
            raise BroadcastError(f"version {version} reached none of {len(engines)} engines: {dict(report.failed)}")
        return report

    def forget(self, engine: str) -> None:
        """Leave the group with an engine (base URL) that is no longer published to, and keep no file for it."""
        self._links.forget(engine)
        self._plain.forget(engine)
        if self._folders is not None:
            self._folders.forget(engine)
        self._holdings.drop(engine)

    def close(self) -> None:
        """Leave all groups."""
        self._links.close()

    def _control(self, session: aiohttp.ClientSession, url: str) -> EngineControl:
        return EngineControl(session, url, key=self._config.api_key, admin_key=self._config.admin_api_key)

    async def _publish(
        self, tensors: Sequence[tuple[str, Tensor]], frozen: FrozenWeights, version: str, engines: Sequence[str]
    ) -> PublishReport:
        start = time.monotonic()
        # Two blocking waits and a bucket to prepare for each engine, one hash, and what most of them get. Not joined
        # here: a thread that waits for a hung engine ends at the time-out of its group, and must not hold up others.
        threads = ThreadPoolExecutor(3 * len(engines) + 2, thread_name_prefix="broadcast")
        try:
            num_grouped = sum(not self._config.reads_files(url) for url in engines)
            # Where all share a group, the buckets are sent once.
            num_consumers = 1 if self._shares_group(num_grouped) else num_grouped
            bucket_bytes, quantise = self._config.bucket_bytes, self._config.quantise
            deliveries = Deliveries(version, tensors, frozen, bucket_bytes, num_consumers, threads, quantise=quantise)
            async with open_session() as session:
                controls = [self._control(session, url) for url in engines]
                visits = [EngineVisit(c, deliveries, self._config, self._plain, self._holdings) for c in controls]
                by_url = await self._visit(visits, deliveries)
            served = [visit for visit in visits if by_url[visit.engine.url] is None]
            return PublishReport(
                version=version,
                ok=tuple(visit.engine.url for visit in served),
                failed={url: failure for url, failure in by_url.items() if failure is not None},
                checksum=combined_checksum(await deliveries.content.checksums()),
                seconds=time.monotonic() - start,
                stall_s=max((visit.stall_s for visit in served), default=0.0),
                transfer_s=max((visit.transfer_s for visit in served), default=0.0),
                sent_bytes=deliveries.sent_bytes,
            )
        finally:
            threads.shutdown(wait=False)

    def _shares_group(self, num_engines: int) -> bool:
        return self._config.broadcast_topology == "group" and num_engines > 1

    async def _visit(self, visits: Sequence[EngineVisit], deliveries: Deliveries) -> dict[str, str | None]:
        """All engines at the same time: URL -> stage and reason of the failure, or None."""
        by_disk = [visit for visit in visits if self._config.reads_files(visit.engine.url)]
        grouped = [visit for visit in visits if visit not in by_disk]
        sending: Awaitable[list[str | None]]
        if self._shares_group(len(grouped)):
            sending = publish_together(grouped, deliveries, self._links, self._config)
        else:
            sending = asyncio.gather(*(_Alone(visit, deliveries, self._links).run() for visit in grouped))
        writing = publish_by_disk(by_disk, deliveries, self._folders)
        failures = [failure for part in await asyncio.gather(sending, writing) for failure in part]
        return {visit.engine.url: failure for visit, failure in zip([*grouped, *by_disk], failures, strict=True)}


class _Alone:
    """One publish to one engine, in a group of its own."""

    def __init__(self, visit: EngineVisit, deliveries: Deliveries, links: EngineLinks) -> None:
        self._visit = visit
        self._deliveries = deliveries
        self._links = links

    async def run(self) -> str | None:
        """Stage and reason of the failure, or None: the engine has the weights."""
        failure = await self._visit.make(self._transfer())
        if failure is not None:
            self._links.drop(self._visit.engine.url)
        return failure

    async def _transfer(self) -> None:
        visit, done = self._visit, 0
        try:
            await visit.inform()
            adds = visit.can_add
            await visit.compare(adds=adds)
            delivery = visit.delivery = await self._deliveries.of(visit.info, visit.missing, adds=adds)
            link = await self._link(delivery)
            await visit.pause()
            await visit.begin()
            for index in range(len(delivery.buckets)):
                await side_by_side(visit.announce(index, link.name), delivery.threads, delivery.sending(link, index))
                delivery.buckets.release(index)
                done = index + 1
            await visit.end()
        finally:
            self._deliveries.leave(visit.delivery, done)

    async def _link(self, delivery: Delivery) -> Link:
        """The group with this engine and all its ranks, built anew when it is not the one that it was built with."""
        visit = self._visit
        visit.stage = "group"
        infos = {visit.engine.url: visit.info}
        known = self._links.find(infos)
        if known is not None:
            return known
        plan = self._links.plan(infos, delivery.buckets.is_cuda)
        return self._links.keep(plan, await side_by_side(visit.join(plan), delivery.threads, plan.join))


def _check_names(names: Sequence[str]) -> None:
    """Refuse what SGLang would notice only after half of an update. Raises ConfigError."""
    if not names:
        raise ConfigError("publish: no tensors")
    if len(set(names)) != len(names):
        raise ConfigError("publish: the same name twice")
    for name in names:
        is_hf = name.startswith(("model.language_model.", "model.visual."))
        if is_hf or not name.startswith(("model.", "visual.", "lm_head.")):
            raise ConfigError(f"publish: {name} is not an engine's name; expected visual.*, model.* or lm_head.*")
