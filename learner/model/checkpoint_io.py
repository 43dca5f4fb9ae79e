"""Training checkpoints in megatron's torch_dist format: model, optimizer, random number generators, and a JSON record.

    learner.json    what the caller wants back, and which model it is of
    model/          what a transformers model directory holds besides weights, so that a checkpoint can be exported
    state/          torch_dist

Owns the format and exact resume: a run that loads a checkpoint continues with bit-identical losses. Saved with one
tensor-parallel size, loaded with another, weights and optimizer state are exact and generators are not restored. Does
not decide when to save, and does not delete.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, tensor_parallel
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.dist_checkpointing.utils import add_prefix_for_sharding
from transformers import AutoConfig

from vagen.common.errors import CheckpointError
from vagen.learner.checkpoint_match import COMPANIONS, read_checkpoint_json, write_checkpoint_json
from vagen.learner.model.actor_critic import VisionLanguageActorCritic
from vagen.learner.model.checkpoint_writer import StateWriter, root_cause
from vagen.learner.model.cpu_compat import compute_device, cuda_as_cpu
from vagen.learner.model.files import begin_directory, commit_directory, copy_companions
from vagen.learner.model.gpt import ModelOptions
from vagen.learner.model.lora import AdapterOptions
from vagen.learner.model.optimizer import Trainer
from vagen.learner.model.parallel import topology

__all__ = [
    "Beside",
    "PendingCheckpoint",
    "begin_checkpoint",
    "load_checkpoint",
    "load_model",
    "read_record",
    "save_checkpoint",
]

_SHARDING = {"distrib_optim_sharding_type": "fully_reshardable"}


Beside = Mapping[str, Trainer | VisionLanguageActorCritic]
"""By name, what is trained or kept apart from the policy: a trainer with its model, or a model alone."""


class PendingCheckpoint:
    """A checkpoint whose content is fixed, on its way to the disk."""

    def __init__(self, path: Path, writer: StateWriter) -> None:
        self._path = path
        self._writer = writer

    @property
    def is_written(self) -> bool:
        """Whether this rank's part is on the disk, or could not be written."""
        return self._writer.has_ended

    @property
    def seconds(self) -> float:
        """That the writing of this rank's part took."""
        return self._writer.seconds

    def wait(self) -> None:
        """Until `is_written`."""
        self._writer.wait()

    def finish(self) -> None:
        """Wait for the writing; the checkpoint appears under its name. Collective over all ranks.

        Raises CheckpointError where a rank could not write its part.
        """
        try:
            self._writer.finish()
            commit_directory(self._path)
        except (OSError, RuntimeError) as error:
            raise _unwritten(self._path, error) from error


def begin_checkpoint(
    path: str | Path,
    model: VisionLanguageActorCritic,
    trainer: Trainer,
    extra: Mapping[str, Any],
    beside: Beside = MappingProxyType({}),
) -> PendingCheckpoint:
    """Copy the state to host memory and start to write it: training may go on. Collective over all ranks.

    `path` appears when the result is finished, complete and flushed to disk, or not at all; one at a time. `extra` is
    what the caller wants back (step, policy version, manifest ...), JSON. Raises CheckpointError where `path` exists or
    cannot be written.
    """
    path = Path(path)
    target = begin_directory(path)
    content = target / "state"
    try:
        if dist.get_rank() == 0:
            content.mkdir()
            write_checkpoint_json(target, _new_record(model, extra, beside))
            (target / COMPANIONS).mkdir()
            copy_companions(model.source_dir, target / COMPANIONS)
        dist.barrier()
        with cuda_as_cpu():
            state = _sharded_state(model, trainer, beside, with_generators=True, is_loading=False)
        return PendingCheckpoint(path, StateWriter(state, content, _SHARDING))
    except (OSError, RuntimeError) as error:
        raise _unwritten(path, error) from error


def save_checkpoint(
    path: str | Path,
    model: VisionLanguageActorCritic,
    trainer: Trainer,
    extra: Mapping[str, Any],
    beside: Beside = MappingProxyType({}),
) -> None:
    """`begin_checkpoint`, and wait until it is there."""
    begin_checkpoint(path, model, trainer, extra, beside).finish()


def _unwritten(path: Path, error: Exception) -> CheckpointError:
    return CheckpointError(f"{path}: could not be written: {root_cause(error)}")


def _new_record(model: VisionLanguageActorCritic, extra: Mapping[str, Any], beside: Beside) -> dict[str, Any]:
    return {
        "model": _fingerprint(model),
        "bf16": model.config.bf16,
        "base_model": model.base_model,
        "world": _world(),
        "beside": sorted(beside),
        "extra": dict(extra),
    }


def read_record(path: str | Path) -> dict[str, Any]:
    """The `extra` of a checkpoint, without reading tensors. Raises CheckpointError where there is no checkpoint."""
    extra: dict[str, Any] = read_checkpoint_json(Path(path))["extra"]
    return extra


def load_checkpoint(
    path: str | Path, model: VisionLanguageActorCritic, trainer: Trainer, beside: Beside = MappingProxyType({})
) -> dict[str, Any]:
    """Restore model, optimizer, what is beside them and (with as many ranks of each kind as saved) generators in place;
    returns `extra`.

    Collective over all ranks. Raises CheckpointError where the checkpoint is missing or belongs to another model.
    """
    record = read_checkpoint_json(Path(path))
    if record["model"] != _fingerprint(model):
        raise CheckpointError(f"{path}: does not match the model: saved from {record['model']}")
    if record.get("beside", []) != sorted(beside):
        raise CheckpointError(
            f"{path}: has {record.get('beside', [])} beside the policy, expected {sorted(beside)} "
            "($.learner.critic.trunk and $.learner.reference.refresh_every of the run that saved it)"
        )
    same_world = record["world"] == _world()
    with cuda_as_cpu():
        wanted = _sharded_state(model, trainer, beside, with_generators=same_world, is_loading=True)
        state = _load_state(Path(path), model, wanted, beside)
        _load_optimizer(trainer, state["optimizer"])
        for name, part in beside.items():
            if isinstance(part, Trainer):
                _load_optimizer(part, state[name]["optimizer"])
    if same_world:
        _set_generators(state["generators"])
    return record["extra"]


