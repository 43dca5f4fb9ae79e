"""The update: megatron's gradient buffers and distributed AdamW around a model.

Owns gradient accumulation, reduction, clipping, the step and the refusal of non-finite gradients. Does not own losses,
learning-rate schedules or files.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.optimizer import (
    OptimizerConfig,
    ParamKey,
    get_megatron_optimizer,
    get_standard_config_overrides,
)
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from torch import Tensor

from vagen.common.errors import ConfigError
from vagen.learner.model.actor_critic import VisionLanguageActorCritic
from vagen.learner.model.batch import TokenOutputs
from vagen.learner.model.cpu_compat import cuda_as_cpu
from vagen.learner.model.pipeline import Microbatches, add_gradients

__all__ = ["AdamOptions", "StepStats", "Trainer"]

Key = TypeVar("Key")


@dataclass(frozen=True, kw_only=True)
class AdamOptions:
    """AdamW. Biases and norms (tensors of one dimension) have no weight decay. `clip_grad` bounds the global gradient
    norm; 0 turns clipping off."""

    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.0
    clip_grad: float = 1.0

    def __post_init__(self) -> None:
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ConfigError(f"optimizer: betas must be in [0, 1), got {self.betas}")
        for name, bound in (("eps", 0.0), ("weight_decay", 0.0), ("clip_grad", 0.0)):
            if getattr(self, name) < bound:
                raise ConfigError(f"optimizer: {name} must be >= {bound}, got {getattr(self, name)}")


@dataclass(frozen=True)
class StepStats:
    """`grad_norm` before clipping, over all ranks; `skipped` where it was not finite and nothing was changed."""

    grad_norm: float
    skipped: bool


class Trainer:
    """A model with its gradients and optimizer state. All methods are collective over all ranks.

    Per step: `zero_grad()`, any number of `accumulate`, then `step(lr)`, or `grad_norm()` instead. Gradients are
    **summed** over microbatches and data-parallel ranks, so a loss is normalised by the global count of what it
    averages over.
    """

    def __init__(
        self, model: VisionLanguageActorCritic, options: AdamOptions, *, has_critic_rate: bool = False
    ) -> None:
        """With `has_critic_rate` the value head is a parameter group of its own, so that `step` takes its rate."""
        self.model = model
        self.has_critic_rate = has_critic_rate
        self.options = options
        ddp_config = DistributedDataParallelConfig(use_distributed_optimizer=True, grad_reduce_in_fp32=True)
        config = OptimizerConfig(
            optimizer="adam",
            lr=0.0,
            adam_beta1=options.betas[0],
            adam_beta2=options.betas[1],
            adam_eps=options.eps,
            weight_decay=options.weight_decay,
            clip_grad=options.clip_grad,
            use_distributed_optimizer=True,
            bf16=model.config.bf16,
            params_dtype=model.config.params_dtype,
        )
        with cuda_as_cpu():
            self._ddp = DistributedDataParallel(model.config, ddp_config, model)
            overrides = _critic_group(config) if has_critic_rate else None
            self.optimizer: Any = get_megatron_optimizer(config, [self._ddp], config_overrides=overrides)
        self._prime()

    def zero_grad(self) -> None:
        """Clear the gradients of a step."""
        self._ddp.zero_grad_buffer()
        self.optimizer.zero_grad()

    def accumulate(
        self, microbatches: Microbatches[Key], loss: Callable[[Key, TokenOutputs], Tensor], **options: Any
    ) -> None:
        """Add the gradient of the sum of losses of microbatches: see `pipeline.add_gradients`."""
        add_gradients(self._ddp, microbatches, loss, **options)

    def step(self, lr: float, *, critic_lr: float | None = None) -> StepStats:
        """Reduce, clip and apply the accumulated gradients with this learning rate; `critic_lr` is the value head's
        where it has one.

        A gradient norm that is not finite on any rank leaves weights and optimizer state as they were.
        """
        grad_norm = self.grad_norm()
        if not math.isfinite(grad_norm):
            return StepStats(grad_norm, skipped=True)
        self.apply(grad_norm, lr, critic_lr=critic_lr)
        return StepStats(grad_norm, skipped=False)

    @torch.no_grad()
    def grad_norm(self) -> float:
        """Reduce the accumulated gradients and return their global norm, not finite where one of them overflowed."""
        with cuda_as_cpu():
            finalize_model_grads([self._ddp], None)
            overflow = bool(self.optimizer.prepare_grads())
            norm = float(self.optimizer.get_grad_norm())
        return math.inf if overflow and math.isfinite(norm) else norm

    @torch.no_grad()
    def apply(self, grad_norm: float, lr: float, *, critic_lr: float | None = None) -> None:
        """The second half of `step`: clip the gradients, whose norm is this, and apply them."""
        with cuda_as_cpu():
            for part in self.optimizer.chained_optimizers:
                if self.options.clip_grad > 0:
                    clip_grad_by_total_norm_fp32(part.get_parameters(), self.options.clip_grad, grad_norm)
            # megatron leaves both to a scheduler of its training script: without this, norms and biases would decay.
            for group in self.optimizer.param_groups:
                is_critic = self.has_critic_rate and group["is_decoupled_lr"] and critic_lr is not None
                group["lr"] = (critic_lr if is_critic else lr) * group["lr_mult"]
                group["weight_decay"] = self.options.weight_decay * group["wd_mult"]
            self.optimizer.step_with_ready_grads()

    def sharded_state(self, sharded_model: Mapping[str, Any], *, is_loading: bool, metadata: dict[str, Any]) -> Any:
        """megatron's sharded state dict of the optimizer, for a model's; any layout can load it.

        Ranks that share out experts have a second optimizer for them; its tensors are in `expert_state`.
        """
        with ExitStack() as stack:
            for part in self.inner_optimizers():
                for buffer in part.buffers:
                    stack.enter_context(_without_padding(buffer))
            # Tensors are named by their parameters, whichever optimizer has them.
            metadata = metadata | {"chained_optim_avoid_prefix": True}
            state = self.optimizer.sharded_state_dict(sharded_model, is_loading=is_loading, metadata=metadata)
        if len(self.inner_optimizers()) == 1:
            return state
        shared, experts = state[0], state[1]
        return shared | {"expert_state": experts["param_state"]}

    def inner_optimizers(self) -> list[Any]:
        """megatron's distributed optimizers, each around one torch optimizer (`.optimizer`): that of experts which are
        shared out comes second."""
        return list(self.optimizer.chained_optimizers)

    def _prime(self) -> None:
        """Give torch's AdamW its state before the first step: megatron saves and loads only what is there."""
        for part in self.inner_optimizers():
            if not isinstance(part.optimizer, torch.optim.AdamW):
                continue
            for group in part.optimizer.param_groups:
                for parameter in group["params"]:
                    part.optimizer.state[parameter] = {
                        "step": torch.tensor(0.0),
                        "exp_avg": torch.zeros_like(parameter),
                        "exp_avg_sq": torch.zeros_like(parameter),
                    }


def _critic_group(config: OptimizerConfig) -> dict[ParamKey, Any]:
    """megatron's own groups and one for the value head, under a key by which checkpoints tell groups apart."""
    return {**get_standard_config_overrides(config), ParamKey(name="*value_head.*"): {"is_decoupled_lr": True}}


@contextmanager
def _without_padding(buffer: Any) -> Iterator[None]:
    """Places of a buffer's parameters as if its buckets had no padding behind them.

    megatron 0.16 joins the buckets' states without their padding, and then looks parameters up with it: behind the
    first bucket of several (a tied embedding on two stages has one of its own) a checkpoint would hold other values.
    """
    places, shift, shifts = buffer.param_index_map, 0, []
    for bucket in buffer.buckets:
        shifts.append(shift)
        shift += bucket.grad_data.numel() - bucket.numel_unpadded
    buffer.param_index_map = {
        parameter: (start - shifts[bucket], end - shifts[bucket], bucket)
        for parameter, (start, end, bucket) in places.items()
    }
    try:
        yield
    finally:
        buffer.param_index_map = places
