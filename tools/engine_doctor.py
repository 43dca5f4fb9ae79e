"""`vagen doctor engine`: whether a running engine is fit to train with, found by asking it.

Owns the questions and what their answers mean. Changes nothing at the engine unless told to try an update.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from vagen.common.errors import ConfigError, EngineError, EngineRefusedError, EngineUnavailableError
from vagen.learner.config import BroadcastConfig
from vagen.learner.engine_control import EngineControl, open_session
from vagen.learner.engine_quantisation import why_quantised
from vagen.tools.doctor import Finding

__all__ = ["TESTED_SGLANG", "EngineDoctor"]

TESTED_SGLANG = "0.5.23"
_UNUSED_RID = "vagen-doctor-no-such-request"


@dataclass(frozen=True, kw_only=True)
class EngineDoctor:
    """One examination of the engine at `url`."""

    url: str
    model_dir: Path | None = None
    """The learner's model folder: what its weights' names and log-probabilities are compared with."""
    api_key: str | None = None
    admin_api_key: str | None = None
    update: bool = False
    """Publish changed weights and then those of `model_dir`."""
    timeout_s: float = 20.0

    def __post_init__(self) -> None:
        if urlsplit(self.url).scheme not in ("http", "https"):
            raise ConfigError(f"engine: expected http://HOST:PORT, got {self.url!r}")
        if self.update and self.model_dir is None:
            raise ConfigError("--update: expected --model DIR as well, the weights to publish")

    def examine(self) -> Iterator[Finding]:
        """All findings, each as soon as it is known; the first that the others need ends it."""
        try:
            info = self._call("GET", "/server_info")
            version = str(self._call("GET", "/model_info").get("weight_version"))
        except EngineError as error:
            yield Finding(name="engine", ok=False, text=f"{self.url}: {error}")
            return
        yield _describe(info)
        yield from self._authorisation(info)
        yield _version(version)
        yield from _layout(info)
        yield _prefix_cache(info)
        if self.model_dir is None:
            yield Finding(name="log-probs", ok=True, text="not compared: --model DIR does")
        else:
            yield from self._compare(self.model_dir, info, version)

    @property
    def _broadcast(self) -> BroadcastConfig:
        return BroadcastConfig(
            api_key=self.api_key, admin_api_key=self.admin_api_key, broadcast_timeout_s=self.timeout_s
        )

    def _call(
        self, method: str, path: str, body: Mapping[str, Any] | None = None, **keys: str | None
    ) -> dict[str, Any]:
        """One call; `keys` replace those of the command line. Raises EngineError, also at the time-out."""
        keys = {"key": self.api_key, "admin_key": self.admin_api_key} | keys

        async def call() -> dict[str, Any]:
            async with open_session() as session, asyncio.timeout(self.timeout_s):
                control = EngineControl(session, self.url.rstrip("/"), **keys)
                return await (control.get(path) if method == "GET" else control.post(path, body))

        try:
            return asyncio.run(call())
        except TimeoutError as error:
            raise EngineUnavailableError(f"{path}: no answer within {self.timeout_s:g} s") from error

    def _opens_administration(self, key: str | None) -> bool:
        """Whether this key, or none, opens what pauses an engine and changes its weights."""
        try:
            self._call("POST", "/abort_request", {"rid": _UNUSED_RID}, key=None, admin_key=key)
        except EngineRefusedError:
            return False
        return True

    def _authorisation(self, info: Mapping[str, Any]) -> Iterator[Finding]:
        if self._opens_administration(None):
            is_private = _is_loopback(self.url)
            where = "only this machine reaches it" if is_private else "start it with --api-key and --admin-api-key"
            yield Finding(name="keys", ok=is_private, text=f"anyone may pause it and change its weights: {where}")
            return
        if not self._opens_administration(self.admin_api_key or self.api_key):
            yield Finding(name="keys", ok=False, text="the given key does not open pausing and weights: publishes fail")
            return
        shown = self.admin_api_key is not None and info.get("admin_api_key") == self.admin_api_key
        shared = self.admin_api_key is None or self._opens_administration(self.api_key)
        text = "a key is needed to pause it"
        text += ", and the key of generation is enough" if shared else ", another than that of generation"
        text += "; /server_info shows it to every actor" if shown else ""
        yield Finding(name="keys", ok=True, text=text)

    def _compare(self, model_dir: Path, info: Mapping[str, Any], version: str) -> Iterator[Finding]:
        from vagen.tools.engine_comparison import EngineComparison

        try:
            checksums = self._call("POST", "/weights_checker", {"action": "checksum"})
        except EngineError as error:
            yield Finding(name="weights", ok=False, text=str(error))
            return
        comparison = EngineComparison(self.url.rstrip("/"), model_dir, info, self._broadcast)
        yield from comparison.examine(checksums, version, update=self.update)


def _describe(info: Mapping[str, Any]) -> Finding:
    if info.get("kind") == "local":
        return Finding(name="engine", ok=True, text=f"local engine on {info.get('device')}, {info.get('dtype')}")
    version = str(info.get("version"))
    text = f"SGLang {version} on {info.get('device')}, {info.get('dtype')}, tensor parallel {info.get('tp_size', 1)}"
    return Finding(
        name="engine", ok=True, text=text + ("" if version == TESTED_SGLANG else f" (tested: {TESTED_SGLANG})")
    )


def _version(version: str) -> Finding:
    if version.isdecimal():
        return Finding(name="version", ok=True, text=f"weights of version {version}")
    if version == "default":
        text = "none before the first publish; --weight-version 0 lets `vagen eval` use it before"
        return Finding(name="version", ok=True, text=text)
    return Finding(name="version", ok=False, text=f"{version!r}: a publish failed half-way, only another one mends it")


def _layout(info: Mapping[str, Any]) -> Iterator[Finding]:
    for name in ("pp_size", "dp_size"):
        if info.get(name, 1) != 1:
            text = f"{name} {info[name]}: weights are published to engines with {name} 1 only"
            yield Finding(name="layout", ok=False, text=text)
    reason = why_quantised(info, {})
    if reason is not None:
        yield Finding(name="layout", ok=False, text=reason)


def _prefix_cache(info: Mapping[str, Any]) -> Finding:
    if info.get("kind") == "local" or info.get("disable_radix_cache"):
        return Finding(name="prefix cache", ok=True, text="off: any pause_mode")
    text = "on: right with pause_mode retract and abort, which flush it; in_place wants --disable-radix-cache"
    return Finding(name="prefix cache", ok=True, text=text)


def _is_loopback(url: str) -> bool:
    host = urlsplit(url).hostname or ""
    try:
        return all(ipaddress.ip_address(found[4][0]).is_loopback for found in socket.getaddrinfo(host, None))
    except OSError:
        return False
