"""One engine in one publish: the calls that are made to it, and what is known of it between them.

Owns no order among engines and moves no bytes: `vagen.learner.broadcast` visits each engine alone,
`vagen.learner.group_publish` several together, `vagen.learner.disk_publish` those that read files.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from vagen.common.engines import INCOMPLETE_VERSION
from vagen.common.errors import BroadcastError, EngineRefusedError
from vagen.learner.config import BroadcastConfig
from vagen.learner.engine_checksums import can_compare, differing_names, require_equal
from vagen.learner.engine_control import EngineControl
from vagen.learner.engine_links import LinkPlan, num_ranks
from vagen.learner.engine_quantisation import PlainEngines
from vagen.learner.frozen_weights import converted
from vagen.learner.holdings import Holdings
from vagen.learner.weight_buckets import Deliveries, Delivery

__all__ = ["RESUME_SHARE", "TRANSFER_SHARE", "EngineVisit"]

TRANSFER_SHARE, RESUME_SHARE = 0.8, 0.9
"""Of the time-out: when the transfer must have ended, and when the attempt to continue must have."""

T = TypeVar("T")


class EngineVisit:
    """The steps of a publish to one engine. They raise EngineError, BroadcastError or RuntimeError."""

    def __init__(
        self,
        engine: EngineControl,
        deliveries: Deliveries,
        config: BroadcastConfig,
        plain: PlainEngines,
        holdings: Holdings,
    ) -> None:
        self.engine = engine
        self.stage = "server_info"
        """What is being done, for the reason of a failure."""
        self.info: Mapping[str, Any] = {}
        """`/server_info`, once `inform` has asked for it."""
        self.stall_s = self.transfer_s = 0.0
        self.delivery: Delivery | None = None
        """What it gets, once it is known what it lacks."""
        self.missing: frozenset[str] = frozenset()
        """Frozen tensors that it does not have, once `compare` has asked."""
        self._deliveries = deliveries
        self._config = config
        self._plain = plain
        self._holdings = holdings
        self._has_compared = False
        self._asked_to_pause_at: float | None = None
        self._began_at: float | None = None

    async def make(self, transfer: Coroutine[Any, Any, None]) -> str | None:
        """All of a visit: `transfer`, which informs, pauses and brings the weights; then continue and compare.

        Stage and reason of the failure, or None: the engine has the weights.
        """
        start = asyncio.get_running_loop().time()
        failure: str | None = "cancelled"
        try:
            failure = await self.bounded(start, TRANSFER_SHARE, transfer)
        finally:
            failure = await self.bounded(start, RESUME_SHARE, self.resume(failure)) or failure
        return failure or await self.bounded(start, 1.0, self.verify())

    async def bounded(self, start: float, share: float, work: Coroutine[Any, Any, None]) -> str | None:
        """Run `work` until `share` of the time-out has passed since `start`.

        Stage and reason of the failure, or None.
        """
        bound = share * self._config.broadcast_timeout_s
        try:
            async with asyncio.timeout_at(start + bound):
                await work
        except TimeoutError:
            return f"{self.stage}: not finished {bound:.1f} s after the start"
        except RuntimeError as error:  # EngineError, and what torch raises for stores and groups
            return f"{self.stage}: {error}"
        return None

    async def inform(self) -> None:
        """Learn what the engine is."""
        self.stage = "server_info"
        self.info = await self.engine.get("/server_info")
        num_ranks(self.engine.url, self.info)  # raises EngineError for layouts that cannot be served
        await self._plain.require(self.engine, self.info)

    @property
    def can_add(self) -> bool:
        """Whether the engine adds low-rank updates to its weights itself, as it would be done here."""
        return (
            bool(self._deliveries.frozen.updates)
            and self.info.get("takes_low_rank_updates") is True
            and not self._deliveries.form_of(self.info)
            and self._holdings.may_add(self.engine.url, self.info)
        )

    async def compare(self, *, adds: bool) -> None:
        """Learn which of the frozen tensors the engine lacks; with `adds`, which of those that it would add to too."""
        frozen = self._deliveries.frozen
        wanted = frozen.names if adds else frozen.names - frozen.updated
        self.missing = frozenset()
        if not wanted:
            return
        if self._deliveries.is_quantised(self.info):
            # What it makes of frozen weights is not what they are here.
            self.missing = frozen.names
            return
        self.stage = "checksum before"
        version = str((await self.engine.get("/model_info")).get("weight_version"))
        if self._holdings.is_proven(self.engine.url, self.info, version, frozen, adds=adds):
            return
        if not can_compare(self.info):
            self.missing = wanted
            return
        answer = await self.engine.post("/weights_checker", {"action": "checksum"})
        dtype = self._deliveries.dtype_of(self.info)

        def differing() -> list[str]:
            tensors = [(name, converted(tensor, dtype)) for name, tensor in frozen.select(wanted)]
            ours = {name: digest for name, digest in frozen.checksums(dtype).items() if name in wanted}
            return differing_names(self.info, answer, tensors, ours, without_updates=adds)

        self.missing = frozenset(await self._in_thread(differing))
        self._has_compared = True

    async def _in_thread(self, function: Callable[[], T]) -> T:
        return await asyncio.wrap_future(self._deliveries.threads.submit(function))

    @property
    def _informed(self) -> Delivery:
        assert self.delivery is not None
        return self.delivery

    async def join(self, plan: LinkPlan) -> None:
        """Have it join a group, which must be joined here at the same time, and leave those that have ended."""
        self.stage = "group"
        for name in plan.abandoned[self.engine.url]:
            with suppress(EngineRefusedError):  # it has left by itself
                await self.engine.post("/destroy_weights_update_group", {"group_name": name})
        await self.engine.post("/init_weights_update_group", plan.requests[self.engine.url])

    async def pause(self) -> None:
        """Stop its generation."""
        self.stage = "pause"
        self._asked_to_pause_at = self._asked_to_pause_at or time.monotonic()
        await self.engine.post("/pause_generation", {"mode": self._config.pause_mode})

    async def begin(self) -> None:
        """Open an update; one that a publish before this left open is closed first."""
        self.stage = "begin"
        self._holdings.drop(self.engine.url)
        updates = self._informed.updates
        try:
            body = {"updates": msgspec.to_builtins(updates)} if updates else {}
            await self.engine.post("/begin_weight_update", body)
        except EngineRefusedError:
            if self.info.get("kind") == "local":
                raise
            # SGLang keeps an update open until it is ended, whoever began it.
            await self.engine.post("/end_weight_update")
            await self.engine.post("/begin_weight_update")
        self._began_at = time.monotonic()

    async def announce(self, index: int, group_name: str) -> None:
        """Have it receive a bucket, which must be broadcast at the same time."""
        delivery = self._informed
        buckets = delivery.buckets
        self.stage = f"bucket {index + 1} of {len(buckets)}"
        is_last = index == len(buckets) - 1
        announcement = {
            **buckets.describe(index),
            "group_name": group_name,
            "load_format": "flattened_bucket",
            # Before the last bucket the engine's weights are of no version.
            "weight_version": delivery.version if is_last else None,
            "flush_cache": is_last and self._config.pause_mode != "in_place",
        }
        await self.engine.post("/update_weights_from_distributed", announcement)

    async def load(self, folder: Path) -> None:
        """Have it read a folder of safetensors: a whole update in one request."""
        delivery = self._informed
        self.stage = "load"
        self._holdings.drop(self.engine.url)
        self._began_at = time.monotonic()
        update = {
            "model_path": str(folder),
            "load_format": "safetensors",
            "weight_version": delivery.version,
            "flush_cache": self._config.pause_mode != "in_place",
        }
        await self.engine.post("/update_weights_from_disk", update)
        self.transfer_s = time.monotonic() - self._began_at
        delivery.content.checksums()

    async def end(self) -> None:
        """Close the update."""
        assert self._began_at is not None
        self.transfer_s = time.monotonic() - self._began_at
        self.stage = "end"
        self._informed.content.checksums()
        await self.engine.post("/end_weight_update")

    async def resume(self, failure: str | None) -> None:
        """Let the engine go on, whatever happened after it was asked to pause."""
        if self._asked_to_pause_at is None:
            return
        if failure is None:
            self.stage = "continue"
        elif self._began_at is not None and self.info.get("kind") != "local":
            # SGLang has no staging: what it samples until the next publish is of no policy version.
            version = {"new_version": INCOMPLETE_VERSION, "abort_all_requests": False}
            await self.engine.post("/update_weight_version", version)
        await self.engine.post("/continue_generation")
        self.stall_s = time.monotonic() - self._asked_to_pause_at

    async def verify(self) -> None:
        """Raise BroadcastError unless the engine has exactly these weights under this version."""
        self.stage = "checksum"
        delivery, url = self._informed, self.engine.url
        version = (await self.engine.get("/model_info")).get("weight_version")
        if version != delivery.version:
            raise BroadcastError(f"the engine reports version {version} instead of {delivery.version}")
        answer = await self.engine.post("/weights_checker", {"action": "checksum"})
        ours = await asyncio.shield(delivery.content.checksums())
        if can_compare(self.info):
            try:
                await self._in_thread(lambda: require_equal(self.info, answer, delivery.content.tensors(), ours))
            except BroadcastError:
                if delivery.updates and self._has_compared:
                    self._holdings.note_other_sum(url, self.info)
                raise
        self._holdings.prove(url, self.info, delivery.version, self._deliveries.frozen, adds=bool(delivery.updates))
