"""The DEALER socket to the buffer, with the monitor that tells of its connections.

Dropped here: nothing. `sndhwm` is 0, since a high-water mark equal to the sender's window stalls sends until a timer:
the window is the bound, and the sender hands over nothing while no connection stands.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import zmq
import zmq.asyncio
from zmq.utils.monitor import parse_monitor_message

from vagen.actor.handshake import FAILURES
from vagen.common.curve import ActorKeys
from vagen.common.errors import ConfigError

_LINGER_MS = 1000


class BufferSocket:
    """Frames out and in, and events of connections; `open` it first. `keys` encrypt and authenticate."""

    def __init__(self, url: str, keys: ActorKeys | None) -> None:
        self._url = url
        self._keys = keys
        self._context: zmq.asyncio.Context | None = None
        self._dealer: zmq.asyncio.Socket
        self._monitor: zmq.asyncio.Socket

    @property
    def is_open(self) -> bool:
        return self._context is not None and not self._context.closed

    def open(self) -> None:
        """Begin to connect. Raises `ConfigError` for a malformed address."""
        self._context = zmq.asyncio.Context()
        # The routing id stays random: an actor must not be shut out by its own half-open old connection.
        dealer = self._dealer = self._context.socket(zmq.DEALER)
        dealer.set(zmq.IPV6, 1)
        dealer.set(zmq.SNDHWM, 0)
        dealer.set(zmq.RCVHWM, 0)
        dealer.set(zmq.LINGER, _LINGER_MS)
        dealer.set(zmq.RECONNECT_IVL, 100)
        dealer.set(zmq.RECONNECT_IVL_MAX, 2000)
        # ZeroMQ's own heartbeats would take an ingest at capacity, which reads nothing, for dead.
        dealer.set(zmq.TCP_KEEPALIVE, 1)
        dealer.set(zmq.TCP_KEEPALIVE_IDLE, 20)
        dealer.set(zmq.TCP_KEEPALIVE_INTVL, 10)
        if self._keys is not None:
            dealer.curve_publickey, dealer.curve_secretkey = self._keys.own
            dealer.curve_serverkey = self._keys.server
        self._monitor = dealer.get_monitor_socket(
            zmq.EVENT_CONNECTED | zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED | FAILURES
        )
        try:
            dealer.connect(self._url)
        except zmq.ZMQError as error:
            self._close_sockets()
            self._context.term()
            raise ConfigError(f"--buffer {self._url}: expected tcp://HOST:PORT ({error})") from error

    async def send(self, *frames: bytes) -> None:
        await self._dealer.send_multipart(frames)

    async def receive(self) -> list[bytes]:
        frames: list[bytes] = await self._dealer.recv_multipart()
        return frames

    async def next_event(self) -> dict[str, Any]:
        """The next event of a connection, as `parse_monitor_message` gives it."""
        return dict(parse_monitor_message(await self._monitor.recv_multipart()))

    def connect_again(self) -> None:
        """Leave the connection there is, if any, for a new one."""
        with contextlib.suppress(zmq.ZMQError):  # after a refusal there may be nothing left to disconnect
            self._dealer.disconnect(self._url)
        self._dealer.connect(self._url)

    async def close(self) -> None:
        """Send what is handed over, for the linger at most, and close."""
        assert self._context is not None, "open() first"
        self._close_sockets()
        # Blocks for the linger at most, and not the loop.
        await asyncio.to_thread(self._context.term)

    def _close_sockets(self) -> None:
        self._dealer.disable_monitor()
        self._monitor.close(linger=0)
        self._dealer.close(linger=_LINGER_MS)