def load_model(path: str | Path) -> tuple[VisionLanguageActorCritic, dict[str, Any]]:
    """The model of a checkpoint, in the dtype it was trained in and without an optimizer, and the `extra`.

    Collective over all ranks. Raises CheckpointError where the checkpoint is missing or not whole.
    """
    record = read_checkpoint_json(Path(path))
    source = Path(path) / COMPANIONS
    kind = record["model"]
    options = ModelOptions(bf16=record["bf16"], value_bins=kind.get("value_bins"))
    if "value_range" in kind:
        low, high = kind["value_range"]
        options = replace(options, value_range=(low, high))
    if "adapter" in kind:
        options = replace(options, adapter=AdapterOptions.of_plain(kind["adapter"]))
    model = VisionLanguageActorCritic(AutoConfig.from_pretrained(source), options, source).to(compute_device())
    model.base_model = record.get("base_model", model.base_model)
    with cuda_as_cpu():
        _load_state(Path(path), model, {"model": model.sharded_state_dict()})
    return model, record["extra"]


def _load_state(
    path: Path, model: VisionLanguageActorCritic, wanted: dict[str, Any], beside: Beside = MappingProxyType({})
) -> dict[str, Any]:
    """Fill the weights of the model and of what is beside it, and return all that was wanted."""
    try:
        state = dist_checkpointing.load(wanted, str(path / "state"))
        model.load_state_dict(state["model"])
        for name, part in beside.items():
            _model_of(part).load_state_dict(state[name]["model"])
    except (CheckpointingException, RuntimeError, KeyError) as error:
        raise CheckpointError(f"{path}: does not match the model: {error}") from error
    return state


def _fingerprint(model: VisionLanguageActorCritic) -> dict[str, Any]:
    """Which model a checkpoint is of; megatron itself would load the tensors that two models happen to share."""
    config = model.config
    critic = {}
    if model.options.value_bins is not None:
        critic = {"value_bins": model.options.value_bins, "value_range": list(model.options.value_range)}
    return {
        "model_type": model.family.model_type,
        "num_layers": config.num_layers,
        "hidden_size": config.hidden_size,
        "vocab_size": model.language_model.vocab_size,
        "tied": model.tied,
        **critic,
        **({} if model.adapter is None else {"adapter": model.adapter.plain()}),
    }


def _world() -> dict[str, int]:
    return topology().sizes


def _sharded_state(
    model: VisionLanguageActorCritic,
    trainer: Trainer,
    beside: Beside,
    *,
    with_generators: bool,
    is_loading: bool,
) -> dict[str, Any]:
    state = _sharded_part(model, trainer, is_loading=is_loading)
    for name, part in beside.items():
        own = _sharded_part(_model_of(part), part if isinstance(part, Trainer) else None, is_loading=is_loading)
        add_prefix_for_sharding(own, f"{name}.")
        state[name] = own
    if with_generators:
        place = topology()
        state["generators"] = ShardedObject("generators", _generators(), (place.world_size,), (place.rank,))
    return state


def _sharded_part(model: VisionLanguageActorCritic, trainer: Trainer | None, *, is_loading: bool) -> dict[str, Any]:
    sharded_model = model.sharded_state_dict()
    state: dict[str, Any] = {"model": sharded_model}
    if trainer is not None:
        state["optimizer"] = trainer.sharded_state(sharded_model, is_loading=is_loading, metadata=dict(_SHARDING))
    return state


def _model_of(part: Trainer | VisionLanguageActorCritic) -> VisionLanguageActorCritic:
    return part.model if isinstance(part, Trainer) else part


def _load_optimizer(trainer: Trainer, state: Any) -> None:
    """megatron 0.16 expects torch AdamW's `step` among the per-parameter tensors although it saves it apart, and
    shares one `step` tensor between all parameters: hide it while tensors are copied, then give each its own."""
    content = {name: value for name, value in state.items() if name not in ("param_state", "expert_state")}
    groups = content["optimizer"]["param_groups"]
    # One layout's experts are trained as its other weights, another's by an optimizer of their own.
    expert_groups = [group | {"is_expert_parallel": True} for group in groups]
    content["optimizer"]["param_groups"] = [*groups, *expert_groups]
    states = ("param_state", "expert_state")
    parts = trainer.inner_optimizers()
    for part, name in zip(parts, states[: len(parts)], strict=True):
        tensors = state[name]
        part.load_state_dict(content)
        steps = {p: values.pop("step") for p, values in part.optimizer.state.items() if "step" in values}
        part.load_parameter_state_from_fully_reshardable(tensors)
        for parameter, step in steps.items():
            part.optimizer.state[parameter]["step"] = step.clone()


def _generators() -> dict[str, Any]:
    """State of every random number generator of this rank."""
    return {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
        "megatron": tensor_parallel.get_cuda_rng_tracker().get_states(),
    }


def _set_generators(state: dict[str, Any]) -> None:
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    if state["cuda"] is not None:
        torch.cuda.set_rng_state(state["cuda"])
    tensor_parallel.get_cuda_rng_tracker().set_states(state["megatron"])
