"""Section `buffer` of a recipe."""

from __future__ import annotations

import re
from typing import Literal
from urllib.parse import urlsplit

from vagen.buffer.address import public_url, with_options
from vagen.buffer.keys import MAX_SHARDS
from vagen.buffer.selection.config import PriorityConfig
from vagen.common.config import Section, require

URL_FORMS = "redis://, rediss://, unix://, redis+cluster:// or rediss+cluster:// URL"
_LOCAL = re.compile(r"ipc:|tcp://(127(\.\d+){3}|localhost|\[::1\]):")

FSYNC_RISK = {
    "always": "an acknowledged trajectory survives a crash of Redis and a power cut",
    "everysec": "a crash of Redis or a power cut may lose up to about two seconds of acknowledged trajectories",
    "none": "a power cut may lose every acknowledged trajectory that the kernel has not written back yet",
}
"""What each setting of `fsync` promises, for `--help` and the start of the log."""


class BufferSecurity(Section, frozen=True, kw_only=True):
    """Who may connect to the ingest."""

    key_file: str | None = None
    """Secret key file of the buffer, made by `vagen keys new`; with it, connections are encrypted (CURVE)."""
    allowed_dir: str | None = None
    """Folder of the public key files of the actors that may connect; changes take effect at once."""
    insecure: bool = False
    """Listen beyond loopback without keys: whoever reaches the port reads along and writes into the run."""

    def __post_init__(self) -> None:
        require(
            (self.key_file is None) == (self.allowed_dir is None),
            "buffer.security",
            {"key_file": self.key_file, "allowed_dir": self.allowed_dir},
            "key_file and allowed_dir together",
        )


