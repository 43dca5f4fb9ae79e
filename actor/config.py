"""The sections of a recipe that an actor reads: `actor`, `harness` and `env`.

The engine's own section belongs to `vagen.actor.local_engine`, `run` to `vagen.common.config`.
"""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

from vagen.actor.engines.config import EnginesConfig
from vagen.common.config import Section, require
from vagen.common.curve import ActorKeys, load_key_pair, load_public_key
from vagen.common.trajectory import SamplingParams

RewardPlacement: TypeAlias = Literal["turn_end", "section_end"]

_BIASED = "{} (truncated sampling changes the distribution, which biases the importance ratio)"


class SamplingConfig(Section, frozen=True, kw_only=True):
    """How the policy's tokens are sampled; only temperature may differ from plain sampling."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0

    def __post_init__(self) -> None:
        # Greedy batches answer with logprobs at temperature 1, which is not what they were sampled with.
        require(0 < self.temperature <= 10, "actor.sampling.temperature", self.temperature, "0 < float <= 10")
        require(self.top_p == 1.0, "actor.sampling.top_p", self.top_p, _BIASED.format("1.0"))
        require(self.top_k == -1, "actor.sampling.top_k", self.top_k, _BIASED.format("-1"))
        require(self.min_p == 0.0, "actor.sampling.min_p", self.min_p, _BIASED.format("0.0"))


class ActorSecurity(Section, frozen=True, kw_only=True):
    """Keys for a buffer that takes encrypted connections; both or none."""

    key_file: str | None = None
    """Secret key file of this actor, made by `vagen keys new`."""
    server_key_file: str | None = None
    """Public key file of the buffer, copied from its machine."""

    def __post_init__(self) -> None:
        require(
            (self.key_file is None) == (self.server_key_file is None),
            "actor.security",
            {"key_file": self.key_file, "server_key_file": self.server_key_file},
            "key_file and server_key_file together",
        )

    def load(self) -> ActorKeys | None:
        """The keys in the files, none where none are set. Raises `ConfigError` for a file that cannot be used."""
        if self.key_file is None or self.server_key_file is None:
            return None
        own = load_key_pair(self.key_file, "$.actor.security.key_file")
        return ActorKeys(own, load_public_key(self.server_key_file, "$.actor.security.server_key_file"))


class ActorConfig(Section, frozen=True, kw_only=True):
    """Section `actor`. Durations in seconds, sizes in bytes or tokens as the names say."""

    concurrency: int = 64
    """Episodes that run at once."""
    security: ActorSecurity = ActorSecurity()
    """Keys for a buffer beyond loopback."""
    sampling: SamplingConfig = SamplingConfig()
    max_new_tokens: int = 256
    """Per turn."""
    max_context: int = 8192
    """Prompt and response together, image placeholders expanded; an episode that would exceed it is truncated."""
    max_turns: int = 0
    """Truncates episodes that the environment does not end; 0 leaves it to the environment."""
    turn_timeout_s: float = 120.0
    """For each reset or step of the environment; beyond it the episode is an infrastructure failure."""
    episode_timeout_s: float = 1800.0
    """Checked between turns; beyond it the episode is truncated."""
    engine_timeout_s: float = 120.0
    """For one response, retries included."""
    engine_retries: int = 4
    """Further tries of a response after requests that failed, at another engine where there is one."""
    engine_api_key: str = ""
    engines: EnginesConfig = EnginesConfig()
    """Health, routing and limits of the engines."""
    group_size: int = 1
    """Consecutive tasks that share a seed."""
    base_seed: int = 0
    reward_placement: RewardPlacement = "turn_end"
    """Token at which a reward component is paid: the turn's last, or the last of the section that the component judges
    (`vagen.envs.parsing.REWARD_SECTIONS`). Whole-turn components and malformed responses are paid at the turn's end."""
    window: int = 32
    """Trajectories that may be sent and unacked."""
    spool_max_bytes: int = 1 << 30
    """Unacked bytes on disk at which no new episode starts."""
    env_workers: int = 4
    """Threads for environment steps."""
    heartbeat_s: float = 1.0
    credit_retry_s: float = 0.5
    """Between requests for start credits that the buffer did not grant."""
    connect_timeout_s: float = 5.0
    """For the first answer of buffer and engine at start."""
    drain_s: float = 10.0
    """That an orderly stop gives to running episodes, and then to unacked trajectories."""
    metrics_port: int = 0
    """0 picks a free one, which `ready.json` names."""

    def __post_init__(self) -> None:
        for name in ("concurrency", "max_new_tokens", "max_context", "group_size", "window", "env_workers"):
            require(getattr(self, name) >= 1, f"actor.{name}", getattr(self, name), "int >= 1")
        for name in ("max_turns", "base_seed", "engine_retries", "drain_s"):
            require(getattr(self, name) >= 0, f"actor.{name}", getattr(self, name), ">= 0")
        for name in ("turn_timeout_s", "episode_timeout_s", "engine_timeout_s", "heartbeat_s"):
            require(getattr(self, name) > 0, f"actor.{name}", getattr(self, name), "float > 0")
        for name in ("credit_retry_s", "connect_timeout_s"):
            require(getattr(self, name) > 0, f"actor.{name}", getattr(self, name), "float > 0")
        require(self.max_new_tokens < self.max_context, "actor.max_new_tokens", self.max_new_tokens, "< max_context")
        require(self.spool_max_bytes >= 1 << 20, "actor.spool_max_bytes", self.spool_max_bytes, "int >= 1048576")
        require(0 <= self.metrics_port <= 65535, "actor.metrics_port", self.metrics_port, "0 <= int <= 65535")

    @property
    def sampling_params(self) -> SamplingParams:
        """As recorded in a trajectory."""
        s = self.sampling
        return SamplingParams(
            temperature=s.temperature,
            top_p=s.top_p,
            top_k=s.top_k,
            min_p=s.min_p,
            max_new_tokens=self.max_new_tokens,
        )


class HarnessConfig(Section, frozen=True, kw_only=True):
    """Section `harness`: how the conversation is kept."""

    name: Literal["concat", "no_concat"] = "concat"
    window: int = 0
    """For `concat`: turns in a context, the one being answered included; 0 keeps all."""

    def __post_init__(self) -> None:
        require(self.window >= 0, "harness.window", self.window, "int >= 0")
        if self.name != "concat":
            require(self.window == 0, "harness.window", self.window, "0 for a harness other than concat")


class EnvSection(Section, frozen=True, kw_only=True):
    """Section `env`: which environment, and its own settings."""

    name: str = "frozen_lake"
    config: dict[str, Any] = {}
