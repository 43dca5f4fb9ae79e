"""Settings of the learner (sections `learner` and `sft` of a recipe). Imports without torch."""

from __future__ import annotations

import math
import re
from pathlib import PurePosixPath
from typing import Annotated, Literal, TypeAlias

import msgspec

from vagen.buffer.selection.config import SelectionConfig
from vagen.common.config import Section, require
from vagen.learner.advantages.config import AdvantageConfig
from vagen.learner.alarms import AlarmConfig
from vagen.learner.layout import ParallelLayout
from vagen.learner.losses.config import LossConfig, ReferenceConfig

PositiveInt = Annotated[int, msgspec.Meta(ge=1)]
PositiveFloat = Annotated[float, msgspec.Meta(gt=0)]
Fraction = Annotated[float, msgspec.Meta(ge=0, le=1)]


Schedule: TypeAlias = Literal["linear", "cosine", "constant"]
"""How a learning rate falls to its end over the run: evenly, along half a cosine, or not at all."""


PLACEHOLDER_REPOSITORY = "your-name/your-model"


def require_repository(path: str, name: str) -> None:
    """Raise `ConfigError` unless a setting names a repository of a hub that somebody chose."""
    is_name = re.fullmatch(r"[\w.-]+/[\w.-]+", name) is not None
    require(is_name and name != PLACEHOLDER_REPOSITORY, path, name, "OWNER/NAME of a repository of yours")


class OptimizerConfig(Section, frozen=True, kw_only=True):
    """AdamW with linear warm-up over updates and decay over learner steps (`learner.schedule`)."""

    lr: PositiveFloat = 3e-4
    lr_end_fraction: Fraction = 0.1
    """The learning rate ends at this fraction of `lr`."""
    warmup_updates: Annotated[int, msgspec.Meta(ge=0)] = 20
    beta1: Fraction = 0.9
    beta2: Fraction = 0.98
    eps: PositiveFloat = 1e-6
    weight_decay: Annotated[float, msgspec.Meta(ge=0)] = 0.0
    clip_grad: PositiveFloat = 1.0
    """Bound of the global gradient norm."""

    def lr_at(self, progress: float, update: int, schedule: Schedule = "linear") -> float:
        """Learning rate of the `update`-th optimizer step (from 0) at `progress` in [0, 1] of the run."""
        warm = min(1.0, (update + 1) / self.warmup_updates) if self.warmup_updates else 1.0
        decayed = {
            "linear": min(1.0, progress),
            "cosine": (1.0 - math.cos(math.pi * min(1.0, progress))) / 2,
            "constant": 0.0,
        }[schedule]
        return self.lr * warm * (1.0 - (1.0 - self.lr_end_fraction) * decayed)


class BroadcastConfig(Section, frozen=True, kw_only=True):
    """How new weights reach the engines."""

    pause_mode: Literal["retract", "in_place", "abort"] = "retract"
    """What becomes of running requests: computed anew under the new weights, kept with their old KV cache, or ended."""
    broadcast_topology: Literal["star", "group", "disk"] = "star"
    """A process group for each engine, so that one that is lost costs the others nothing; or one for all, in which each
    byte leaves the learner once. In a group, what blocks in a step has a fifth of the time-out. `disk`: no group, the
    engines read files."""
    disk_engines: tuple[str, ...] = ()
    """In the other topologies: beginnings of the URLs of engines that no group reaches, which read files instead."""
    disk_dir: str = ""
    """Where those files are, for this run alone: a folder that has the same absolute path for learner and engines."""
    disk_keep: PositiveInt = 2
    """Versions that stay there, the newest among them."""
    quantise: bool = False
    """Send the matrices of the decoder's layers in float8, with a scale for each block of 128 x 128, to engines that
    take it: a quarter of float32's bytes, half of bfloat16's, and a policy that is not quite the learner's."""
    bucket_bytes: PositiveInt = 512 << 20
    """Of one broadcast, or of one file; a larger tensor is alone in one."""
    broadcast_timeout_s: PositiveFloat = 20.0
    """What a dead or hung engine costs a publish at most."""
    admin_api_key: str | None = None
    """The engines' key for pausing and weights."""
    api_key: str | None = None
    """The engines' key for generation, used by the probe."""

    def __post_init__(self) -> None:
        for index, start in enumerate(self.disk_engines):
            is_url = start.startswith(("http://", "https://"))
            require(is_url, f"learner.broadcast.disk_engines[{index}]", start, "http://.. or https://..")
        if self.disk_dir or self.disk_engines or self.broadcast_topology == "disk":
            is_absolute = PurePosixPath(self.disk_dir).is_absolute()
            require(is_absolute, "learner.broadcast.disk_dir", self.disk_dir, "an absolute path")

    def reads_files(self, engine: str) -> bool:
        """Whether the engine at this URL gets weights by disk."""
        return self.broadcast_topology == "disk" or engine.startswith(self.disk_engines)


