"""The local engine's HTTP side: SGLang's endpoints, as far as an RL client needs them.

    POST /generate                                            api key
    POST /abort_request /pause_generation /continue_generation, and all of weights     admin key
    GET  /health /ready /metrics                              open
    GET  /server_info /model_info                             api key

Owns parsing, authorisation, and the two threads behind it: the engine's, and one for administration, on which weights
are received while generation goes on. `output_ids` contain the stop token. Requests that arrive while the engine is
paused wait; a client that disconnects aborts its request. What `/generate` refuses is answered by
`{"error": {"message": ..}}`, what an update refuses by `{"success": false, "message": ..}`.
"""

from __future__ import annotations

import asyncio
import functools
import hmac
import logging
import math
import time
import uuid
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import prometheus_client
from aiohttp import web
from tokenizers import Tokenizer

from vagen.actor.local_engine.admin import (
    AbortBody,
    BeginUpdateBody,
    CheckerBody,
    DestroyGroupBody,
    DiskUpdateBody,
    EmptyBody,
    EndUpdateBody,
    InitGroupBody,
    PauseBody,
    UpdateBody,
)
from vagen.actor.local_engine.config import EngineConfig
from vagen.actor.local_engine.engine import Engine
from vagen.actor.local_engine.model import EngineModel
from vagen.actor.local_engine.requests import BadRequest, GenerateBody, Request, RequestFactory
from vagen.actor.local_engine.weights import WeightReceiver, WeightUpdateError
from vagen.common.metrics import Metrics
from vagen.common.trajectory import content_hash
from vagen.common.weight_transfer import combined_checksum, dtype_name

__all__ = ["EngineServer"]

logger = logging.getLogger(__name__)

_MAX_BODY_BYTES = 64 << 20
B = TypeVar("B")
T = TypeVar("T")


