"""Stand-ins on real sockets for what the real part makes slow or cannot be told to do: scripted answers, faults."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import zmq
import zmq.asyncio
from aiohttp import web
from PIL import Image
from ulid import ULID

from vagen.common.trajectory import Trajectory
from vagen.common.validation import validate_trajectory
from vagen.common.wire import (
    CreditRequest,
    EngineStatus,
    EpisodeFailed,
    Grant,
    Heartbeat,
    Kind,
    Refusal,
    Status,
    TaskGrant,
    check_payload,
    decode_envelope,
    decode_message,
    decode_trajectory,
    encode_message,
)
from vagen.envs.base import Info, Observation, ParsedResponse, StepResult

Answer = web.Response | dict[str, Any]


def generated(
    ids: Sequence[int], reason: str = "stop", versions: Sequence[tuple[Any, int, int]] | None = None, **meta: Any
) -> dict[str, Any]:
    """An answer of `/generate`; token i has logprob -(i + 1) / 10."""
    spans = [(3, 0, len(ids))] if versions is None else versions
    return {
        "output_ids": list(ids),
        "meta_info": {
            "finish_reason": {"type": reason},
            "output_token_logprobs": [[-(i + 1) / 10, token, None] for i, token in enumerate(ids)],
            "weight_versions": [{"version": str(v), "start": start, "end": end} for v, start, end in spans],
            **meta,
        },
    }


@dataclass
class ScriptedEngine:
    """An HTTP engine whose answers are the test's: `script(body, number)` answers the number-th `/generate`."""

    script: Callable[[dict[str, Any], int], Answer | Awaitable[Answer]]
    api_key: str = ""
    incarnation: str = "first"
    port: int = 0
    metrics: str = ""
    """Body of `/metrics`."""
    is_ready: bool = True
    requests: list[dict[str, Any]] = field(default_factory=list)
    aborted: list[str] = field(default_factory=list)
    _runner: web.AppRunner | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def __aenter__(self) -> ScriptedEngine:
        app = web.Application(client_max_size=1 << 24)
        app.add_routes(
            [
                web.post("/generate", self._generate),
                web.post("/abort_request", self._abort),
                web.get("/server_info", self._info),
                web.get("/ready", self._ready),
                web.get("/metrics", self._metrics),
            ]
        )
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self.port)
        await site.start()
        self.port = self._runner.addresses[0][1]
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._runner is not None
        await self._runner.cleanup()

    def _refuses(self, request: web.Request) -> bool:
        return bool(self.api_key) and request.headers.get("Authorization") != f"Bearer {self.api_key}"

    async def _generate(self, request: web.Request) -> web.Response:
        if self._refuses(request):
            return web.Response(status=401, text="wrong token")
        body = await request.json()
        self.requests.append(body)
        answer = self.script(body, len(self.requests) - 1)
        if isinstance(answer, Awaitable):
            answer = await answer
        return answer if isinstance(answer, web.Response) else web.json_response(answer)

    async def _abort(self, request: web.Request) -> web.Response:
        self.aborted.append((await request.json())["rid"])
        return web.Response()

    async def _ready(self, request: web.Request) -> web.Response:
        return web.Response(status=200 if self.is_ready else 503)

    async def _metrics(self, request: web.Request) -> web.Response:
        return web.Response(text=self.metrics)

    async def _info(self, request: web.Request) -> web.Response:
        if self._refuses(request):
            return web.Response(status=401, text="wrong token")
        return web.json_response({"kind": "local", "incarnation": self.incarnation, "model_hash": "m"})


