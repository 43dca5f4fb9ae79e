"""The environments of an actor: one for each running episode, kept for the next episode after a good one."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from vagen.common.errors import EnvironmentFailure
from vagen.envs.base import Environment
from vagen.envs.registry import make_environment

logger = logging.getLogger(__name__)


class EnvironmentPool:
    """Lends environments of one kind; owns the threads that synchronous ones step in."""

    def __init__(self, name: str, config: Mapping[str, Any], workers: int) -> None:
        """`workers` is the number of threads."""
        self._name = name
        self._config = config
        self._executor = ThreadPoolExecutor(workers, thread_name_prefix="env")
        self._idle: list[Environment] = []

    def take(self) -> Environment:
        """An environment that no other episode uses. Raises `ConfigError` for settings that it refuses."""
        return self._idle.pop() if self._idle else make_environment(self._name, self._config, self._executor)

    def give_back(self, env: Environment) -> None:
        """After an episode that ended well."""
        self._idle.append(env)

    async def discard(self, env: Environment) -> None:
        """After a failed or cancelled episode: its state is unknown."""
        try:
            await env.close()
        except EnvironmentFailure as error:
            logger.warning("%s did not close: %s", self._name, error)

    async def close(self) -> None:
        """Close the idle ones and let the threads go; one that hangs is not waited for."""
        while self._idle:
            await self.discard(self._idle.pop())
        self._executor.shutdown(wait=False, cancel_futures=True)
