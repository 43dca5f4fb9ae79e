"""What a Redis user must be allowed for one run, and nothing more.

Patterns are the prefixes of the run's shards: such a user neither reads nor writes what belongs to another run, also
not from inside a script, which Redis holds to the user's rights.
"""

from __future__ import annotations

import hashlib

from vagen.buffer.keys import Keys, Shard
from vagen.common.config import RunConfig

COMMANDS = (
    *("blpop", "del", "eval", "evalsha", "evalsha_ro", "exec", "get", "hdel", "hexists", "hget", "hgetall"),
    *("hincrby", "hkeys", "hlen", "hmget", "hset", "hvals", "incr", "incrby", "llen", "mget", "multi", "ping", "rpush"),
    *("script|load", "set", "unlink", "zadd", "zcard", "zpopmin", "zrange", "zrem", "zremrangebyscore", "zscore"),
)
"""Of buffer and learner, those of the scripts among them."""
CLUSTER_COMMANDS = ("cluster|slots",)


def acl_line(run_name: str, password: str, *, user: str | None = None, shards: int = 1) -> str:
    """The `ACL SETUSER` line of the run's user; it holds a SHA-256 of the password instead of the password.

    Raises `ConfigError` for an unfit run name.
    """
    RunConfig(name=run_name)
    digest = hashlib.sha256(password.encode()).hexdigest()
    patterns = [f"~{Keys(run_name, Shard(index, shards)).prefix}*" for index in range(shards)]
    commands = [f"+{command}" for command in (*COMMANDS, *CLUSTER_COMMANDS)]
    words = ["ACL", "SETUSER", user or f"vagen-{run_name}", "reset", "on", f"#{digest}", *patterns, *commands]
    return " ".join(words)
