"""How any part of the buffer talks to Redis: one client configuration, one list of transient errors, bounded waits."""

from __future__ import annotations

import ssl
import time
from collections.abc import Callable
from typing import Any, TypeVar

import hiredis
import redis
from redis.backoff import NoBackoff
from redis.exceptions import (
    BusyLoadingError,
    ConnectionError,
    ExecAbortError,
    NoScriptError,
    ReadOnlyError,
    ResponseError,
    TimeoutError,
)
from redis.retry import Retry

from vagen.buffer.address import password_source, resolve_password
from vagen.buffer.cluster import MOVED, is_cluster_url, make_slot_pool
from vagen.buffer.config import URL_FORMS
from vagen.buffer.keys import Keys
from vagen.buffer.lua import source
from vagen.common.errors import BufferUnavailableError, ConfigError

TRANSIENT = (ConnectionError, TimeoutError, ReadOnlyError, ExecAbortError, *MOVED)
"""A restart or a failover of Redis, or a slot on the move: the same call may succeed later. Loading is a connection
error to redis-py."""

SOCKET_TIMEOUT_S = 30.0
FIRST_CONTACT_S = 5.0

T = TypeVar("T")


class CommandPacker:
    """Packs commands for a connection of redis-py; a `memoryview`, as payloads are, is sent from where it lies.

    redis-py's own packer copies each argument three times.
    """

    def pack(self, *args: Any) -> list[bytes | memoryview]:
        """The command in pieces to be sent one after the other."""
        if isinstance(args[0], str):
            args = (*args[0].encode().split(), *args[1:])
        if not any(isinstance(arg, memoryview) for arg in args):
            return [hiredis.pack_command(args)]
        pieces: list[bytes | memoryview] = []
        text = b"*%d\r\n" % len(args)
        for arg in args:
            if isinstance(arg, memoryview):
                pieces += [b"%b$%d\r\n" % (text, arg.nbytes), arg]
                text = b"\r\n"
            else:
                encoded = arg if isinstance(arg, bytes) else str(arg).encode()
                text += b"$%d\r\n%b\r\n" % (len(encoded), encoded)
        return [*pieces, text]


def make_client(url: str, socket_timeout_s: float = SOCKET_TIMEOUT_S, *, keys: Keys | None = None) -> redis.Redis:
    """A client that connects on first use and never retries by itself.

    Of a cluster (`redis+cluster://`, `rediss+cluster://`) it reaches the node that serves `keys`. Raises `ConfigError`
    for a malformed URL, a password file that cannot be read, and for TLS options that cannot be used.
    """
    options: dict[str, Any] = {
        "protocol": 3,
        "socket_timeout": socket_timeout_s,
        "socket_connect_timeout": FIRST_CONTACT_S,
        "retry": Retry(NoBackoff(), 0),
        "command_packer": CommandPacker(),
    }
    try:
        url, password = resolve_password(url)
        if password is not None:
            options["password"] = password
        if is_cluster_url(url):
            assert keys is not None, "a client of a cluster needs keys that say which node it wants"
            return redis.Redis.from_pool(make_slot_pool(url, keys.prefix, **options))
        return redis.Redis.from_url(url, **options)
    except ConfigError:
        raise
    except (TypeError, ValueError):
        # Not chained: redis-py's message may quote the password.
        raise ConfigError(f"$.buffer.redis_url: expected {URL_FORMS} with options of redis-py, got {url!r}") from None


def first_contact(client: redis.Redis, url: str, timeout_s: float = FIRST_CONTACT_S) -> None:
    """Wait until Redis answers; while it loads its data, wait on.

    Raises `BufferUnavailableError` when nobody answers within `timeout_s`, `ConfigError` when it wants a password or
    the user lacks a permission.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            client.ping()
            return
        except BusyLoadingError:
            deadline = time.monotonic() + timeout_s
        except (redis.AuthenticationError, redis.exceptions.NoPermissionError) as error:
            raise ConfigError(
                f"$.buffer.redis_url: {url} refused the login with {password_source(url)}: {error}"
            ) from error
        except TRANSIENT as error:
            if _is_certificate_problem(error):
                raise ConfigError(
                    f"$.buffer.redis_url: TLS with {url} failed: {error}; see buffer.redis_ca_file, redis_cert_file and"
                    " redis_key_file"
                ) from error
            if time.monotonic() > deadline:
                raise BufferUnavailableError(
                    f"no Redis answers at {url} ({error}); start `vagen-buffer serve`, which writes the URL to"
                    " <run-dir>/buffer/ready.json, or correct $.buffer.redis_url"
                ) from error
        except ResponseError as error:
            raise ConfigError(f"$.buffer.redis_url: {url} answered: {error}") from error
        time.sleep(0.05)


def _is_certificate_problem(error: BaseException) -> bool:
    """Whether TLS failed for good: a certificate that is wrong, missing or not accepted."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, ssl.SSLError) and not isinstance(cause, ssl.SSLEOFError):
            return True
        cause = cause.__cause__ or cause.__context__
    return False


def patiently(call: Callable[[], T], timeout_s: float, what: str) -> T:
    """The result of `call`, repeated over outages of Redis; it must be safe to run twice.

    Raises `BufferUnavailableError` once `timeout_s` have passed without success.
    """
    deadline = time.monotonic() + timeout_s
    pause = 0.02
    while True:
        try:
            return call()
        except TRANSIENT as error:
            if time.monotonic() + pause > deadline:
                raise BufferUnavailableError(f"{what}: no answer from Redis for {timeout_s:g} s: {error}") from error
        time.sleep(pause)
        pause = min(2 * pause, 0.5)


def run_script(client: redis.Redis, keys: Keys, name: str, *args: object) -> Any:
    """Run a script at once, loading it where the server does not know it."""
    script = source(name)
    try:
        return client.evalsha(script.sha, 1, keys.prefix, *args)
    except NoScriptError:
        return client.eval(script.text, 1, keys.prefix, *args)


def run_read_only(client: redis.Redis, keys: Keys, name: str, *args: object) -> Any:
    """Run a script that the server holds to writing nothing."""
    script = source(name)
    try:
        return client.evalsha_ro(script.sha, 1, keys.prefix, *args)
    except NoScriptError:
        client.script_load(script.text)
        return client.evalsha_ro(script.sha, 1, keys.prefix, *args)


__all__ = [
    "FIRST_CONTACT_S",
    "SOCKET_TIMEOUT_S",
    "TRANSIENT",
    "first_contact",
    "make_client",
    "patiently",
    "run_read_only",
    "run_script",
]