class CriticConfig(Section, frozen=True, kw_only=True):
    """Where values come from, and how fast they are learnt."""

    trunk: Literal["shared", "detached", "separate"] = "shared"
    """`shared`: a head on the policy's trunk, whose loss trains both. `detached`: the same head, whose loss stops at
    itself. `separate`: a model of its own, started from the same directory, with gradients, clipping and optimizer of
    its own; twice the memory and the time."""
    lr: PositiveFloat | None = None
    """Peak learning rate of the head, or of the separate model; null: the policy's. It follows `learner.schedule` and
    is not scaled by how stale a batch is."""
    warmup_updates: Annotated[int, msgspec.Meta(ge=0)] | None = None
    """Updates of its own linear warm-up; null: as many as the policy's."""
    warmup_steps: Annotated[int, msgspec.Meta(ge=0)] = 0
    """Learner steps at the start of the run that train the critic alone: the policy does not move, to the bit."""
    privileged: bool = False
    """The critic also reads what the environment says of its state (`Observation.state`) before each response, which
    the policy never does. Only a separate one may."""

    def __post_init__(self) -> None:
        require(
            not self.privileged or self.trunk == "separate",
            "learner.critic.trunk",
            self.trunk,
            "separate with privileged true (a shared trunk would show the policy what the critic reads)",
        )

    @property
    def is_apart(self) -> bool:
        """Whether the critic's parameters need a learning rate of their own."""
        return (self.trunk, self.lr, self.warmup_updates, self.warmup_steps) != ("shared", None, None, 0)

    def optimizer(self, policy: OptimizerConfig) -> OptimizerConfig:
        """The critic's optimizer: the policy's but for what is stated here."""
        changes = {"lr": self.lr, "warmup_updates": self.warmup_updates}
        return msgspec.structs.replace(policy, **{name: value for name, value in changes.items() if value is not None})


class LoRAConfig(Section, frozen=True, kw_only=True):
    """Low-rank adapters (Hu et al. 2021) instead of all weights: they and the critic's head are what is trained.

    Engines and exported weights have them merged; the export's folder `adapter` has them apart, for PEFT.
    """

    rank: Annotated[int, msgspec.Meta(ge=0)] = 0
    """0 trains all weights."""
    alpha: PositiveFloat = 32.0
    """The update is multiplied by alpha / rank."""
    targets: tuple[Literal["qkv_proj", "o_proj", "gate_up_proj", "down_proj"], ...] = (
        "qkv_proj",
        "o_proj",
        "gate_up_proj",
        "down_proj",
    )
    """Layers of the decoder: what makes queries, keys and values, attention's output, and the MLP's two."""

    def __post_init__(self) -> None:
        require(len(self.targets) > 0, "learner.lora.targets", self.targets, "at least one layer")


