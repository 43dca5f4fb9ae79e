"""What a Redis user must be allowed for one run, and nothing more.

Patterns are the prefixes of the run's shards: such a user neither reads nor writes what belongs to another run, also
not from inside a script, which Redis holds to the user's rights.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.resources
import re

from vagen.buffer.keys import Key, Keys, Shard
from vagen.buffer.lua import source
from vagen.common.config import RunConfig

CLIENT_COMMANDS = frozenset(
    "blpop eval evalsha evalsha_ro exec get hdel hget hgetall hincrby hkeys hlen hmget hset hvals incrby lrange mget"
    " multi ping script|load set time zcard zcount zrange".split()
)
"""What buffer, learner and `vagen buffer` send themselves."""
CLUSTER_COMMANDS = frozenset({"cluster|slots"})


@functools.cache
def script_names() -> tuple[str, ...]:
    """Every script that clients run."""
    folder = importlib.resources.files("vagen.buffer").joinpath("scripts")
    names = (file.name.removesuffix(".lua") for file in folder.iterdir() if file.name.endswith(".lua"))
    return tuple(sorted(set(names) - {"prelude"}))


@functools.cache
def commands() -> tuple[str, ...]:
    """All commands that the user of a run needs, those of the scripts among them."""
    inside = {
        command.lower()
        for name in script_names()
        for command in re.findall(r"redis\.p?call\(\s*'(\w+)'", source(name).text)
    }
    return tuple(sorted(CLIENT_COMMANDS | CLUSTER_COMMANDS | inside))


def acl_line(run_name: str, password: str, *, user: str | None = None, shards: int = 1) -> str:
    """The `ACL SETUSER` line of the run's user; it holds a SHA-256 of the password instead of the password.

    Raises `ConfigError` for an unfit run name.
    """
    RunConfig(name=run_name)
    digest = hashlib.sha256(password.encode()).hexdigest()
    patterns = [f"~{Keys(run_name, Shard(index, shards)).prefix}*" for index in range(shards)]
    if shards > 1:
        patterns.append(f"~{Keys(run_name)[Key.LAYOUT]}")
    words = ["ACL", "SETUSER", user or f"vagen-{run_name}", "reset", "on", f"#{digest}", *patterns]
    return " ".join([*words, *(f"+{command}" for command in commands())])
