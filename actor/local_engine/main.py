"""The process of the local engine: loads a model, serves until it is told to stop."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import sys
from pathlib import Path

import torch

from vagen.actor.local_engine.config import EngineConfig
from vagen.actor.local_engine.model import EngineModel
from vagen.actor.local_engine.server import EngineServer
from vagen.common.config import RunConfig
from vagen.common.errors import ConfigError, EngineError
from vagen.common.metrics import Metrics

__all__ = ["run_engine"]

logger = logging.getLogger(__name__)

_SWITCH_INTERVAL_S = 0.0005


def run_engine(model_dir: Path, config: EngineConfig, run: RunConfig, ready_file: Path | None = None) -> None:
    """Serve `model_dir` until SIGTERM or SIGINT.

    Once requests are answered, `ready_file` is written in one piece: `{"pid": .., "url": ..}`. Raises ConfigError for
    a model that cannot be loaded or an address that cannot be bound, EngineError when the engine's thread died.
    """
    torch.set_num_threads(config.num_threads)
    # The engine's thread gives up the interpreter at every operation of torch; at the default of 5 ms it would wait
    # that long for the HTTP side, many times a step.
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    model = EngineModel(model_dir, config)
    asyncio.run(_serve(model, model_dir, config, run, ready_file))


async def _serve(
    model: EngineModel, model_dir: Path, config: EngineConfig, run: RunConfig, ready_file: Path | None
) -> None:
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    server = EngineServer(model, model_dir, config, Metrics("vagen_engine", run.name))
    try:
        try:
            url = await server.start()
        except OSError as error:
            raise ConfigError(f"engine: cannot listen on {config.host}:{config.port}: {error.strerror}") from error
        logger.info("serving %s (%d parameters) on %s", model_dir, model.num_parameters, url)
        if ready_file is not None:
            _write_ready(ready_file, url)
        ends = [asyncio.ensure_future(event.wait()) for event in (stop, server.died)]
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        for end in ends:
            end.cancel()
    finally:
        await server.close()
    if server.died.is_set():
        raise EngineError("the engine's thread died; the log has the reason")


def _write_ready(file: Path, url: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    partial = file.with_name(file.name + ".partial")
    partial.write_text(json.dumps({"pid": os.getpid(), "url": url}) + "\n")
    partial.replace(file)