class LearnerConfig(Section, frozen=True, kw_only=True):
    """Section `learner`."""

    total_steps: PositiveInt = 60
    batch_size: PositiveInt = 96
    """Trajectories of one step, over all data-parallel ranks."""
    max_staleness: Annotated[int, msgspec.Meta(ge=0)] = 4
    """In learner steps, measured at consumption from a trajectory's oldest token; never exceeded."""
    selection: SelectionConfig = SelectionConfig()
    publish_every: PositiveInt = 1
    overlap_publish: bool = True
    """Train while a thread publishes a copy of the weights, and probe where it costs no wait; else wait for each
    publish."""
    checkpoint_every: PositiveInt = 10
    keep_checkpoints: PositiveInt = 2
    asynchronous_checkpoints: bool = True
    """Train while threads write a checkpoint, from a copy of its state in host memory; else wait for it."""
    hub_every: PositiveInt | None = None
    """Upload the model after every so many steps, a multiple of `checkpoint_every`, and after the last; none never."""
    hub_repository: str = PLACEHOLDER_REPOSITORY
    """OWNER/NAME of the repository, which is made where it is missing; the default is refused."""
    hub_private: bool = True
    prefetch: Annotated[int, msgspec.Meta(ge=0, le=1)] = 1
    """1 claims and prepares the next batch during the update."""
    expected_trajectory_bytes: PositiveInt = 64 << 10
    """For the check that the buffer can hold what is claimed between two checkpoints."""

    archive: str | None = None
    """Folder, relative to the run's, in which every trained trajectory is kept; none keeps nothing. A replay,
    whose data are kept already, ignores it."""

    ppo_epochs: PositiveInt = 2
    minibatch_rows: PositiveInt = 96
    """Rows of one optimizer step, over all data-parallel ranks."""
    max_tokens_per_microbatch: PositiveInt = 16384
    tensor_parallel_size: PositiveInt = 1
    """Ranks that each layer is cut into."""
    pipeline_parallel_size: PositiveInt = 1
    """Stages of consecutive layers."""
    context_parallel_size: PositiveInt = 1
    """Ranks that each row is cut into. What is left of torchrun's processes shares each batch."""
    expert_parallel_size: PositiveInt = 1
    """Of a mixture of experts: ranks of a stage that its experts are shared out to, whatever else these ranks share."""
    sequence_parallel: bool = False
    """Norms and residuals of a part of the tokens on each tensor-parallel rank."""
    recompute: bool = False
    """Trade one more forward pass of each decoder layer for its activations."""
    bf16: bool = False
    """Weights and activations in bfloat16; master weights and optimizer state stay float32."""
    require_transformer_engine: bool = True
    """On a GPU, refuse to start without Transformer Engine; false takes torch's attention there."""
    num_threads: PositiveInt = 1

    optimizer: OptimizerConfig = OptimizerConfig()
    schedule: Schedule = "linear"
    """Of every learning rate."""
    critic: CriticConfig = CriticConfig()
    lora: LoRAConfig = LoRAConfig()
    freeze_vision: Literal["none", "tower", "projector", "all"] = "none"
    """What of the vision module stays as it was loaded: its blocks, what projects their output into the decoder, or
    both. With `all` the features of a picture are computed once per step and shared by its PPO epochs."""
    advantage: AdvantageConfig = AdvantageConfig()
    alarms: AlarmConfig = AlarmConfig()
    loss: LossConfig = LossConfig()
    reference: ReferenceConfig = ReferenceConfig()
    broadcast: BroadcastConfig = BroadcastConfig()

    probe_prompts: Annotated[int, msgspec.Meta(ge=0)] = 8
    """Prompts of the first batch that are sampled again after each publish and rescored; 0 turns the check off."""
    max_skipped_updates: PositiveInt = 5
    """Stop after so many optimizer steps in a row with a non-finite gradient."""
    store_timeout_s: PositiveFloat = 60.0
    """How long Redis may be away before the learner gives up."""
    metrics_port: Annotated[int, msgspec.Meta(ge=0, le=65535)] = 0
    """0 picks a free port, written to ready.json."""

    def __post_init__(self) -> None:
        if self.hub_every is not None:
            require(
                self.hub_every % self.checkpoint_every == 0,
                "learner.hub_every",
                self.hub_every,
                f"a multiple of checkpoint_every ({self.checkpoint_every})",
            )
            require_repository("learner.hub_repository", self.hub_repository)

    @property
    def layout(self) -> ParallelLayout:
        """How the model lies on processes."""
        return ParallelLayout(
            tensor=self.tensor_parallel_size,
            pipeline=self.pipeline_parallel_size,
            context=self.context_parallel_size,
            expert=self.expert_parallel_size,
        )

    @property
    def batch_bytes(self) -> int:
        """Payload bytes of one batch, as expected."""
        return self.batch_size * self.expected_trajectory_bytes

    @property
    def required_capacity_bytes(self) -> int:
        """What the buffer must hold: all that is claimed between two checkpoints, prefetched, filling and being
        made.
        """
        return (self.checkpoint_every + self.prefetch + 2) * self.batch_bytes


