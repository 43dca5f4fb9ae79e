"""Runs a synchronous environment core on a shared thread pool, off the actor's event loop.

Owns the time limit of a call and the translation of a core's exceptions into `EnvironmentFailure`. Does not own the
pool: it is bounded and shared by all episodes of the process. A core that hangs keeps its thread until it returns, so
a simulator that may hang belongs in a process of its own behind a natively asynchronous `Environment`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any, ParamSpec, TypeVar

from vagen.common.errors import EnvironmentFailure, VagenError
from vagen.envs.base import EnvironmentCore, Info, Observation, StepResult

logger = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")


class ThreadedEnvironment:
    """An `Environment` made of an `EnvironmentCore` and a pool of threads.

    `timeout_s` bounds each call, waiting for a thread included. After a failure or a cancelled call the state of the
    core is unknown: every further call except `close` raises `EnvironmentFailure`.
    """

    def __init__(self, core: EnvironmentCore, executor: Executor, *, timeout_s: float = 60.0) -> None:
        self._core = core
        self._executor = executor
        self._timeout_s = timeout_s
        self._name = type(core).__name__
        self._call: Future[Any] | None = None
        self._failure: str | None = None
        self._closed = False

    async def reset(self, seed: int) -> tuple[Observation, Info]:
        return await self._run("reset", self._core.reset, seed)

    async def step(self, response: str) -> StepResult:
        return await self._run("step", self._core.step, response)

    def system_prompt(self) -> str:
        return self._core.system_prompt()

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        if self._call is not None and not self._call.done():
            # The core is still inside a call that was given up; its thread closes it on the way out.
            self._call.add_done_callback(self._close_late)
            return
        self._failure = None
        await self._run("close", self._core.close)
        self._failure = "it is closed"

    def _close_late(self, call: Future[Any]) -> None:
        logger.warning("%s: an abandoned call has returned, closing", self._name)
        self._core.close()

    async def _run(self, method: str, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        if self._failure is not None:
            raise EnvironmentFailure(f"{self._name}.{method}: {self._failure}")
        call = self._executor.submit(function, *args, **kwargs)
        self._call = call
        waiter = asyncio.wrap_future(call)
        # Holds when the wait below is cancelled; cleared by every other way out.
        self._failure = f"an earlier {method} was cancelled"
        try:
            done, _ = await asyncio.wait({waiter}, timeout=self._timeout_s)
        finally:
            never_ran = call.cancel()
            waiter.cancel()  # else an error that comes later is logged as never retrieved
        if not done:
            place = "waiting for a thread" if never_ran else "running"
            self._failure = f"an earlier {method} timed out"
            raise EnvironmentFailure(f"{self._name}.{method}: still {place} after {self._timeout_s} s")
        error = waiter.exception()
        if error is None:
            self._failure = None
            return waiter.result()
        self._failure = f"an earlier {method} raised {type(error).__name__}"
        if isinstance(error, VagenError) or not isinstance(error, Exception):
            raise error
        raise EnvironmentFailure(f"{self._name}.{method} raised {type(error).__name__}: {error}") from error
