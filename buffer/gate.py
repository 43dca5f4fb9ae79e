"""Who may talk to the ingest: CURVE on its socket, and the list of actors' public keys behind it.

    actor's handshake --> libzmq --ZAP--> the gate's thread: is the key in a file of the folder? --> 200 or 400
    message of a peer --> ingest: is the key that it was admitted with still there? --> read or forgotten

The folder is looked at several times a second, so adding a file admits an actor and removing one shuts it out, also on
a connection that stands. Whatever fails, fails closed: the socket enforces its ZAP domain, so without the thread nobody
gets in, and the ingest ends with an error when the thread has ended.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import zmq
from zmq.utils import z85

from vagen.common.curve import KeyPair, read_public_keys
from vagen.common.errors import ConfigError, InfrastructureError
from vagen.common.metrics import Metrics

logger = logging.getLogger(__name__)

_ENDPOINT = "inproc://zeromq.zap.01"
_DOMAIN = b"vagen"
_LOOK_S = 0.25
_COMPLAIN_S = 1.0


class Gate:
    """The ZAP handler of one context, with the allowed keys of one folder."""

    def __init__(self, context: zmq.Context[Any], keys: KeyPair, folder: Path, metrics: Metrics) -> None:
        """Starts answering. Raises `ConfigError` when the folder cannot be read."""
        self._keys = keys
        self._folder = folder
        self._metrics = metrics
        self._stamp: object = None
        self._allowed: Mapping[bytes, str] = {}
        self._failure: BaseException | None = None
        self._next_complaint = 0.0
        if not folder.is_dir():
            raise ConfigError(f"$.buffer.security.allowed_dir: {folder} is no folder; make it, and put public keys in")
        self._look()
        self._closing = threading.Event()
        self._socket = context.socket(zmq.REP)
        self._socket.linger = 0
        self._socket.bind(_ENDPOINT)
        self._thread = threading.Thread(target=self._serve, name="gate", daemon=True)
        self._thread.start()

    def secure(self, socket: zmq.Socket[Any]) -> None:
        """Encrypt a socket and put it behind this gate; to be called before it is bound."""
        socket.curve_server = True
        socket.curve_secretkey = self._keys.secret
        socket.zap_domain = _DOMAIN
        # Without it libzmq admits every key as soon as no handler answers.
        socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)

    def admits(self, frame: zmq.Frame) -> bool:
        """Whether the key of the peer that sent the frame is still allowed."""
        try:
            key = str(frame.get("User-Id")).encode()
        except zmq.ZMQError:
            key = b""
        if key in self._allowed:
            return True
        self._refuse("message", key.decode(), "a connection that stands")
        return False

    def check(self) -> None:
        """Raises `InfrastructureError` when nobody answers handshakes any more."""
        if not self._thread.is_alive():
            raise InfrastructureError(f"the thread that checks actors' keys has ended: {self._failure!r}")

    def close(self) -> None:
        """Stop answering; nobody is admitted from then on."""
        self._closing.set()
        self._thread.join()

    def _serve(self) -> None:
        try:
            while not self._closing.is_set():
                asked = self._socket.poll(int(1000 * _LOOK_S))
                self._look()
                if asked:
                    self._socket.send_multipart(self._answer(self._socket.recv_multipart()))
        except BaseException as error:
            self._failure = error
            raise
        finally:
            self._socket.close(0)

    def _answer(self, request: list[bytes]) -> list[bytes]:
        """Reply to a ZAP 1.0 request: version, id, domain, address, identity, mechanism, credentials."""
        version, request_id, domain, address, _, mechanism, *credentials = request
        key = b""
        if (version, domain, mechanism) == (b"1.0", _DOMAIN, b"CURVE") and [len(part) for part in credentials] == [32]:
            key = z85.encode(credentials[0])
            if key in self._allowed:
                return [version, request_id, b"200", b"OK", key, b""]
        self._refuse("handshake", key.decode(), address.decode("ascii", "replace"))
        return [version, request_id, b"400", b"this key is not allowed", b"", b""]

    def _refuse(self, what: str, key: str, source: str) -> None:
        self._metrics.count("vagen_buffer_refused_peers_total", what=what)
        if time.monotonic() >= self._next_complaint:
            self._next_complaint = time.monotonic() + _COMPLAIN_S
            logger.warning("refused a %s from %s: key %s is not in %s", what, source, key, self._folder)

    def _look(self) -> None:
        """Read the folder if it has changed; what cannot be read admits nobody."""
        try:
            stamp = _stamp(self._folder)
            if stamp == self._stamp:
                return
            allowed, problems = read_public_keys(self._folder)
        except OSError as error:
            stamp, allowed, problems = [], {}, [f"{self._folder}: {error.strerror}, nobody is admitted"]
            if self._stamp == stamp:
                return
        for problem in problems:
            logger.error("%s", problem)
        for name in sorted(set(allowed.values()) ^ set(self._allowed.values())):
            logger.info("actor key %s: %s", name, "allowed" if name in allowed.values() else "not allowed any more")
        self._stamp, self._allowed = stamp, allowed


def _stamp(folder: Path) -> list[tuple[str, int, int, int]]:
    """Differs when a file has come, gone or changed."""
    found = []
    for entry in os.scandir(folder):
        with contextlib.suppress(FileNotFoundError):  # gone since it was listed
            stat = entry.stat()
            found.append((entry.name, stat.st_mtime_ns, stat.st_size, stat.st_ino))
    return sorted(found)