class EngineServer:
    """Endpoints over one engine. Lives on the thread of the event loop that calls `start`."""

    def __init__(self, model: EngineModel, model_dir: Path, config: EngineConfig, metrics: Metrics) -> None:
        self.incarnation = uuid.uuid4().hex
        self.died = asyncio.Event()
        """Set when the engine's thread has ended by an error."""
        self._model = model
        self._model_dir = model_dir
        self._config = config
        self._metrics = metrics
        self._loop = asyncio.get_running_loop()
        self._receiver = WeightReceiver(model.hf, is_tied=model.is_tied)
        self._admin = ThreadPoolExecutor(1, thread_name_prefix="weights")
        self._engine = Engine(
            model,
            config,
            metrics,
            on_finished=lambda requests: self._call_soon(self._resolve, requests),
            on_pause_expired=self._receiver.discard,
            on_died=lambda: self._call_soon(self._give_up),
        )
        self._factory = RequestFactory(
            vocab_size=model.vocab_size,
            max_context=model.max_context,
            max_new_tokens_limit=config.max_new_tokens_limit,
            eos_token_ids=model.eos_token_ids,
            vision_tokens=model.vision_tokens,
            video_token_id=model.video_token_id,
            image_spec=model.image_spec,
            image_cache_bytes=config.image_cache_bytes,
            seed=config.seed,
        )
        self._pending: dict[Request, asyncio.Future[None]] = {}
        """Requests that a handler waits for: at most `max_running + max_waiting`."""
        tokenizer = model_dir / "tokenizer.json"
        self._tokenizer = Tokenizer.from_file(str(tokenizer)) if tokenizer.is_file() else None
        self._hashes = {"model_hash": _hash(model_dir / "config.json"), "tokenizer_hash": _hash(tokenizer)}
        self._runner: web.AppRunner | None = None

    async def start(self) -> str:
        """Listen, and return the URL."""
        self._engine.start()
        app = web.Application(client_max_size=_MAX_BODY_BYTES)
        app.add_routes(self._routes())
        self._runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=2.0)
        await self._runner.setup()
        await web.TCPSite(self._runner, self._config.host, self._config.port).start()
        host, port = self._runner.addresses[0][:2]
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    async def close(self) -> None:
        """Abort what runs, answer it, and stop listening."""
        await asyncio.to_thread(self._engine.close)
        if self._runner is not None:
            await self._runner.cleanup()
        await asyncio.to_thread(self._admin.shutdown, True, cancel_futures=True)
        self._receiver.close()

    def _routes(self) -> list[web.RouteDef]:
        key, admin_key = self._config.api_key, self._config.admin_api_key
        keys = tuple(k for k in (key, admin_key) if k is not None) if key is not None else ()
        admin_keys = (admin_key,) if admin_key is not None else keys

        def administrative(path: str, kind: type[B], handler: Callable[[B], Awaitable[dict[str, Any]]]) -> web.RouteDef:
            return web.post(path, _guarded(admin_keys, functools.partial(self._administer, kind, handler)))

        return [
            web.post("/generate", _guarded(keys, self._generate)),
            administrative("/abort_request", AbortBody, self._abort),
            administrative("/pause_generation", PauseBody, self._pause),
            administrative("/continue_generation", EmptyBody, self._continue),
            administrative("/init_weights_update_group", InitGroupBody, self._init_group),
            administrative("/destroy_weights_update_group", DestroyGroupBody, self._destroy_group),
            administrative("/begin_weight_update", BeginUpdateBody, self._begin_update),
            administrative("/update_weights_from_distributed", UpdateBody, self._update),
            administrative("/end_weight_update", EndUpdateBody, self._end_update),
            administrative("/update_weights_from_disk", DiskUpdateBody, self._update_from_disk),
            administrative("/weights_checker", CheckerBody, self._check_weights),
            web.get("/health", self._health),
            web.get("/ready", self._health),
            web.get("/metrics", self._show_metrics),
            web.get("/server_info", _guarded(keys, self._server_info)),
            web.get("/model_info", _guarded(keys, self._model_info)),
        ]

    async def _generate(self, http: web.Request) -> web.Response:
        if not self._engine.is_alive:
            return _error(503, "the engine has died")
        if len(self._pending) >= self._config.max_running + self._config.max_waiting:
            return _error(503, f"queue is full: {len(self._pending)} requests")
        try:
            body = _decode(await http.read(), GenerateBody)
            deadline = time.monotonic() + self._config.request_timeout_s
            request = self._factory.build(body, body.rid or uuid.uuid4().hex, deadline)
        except BadRequest as error:
            return _error(400, str(error))
        future = self._pending[request] = self._loop.create_future()
        self._engine.submit(request)
        try:
            await future
        except asyncio.CancelledError:
            self._engine.call(lambda: self._engine.abort(lambda other: other is request, "the client disconnected"))
            raise
        finally:
            del self._pending[request]
        if request.finish_reason is None:
            return _error(503, "the engine died while it generated")
        return _json(request.answer(self._engine.weight_version, self._decode_text if self._tokenizer else None))

    def _decode_text(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        assert self._tokenizer is not None
        return str(self._tokenizer.decode(ids, skip_special_tokens=skip_special_tokens))

    async def _administer(
        self, kind: type[B], handler: Callable[[B], Awaitable[dict[str, Any]]], http: web.Request
    ) -> web.Response:
        """Run an administrative request; while a pause lasts, each of them puts off its end."""
        self._engine.call(self._engine.touch_pause)
        try:
            return _json({"success": True, "message": "", **await handler(_decode(await http.read(), kind))})
        except BadRequest as error:
            return _error(400, str(error))
        except WeightUpdateError as error:
            logger.warning("%s: %s", http.path, error)
            return _json({"success": False, "message": str(error)}, 400)
        except TimeoutError:
            return _error(503, f"the engine did not answer in {self._config.broadcast_timeout_s} s")
        finally:
            self._engine.call(self._engine.touch_pause)

    async def _abort(self, body: AbortBody) -> dict[str, Any]:
        if not body.rid and not body.abort_all:
            raise BadRequest("rid: expected a prefix, or abort_all")
        matches = (lambda _: True) if body.abort_all else (lambda request: request.rid.startswith(body.rid))
        return {"aborted": await self._on_engine(lambda: self._engine.abort(matches, "aborted by /abort_request"))}

    async def _pause(self, body: PauseBody) -> dict[str, Any]:
        await self._on_engine(lambda: self._engine.pause(body.mode))
        return {}

    async def _continue(self, _: EmptyBody) -> dict[str, Any]:
        await self._on_engine(self._engine.resume)
        return {}

    async def _init_group(self, body: InitGroupBody) -> dict[str, Any]:
        await self._on_admin(
            lambda: self._receiver.init_group(
                body.group_name,
                host=body.master_address,
                port=body.master_port,
                rank=body.rank_offset,
                world_size=body.world_size,
                backend=body.backend,
                timeout_s=min(body.timeout_s or math.inf, self._config.broadcast_timeout_s),
            )
        )
        return {}

    async def _destroy_group(self, body: DestroyGroupBody) -> dict[str, Any]:
        await self._on_admin(lambda: self._receiver.destroy_group(body.group_name))
        return {}

    async def _begin_update(self, body: BeginUpdateBody) -> dict[str, Any]:
        await self._on_admin(lambda: self._receiver.begin(body.updates))
        return {}

    async def _update(self, body: UpdateBody) -> dict[str, Any]:
        await self._on_admin(
            lambda: self._receiver.receive(
                body.names,
                body.dtypes,
                body.shapes,
                group_name=body.group_name,
                flattened=body.load_format is not None,
                version=body.weight_version,
            )
        )
        return {}

    async def _end_update(self, body: EndUpdateBody) -> dict[str, Any]:
        await self._on_admin(lambda: self._apply(body.weight_version))
        return {"weight_version": self._engine.weight_version}

    async def _update_from_disk(self, body: DiskUpdateBody) -> dict[str, Any]:
        def update() -> None:
            self._receiver.begin()
            try:
                self._receiver.read_folder(Path(body.model_path), body.weight_version)
            except WeightUpdateError:
                self._receiver.discard()
                raise
            self._apply(None)

        await self._on_admin(update)
        return {"weight_version": self._engine.weight_version}

    async def _check_weights(self, _: CheckerBody) -> dict[str, Any]:
        checksums = await self._on_admin(self._receiver.checksums)
        bases = await self._on_admin(self._receiver.base_checksums)
        combined = combined_checksum(checksums)
        rank = {"checksums": checksums, "base_checksums": bases, "per_gpu_checksum": combined}
        return {"ranks": [rank], "per_engine_checksum": combined}

    async def _health(self, _: web.Request) -> web.Response:
        return web.Response() if self._engine.is_alive else _error(503, "the engine has died")

    async def _show_metrics(self, _: web.Request) -> web.Response:
        running, waiting = self._engine.load
        self._metrics.gauge("vagen_engine_running_requests", running)
        self._metrics.gauge("vagen_engine_waiting_requests", waiting)
        self._metrics.gauge("vagen_engine_kv_usage", self._engine.kv_usage)
        if self._engine.weight_version.isdigit():
            self._metrics.gauge("vagen_engine_policy_version", int(self._engine.weight_version))
        text = prometheus_client.generate_latest(self._metrics.registry)
        return web.Response(body=text, headers={"Content-Type": prometheus_client.CONTENT_TYPE_LATEST})

    async def _server_info(self, _: web.Request) -> web.Response:
        model = self._model
        forbidden = model.vision_tokens.forbidden_token_ids if model.vision_tokens is not None else ()
        return _json(
            {
                "kind": "local",
                "incarnation": self.incarnation,
                "model_path": str(self._model_dir),
                **self._hashes,
                "weight_version": self._engine.weight_version,
                "max_context": model.max_context,
                "max_running_requests": self._config.max_running,
                "vocab_size": model.vocab_size,
                "forbidden_token_ids": forbidden,
                "eos_token_ids": model.eos_token_ids,
                "dtype": dtype_name(model.dtype),
                "block_fp8": True,
                "device": str(model.device),
                "num_parameters": model.num_parameters,
                "paused": self._engine.is_paused,
                "takes_low_rank_updates": True,
            }
        )

    async def _model_info(self, _: web.Request) -> web.Response:
        return _json(
            {
                "model_path": str(self._model_dir),
                "tokenizer_path": str(self._model_dir),
                "is_generation": True,
                "weight_version": self._engine.weight_version,
            }
        )

    async def _on_engine(self, function: Callable[[], T]) -> T:
        """Run on the engine's thread, between two steps. Raises TimeoutError."""
        future = asyncio.wrap_future(self._engine.call(function))
        return await asyncio.wait_for(future, self._config.broadcast_timeout_s)

    async def _on_admin(self, function: Callable[[], T]) -> T:
        """Run on the administration thread; what blocks there is bounded by `broadcast_timeout_s` itself."""
        return await self._loop.run_in_executor(self._admin, function)

    def _apply(self, version: str | None) -> None:
        """End the update and let the engine apply it; runs to its end even if the client has gone."""
        staged = self._receiver.end(version)
        applied = self._engine.call(
            lambda: self._engine.apply_weights(lambda: self._receiver.apply(staged), staged.version)
        )
        applied.result(self._config.broadcast_timeout_s)

    def _call_soon(self, function: Callable[..., None], *arguments: object) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(function, *arguments)

    def _resolve(self, requests: Sequence[Request]) -> None:
        for request in requests:
            future = self._pending.get(request)
            if future is not None and not future.done():
                future.set_result(None)

    def _give_up(self) -> None:
        self.died.set()
        self._resolve(list(self._pending))


def _guarded(
    keys: Sequence[str], handler: Callable[[web.Request], Awaitable[web.Response]]
) -> Callable[[web.Request], Awaitable[web.Response]]:
    """`handler` behind a bearer token that is one of `keys`; open without keys."""
    if not keys:
        return handler
    accepted = [f"Bearer {key}".encode() for key in keys]

    async def guard(http: web.Request) -> web.Response:
        given = http.headers.get("Authorization", "").encode("utf-8", "surrogateescape")
        if not any(hmac.compare_digest(given, key) for key in accepted):
            return _error(401, "Unauthorized")
        return await handler(http)

    return guard


def _decode(raw: bytes, kind: type[B]) -> B:
    try:
        return msgspec.json.decode(raw, type=kind)
    except msgspec.DecodeError as error:
        raise BadRequest(str(error)) from None


def _json(content: dict[str, Any], status: int = 200) -> web.Response:
    return web.Response(status=status, body=msgspec.json.encode(content), content_type="application/json")


def _error(status: int, message: str) -> web.Response:
    return _json({"error": {"message": message}}, status)


def _hash(file: Path) -> str:
    return content_hash(file.read_bytes()) if file.is_file() else ""
