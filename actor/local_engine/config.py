"""Settings of the local engine: section `engine` of a recipe."""

from __future__ import annotations

from vagen.common.config import Section, require


class EngineConfig(Section, frozen=True, kw_only=True):
    """Section `engine`. The model folder is no setting: the command line names it."""

    host: str = "127.0.0.1"
    port: int = 0
    """0 picks a free port; the ready file says which."""
    device: str = "cpu"
    """`cpu`, or a torch CUDA device."""
    dtype: str = "float32"
    """Of the weights and of the KV cache; logits and log-probabilities are always float32."""
    num_threads: int = 1
    """Of torch. Two threads under contention were up to 14 times slower than one on a small model."""
    max_running: int = 64
    """Slots of the KV cache: requests that generate at once."""
    max_waiting: int = 4096
    """Requests queued for a slot; above it `/generate` answers 503."""
    max_context: int = 1024
    """Tokens of a slot, images expanded: prompt and response together."""
    max_new_tokens_limit: int = 1024
    """Above it a request is refused."""
    max_prefill_tokens: int = 4096
    """Padded prompt tokens of one forward pass: bounds how long running requests wait for arrivals."""
    image_cache_bytes: int = 64 << 20
    """Of each of two caches, patches and features; the second is emptied whenever the weights change. 0 = off."""
    seed: int | None = None
    """Of requests that bring no `sampling_seed`; none draws one at each start, so that no two engines sample alike."""
    api_key: str | None = None
    """Bearer token for everything but administration; None = open."""
    admin_api_key: str | None = None
    """Bearer token for pause, abort and weights; None = as `api_key`."""
    request_timeout_s: float = 600.0
    """A request that is not finished by then is aborted and answers with what it has."""
    broadcast_timeout_s: float = 20.0
    """Bound of each wait for the trainer: building a group, receiving one bucket."""
    pause_timeout_s: float = 60.0
    """A pause ends by itself, old weights in force, when no administrator has called for this long."""
    weight_version: str = "0"
    """Version of the weights in the model folder."""

    def __post_init__(self) -> None:
        require(0 <= self.port < 65536, "engine.port", self.port, "int in [0, 65535]")
        require(self.dtype in ("float32", "bfloat16"), "engine.dtype", self.dtype, "float32 or bfloat16")
        device = self.device.partition(":")[0]
        require(device in ("cpu", "cuda"), "engine.device", self.device, "cpu, cuda or cuda:N")
        require(self.image_cache_bytes >= 0, "engine.image_cache_bytes", self.image_cache_bytes, "int >= 0")
        require(self.seed is None or self.seed >= 0, "engine.seed", self.seed, "null or int >= 0")
        for name in ("num_threads", "max_running", "max_waiting", "max_new_tokens_limit", "max_prefill_tokens"):
            require(getattr(self, name) >= 1, f"engine.{name}", getattr(self, name), "int >= 1")
        require(self.max_context >= 2, "engine.max_context", self.max_context, "int >= 2")
        for name in ("request_timeout_s", "broadcast_timeout_s", "pause_timeout_s"):
            require(getattr(self, name) > 0, f"engine.{name}", getattr(self, name), "number > 0")
        require(self.weight_version != "", "engine.weight_version", self.weight_version, "a non-empty string")