@dataclass
class ScriptedIngest:
    """The buffer's side of the socket, on a real ROUTER, without Redis behind it."""

    endpoint: str = "tcp://127.0.0.1:*"
    engines: tuple[EngineStatus, ...] = ()
    tasks: list[TaskGrant] = field(default_factory=list)
    """Granted in order."""
    lease_s: float = 30.0
    acks: bool = True
    refuse: Callable[[Trajectory], tuple[str, str] | None] = lambda trajectory: None
    admits_announced: bool = True
    """Whether every announced engine is admitted at once."""
    stored: dict[str, Trajectory] = field(default_factory=dict)
    puts: list[str] = field(default_factory=list)
    heartbeats: list[Heartbeat] = field(default_factory=list)
    failures: list[EpisodeFailed] = field(default_factory=list)
    wants: list[int] = field(default_factory=list)
    _changed: asyncio.Event = field(default_factory=asyncio.Event)

    async def __aenter__(self) -> ScriptedIngest:
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.set(zmq.IPV6, int("[" in self.endpoint))
        self._socket.bind(self.endpoint)
        self.endpoint = self._socket.get(zmq.LAST_ENDPOINT).decode().rstrip("\0")
        self._work = asyncio.create_task(self._serve())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._work.cancel()
        await asyncio.gather(self._work, return_exceptions=True)
        self._socket.close(linger=0)
        self._context.term()

    async def until(self, holds: Callable[[], bool], timeout_s: float = 20.0) -> None:
        """Wait until a message has made `holds` true."""

        async def wait() -> None:
            while not holds():
                self._changed.clear()
                waiters = {asyncio.ensure_future(self._changed.wait()), self._work}
                await asyncio.wait(waiters, return_when=asyncio.FIRST_COMPLETED)
                if self._work.done():
                    self._work.result()

        await asyncio.wait_for(wait(), timeout_s)

    @property
    def status(self) -> Status:
        return Status(learner_step=0, policy_version=3, engines=self.engines)

    async def _serve(self) -> None:
        while True:
            peer, kind, *frames = await self._socket.recv_multipart()
            for reply in self._answer(kind, frames):
                await self._socket.send_multipart([peer, *reply])
            self._changed.set()

    def _answer(self, kind: bytes, frames: list[bytes]) -> list[tuple[bytes, bytes]]:
        if kind == Kind.PUT:
            return self._store(*frames)
        if kind == Kind.HEARTBEAT:
            beat = decode_message(frames[0], Heartbeat)
            self.heartbeats.append(beat)
            if self.admits_announced:
                self.engines = tuple(
                    EngineStatus(url=e.url, incarnation=e.incarnation, policy_version=3) for e in beat.engines
                )
            return [(Kind.STATUS.value, encode_message(self.status))]
        if kind == Kind.FAILED:
            self.failures.append(decode_message(frames[0], EpisodeFailed))
            return []
        assert kind == Kind.REQUEST, kind
        want = decode_message(frames[0], CreditRequest).want
        self.wants.append(want)
        granted, self.tasks = self.tasks[:want], self.tasks[want:]
        grant = Grant(tasks=tuple(granted), lease_s=self.lease_s, status=self.status)
        return [(Kind.GRANT.value, encode_message(grant))]

    def _store(self, head: bytes, payload: bytes) -> list[tuple[bytes, bytes]]:
        envelope = decode_envelope(head)
        check_payload(envelope, payload)
        trajectory = decode_trajectory(payload)
        validate_trajectory(trajectory)
        assert trajectory.actor_seq == envelope.actor_seq
        self.puts.append(trajectory.trajectory_id)
        refusal = self.refuse(trajectory)
        if refusal is not None:
            message = Refusal(trajectory_id=envelope.trajectory_id, field=refusal[0], problem=refusal[1])
            return [(Kind.REFUSE.value, encode_message(message))]
        self.stored[trajectory.trajectory_id] = trajectory
        return [(Kind.ACK.value, ULID.from_str(trajectory.trajectory_id).bytes)] if self.acks else []


@dataclass
class ScriptedEnvironment:
    """Turns from a list: (reward, terminated, truncated). Observation k has text `look k`, a picture of its own and the
    state `at k`."""

    turns: Sequence[tuple[Mapping[str, float], bool, bool]]
    sizes: Sequence[tuple[int, int]] = ((56, 56),)
    system: str = "Walk."
    sections: Mapping[str, str] = field(default_factory=dict)
    on_step: Callable[[int], Awaitable[None]] | None = None
    responses: list[str] = field(default_factory=list)
    seeds: list[int] = field(default_factory=list)
    closed: bool = False

    def _look(self) -> Observation:
        k = len(self.responses)
        shade = (37 * k % 256, len(self.seeds) % 256, 5)
        return Observation(f"<image>look {k}", (Image.new("RGB", self.sizes[k % len(self.sizes)], shade),), f"at {k}")

    async def reset(self, seed: int) -> tuple[Observation, Info]:
        self.seeds.append(seed)
        self.responses = []
        return self._look(), Info()

    async def step(self, response: str) -> StepResult:
        turn = len(self.responses)
        if self.on_step is not None:
            await self.on_step(turn)
        self.responses.append(response)
        reward, terminated, truncated = self.turns[turn]
        return StepResult(
            observation=self._look(),
            reward=reward,
            terminated=terminated,
            truncated=truncated,
            info=Info(success=terminated, metrics={"steps": float(turn + 1)}),
            parsed=ParsedResponse(format_ok=True, action_valid=True, actions=("Left",), sections=self.sections),
        )

    def system_prompt(self) -> str:
        return self.system

    async def close(self) -> None:
        self.closed = True
