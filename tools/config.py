"""Section `demo` of a recipe: evaluations, patience and targets of `vagen demo`."""

from __future__ import annotations

from vagen.common.config import Section, require


class DemoConfig(Section, frozen=True, kw_only=True):
    """What `vagen demo` measures around a training run, and how long it waits for the processes of the run."""

    levels: int = 1000
    """Held-out levels of the evaluations before and after."""
    eval_every_steps: int = 10
    """Learner steps between the small evaluations of the curve; 0 switches them off."""
    eval_levels: int = 200
    """Held-out levels of one point of the curve."""
    transcripts: int = 6
    """Episodes kept with pictures and text by the evaluations before and after."""
    ready_timeout_s: float = 180.0
    """How long a process may take until it serves."""
    restart_grace_s: float = 120.0
    """How long a process that died may take to be started again by hand."""
    train_timeout_s: float = 86400.0
    """How long the learner may take for all of its steps."""
    stop_timeout_s: float = 30.0
    """How long a process may take to stop before it is killed."""
    max_success_before: float = 0.35
    """Target: held-out success of the warm start stays below."""
    min_success_after: float = 0.8
    """Target: held-out success after training is at least this."""

    def __post_init__(self) -> None:
        for name, low in (("levels", 1), ("eval_every_steps", 0), ("eval_levels", 1), ("transcripts", 0)):
            value = getattr(self, name)
            require(value >= low, f"demo.{name}", value, f"int >= {low}")
        for name in ("ready_timeout_s", "restart_grace_s", "train_timeout_s", "stop_timeout_s"):
            value = getattr(self, name)
            require(0 < value < 1e9, f"demo.{name}", value, "seconds > 0")
        for name in ("max_success_before", "min_success_after"):
            value = getattr(self, name)
            require(0 <= value <= 1, f"demo.{name}", value, "number in [0, 1]")
