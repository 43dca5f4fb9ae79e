"""CURVE key pairs in files, and the folder of public keys that a buffer admits.

A pair is two files in the format of `zmq.auth`: `NAME.key` holds the public key and may be copied freely,
`NAME.key_secret` holds both and must be readable by its owner alone. Owns the files; sockets are the callers'.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import NamedTuple

import zmq
from zmq.utils import z85

from vagen.common.errors import ConfigError

PUBLIC_SUFFIX = ".key"
SECRET_SUFFIX = ".key_secret"
_MAX_FILE_BYTES = 1 << 16
_FIELD = re.compile(r"^\s*(public|secret)-key\s*=\s*[\"'](.{40})[\"']\s*$", re.MULTILINE)


class KeyPair(NamedTuple):
    """Both keys in Z85, 40 bytes each."""

    public: bytes
    secret: bytes

    def __repr__(self) -> str:
        return f"KeyPair({self.public.decode()}, secret not shown)"


class ActorKeys(NamedTuple):
    """What an actor needs to reach an encrypted buffer."""

    own: KeyPair
    server: bytes
    """Public key of the buffer."""


def create_key_pair(folder: Path, name: str) -> Path:
    """Make `NAME.key` and `NAME.key_secret` and return the path of the public one.

    Raises `ConfigError` for an unfit name and when one of the files exists: keys are never overwritten.
    """
    if re.fullmatch(r"[A-Za-z0-9._-]{1,64}", name) is None:
        raise ConfigError(f"{name!r}: expected a name of 1-64 of A-Za-z0-9._-")
    folder.mkdir(parents=True, exist_ok=True)
    public, secret = zmq.curve_keypair()
    head = f'metadata\n    name = "{name}"\ncurve\n    public-key = "{public.decode()}"\n'
    path, secret_path = folder / f"{name}{PUBLIC_SUFFIX}", folder / f"{name}{SECRET_SUFFIX}"
    for file in (path, secret_path):
        if file.exists():
            raise ConfigError(f"{file}: exists already; remove it, or choose another name")
    with open(secret_path, "x", opener=_private) as stream:
        stream.write(f'{head}    secret-key = "{secret.decode()}"\n')
    with open(path, "x") as stream:
        stream.write(head)
    return path


def _private(file: str, flags: int) -> int:
    return os.open(file, flags, 0o600)


def load_key_pair(path: str | Path, setting: str) -> KeyPair:
    """The pair in a secret key file. `setting` names where the path comes from.

    Raises `ConfigError` for a file that is missing, malformed, or that others than its owner may read or write.
    """
    fields = _read(Path(path), setting)
    mode = Path(path).stat().st_mode & 0o777
    if mode & 0o077:
        raise ConfigError(f"{setting}: {path} has mode {mode:03o}, a secret key needs 600: chmod 600 {path}")
    if "secret" not in fields:
        raise ConfigError(f"{setting}: {path} has no secret key; expected the file that ends in {SECRET_SUFFIX}")
    return KeyPair(fields["public"], fields["secret"])


def load_public_key(path: str | Path, setting: str) -> bytes:
    """The public key in a file. Raises `ConfigError` for a file that is missing or malformed."""
    return _read(Path(path), setting)["public"]


def read_public_keys(folder: Path) -> tuple[dict[bytes, str], list[str]]:
    """Names by public key of the `*.key` files of a folder, and what is wrong with others of them.

    Raises `OSError` when the folder cannot be read.
    """
    keys: dict[bytes, str] = {}
    problems = []
    for entry in sorted(os.scandir(folder), key=lambda entry: entry.name):
        if entry.name.endswith(PUBLIC_SUFFIX):
            try:
                keys[load_public_key(entry.path, "ignored")] = entry.name.removesuffix(PUBLIC_SUFFIX)
            except ConfigError as error:
                problems.append(str(error))
    return keys, problems


def _read(path: Path, setting: str) -> dict[str, bytes]:
    try:
        with path.open(encoding="ascii") as stream:
            text = stream.read(_MAX_FILE_BYTES)
    except OSError as error:
        raise ConfigError(f"{setting}: cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError:
        text = ""
    fields = {match[1]: match[2].encode() for match in _FIELD.finditer(text)}
    try:
        if all(len(z85.decode(key)) == 32 for key in fields.values()) and "public" in fields:
            return fields
    except (KeyError, ValueError):
        pass
    raise ConfigError(f"{setting}: {path} is no key file; `vagen keys new` makes them")
