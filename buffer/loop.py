"""The ingest: the one loop of `vagen-buffer`.

      actors (DEALER)                                           Redis
    PUT, HEARTBEAT, REQUEST, FAILED                              ^
            |                                                    |
            v                                                    |
         receive ---> read ------------> fit ------------> begin-+  one MULTI/EXEC, fsynced
            ^         bytes -> checked    | puts above       :      while the next batch is received and read
            |         requests            | the capacity     v
            +---------- pending <---------+           finish, answer ---> ACK, REFUSE, STATUS, GRANT
                        (bounded)

    consumes      at most 32 messages or 32 MB at a time, those that are pending among them; as much is on its way
    waits for     messages, at most TICK_S; Redis, without limit, but a request to stop ends the wait
    unblocked by  `done` of the learner, which frees payloads; Redis coming back; SIGTERM

Nothing is dropped: a put that does not fit stays pending, and when 32 do, the socket is not read any more; then the
peers' queues fill and the actors, whose windows of unacknowledged trajectories are bounded, slow down. An
acknowledgement leaves only after EXEC. Bytes that are no message of ours are counted and forgotten.
"""

from __future__ import annotations

import contextlib
import logging
import re
import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import psutil
import zmq
from ulid import ULID

from vagen.buffer.config import BufferConfig
from vagen.buffer.connection import TRANSIENT
from vagen.buffer.gate import Gate
from vagen.buffer.requests import Ask, BadPut, Beat, Failure, Malformed, Put, Request, check_size, read_request
from vagen.buffer.selection.priority import Prioritizer
from vagen.buffer.settings import describe
from vagen.buffer.store import Commit, IngestStore, Outcome
from vagen.buffer.transaction import Transaction
from vagen.common.errors import ConfigError
from vagen.common.memory import release_freed_memory
from vagen.common.metrics import Metrics
from vagen.common.wire import MAX_PAYLOAD_BYTES, Grant, Kind, Refusal, Status, encode_message

logger = logging.getLogger(__name__)

MAX_BATCH_MESSAGES = 32
MAX_BATCH_BYTES = 32 << 20
MAX_UNREAD_ANSWERS = 512
TICK_S = 0.25
RETRY_FULL_S = 0.05
REPORT_S = 2.0


def bind_router(context: zmq.Context[Any], endpoint: str, gate: Gate | None = None) -> zmq.Socket[Any]:
    """The socket that actors connect to.

    Routing ids are random, so that a restarted actor is not shut out by its own old connection. Few messages wait
    per peer (they may be large). A peer that reads no answers loses those above `MAX_UNREAD_ANSWERS`, which an actor
    never leaves unread: it has one request, at most 8 heartbeats and its window of trajectories unanswered.
    Raises `ConfigError` when the endpoint cannot be bound.
    """
    socket = context.socket(zmq.ROUTER)
    socket.rcvhwm = 8
    socket.sndhwm = MAX_UNREAD_ANSWERS
    socket.handshake_ivl = 10_000
    socket.linger = 1000
    socket.maxmsgsize = MAX_PAYLOAD_BYTES
    # Not ZMTP heartbeats: while the socket is not read, a healthy peer's answers to them wait behind its data.
    socket.tcp_keepalive = 1
    socket.tcp_keepalive_idle = 30
    socket.tcp_keepalive_intvl = 5
    socket.tcp_keepalive_cnt = 4
    socket.ipv6 = "[" in endpoint
    if gate is not None:
        gate.secure(socket)
    try:
        socket.bind(endpoint)
    except zmq.ZMQError as error:
        socket.close(0)
        raise ConfigError(
            f"$.buffer.endpoint: cannot listen at {endpoint}: {error.strerror}; is another vagen-buffer running there?"
        ) from error
    return socket


def bind_again(context: zmq.Context[Any], endpoint: str, gate: Gate | None) -> zmq.Socket[Any]:
    """`bind_router` for an endpoint whose last socket was closed just now, which takes ZeroMQ a moment."""
    deadline = time.monotonic() + 10.0
    while True:
        try:
            return bind_router(context, endpoint, gate)
        except ConfigError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)


