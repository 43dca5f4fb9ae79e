"""The estimators by name. Owns look-up and what each estimator declares it needs; no arithmetic. Imports without torch.

An estimator of your own is a function of `(inputs, config, reduce)` decorated with `advantage_estimator`, named in the
recipe by its import path:

    @advantage_estimator("reward_to_go", needs_critic=False)
    def reward_to_go(inputs, config, reduce): ...

    learner: {advantage: {name: "my_package.my_module:reward_to_go"}}
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias

from vagen.common.config import import_object
from vagen.common.errors import ConfigError

if TYPE_CHECKING:
    import torch

    from vagen.learner.advantages.batch import AdvantageInputs, AdvantageOutputs
    from vagen.learner.advantages.config import AdvantageConfig

    Reduce = Callable[[torch.Tensor], torch.Tensor]
    EstimatorFunction = Callable[[AdvantageInputs, AdvantageConfig, Reduce], AdvantageOutputs]

WhitenOver: TypeAlias = Literal["tokens", "targets"]

_BUILT_IN_MODULES = ("vagen.learner.advantages.gae", "vagen.learner.advantages.group_relative")
_REGISTRY: dict[str, Estimator] = {}


@dataclass(frozen=True)
class Estimator:
    """An estimator and what it needs, checked against the rest of the recipe before anything starts."""

    name: str
    function: EstimatorFunction
    needs_critic: bool
    """Reads `values` and `bootstrap_values`; otherwise both may be zeros and no critic is trained."""
    row_local: bool
    """Every advantage depends on tokens of its own row alone, so rows of one episode need not be brought together."""
    needs_groups: bool
    """Compares the segments of one group; never whitened."""
    whole_episode: bool
    """Needs the whole episode's reward: refused together with cutting episodes into fragments."""
    whiten_over: WhitenOver = "tokens"
    """Whose moments whitening uses: all policy tokens, or those with a critic target (one a turn)."""

    def __call__(self, inputs: AdvantageInputs, config: AdvantageConfig, reduce: Reduce) -> AdvantageOutputs:
        return self.function(inputs, config, reduce)


def advantage_estimator(
    name: str,
    *,
    aliases: tuple[str, ...] = (),
    needs_critic: bool,
    row_local: bool = False,
    needs_groups: bool = False,
    whole_episode: bool = False,
    whiten_over: WhitenOver = "tokens",
) -> Callable[[EstimatorFunction], Estimator]:
    """Register the decorated function under `name` and `aliases`. A taken name raises `ConfigError`."""

    def register(function: EstimatorFunction) -> Estimator:
        estimator = Estimator(name, function, needs_critic, row_local, needs_groups, whole_episode, whiten_over)
        for key in (name, *aliases):
            if key in _REGISTRY:
                raise ConfigError(f"advantage estimator {key!r} is already registered; choose another name")
            _REGISTRY[key] = estimator
        return estimator

    return register


def get_estimator(name: str) -> Estimator:
    """The estimator registered as `name`, or the one found at the import path `package.module:function`."""
    for module in _BUILT_IN_MODULES:
        importlib.import_module(module)
    if ":" in name:
        return _import_estimator(name)
    if name not in _REGISTRY:
        raise ConfigError(
            f"$.learner.advantage.name: unknown estimator {name!r}; known are {', '.join(sorted(_REGISTRY))}, "
            "or package.module:function of your own"
        )
    return _REGISTRY[name]


def _import_estimator(path: str) -> Estimator:
    found = import_object(path, "learner.advantage.name")
    if not isinstance(found, Estimator):
        raise ConfigError(
            f"$.learner.advantage.name: {path!r} is not an estimator; decorate it with "
            "vagen.learner.advantages.registry.advantage_estimator, which says what it needs"
        )
    return found