class BufferConfig(Section, frozen=True, kw_only=True):
    """What `vagen-buffer` serves, how much it holds and how it paces the actors."""

    endpoint: str = "tcp://127.0.0.1:5600"
    """Where actors connect; port `*` picks a free one, which `ready.json` names."""
    security: BufferSecurity = BufferSecurity()
    """Encryption and the list of actors; required beyond loopback."""
    redis_url: str | None = None
    """`redis://`, `rediss://`, `unix://`, or `redis+cluster://` with any node of a cluster; none starts an embedded
    Valkey in the run's folder."""
    redis_password_file: str | None = None
    """File whose first line is the password; else the environment variable `VAGEN_REDIS_PASSWORD`, so that it is in no
    recipe. A password in `redis_url` works too, and is copied wherever the recipe is."""
    redis_ca_file: str | None = None
    """Certificates of the authorities that may sign the server's, for `rediss://`; those of the system by default."""
    redis_cert_file: str | None = None
    """Client certificate, where Redis wants one."""
    redis_key_file: str | None = None
    """Its private key."""
    fsync: Literal["always", "everysec", "none"] = "always"
    """When Redis makes a commit durable; see `FSYNC_RISK`."""
    shards: int = 1
    """Independent parts of the buffer, each with an ingest of its own (`vagen-buffer serve --shard K`)."""
    capacity_bytes: int = 1 << 30
    """Payload bytes held by a shard, the room promised to incomplete groups among them. The memory of every process
    that follows from it is in docs/buffer.md."""
    when_full: Literal["block", "drop_stalest", "drop_oldest"] = "block"
    """What a trajectory that does not fit does: wait, which slows the actors down, or take the room of ready units:
    those with the lowest learner step of the oldest token, or those that arrived first. What is claimed or awaits its
    group is never dropped."""
    max_memory_bytes: int = 4 << 30
    """Of the ingest process; beyond it all connections are dropped, and actors send again what is unacknowledged."""
    group_timeout_s: float = 120.0
    """How long the first member of a group waits for the others."""
    partial_groups: Literal["train", "drop"] = "train"
    """What becomes of a group that timed out incomplete, or lost members to staleness: trained on as it is, or filtered
    under the reason `partial_group`."""
    priority: PriorityConfig = PriorityConfig()
    lease_s: float = 30.0
    """How long a granted task is an actor's without a heartbeat that lists it."""
    heartbeat_timeout_s: float = 30.0
    """How long an engine stays a member without a heartbeat that announces it."""
    max_running: int = 256
    """Episodes that may run at once, over all actors."""
    quarantine_bytes: int = 64 << 20
    """Disk space for refused payloads, which `vagen buffer quarantine` lists; the oldest go first, 0 keeps none."""
    max_attempts: int = 5
    """Attempts at one task before it is given up and counted as abandoned."""
    start_timeout_s: float = 30.0
    """How long Redis may take to answer at start; loading its data does not count."""
    metrics_port: int | None = 0
    """Port of the Prometheus exporter on loopback: 0 picks a free one, none starts no exporter."""

    def __post_init__(self) -> None:
        require(
            re.fullmatch(r"(tcp|ipc)://.+", self.endpoint) is not None,
            "buffer.endpoint",
            self.endpoint,
            "tcp://HOST:PORT or ipc://PATH",
        )
        require(
            _LOCAL.match(self.endpoint) is not None or self.security.key_file is not None or self.security.insecure,
            "buffer.endpoint",
            self.endpoint,
            "a loopback address, or keys: set buffer.security.key_file and buffer.security.allowed_dir, made with "
            "`vagen keys new` (buffer.security.insecure: true takes messages from anybody instead)",
        )
        require(
            self.redis_url is None
            or re.match(r"(redis|rediss|unix|redis\+cluster|rediss\+cluster)://.", self.redis_url) is not None,
            "buffer.redis_url",
            self.redis_url,
            URL_FORMS,
        )
        require(
            self.redis_url is None or self.redis_url.startswith("unix") or "@" not in urlsplit(self.redis_url).path,
            "buffer.redis_url",
            self.redis_url,
            "URL whose password has %2F for / and %40 for @",
        )
        tls = self.redis_ca_file or self.redis_cert_file or self.redis_key_file
        require(
            tls is None or self.redis_url is None or self.redis_url.startswith("rediss"),
            "buffer.redis_url",
            self.redis_url,
            "rediss:// URL together with redis_ca_file, redis_cert_file or redis_key_file",
        )
        require(1 <= self.shards <= MAX_SHARDS, "buffer.shards", self.shards, f"1 <= int <= {MAX_SHARDS}")
        require(
            self.max_memory_bytes >= 256 << 20, "buffer.max_memory_bytes", self.max_memory_bytes, f"int >= {256 << 20}"
        )
        require(self.capacity_bytes >= 1 << 16, "buffer.capacity_bytes", self.capacity_bytes, f"int >= {1 << 16}")
        for name in ("group_timeout_s", "lease_s", "heartbeat_timeout_s", "start_timeout_s"):
            value = getattr(self, name)
            require(0 < value < 1e9, f"buffer.{name}", value, "seconds > 0")
        for name in ("max_running", "max_attempts"):
            value = getattr(self, name)
            require(value >= 1, f"buffer.{name}", value, "int >= 1")
        require(self.quarantine_bytes >= 0, "buffer.quarantine_bytes", self.quarantine_bytes, "int >= 0")
        port = self.metrics_port
        require(port is None or 0 <= port < 1 << 16, "buffer.metrics_port", port, "port 0-65535 or null")

    @property
    def redis_address(self) -> str | None:
        """`redis_url` with the files of the other settings in its query, which every client understands."""
        return None if self.redis_url is None else self.complete(self.redis_url)

    def complete(self, url: str) -> str:
        """The URL of this buffer's Redis as a client needs it, from one that somebody announced or gave.

        Adds the files of the settings, and the password where it stands in this recipe's own URL.
        """
        own = self.redis_url
        if own is None and url.startswith("unix:"):
            return url  # the embedded server's, which has neither password nor TLS
        tls = {}
        if url.startswith("rediss"):
            tls = {
                "ssl_ca_certs": self.redis_ca_file,
                "ssl_certfile": self.redis_cert_file,
                "ssl_keyfile": self.redis_key_file,
            }
        completed = with_options(url, password_file=self.redis_password_file, **tls)
        if own is not None and own != url and public_url(self.complete(own)) == completed:
            return self.complete(own)
        return completed
