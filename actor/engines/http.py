"""HTTP to one engine: calls that end within a time-out, typed failures, and who it is that answers."""

from __future__ import annotations

import logging
from typing import Any, Literal, TypeVar

import aiohttp
import msgspec

from vagen.common.engines import incarnation_of
from vagen.common.errors import EngineError, EngineRefusedError, EngineUnavailableError
from vagen.common.trajectory import EngineIdentity

__all__ = ["SIDE_CALL_TIMEOUT_S", "EngineHttp"]

logger = logging.getLogger(__name__)

SIDE_CALL_TIMEOUT_S = 5.0
"""For calls that generate nothing."""
_CONNECT_TIMEOUT_S = 5.0
_BUSY = (408, 429)
"""Of SGLang's router: it waited too long for an engine, or its queue is full."""

A = TypeVar("A")


class EngineHttp:
    """The connections to one engine. Belongs to one event loop; `close` it."""

    def __init__(self, url: str, api_key: str = "") -> None:
        self.url = url.rstrip("/")
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._session: aiohttp.ClientSession | None = None

    async def call(
        self, method: Literal["GET", "POST"], path: str, body: object = None, timeout_s: float = SIDE_CALL_TIMEOUT_S
    ) -> bytes:
        """Body of the answer.

        Raises `EngineUnavailableError` when there is none within `timeout_s` or it is a 5xx or says that it is busy,
        `EngineRefusedError` for another 4xx.
        """
        if self._session is None:
            # The number of episodes is the bound on connections.
            self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), headers=self._headers)
        url = self.url + path
        timeout = aiohttp.ClientTimeout(total=timeout_s, sock_connect=_CONNECT_TIMEOUT_S)
        try:
            async with self._session.request(method, url, json=body, timeout=timeout) as response:
                answer = await response.read()
        except TimeoutError as error:
            raise EngineUnavailableError(f"{url}: no answer within {timeout_s:.1f} s") from error
        except (aiohttp.ClientError, OSError) as error:
            raise EngineUnavailableError(f"{url}: {type(error).__name__}: {error}") from error
        if response.status >= 400:
            text = answer[:300].decode(errors="replace")
            is_busy = response.status in _BUSY or response.status >= 500
            kind = EngineUnavailableError if is_busy else EngineRefusedError
            raise kind(f"{url}: HTTP {response.status}: {text}")
        return answer

    def decode(self, body: bytes, kind: type[A]) -> A:
        """A JSON body as `kind`. Raises `EngineError`."""
        try:
            return msgspec.json.decode(body, type=kind)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise EngineError(f"{self.url}: not the answer of an engine: {error}") from error

    async def identity(self, model_hash: str, tokenizer_hash: str) -> EngineIdentity:
        """Who answers now; its incarnation changes when it is restarted. `model_hash` is for engines that tell none.

        Raises `EngineRefusedError` for what is no engine to train with.
        """
        try:
            info = self.decode(await self.call("GET", "/server_info"), dict[str, Any])
        except EngineRefusedError as error:
            await self._refuse_vllm(error)
            raise
        if "vllm_config" in info:
            raise EngineRefusedError(self._no_training("vLLM"))
        return EngineIdentity(
            kind=str(info.get("kind", "sglang")),
            incarnation=incarnation_of(info),
            model_hash=str(info.get("model_hash") or model_hash),
            tokenizer_hash=tokenizer_hash,
        )

    async def abort(self, rid: str) -> None:
        """Ask the engine to give up a request that nobody waits for; best effort."""
        try:
            await self.call("POST", "/abort_request", {"rid": rid})
        except EngineError as error:
            logger.info("abort of %s at %s: %s", rid, self.url, error)

    async def close(self) -> None:
        """Close the connections."""
        if self._session is not None:
            await self._session.close()

    async def _refuse_vllm(self, cause: EngineRefusedError) -> None:
        """Raise where a server without `/server_info` says that it is vLLM, which has `/version` and SGLang has not."""
        try:
            version = self.decode(await self.call("GET", "/version"), dict[str, Any]).get("version")
        except EngineError:
            return
        if version is not None:
            raise EngineRefusedError(self._no_training(f"vLLM {version}")) from cause

    def _no_training(self, what: str) -> str:
        return (
            f"{self.url} is {what}, which neither says which weights sampled a token nor takes weights as SGLang does: "
            "train with SGLang or the local engine; `vagen eval --api openai` evaluates with it"
        )
