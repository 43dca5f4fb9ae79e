"""An actor process put together: engine, renderer, spool, socket and loop; ready file, signals and orderly end."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import re
import signal
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from vagen.actor.child_engine import child_engine
from vagen.actor.config import ActorConfig, EnvSection, HarnessConfig
from vagen.actor.engines.http import EngineHttp
from vagen.actor.engines.pool import EnginePool
from vagen.actor.engines.roster import Roster
from vagen.actor.loop import ActorLoop
from vagen.actor.rendering import ChatRenderer
from vagen.actor.sender import Presence, Sender
from vagen.actor.spool import Spool
from vagen.common.config import RunConfig, require, section, to_plain
from vagen.common.memory import collect_rarely, keep_freed_memory
from vagen.common.metrics import Metrics
from vagen.envs.registry import parse_environment_config

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class ActorOptions:
    """What the command line says. `engines` are URLs, or `local` alone for an engine of the actor's own.

    `buffer` lists the endpoints of the buffer's shards, in their order and separated by commas.
    """

    engines: Sequence[str]
    buffer: str
    model_dir: Path
    name: str
    run_dir: Path
    data_dir: Path
    recipe_source: str | None = None
    overrides: Sequence[str] = ()

    @property
    def actor_dir(self) -> Path:
        """Ready file, log and resolved settings of this actor."""
        return self.run_dir / self.name


@dataclass(frozen=True, slots=True, kw_only=True)
class ActorSections:
    """The sections of a recipe that an actor uses, validated."""

    run: RunConfig
    actor: ActorConfig
    env: EnvSection
    harness: HarnessConfig

    @classmethod
    def of(cls, recipe: dict[str, Any]) -> ActorSections:
        """Raises `ConfigError` naming the first setting that cannot work."""
        env = section(recipe, "env", EnvSection)
        parse_environment_config(env.name, env.config)
        actor, harness = section(recipe, "actor", ActorConfig), section(recipe, "harness", HarnessConfig)
        require(
            actor.engines.conversations == "client" or (harness.name == "concat" and harness.window == 0),
            "actor.engines.conversations",
            actor.engines.conversations,
            f"client with harness {harness.name}, window {harness.window}: only concat, window 0, keeps what was said",
        )
        return cls(run=section(recipe, "run", RunConfig), actor=actor, env=env, harness=harness)


async def serve(options: ActorOptions, sections: ActorSections) -> None:
    """Run an actor until SIGTERM or SIGINT.

    Raises a `ConfigError`, `EngineUnavailableError` or `BufferUnavailableError` within `connect_timeout_s` when
    something is missing at start.
    """
    keep_freed_memory()
    collect_rarely()
    config = sections.actor
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    ready = options.actor_dir / "ready.json"
    ready.unlink(missing_ok=True)
    metrics = Metrics("vagen_actor", sections.run.name)
    presence = Presence()
    renderer = ChatRenderer.load(options.model_dir)
    spool = Spool(options.data_dir, sections.run.name, config.spool_max_bytes)
    try:
        sender = Sender(
            choose_endpoint(options.buffer, options.name, spool),
            spool,
            presence,
            metrics,
            run_id=sections.run.name,
            window=config.window,
            heartbeat_s=config.heartbeat_s,
            keys=config.security.load(),
        )
        async with _serving(sender, config.connect_timeout_s):
            async with _engine_urls(options) as urls:
                router = config.engines.router_url
                engines = EnginePool(
                    Roster(urls, config.engines.file, EngineHttp(router, config.engine_api_key) if router else None),
                    renderer,
                    config.engines,
                    metrics,
                    api_key=config.engine_api_key,
                    retries=config.engine_retries,
                )
                loop.add_signal_handler(signal.SIGHUP, engines.look_now)
                try:
                    await engines.connect(config.connect_timeout_s)
                    presence.engines = engines.announcements
                    actor = ActorLoop(
                        run=sections.run,
                        config=config,
                        env=sections.env,
                        harness=sections.harness,
                        renderer=renderer,
                        engines=engines,
                        spool=spool,
                        sender=sender,
                        presence=presence,
                        metrics=metrics,
                    )
                    _write_ready(options, sections, sender, engines.urls, metrics.serve(config.metrics_port))
                    await actor.run(stop)
                finally:
                    await engines.close()
    finally:
        ready.unlink(missing_ok=True)
        await spool.close()


def _engine_urls(options: ActorOptions) -> AbstractAsyncContextManager[Sequence[str]]:
    """The engines of the command line; one of the actor's own where it says so."""
    if "local" not in options.engines:
        return nullcontext(options.engines)
    arguments = ["--config", options.recipe_source] if options.recipe_source else []
    for override in options.overrides:
        arguments += ["--set", override]
    return _own_engine(child_engine(options.model_dir, options.actor_dir / "engine", arguments))


@asynccontextmanager
async def _own_engine(child: AbstractAsyncContextManager[str]) -> AsyncIterator[Sequence[str]]:
    async with child as url:
        yield (url,)


@asynccontextmanager
async def _serving(sender: Sender, timeout_s: float) -> AsyncIterator[None]:
    """The sender at work, once the buffer has answered; says good-bye at the end."""
    sender.open()
    try:
        async with asyncio.TaskGroup() as group:
            work = group.create_task(sender.run(), name="sender")
            await sender.wait_for_buffer(timeout_s)
            yield
            work.cancel()
    finally:
        await sender.close()


def choose_endpoint(endpoints: str, name: str, spool: Spool) -> str:
    """The shard that an actor sends to: the one that has what is unacked, else one that its name decides.

    Actors that are named by numbers spread evenly.
    """
    shards = endpoints.split(",")
    if spool.in_flight and spool.shard[1] == len(shards):
        return shards[spool.shard[0]]
    number = re.search(r"\d+$", name)
    return shards[(int(number[0]) if number else xxhash.xxh3_64_intdigest(name.encode())) % len(shards)]


def _write_ready(
    options: ActorOptions, sections: ActorSections, sender: Sender, engines: Sequence[str], port: int
) -> None:
    """Write `ready.json`, which exists while episodes may run, and the settings that are in force."""
    folder = options.actor_dir
    folder.mkdir(parents=True, exist_ok=True)
    settings = {name: to_plain(getattr(sections, name)) for name in ("run", "actor", "env", "harness")}
    settings["actor"]["engine_api_key"] = "set" if sections.actor.engine_api_key else ""
    (folder / "config.json").write_text(json.dumps(settings, indent=2) + "\n")
    ready = {
        "pid": os.getpid(),
        "actor_id": sender.actor_id,
        "engines": list(engines),
        "buffer": sender.url,
        "metrics_port": port,
    }
    partial = folder / "ready.json.partial"
    partial.write_text(json.dumps(ready) + "\n")
    partial.replace(folder / "ready.json")
    logger.info("actor %s ready: engines %s, buffer %s", sender.actor_id, ", ".join(engines), sender.url)
