"""Publishing weights: from tensors under the engines' names to every engine that takes them.

For each engine, all at the same time and each within `broadcast_timeout_s` (`_Visit`):

    /server_info -> (new engine or new incarnation: build a group) -> pause -> begin
    -> for each bucket: announcement over HTTP and broadcast, side by side -> end -> continue -> compare checksums

The topology is a star: one group per engine (this process and the engine's ranks), kept between publishes, each over a
connection of its own to the one store of this process, so that an engine that is dead or hangs blocks nothing but
itself. Whatever fails, an engine that was asked to pause is asked to continue; the local engine resumes by itself when
it cannot even be asked (`engine.pause_timeout_s`). An engine that fails is dropped with its group. What counts as
published is a checksum, never the return of a send (`vagen.learner.engine_checksums`). Does not know which engines
exist, who may take traffic, or where the tensors come from.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import aiohttp
from torch import Tensor

from vagen.common.engines import INCOMPLETE_VERSION
from vagen.common.errors import BroadcastError, ConfigError, EngineRefusedError
from vagen.common.weight_transfer import (
    broadcast,
    combined_checksum,
    dtype_name,
    flatten_bucket,
    joined_bytes,
    tensor_checksum,
)
from vagen.learner.config import BroadcastConfig
from vagen.learner.engine_checksums import can_compare, require_equal
from vagen.learner.engine_control import EngineControl, ProbeAnswer, ProbePrompt, open_session, probe_engine
from vagen.learner.engine_links import EngineLinks, Link, side_by_side

__all__ = ["Broadcaster", "ProbeAnswer", "ProbePrompt", "PublishReport", "checksum", "probe_engine"]

logger = logging.getLogger(__name__)

_TRANSFER_SHARE, _RESUME_SHARE = 0.8, 0.9
"""Of the time-out: when the transfer must have ended, and when the attempt to continue must have."""


@dataclass(frozen=True, kw_only=True)
class PublishReport:
    """What became of one publish."""

    version: str
    ok: tuple[str, ...]
    """URLs of the engines whose weights are proven to be these."""
    failed: Mapping[str, str]
    """URL -> stage and reason."""
    checksum: str
    """Of the published tensors."""
    seconds: float
    stall_s: float
    """Longest time that an engine of `ok` was paused."""
    transfer_s: float
    """Longest time from the first announcement to an engine of `ok` until it had the last bucket."""


def checksum(tensors: Sequence[tuple[str, Tensor]]) -> str:
    """One checksum of named tensors, whatever their order."""
    return combined_checksum({name: tensor_checksum(tensor) for name, tensor in tensors})


class Broadcaster:
    """Publishes to a set of engines that may differ from one publish to the next. One thread uses it."""

    def __init__(self, config: BroadcastConfig) -> None:
        self._config = config
        self._links = EngineLinks(config.broadcast_timeout_s)

    def publish(
        self,
        tensors: Sequence[tuple[str, Tensor]],
        version: int | str,
        engines: Sequence[str],
        *,
        require_one: bool = False,
    ) -> PublishReport:
        """Bring `tensors`, by engine name, to all engines (base URLs) as `version`. Blocks; no engine makes it raise.

        The tensors must not change until this returns. Raises ConfigError for names that no engine has, and
        BroadcastError when `require_one` and none took the weights.
        """
        _check_names([name for name, _ in tensors])
        report = asyncio.run(self._publish(tensors, str(version), list(dict.fromkeys(engines))))
        logger.info(
            "version %s: %d of %d engines in %.3f s, stall %.3f s, failed: %s",
            version,
            len(report.ok),
            len(report.ok) + len(report.failed),
            report.seconds,
            report.stall_s,
            dict(report.failed) or "none",
        )
        if require_one and not report.ok:
            raise BroadcastError(f"version {version} reached none of {len(engines)} engines: {dict(report.failed)}")
        return report

    def forget(self, engine: str) -> None:
        """Leave the group with an engine (base URL) that is no longer published to."""
        self._links.drop(engine)

    def close(self) -> None:
        """Leave all groups."""
        self._links.close()

    def _control(self, session: aiohttp.ClientSession, url: str) -> EngineControl:
        return EngineControl(session, url, key=self._config.api_key, admin_key=self._config.admin_api_key)

    async def _publish(
        self, tensors: Sequence[tuple[str, Tensor]], version: str, engines: Sequence[str]
    ) -> PublishReport:
        start = time.monotonic()
        # Two blocking waits and a bucket to prepare for each engine, one hash. Not joined here: a thread that waits for
        # a hung engine ends at the time-out of its group, and must not hold up the others.
        threads = ThreadPoolExecutor(3 * len(engines) + 1, thread_name_prefix="broadcast")
        try:
            buckets = _Buckets(tensors, self._config.bucket_bytes, num_consumers=len(engines))
            delivery = _Delivery(version, buckets, threads)
            # While the engines are asked to pause.
            threads.submit(buckets.prepare, 0)
            async with open_session() as session:
                controls = [self._control(session, url) for url in engines]
                visits = [_Visit(control, delivery, self._links, self._config) for control in controls]
                failures = await asyncio.gather(*(visit.run() for visit in visits))
            by_url = dict(zip(engines, failures, strict=True))
            served = [visit for visit, failure in zip(visits, failures, strict=True) if failure is None]
            return PublishReport(
                version=version,
                ok=tuple(url for url, failure in by_url.items() if failure is None),
                failed={url: failure for url, failure in by_url.items() if failure is not None},
                checksum=combined_checksum(await delivery.checksums()),
                seconds=time.monotonic() - start,
                stall_s=max((visit.stall_s for visit in served), default=0.0),
                transfer_s=max((visit.transfer_s for visit in served), default=0.0),
            )
        finally:
            threads.shutdown(wait=False)


class _Delivery:
    """What all visits of one publish share."""

    def __init__(self, version: str, buckets: _Buckets, threads: ThreadPoolExecutor) -> None:
        self.version = version
        self.buckets = buckets
        self.threads = threads
        self._checksums: asyncio.Future[dict[str, str]] | None = None

    def checksums(self) -> asyncio.Future[dict[str, str]]:
        """Of the tensors, by engine name. The first call begins to compute them.

        Nobody calls before an engine has received everything: hashing would take processor and memory from the
        transfer, while the engine's own hash, which is waited for as well, runs at the same time.
        """
        if self._checksums is None:
            tensors = self.buckets.tensors
            hashing = self.threads.submit(lambda: {name: tensor_checksum(tensor) for name, tensor in tensors})
            self._checksums = asyncio.wrap_future(hashing)
        return self._checksums


class _Visit:
    """One publish to one engine."""

    def __init__(self, engine: EngineControl, delivery: _Delivery, links: EngineLinks, config: BroadcastConfig) -> None:
        self.stall_s = self.transfer_s = 0.0
        self._engine = engine
        self._delivery = delivery
        self._links = links
        self._config = config
        self._stage = "server_info"
        self._info: dict[str, Any] = {}
        self._asked_to_pause_at: float | None = None
        self._buckets_done = 0
        self._has_begun = False

    async def run(self) -> str | None:
        """Stage and reason of the failure, or None: the engine has the weights."""
        start = asyncio.get_running_loop().time()
        failure: str | None = "cancelled"
        try:
            failure = await self._bounded(start, _TRANSFER_SHARE, self._transfer())
        finally:
            self._delivery.buckets.skip_from(self._buckets_done)
            failure = await self._bounded(start, _RESUME_SHARE, self._resume(failure)) or failure
        failure = failure or await self._bounded(start, 1.0, self._verify())
        if failure is not None:
            self._links.drop(self._engine.url)
        return failure

    async def _bounded(self, start: float, share: float, work: Coroutine[Any, Any, None]) -> str | None:
        """Run `work` until `share` of the time-out has passed since `start`; the failure, or None."""
        bound = share * self._config.broadcast_timeout_s
        try:
            async with asyncio.timeout_at(start + bound):
                await work
        except TimeoutError:
            return f"{self._stage}: not finished {bound:.1f} s after the start"
        except RuntimeError as error:  # EngineError, and what torch raises for stores and groups
            return f"{self._stage}: {error}"
        return None

    async def _transfer(self) -> None:
        engine, buckets, threads = self._engine, self._delivery.buckets, self._delivery.threads
        self._info = await engine.get("/server_info")
        self._stage = "group"
        link = await self._links.get(engine, self._info, buckets.is_cuda, threads)
        self._stage = "pause"
        self._asked_to_pause_at = time.monotonic()
        await engine.post("/pause_generation", {"mode": self._config.pause_mode})
        self._stage = "begin"
        await self._begin()
        self._has_begun = True
        began = time.monotonic()
        for index in range(len(buckets)):
            self._stage = f"bucket {index + 1} of {len(buckets)}"
            is_last = index == len(buckets) - 1
            announcement = {
                **buckets.describe(index),
                "group_name": link.name,
                "load_format": "flattened_bucket",
                # Before the last bucket the engine's weights are of no version.
                "weight_version": self._delivery.version if is_last else None,
                "flush_cache": is_last and self._config.pause_mode != "in_place",
            }
            await side_by_side(
                engine.post("/update_weights_from_distributed", announcement),
                threads,
                self._sending(link, index),
            )
            buckets.release(index)
            self._buckets_done = index + 1
        self.transfer_s = time.monotonic() - began
        self._stage = "end"
        self._delivery.checksums()
        await engine.post("/end_weight_update")

    async def _begin(self) -> None:
        """Open an update; one that a publish before this left open is closed first."""
        try:
            await self._engine.post("/begin_weight_update")
        except EngineRefusedError:
            # SGLang keeps an update open until it is ended, whoever began it.
            await self._engine.post("/end_weight_update")
            await self._engine.post("/begin_weight_update")

    def _sending(self, link: Link, index: int) -> Callable[[], None]:
        buckets, threads = self._delivery.buckets, self._delivery.threads

        def send() -> None:
            flat = buckets.get(index)
            threads.submit(buckets.prepare, index + 1)
            broadcast(link.group, flat if link.backend == "nccl" else flat.cpu())

        return send

    @property
    def _may_be_half_new(self) -> bool:
        """Whether a failed transfer may have changed the weights in force."""
        return self._has_begun and self._info.get("kind") != "local"

    async def _resume(self, failure: str | None) -> None:
        """Let the engine go on, whatever happened after it was asked to pause."""
        if self._asked_to_pause_at is None:
            return
        if failure is None:
            self._stage = "continue"
        elif self._may_be_half_new:
            # SGLang has no staging: what it samples until the next publish is of no policy version.
            version = {"new_version": INCOMPLETE_VERSION, "abort_all_requests": False}
            await self._engine.post("/update_weight_version", version)
        await self._engine.post("/continue_generation")
        self.stall_s = time.monotonic() - self._asked_to_pause_at

    async def _verify(self) -> None:
        """Raise BroadcastError unless the engine has exactly these weights under this version."""
        self._stage = "checksum"
        version = (await self._engine.get("/model_info")).get("weight_version")
        if version != self._delivery.version:
            raise BroadcastError(f"the engine reports version {version} instead of {self._delivery.version}")
        answer = await self._engine.post("/weights_checker", {"action": "checksum"})
        ours = await asyncio.shield(self._delivery.checksums())
        if can_compare(self._info):
            tensors = self._delivery.buckets.tensors
            await asyncio.wrap_future(self._delivery.threads.submit(require_equal, self._info, answer, tensors, ours))


class _Buckets:
    """The tensors in flattened buckets, made when the first engine wants one and freed after the last has had it.

    Tensors that lie one after the other in memory, as those of a snapshot, are a bucket already.
    """

    def __init__(self, tensors: Sequence[tuple[str, Tensor]], bucket_bytes: int, num_consumers: int) -> None:
        self.tensors = tensors
        self._members = _partition(tensors, bucket_bytes)
        self._announcements = [_announcement(members) for members in self._members]
        self._locks = [threading.Lock() for _ in self._members]
        self._flat: dict[int, Tensor] = {}
        self._left = [num_consumers] * len(self._members)

    def __len__(self) -> int:
        return len(self._members)

    @property
    def is_cuda(self) -> bool:
        """Whether the tensors are on a GPU."""
        return self._members[0][0][1].is_cuda

    def describe(self, index: int) -> Mapping[str, Any]:
        """Names, dtypes and shapes of a bucket, as an engine wants them announced."""
        return self._announcements[index]

    def get(self, index: int) -> Tensor:
        """uint8 [bytes of the bucket]; any thread."""
        with self._locks[index]:
            if index not in self._flat:
                members = [tensor for _, tensor in self._members[index]]
                joined = joined_bytes(members)
                self._flat[index] = flatten_bucket(members) if joined is None else joined
            return self._flat[index]

    def prepare(self, index: int) -> None:
        """Make a bucket, if there is one of that number, while the one before it is on the wire; any thread."""
        if index < len(self) and self._left[index] > 0:
            self.get(index)

    def release(self, index: int) -> None:
        """One engine needs this bucket no more."""
        with self._locks[index]:
            self._left[index] -= 1
            if self._left[index] == 0:
                self._flat.pop(index, None)

    def skip_from(self, index: int) -> None:
        """One engine will not come for the buckets from `index` on."""
        for skipped in range(index, len(self)):
            self.release(skipped)


def _partition(tensors: Sequence[tuple[str, Tensor]], bucket_bytes: int) -> list[list[tuple[str, Tensor]]]:
    """Consecutive tensors of at most `bucket_bytes`; a larger one is a bucket of its own."""
    buckets: list[list[tuple[str, Tensor]]] = []
    room = 0
    for name, tensor in tensors:
        if not buckets or tensor.nbytes > room:
            buckets.append([])
            room = bucket_bytes
        buckets[-1].append((name, tensor))
        room -= tensor.nbytes
    return buckets


def _announcement(members: Sequence[tuple[str, Tensor]]) -> dict[str, Any]:
    return {
        "names": [name for name, _ in members],
        "dtypes": [dtype_name(tensor.dtype) for _, tensor in members],
        "shapes": [list(tensor.shape) for _, tensor in members],
    }


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
