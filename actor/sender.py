"""The actor's side of the buffer's socket: trajectories out, acks, credits and status in.

        spool --(oldest first, at most `window` unacked)--> PUT ----> ingest
        release the spool's row <------------------- ACK or REFUSE <--/
        HEARTBEAT every `heartbeat_s` --------------> STATUS
        REQUEST while slots are free ----------------> GRANT

Owns the window, resending and the latest status. Does not own the socket (`buffer_socket`), what is in flight (`spool`)
nor which episodes run (`loop`).

Dropped here: nothing. Nothing is handed to the socket while no connection stands, and whatever is unacked when a
connection is made is sent again, which ids make harmless.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import zmq
from ulid import ULID

from vagen.actor.buffer_socket import BufferSocket
from vagen.actor.handshake import HandshakeFailure, explain_failure
from vagen.actor.signals import Signal
from vagen.actor.spool import Entry, Spool
from vagen.common.curve import ActorKeys
from vagen.common.errors import BufferUnavailableError, ConfigError, WireError
from vagen.common.metrics import Metrics
from vagen.common.trajectory import Trajectory
from vagen.common.wire import (
    MAX_CONTROL_ITEMS,
    CreditRequest,
    EngineAnnouncement,
    EpisodeFailed,
    Grant,
    Heartbeat,
    Kind,
    Refusal,
    Status,
    TaskGrant,
    decode_message,
    encode_message,
)

logger = logging.getLogger(__name__)

_ID_BYTES = 16
_SILENCE_S = 60.0
_MAX_SILENCE_S = 960.0
_REFUSED_RETRY_S = 2.0
_REQUEST_TIMEOUT_S = 5.0
_RESEND_S = 30.0
_MAX_UNANSWERED = 8
"""Heartbeats in a row without any answer before they slow down: a stopped ingest must not fill memory."""


@dataclass(slots=True)
class _Sent:
    """A member of the window."""

    entry: Entry
    sent_at: float


@dataclass(slots=True)
class Presence:
    """What heartbeats say about the actor, kept up to date by the loop."""

    running: set[tuple[int, int]] = field(default_factory=set)
    """Task index and attempt of the episodes that run."""
    engines: tuple[EngineAnnouncement, ...] = ()


class Sender:
    """See the module. `start`, then `run` as a task; everything belongs to one event loop."""

    def __init__(
        self,
        url: str,
        spool: Spool,
        presence: Presence,
        metrics: Metrics,
        *,
        run_id: str,
        window: int,
        heartbeat_s: float,
        keys: ActorKeys | None = None,
        on_refused: Callable[[Refusal], None] = lambda refusal: None,
    ) -> None:
        """`keys` encrypt the connection and prove to the buffer who this is; `on_refused` is told of each trajectory
        that will never be accepted.
        """
        self.url = url
        self.status: Status | None = None
        """The latest, None until the buffer has answered."""
        self.changed = Signal()
        """Notified when status, window or connection changed."""
        self._spool = spool
        self._presence = presence
        self._metrics = metrics
        self._run_id = run_id
        self._size = window
        self._heartbeat_s = heartbeat_s
        self._keys = keys
        self._failure: HandshakeFailure | None = None
        self._on_refused = on_refused
        self._incarnation = str(ULID())
        self._outbox: deque[Entry] = deque(spool.entries())
        self._window: dict[bytes, _Sent] = {}
        self._unacked_tasks: dict[bytes, int] = {}
        self._late_tasks: list[tuple[float, TaskGrant]] = []
        self._request: asyncio.Future[Grant] | None = None
        self._connected = False
        self._heard_at = 0.0
        self._silence_s = _SILENCE_S
        self._unanswered = 0
        self._socket = BufferSocket(url, keys)

    def open(self) -> None:
        """Make the socket and begin to connect. Raises `ConfigError` for a malformed address."""
        self._socket.open()

    async def run(self) -> None:
        """Serve the socket until cancelled."""
        async with asyncio.TaskGroup() as group:
            for work in (self._watch, self._receive, self._send, self._beat):
                group.create_task(work(), name=f"sender.{work.__name__}")

    async def wait_for_buffer(self, timeout_s: float) -> Status:
        """The buffer's first answer. Raises `BufferUnavailableError`, or `ConfigError` at once when it refuses us."""
        deadline = time.monotonic() + timeout_s
        while self.status is None:
            failure = self._failure
            if failure is not None and failure.is_final:
                raise ConfigError(f"buffer {self.url} refused the connection: {failure.problem}")
            left = deadline - time.monotonic()
            if left <= 0 and failure is not None:
                raise BufferUnavailableError(
                    f"no connection to the buffer at {self.url} within {timeout_s:g} s: {failure.problem}"
                )
            if left <= 0:
                raise BufferUnavailableError(
                    f"no buffer answers at {self.url} within {timeout_s:g} s; start one with "
                    f"`vagen-buffer serve` (it answers actors of its own run only; this is run {self._run_id!r})"
                )
            await self.changed.wait(left)
        return self.status

    @property
    def actor_id(self) -> str:
        """Of the spool, the same after every start."""
        return self._spool.actor_id

    @property
    def in_window(self) -> int:
        """Trajectories sent and unacked."""
        return len(self._window)

    async def put(self, trajectory: Trajectory) -> None:
        """Journal a trajectory; it is sent, and sent again until acked, from then on."""
        # Shielded: what is handed to the spool becomes durable, so it must be sent even if its episode is cancelled.
        await asyncio.shield(asyncio.ensure_future(self._put(trajectory)))

    async def _put(self, trajectory: Trajectory) -> None:
        entry = await self._spool.journal(trajectory)
        self._metrics.count("vagen_actor_trajectories_total", fate="journalled")
        self._metrics.gauge("vagen_actor_in_flight", self._spool.in_flight)
        self._unacked_tasks[entry.trajectory_id] = trajectory.task_index
        self._outbox.append(entry)
        self.changed.notify()

    async def request(self, want: int, engines: tuple[str, ...] = ()) -> Sequence[TaskGrant]:
        """Ask for up to `want` tasks to be played on `engines`, on any when there are none named.

        Empty when the buffer has none to give now, or does not answer in time.
        """
        late = self._take_late(want)
        if late:
            return late
        if not self._connected:
            await self.changed.wait(_REQUEST_TIMEOUT_S)
            return ()
        self._request = asyncio.get_running_loop().create_future()
        try:
            asked = CreditRequest(run_id=self._run_id, actor_id=self.actor_id, want=want, engines=engines)
            await self._post(Kind.REQUEST, asked)
            async with asyncio.timeout(_REQUEST_TIMEOUT_S):
                return (await self._request).tasks
        except TimeoutError:
            return ()
        finally:
            self._request = None

    async def report_failure(self, task: TaskGrant, error: str) -> None:
        """Tell the buffer that an episode ended as an infrastructure failure, so that its task is granted again."""
        if self._connected:
            message = EpisodeFailed(
                run_id=self._run_id,
                actor_id=self.actor_id,
                task_index=task.task_index,
                attempt=task.attempt,
                error=error[:500],
            )
            await self._post(Kind.FAILED, message)

    async def flush(self, timeout_s: float) -> bool:
        """Wait until nothing is in flight; False when `timeout_s` passed first (it stays in the spool)."""
        deadline = time.monotonic() + timeout_s
        while self._spool.in_flight:
            left = deadline - time.monotonic()
            if left <= 0:
                return False
            await self.changed.wait(left)
        return True

    async def close(self) -> None:
        """Say good-bye, so that the buffer gives this actor's tasks to others at once, and close the socket."""
        if self._socket.is_open:
            if self._connected:
                await self._post(Kind.HEARTBEAT, self._heartbeat(closing=True))
            await self._socket.close()

    async def _watch(self) -> None:
        """Follow the connection; on each new one everything unacked goes out again."""
        handle = -1
        while True:
            event = await self._socket.next_event()
            failure = explain_failure(event, self._keys)
            if failure is not None:
                await self._take_failure(failure)
                continue
            if event["event"] == zmq.EVENT_CONNECTED:
                handle = event["value"]
                continue
            if event["event"] == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._connected = True
                self._failure = None
                self._heard_at = time.monotonic()
                self._resend(list(self._window))
                self._unanswered = 0
                await self._post(Kind.HEARTBEAT, self._heartbeat())
            elif event["value"] == handle and self._connected:
                self._connected = False
            else:
                continue  # the end of a connection that has been replaced already, or never stood
            logger.info("buffer %s %s", self.url, "connected" if self._connected else "disconnected")
            self.changed.notify()

    async def _take_failure(self, failure: HandshakeFailure) -> None:
        """Say once what is wrong; try again later, since keys may be changed while this actor runs."""
        if failure != self._failure:
            logger.error("buffer %s refused the connection: %s", self.url, failure.problem)
        self._failure = failure
        self.changed.notify()
        if failure.is_final:
            await asyncio.sleep(_REFUSED_RETRY_S)
            self._socket.connect_again()

    async def _send(self) -> None:
        """Fill the window, oldest first."""
        while True:
            # What is in flight belongs to one shard of the buffer, and only a status tells which one this is.
            while not (self.status and self._connected and self._outbox and len(self._window) < self._size):
                await self.changed.wait(60.0)
            entry = self._outbox.popleft()
            if not self._spool.holds(entry.trajectory_id):
                continue  # the ack of an earlier send came while it waited to be sent again
            self._window[entry.trajectory_id] = _Sent(entry, time.monotonic())
            envelope, payload = await self._spool.load(entry.actor_seq)
            await self._socket.send(Kind.PUT.value, envelope, payload)

    async def _receive(self) -> None:
        while True:
            frames = await self._socket.receive()
            self._heard_at = time.monotonic()
            self._silence_s = _SILENCE_S
            self._unanswered = 0
            try:
                self._handle(frames)
            except WireError as error:
                logger.warning("buffer %s sent what is no message: %s", self.url, error)
            self.changed.notify()

    def _handle(self, frames: list[bytes]) -> None:
        if len(frames) != 2:
            raise WireError(f"expected 2 frames, got {len(frames)}")
        kind, body = frames
        if kind == Kind.ACK:
            if len(body) % _ID_BYTES:
                raise WireError(f"ack of {len(body)} bytes, expected a multiple of {_ID_BYTES}")
            for start in range(0, len(body), _ID_BYTES):
                self._settle(body[start : start + _ID_BYTES], "acked")
        elif kind == Kind.REFUSE:
            refusal = decode_message(body, Refusal)
            logger.warning("trajectory %s refused: %s: %s", ULID(refusal.trajectory_id), refusal.field, refusal.problem)
            if self._spool.holds(refusal.trajectory_id):
                self._on_refused(refusal)
            self._settle(refusal.trajectory_id, "refused")
        elif kind == Kind.STATUS:
            self._learn(decode_message(body, Status))
        elif kind == Kind.GRANT:
            grant = decode_message(body, Grant)
            self._learn(grant.status)
            self._heartbeat_s = min(self._heartbeat_s, grant.lease_s / 3)
            if self._request is not None and not self._request.done():
                self._request.set_result(grant)
            else:
                expires_at = time.monotonic() + grant.lease_s
                self._late_tasks += [(expires_at, task) for task in grant.tasks]
        else:
            raise WireError(f"unknown kind {kind[:8]!r}")

    def _learn(self, status: Status) -> None:
        self._spool.assign((status.shard, status.num_shards))
        self.status = status

    def _take_late(self, want: int) -> list[TaskGrant]:
        """Tasks of grants that came after their request had timed out, while their lease lasts."""
        now = time.monotonic()
        valid = [(expires_at, task) for expires_at, task in self._late_tasks if expires_at > now]
        self._late_tasks = valid[want:]
        return [task for _, task in valid[:want]]

    def _settle(self, trajectory_id: bytes, fate: str) -> None:
        self._window.pop(trajectory_id, None)
        self._unacked_tasks.pop(trajectory_id, None)
        if self._spool.release(trajectory_id) is not None:
            self._metrics.count("vagen_actor_trajectories_total", fate=fate)
            self._metrics.gauge("vagen_actor_in_flight", self._spool.in_flight)

    async def _beat(self) -> None:
        """Heartbeats, and the rare trajectory whose answer was lost on a connection that stands."""
        while True:
            await asyncio.sleep(self._heartbeat_s * (1 if self._unanswered < _MAX_UNANSWERED else 10))
            if not self._connected:
                continue
            self._reconnect_if_silent()
            self._unanswered += 1
            await self._post(Kind.HEARTBEAT, self._heartbeat())
            # An ingest at capacity reads nothing: only one that has answered later messages has lost this one.
            lost = [key for key, sent in self._window.items() if sent.sent_at + _RESEND_S < self._heard_at]
            self._resend(lost)

    def _reconnect_if_silent(self) -> None:
        """Make a new connection when the peer may be gone without a word; less and less often, as it may be full."""
        if time.monotonic() - self._heard_at < self._silence_s:
            return
        logger.warning("buffer %s: no answer for %.0f s, connecting again", self.url, self._silence_s)
        self._heard_at = time.monotonic()
        self._silence_s = min(2 * self._silence_s, _MAX_SILENCE_S)
        self._socket.connect_again()

    def _resend(self, keys: list[bytes]) -> None:
        entries = sorted((self._window.pop(key).entry for key in keys), key=lambda entry: entry.actor_seq)
        self._outbox.extendleft(reversed(entries))
        self._metrics.count("vagen_actor_trajectories_total", len(entries), fate="resent")

    def _heartbeat(self, closing: bool = False) -> Heartbeat:
        # A task whose trajectory is unacked counts as running: its lease must not lapse while it waits for the window.
        tasks = {index for index, _ in self._presence.running} | set(self._unacked_tasks.values())
        return Heartbeat(
            run_id=self._run_id,
            actor_id=self.actor_id,
            incarnation=self._incarnation,
            journalled=self._spool.journalled,
            in_flight=self._spool.in_flight,
            running_tasks=tuple(sorted(tasks)[:MAX_CONTROL_ITEMS]),
            engines=self._presence.engines,
            closing=closing,
        )

    async def _post(self, kind: Kind, message: Heartbeat | CreditRequest | EpisodeFailed) -> None:
        await self._socket.send(kind.value, encode_message(message))
