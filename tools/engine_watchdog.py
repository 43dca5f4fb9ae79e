"""Watches over a SGLang whose learner may die: lets it go on, or says that it is stuck.

    GET /health answers (a token was made) -> fine
    none for pause_timeout_s -> POST /end_weight_update: an update was open -> its version becomes `incomplete`
                             -> POST /continue_generation
    the engine does not answer these -> stuck

SGLang has no time-out of its own for a pause, nor for the wait for a trainer that hangs. Changes nothing of an engine
that generates. Owns no process: whoever runs it ends and restarts an engine that is stuck.
"""

from __future__ import annotations

import http.client
import json
import logging
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass

from vagen.common.engines import INCOMPLETE_VERSION
from vagen.common.errors import EngineUnavailableError

__all__ = ["EngineWatchdog"]

logger = logging.getLogger(__name__)

_LOOKS = 4
"""At the engine, in `pause_timeout_s`."""
_REFUSED = 400
"""Answer to the end of an update where none is open."""


@dataclass(frozen=True, kw_only=True)
class EngineWatchdog:
    """Watches one engine that serves."""

    url: str
    api_key: str | None = None
    admin_api_key: str | None = None
    """The key of pausing and weights; default: `api_key`."""
    pause_timeout_s: float = 60.0
    """The longest time without a token that a living learner may cause: more than its `broadcast_timeout_s`."""

    def watch(self, stopped: threading.Event) -> None:
        """Look until `stopped`. Raises EngineUnavailableError once the engine is stuck."""
        interval = self.pause_timeout_s / _LOOKS
        silent_since: float | None = None
        wait_s = interval
        while not stopped.wait(wait_s):
            looked_at = time.monotonic()
            if self._generates(interval):
                silent_since = None
            elif silent_since is None:
                silent_since = looked_at
            elif time.monotonic() - silent_since >= self.pause_timeout_s:
                logger.warning("%s: no token for %.0f s; it is told to go on", self.url, self.pause_timeout_s)
                self._resume(interval)
                silent_since = None
            wait_s = max(0.0, looked_at + interval - time.monotonic())

    def _generates(self, timeout_s: float) -> bool:
        """Whether it made a token, for us or for anyone."""
        try:
            return self._call("GET", "/health", None, timeout_s) == 200
        except EngineUnavailableError as error:
            logger.debug("%s", error)
            return False

    def _resume(self, timeout_s: float) -> None:
        """End an open update as one that is not whole, and the pause. Raises EngineUnavailableError."""
        if self._call("POST", "/end_weight_update", {}, timeout_s) != _REFUSED:
            # SGLang writes weights in place: what an open update had received is in force.
            version = {"new_version": INCOMPLETE_VERSION, "abort_all_requests": False}
            self._call("POST", "/update_weight_version", version, timeout_s)
        self._call("POST", "/continue_generation", {}, timeout_s)

    def _call(self, method: str, path: str, body: Mapping[str, object] | None, timeout_s: float) -> int:
        """Status of the answer. Raises EngineUnavailableError when none comes, or none that says yes or no."""
        key = self.api_key if method == "GET" else self.admin_api_key or self.api_key
        headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, headers, method=method)
        try:
            with urllib.request.urlopen(request, timeout=timeout_s) as answer:
                return int(answer.status)
        except urllib.error.HTTPError as error:
            status = error.code
        except (urllib.error.URLError, http.client.HTTPException, TimeoutError, ConnectionError) as error:
            raise EngineUnavailableError(f"{self.url}{path}: {error}") from error
        if status != _REFUSED:
            raise EngineUnavailableError(f"{self.url}{path}: {status}")
        return status
