"""A local engine as the actor's child: started on a free port, ended with the actor, however that ends."""

from __future__ import annotations

import asyncio
import json
import logging
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from vagen.common.errors import EngineUnavailableError

logger = logging.getLogger(__name__)

_START_TIMEOUT_S = 120.0
_STOP_TIMEOUT_S = 10.0
_POLL_S = 0.1
_LOG_TAIL_BYTES = 2000


@asynccontextmanager
async def child_engine(model_dir: Path, folder: Path, recipe_arguments: Sequence[str]) -> AsyncIterator[str]:
    """Start `vagen-actor engine` and yield its URL; its ready file and log lie in `folder`.

    The body is cancelled and `EngineUnavailableError` raised when the child ends first, or does not start.
    """
    folder.mkdir(parents=True, exist_ok=True)
    ready, log = folder / "ready.json", folder / "engine.log"
    ready.unlink(missing_ok=True)
    arguments = ["engine", "--model", str(model_dir), "--port", "0", "--ready-file", str(ready), "--with-parent"]
    with log.open("ab") as output:
        child = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "vagen.actor.cli",
            *arguments,
            *recipe_arguments,
            # The child ends when this pipe does: also when the actor is killed.
            stdin=asyncio.subprocess.PIPE,
            stdout=output,
            stderr=output,
            # Ctrl-C goes to the actor alone, which drains before its engine ends.
            start_new_session=True,
        )
    try:
        url = await _wait_until_ready(child, ready, log)
        logger.info("local engine %s, pid %d", url, child.pid)
        async with asyncio.TaskGroup() as group:
            watch = group.create_task(_watch(child, log), name="watch_child")
            yield url
            watch.cancel()
    finally:
        await _stop(child)


async def _wait_until_ready(child: asyncio.subprocess.Process, ready: Path, log: Path) -> str:
    deadline = asyncio.get_running_loop().time() + _START_TIMEOUT_S
    while not ready.is_file():
        if child.returncode is not None:
            raise _ended(child, log)
        if asyncio.get_running_loop().time() > deadline:
            raise EngineUnavailableError(f"local engine is not ready after {_START_TIMEOUT_S:g} s; see {log}")
        await asyncio.sleep(_POLL_S)
    return str(json.loads(ready.read_text())["url"])


async def _watch(child: asyncio.subprocess.Process, log: Path) -> None:
    await child.wait()
    raise _ended(child, log)


def _ended(child: asyncio.subprocess.Process, log: Path) -> EngineUnavailableError:
    tail = log.read_bytes()[-_LOG_TAIL_BYTES:].decode(errors="replace").strip()
    return EngineUnavailableError(f"local engine ended with exit status {child.returncode}; the end of {log}:\n{tail}")


async def _stop(child: asyncio.subprocess.Process) -> None:
    if child.returncode is None:
        child.terminate()
        try:
            await asyncio.wait_for(child.wait(), _STOP_TIMEOUT_S)
        except TimeoutError:
            logger.warning("local engine %d did not stop within %g s: killed", child.pid, _STOP_TIMEOUT_S)
            child.kill()
            await child.wait()