class ModelConfig(Section, frozen=True, kw_only=True):
    """Section `model`: the small Qwen2.5-VL that `vagen sft` makes from nothing.

    The defaults give 0.70 million parameters. Every vision block has full attention; sizes in pixels are those of the
    image processor.
    """

    vocab_size: PositiveInt = 384
    """At most; the tokenizer takes what its texts need."""
    vocab_multiple: PositiveInt = 16
    hidden_size: PositiveInt = 128
    intermediate_size: PositiveInt = 384
    num_layers: PositiveInt = 2
    num_heads: PositiveInt = 4
    num_kv_heads: PositiveInt = 2
    vision_hidden_size: PositiveInt = 64
    vision_intermediate_size: PositiveInt = 128
    vision_num_layers: PositiveInt = 2
    vision_num_heads: PositiveInt = 4
    patch_size: PositiveInt = 14
    merge_size: PositiveInt = 2
    min_pixels: PositiveInt = 28 * 28
    max_pixels: PositiveInt = 28 * 28 * 64
    max_position_embeddings: PositiveInt = 4096
    rope_theta: PositiveFloat = 1e4
    initializer_range: PositiveFloat = 0.04

    def __post_init__(self) -> None:
        require(
            self.hidden_size % (2 * self.num_heads) == 0,
            "model.hidden_size",
            self.hidden_size,
            f"a multiple of 2 * num_heads ({2 * self.num_heads})",
        )
        require(
            self.num_heads % self.num_kv_heads == 0,
            "model.num_heads",
            self.num_heads,
            f"a multiple of num_kv_heads ({self.num_kv_heads})",
        )
        require(
            self.max_pixels >= self.min_pixels,
            "model.max_pixels",
            self.max_pixels,
            f"int >= min_pixels ({self.min_pixels})",
        )

    @property
    def mrope_section(self) -> list[int]:
        """Split of half a head over time, height and width: 1 : 1.5 : 1.5, as Qwen2.5-VL's."""
        head_dim = self.hidden_size // self.num_heads
        spatial = 3 * head_dim // 16
        return [head_dim // 2 - 2 * spatial, spatial, spatial]


class SFTConfig(Section, frozen=True, kw_only=True):
    """Section `sft`: the supervised warm start on scripted turns."""

    turns: PositiveInt = 5000
    expert_probability: Fraction = 0.1
    """Share of expert actions; the rest is random, so that acting is left to reinforcement learning."""
    steps: PositiveInt = 350
    batch_rows: PositiveInt = 64
    value_weight: Annotated[float, msgspec.Meta(ge=0)] = 0.1
    max_tokens_per_microbatch: PositiveInt = 16384
    optimizer: OptimizerConfig = OptimizerConfig(lr=1e-3, warmup_updates=30, weight_decay=0.0, eps=1e-8)
    num_threads: PositiveInt = 1

    def __post_init__(self) -> None:
        require(self.turns >= self.batch_rows, "sft.turns", self.turns, f"int >= sft.batch_rows ({self.batch_rows})")
