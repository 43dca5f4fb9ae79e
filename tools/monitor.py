"""Gathers what a demo shows: learner's steps, metrics, evaluations, state of the processes. Decides nothing."""

from __future__ import annotations

from typing import Any

import msgspec

from vagen.buffer.accounting import audit
from vagen.buffer.service import read_ready
from vagen.tools.child import Stage
from vagen.tools.recipe import Recipe
from vagen.tools.runs import DemoState, RunDir, StepRecord, TelemetrySample, num_steps
from vagen.tools.screen import ProcessView, Snapshot
from vagen.tools.supervisor import Supervisor
from vagen.tools.telemetry import Telemetry, metrics_url, rate, time_shares

_WATCHED = ("actor", "engine", "buffer", "learner")


class Monitor:
    """The present picture of one run; `look` refreshes it."""

    def __init__(self, run: RunDir, recipe: Recipe, supervisor: Supervisor) -> None:
        self._run = run
        self._recipe = recipe
        self._supervisor = supervisor
        earlier = run.read_telemetry()
        self._telemetry = Telemetry(
            {name: lambda name=name: self._endpoint(name) for name in _WATCHED},  # type: ignore[misc]
            run.telemetry,
            start=earlier[-1] if earlier else None,
        )
        self._sample: TelemetrySample | None = None
        self.steps: list[StepRecord] = run.read_steps()

    @property
    def steps_taken(self) -> int:
        """Learner steps so far, over all attempts."""
        return num_steps(self.steps)

    def look(self) -> None:
        """Read what is new."""
        self._sample = self._telemetry.sample()
        self.steps = self._run.read_steps()

    def is_trained(self) -> bool:
        """Whether the learner has left the model that it exports after its last step."""
        return self._run.export.is_dir()

    def serves(self, name: str) -> bool:
        """Whether a process serves now."""
        process = self._supervisor.processes.get(name)
        return process is not None and process.stage is Stage.SERVING

    def audit(self) -> dict[str, Any]:
        """The accounting identity now. Raises `BufferUnavailableError` when Redis does not answer."""
        url = self._recipe.buffer.complete(read_ready(self._run.root).redis_url)
        accounting = audit(url, self._recipe.run.name, self._recipe.buffer.shards)
        plain: dict[str, Any] = msgspec.to_builtins(accounting)
        return plain | {"pending": accounting.pending, "identity_holds": accounting.identity_holds}

    def snapshot(self, state: DemoState, elapsed_s: float) -> Snapshot:
        """For the screen."""
        window = self._telemetry.window()
        shares = time_shares(window[0], window[1], {"actor": self._recipe.actor.concurrency}) if window else {}
        return Snapshot(
            title=f"vagen demo · {state.config} · seed {state.seed}",
            stage=state.stage,
            elapsed_s=elapsed_s,
            total_steps=self._recipe.learner.total_steps,
            steps=self.steps,
            before=self._run.read_evaluation("before"),
            after=self._run.read_evaluation("after"),
            curve=self._run.read_curve(),
            target=self._recipe.demo.min_success_after,
            gauges=self._sample.gauges if self._sample else {},
            generated_per_s=rate(window, "actor_tokens_total"),
            trained_per_s=rate(window, "learner_tokens_total[policy]"),
            trajectories_per_s=rate(window, "learner_trajectories_total"),
            processes=[
                ProcessView(
                    name=name,
                    state=process.stage.value,
                    pid=process.pid if process.alive else None,
                    cpu_s=process.cpu_seconds,
                    shares=shares.get(name, {}),
                )
                for name, process in self._supervisor.processes.items()
            ],
        )

    def _endpoint(self, name: str) -> str | None:
        return metrics_url(name, self._run.ready(name)) if self.serves(name) else None
