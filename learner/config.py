"""Settings of the learner (sections `learner` and `sft` of a recipe). Imports without torch."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from vagen.buffer.selection.config import SelectionConfig
from vagen.common.config import Section, require
from vagen.learner.advantages.config import AdvantageConfig
from vagen.learner.alarms import AlarmConfig
from vagen.learner.losses.config import LossConfig, ReferenceConfig

PositiveInt = Annotated[int, msgspec.Meta(ge=1)]
PositiveFloat = Annotated[float, msgspec.Meta(gt=0)]
Fraction = Annotated[float, msgspec.Meta(ge=0, le=1)]


class OptimizerConfig(Section, frozen=True, kw_only=True):
    """AdamW with linear warm-up over updates and linear decay over learner steps."""

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

    def lr_at(self, progress: float, update: int) -> float:
        """Learning rate of the `update`-th optimizer step (from 0) at `progress` in [0, 1] of the run."""
        warm = min(1.0, (update + 1) / self.warmup_updates) if self.warmup_updates else 1.0
        return self.lr * warm * (1.0 - (1.0 - self.lr_end_fraction) * min(1.0, progress))


class BroadcastConfig(Section, frozen=True, kw_only=True):
    """How new weights reach the engines."""

    pause_mode: Literal["retract", "in_place", "abort"] = "retract"
    """What becomes of running requests: computed anew under the new weights, kept with their old KV cache, or ended."""
    bucket_bytes: PositiveInt = 512 << 20
    broadcast_timeout_s: PositiveFloat = 20.0
    """What a dead or hung engine costs a publish at most."""
    admin_api_key: str | None = None
    """The engines' key for pausing and weights."""
    api_key: str | None = None
    """The engines' key for generation, used by the probe."""


class LearnerConfig(Section, frozen=True, kw_only=True):
    """Section `learner`."""

    total_steps: PositiveInt = 60
    batch_size: PositiveInt = 96
    """Trajectories of one step, over all data-parallel ranks."""
    max_staleness: Annotated[int, msgspec.Meta(ge=0)] = 4
    """In learner steps, measured at consumption from a trajectory's oldest token; never exceeded."""
    selection: SelectionConfig = SelectionConfig()
    publish_every: PositiveInt = 1
    checkpoint_every: PositiveInt = 10
    keep_checkpoints: PositiveInt = 2
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
    num_threads: PositiveInt = 1

    optimizer: OptimizerConfig = OptimizerConfig()
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