class Ingest:
    """Carries messages from the socket into Redis and answers them."""

    def __init__(
        self,
        socket: zmq.Socket[Any],
        store: IngestStore,
        metrics: Metrics,
        *,
        run_name: str,
        config: BufferConfig,
        gate: Gate | None = None,
        stopping: Callable[[], bool],
        quarantine: Callable[[Put | BadPut, str, str], object] = lambda *refusal: None,
        revive: Callable[[], object] = lambda: None,
        report: Callable[[], None] = lambda: None,
        reopen: Callable[[], zmq.Socket[Any]] | None = None,
    ) -> None:
        """Calls go out of here for what the service owns.

        `quarantine` is given what was refused, with field and problem; `revive` is called while Redis is away,
        `report` every `REPORT_S` seconds, and `reopen` binds a new socket once peers made the old one hold too much.
        """
        self._socket = socket
        self._store = store
        self._metrics = metrics
        self._run_name = run_name
        self._config = config
        self._gate = gate
        self._prioritizer = Prioritizer(config.priority)
        self._stopping = stopping
        self._quarantine = quarantine
        self._revive = revive
        self._report = report
        self._reopen = reopen
        self._process = psutil.Process()
        self._next_look = self._next_drop = 0.0
        self._pending: list[Request] = []
        self._commit: Commit | None = None
        """The batch that is on its way to Redis."""
        self._started = 0.0
        self._num_left = 0
        """Puts of the last batch that did not fit."""
        self._blind = True
        """Heartbeats could not be read for a while: no lease ends before they are."""
        self._is_full: bool | None = None
        """What Redis was told last."""
        self._next_tick = 0.0
        self._next_report = 0.0
        self._next_complaint = 0.0

    def run(self) -> None:
        """Serve until told to stop. Raises `InfrastructureError` when the gate has failed."""
        while not self._stopping():
            self._check_gate()
            self._check_memory()
            self._pending += self._receive()
            try:
                self._finish()
                self._tick()
                self._begin()
            except TRANSIENT as error:
                self._recover(error)
        with contextlib.suppress(*TRANSIENT):
            self._finish()

    def _receive(self) -> list[Request]:
        """At most a batch, less what is pending; waits for the first message, or for the commit that is on its way."""
        room = MAX_BATCH_MESSAGES - len(self._pending)
        num_bytes = sum(len(request.payload) for request in self._pending if isinstance(request, Put | BadPut))
        if room <= 0 or num_bytes >= MAX_BATCH_BYTES:
            self._blind = True
            if self._commit is None:
                self._wait("room", time.sleep, RETRY_FULL_S)
            return []
        if self._commit is None:
            self._wait("messages", self._poll, RETRY_FULL_S if self._pending else TICK_S)
        requests: list[Request] = []
        while len(requests) < room and num_bytes < MAX_BATCH_BYTES:
            if self._commit is not None and self._commit.transaction.is_answered():
                break  # what is durable is acknowledged before more is read
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                if self._commit is None or not self._await_news(self._commit.transaction):
                    break
                continue
            if self._gate is not None and not self._gate.admits(frames[-1]):
                continue
            buffers = [frame.buffer for frame in frames]
            num_bytes += sum(len(buffer) for buffer in buffers)
            requests.append(read_request(buffers, self._run_name, self._store.capacity_bytes, self._prioritizer))
        return requests

    def _await_news(self, transaction: Transaction) -> bool:
        """Wait for a message or more of the answer to the transaction; false when neither comes for a while."""
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(transaction.fileno(), zmq.POLLIN)
        came: list[object] = []
        self._wait("redis", lambda timeout_s: came.extend(poller.poll(int(1000 * timeout_s))), TICK_S)
        return bool(came)

    def _begin(self) -> None:
        """Send what fits of the pending requests to Redis; the rest stays pending."""
        puts = [request for request in self._pending if isinstance(request, Put)]
        fitting = [True] * len(puts) if self._store.surely_fit(puts) else self._store.fitting(puts)
        too_many = {id(put) for put, fits in zip(puts, fitting, strict=True) if not fits}
        batch = [request for request in self._pending if id(request) not in too_many]
        if batch:
            self._started = time.monotonic()
            self._commit = self._store.begin(batch, time.time())
        self._pending = [put for put in puts if id(put) in too_many]
        self._num_left = len(too_many)

    def _finish(self) -> None:
        """Wait for the batch that is on its way and answer it; what Redis had no room for is pending again."""
        if self._commit is None:
            return
        outcomes, status = self._store.finish(self._commit)
        batch, self._commit = self._commit.requests, None
        self._metrics.observe("vagen_buffer_commit_seconds", time.monotonic() - self._started)
        full = [request for request, outcome in zip(batch, outcomes, strict=True) if outcome.verdict == "full"]
        self._pending = full + self._pending
        self._num_left += len(full)
        self._answer(batch, outcomes, status)

    def _recover(self, error: Exception) -> None:
        """Take back what was on its way, and wait for Redis.

        Whether a transaction took effect is unknown. All but grants may be repeated: the actor asks again, and what was
        granted unheard ends with its lease.
        """
        sent = self._commit.requests if self._commit is not None else ()
        self._commit = None
        self._pending = [request for request in (*sent, *self._pending) if not isinstance(request, Ask)]
        self._wait_for_redis(error)

    def _answer(self, batch: Sequence[Request], outcomes: Sequence[Outcome], status: Status) -> None:
        acks: dict[bytes, list[bytes]] = {}
        for request, outcome in zip(batch, outcomes, strict=True):
            match request:
                case Put() | BadPut():
                    self._count(request, outcome)
                    trajectory_id = ULID.from_str(request.trajectory_id).bytes
                    if outcome.verdict in ("stored", "duplicate"):
                        acks.setdefault(request.peer, []).append(trajectory_id)
                    elif outcome.verdict in ("refused", "stale"):
                        if outcome.verdict == "refused":
                            self._quarantine(request, outcome.field, outcome.problem)
                        refusal = Refusal(trajectory_id=trajectory_id, field=outcome.field, problem=outcome.problem)
                        self._send(request.peer, Kind.REFUSE, encode_message(refusal))
                case Beat():
                    told = msgspec.structs.replace(status, reason=outcome.reason)
                    self._send(request.peer, Kind.STATUS, encode_message(told))
                case Ask():
                    self._metrics.count("vagen_buffer_grants_total", len(outcome.tasks))
                    told = msgspec.structs.replace(status, reason=outcome.reason)
                    grant = Grant(tasks=outcome.tasks, lease_s=self._config.lease_s, status=told)
                    self._send(request.peer, Kind.GRANT, encode_message(grant))
                case Failure():
                    self._metrics.count("vagen_buffer_failed_episodes_total", float(outcome.verdict == "ok"))
                case Malformed():
                    self._reject(request, status)
        for peer, ids in acks.items():
            self._send(peer, Kind.ACK, b"".join(ids))

    def _reject(self, request: Malformed, status: Status) -> None:
        """Count a malformed message; tell a peer that waits for an answer what is wrong with its question."""
        self._metrics.count("vagen_buffer_trajectories_total", fate="malformed")
        if time.monotonic() >= self._next_complaint:
            logger.warning("malformed message: %s", request.problem)
            self._next_complaint = time.monotonic() + 1.0
        told = msgspec.structs.replace(status, reason=request.problem)
        if request.kind == Kind.HEARTBEAT.value:
            self._send(request.peer, Kind.STATUS, encode_message(told))
        elif request.kind == Kind.REQUEST.value:
            grant = Grant(tasks=(), lease_s=self._config.lease_s, status=told)
            self._send(request.peer, Kind.GRANT, encode_message(grant))

    def _count(self, request: Put | BadPut, outcome: Outcome) -> None:
        if outcome.verdict == "full":
            return
        self._metrics.count("vagen_buffer_trajectories_total", fate=outcome.verdict)
        if outcome.verdict == "stored" and isinstance(request, Put):
            self._metrics.count("vagen_buffer_stored_bytes_total", len(request.payload))
        if outcome.verdict == "refused":
            self._metrics.count("vagen_buffer_refused_total", field=re.sub(r"\[[^\]]*\]", "[]", outcome.field))

    def _send(self, peer: bytes, kind: Kind, body: bytes) -> None:
        # An answer to a peer that has gone is discarded by the socket; the peer asks or resends when it is back.
        self._socket.send_multipart([peer, kind.value, body], zmq.NOBLOCK)

    def _tick(self) -> None:
        """Act on what is due by the clock."""
        now = time.monotonic()
        if now < self._next_tick:
            return
        self._apply_settings()
        reading = self._num_left < MAX_BATCH_MESSAGES
        if self._blind and reading:
            self._store.renew_all(time.time())
            self._blind = False
        self._store.tick(time.time(), leases_end=not self._blind)
        is_full = self._num_left > 0
        if is_full != self._is_full:
            self._store.say_full(is_full)
            self._is_full = is_full
        self._next_tick = now + TICK_S
        if now >= self._next_report:
            self._report()
            self._next_report = now + REPORT_S

    def _apply_settings(self) -> None:
        """Log what was changed live; a pending put that can never fit any more is refused with the next batch."""
        before = self._store.capacity_bytes
        for state in self._store.refresh_settings():
            logger.info("setting changed: %s", describe(state))
        if self._store.capacity_bytes < before:
            self._pending = [
                check_size(request, self._store.capacity_bytes) if isinstance(request, Put) else request
                for request in self._pending
            ]

    def _wait_for_redis(self, error: Exception) -> None:
        """Return when Redis answers again, or when told to stop."""
        logger.error("Redis is away (%s): nothing is acknowledged until it is back", error)
        self._blind = True
        self._metrics.count("vagen_buffer_redis_outages_total")
        started, pause = time.monotonic(), 0.02
        while not self._stopping():
            self._check_memory()
            self._revive()
            try:
                self._store.ping()
                break
            except TRANSIENT as again:
                logger.debug("waiting for Redis: %s", again)
            self._wait("redis", time.sleep, pause)
            pause = min(2 * pause, 1.0)
        else:
            return
        logger.warning("Redis is back after %.1f s", time.monotonic() - started)

    def _check_gate(self) -> None:
        if self._gate is not None:
            self._gate.check()

    def _check_memory(self) -> None:
        """Drop all connections when peers make ZeroMQ hold too much, which bounds messages but not their parts.

        Nothing is lost: what is dropped is unacknowledged, and actors send it again.
        """
        now = time.monotonic()
        if now < self._next_look or self._reopen is None:
            return
        self._next_look = now + TICK_S
        limit = self._config.max_memory_bytes
        if self._process.memory_info().rss <= limit:
            return
        release_freed_memory()
        held = self._process.memory_info().rss
        if held <= limit or now < self._next_drop:
            return
        logger.error(
            "%d MB of memory are held, $.buffer.max_memory_bytes is %d MB: all connections are dropped, actors send"
            " again what is unacknowledged",
            *(held >> 20, limit >> 20),
        )
        self._metrics.count("vagen_buffer_refused_peers_total", what="memory")
        self._pending = []
        self._blind = True
        self.close()
        self._socket = self._reopen()
        # ZeroMQ frees what it holds in threads of its own, and not at once.
        self._next_drop = time.monotonic() + REPORT_S

    def close(self) -> None:
        """Close the socket."""
        self._socket.close()

    def _poll(self, timeout_s: float) -> None:
        self._socket.poll(int(1000 * timeout_s))

    def _wait(self, what: str, wait: Callable[[float], object], amount: float) -> None:
        started = time.monotonic()
        wait(amount)
        self._metrics.count("vagen_buffer_wait_seconds_total", time.monotonic() - started, what=what)
