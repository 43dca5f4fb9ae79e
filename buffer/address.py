"""The URL of Redis: what it says, and where its password comes from.

A URL that travels (`ready.json`, command lines, logs) is public: user, host, files, but no password. The password
follows when a client is made: from the URL if a person wrote it there, else from the file that the URL's
`password_file` names, else from the environment variable `VAGEN_REDIS_PASSWORD`.
"""

from __future__ import annotations

import os
from pathlib import Path
from urllib.parse import SplitResult, parse_qsl, quote, urlencode, urlsplit

from vagen.common.errors import ConfigError

PASSWORD_VARIABLE = "VAGEN_REDIS_PASSWORD"
_PASSWORD_FILE = "password_file"


def public_url(url: str) -> str:
    """The URL without its password."""
    parts = urlsplit(url)
    info, at, host = parts.netloc.rpartition("@")
    query = [(key, value) for key, value in _query(parts.query) if key != "password"]
    return _join(parts._replace(netloc=info.partition(":")[0] + at + host), query)


def with_options(url: str, **options: str | None) -> str:
    """The URL with options added to its query: those that are given and that it does not have yet."""
    parts = urlsplit(url)
    query = dict(_query(parts.query))
    query = {key: value for key, value in options.items() if value is not None} | query
    return _join(parts, list(query.items()))


def resolve_password(url: str) -> tuple[str, str | None]:
    """The URL as redis-py takes it, and the password, which is none where the URL has one or nobody gave one.

    Raises `ConfigError` for a password file that cannot be read or is empty.
    """
    parts = urlsplit(url)
    query = dict(_query(parts.query))
    file = query.pop(_PASSWORD_FILE, None)
    plain = _join(parts, list(query.items()))
    if parts.password or "password" in query:
        return plain, None
    if file is not None:
        return plain, read_password_file(file)
    # The embedded server is reached by a socket that belongs to one user, and has no password.
    return plain, None if parts.scheme == "unix" else os.environ.get(PASSWORD_VARIABLE) or None


def read_password_file(file: str | Path) -> str:
    """The first line of a file. Raises `ConfigError` when it cannot be read or is empty."""
    try:
        password = Path(file).read_text().partition("\n")[0].strip("\r")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"$.buffer.redis_password_file: cannot read {file}: {error}") from error
    if not password:
        raise ConfigError(f"$.buffer.redis_password_file: {file} has an empty first line, expected the password")
    return password


def password_source(url: str) -> str:
    """Where the password of a URL came from, in words."""
    parts = urlsplit(url)
    query = dict(_query(parts.query))
    if parts.password or "password" in query:
        return "the password in the URL"
    if _PASSWORD_FILE in query:
        return f"the password in {query[_PASSWORD_FILE]}"
    if os.environ.get(PASSWORD_VARIABLE):
        return f"the password in {PASSWORD_VARIABLE}"
    return f"no password; set buffer.redis_password_file or {PASSWORD_VARIABLE}"


def _query(text: str) -> list[tuple[str, str]]:
    return parse_qsl(text, keep_blank_values=True)


def _join(parts: SplitResult, query: list[tuple[str, str]]) -> str:
    # Not urlunsplit: it makes unix:/path of unix:///path.
    text = urlencode(query, quote_via=quote, safe="/")
    return f"{parts.scheme}://{parts.netloc}{parts.path}" + (f"?{text}" if text else "")
