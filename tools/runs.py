"""The folder of a run: where each process leaves what, and reading it back.

    recipe.yaml             the recipe as it ran, overrides and seed merged in
    demo.json, demo.lock    stages, outcome and CPU time, kept by `vagen demo`; held while one runs
    model/                  the warm start
    <process>/ready.json    who serves where, written by buffer, engine, actor and learner
    learner/metrics.jsonl   one line a learner step
    learner/recipe.yaml     the recipe as the learner was given it, without keys and passwords
    learner/checkpoints/    what a learner resumes from
    learner/export/         the trained model, written after the last step
    eval/                   before.json, after.json, curve.jsonl
    telemetry.jsonl         cumulative counters of all processes, sampled by `vagen demo`
    buffer/audit.json       the accounting identity after the drain
    logs/<process>.log      what the process printed
    summary.json, report.html

Owns these names and the typed reading of what is inside. Reading is tolerant: a run may be partial, a last line torn.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import msgspec

logger = logging.getLogger(__name__)

R = TypeVar("R", bound=msgspec.Struct)


class Publish(msgspec.Struct, frozen=True, kw_only=True):
    """One publish of weights, as the learner logged it."""

    version: int
    step: int = 0
    """Learner step whose weights these are."""
    seconds: float = 0.0
    stall_s: float = 0.0
    """How long generation stood still."""
    ok: tuple[str, ...] = ()
    """Engines whose weights were checked."""
    failed: dict[str, str] = {}
    """Engine -> why it was dropped."""
    probe_mismatch: float | None = None
    """Mean |engine - learner| log-probability of the probe; none where it was not probed."""


class Ratio(msgspec.Struct, frozen=True, kw_only=True):
    """Importance ratio of one batch."""

    mean: float | None = None
    max: float | None = None
    p99: float | None = None
    ess: float | None = None
    truncated_share: float | None = None


class StepRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One line of `learner/metrics.jsonl`."""

    step: int
    time: float
    """Unix time in seconds."""
    wall_s: float = 0.0
    version: int | None = None
    """Newest whose publish has ended since the line before."""
    num_trajectories: int = 0
    success: float | None = None
    reward_mean: float | None = None
    reward_by_component: dict[str, float] = {}
    turns_mean: float | None = None
    policy_tokens: int = 0
    context_tokens: int = 0
    staleness: dict[str, int] = {}
    """Staleness in learner steps -> trajectories."""
    mixed_version_trajectories: int = 0
    entropy: float | None = None
    loss: dict[str, float | None] = {}
    grad_norm: float | None = None
    lr: float | None = None
    clip_fraction: float | None = None
    ratio: Ratio = Ratio()
    mismatch_current_version: float | None = None
    explained_variance: float | None = None
    probe_mismatch: float | None = None
    """Largest of `publishes`."""
    seconds: dict[str, float] = {}
    publishes: tuple[Publish, ...] = ()
    """Those that have ended since the line before."""
    skipped_updates: int = 0


class TranscriptTurn(msgspec.Struct, frozen=True, kw_only=True):
    """One turn of an episode, to be looked at."""

    image_png_b64: str | None = None
    response: str = ""
    reward: float = 0.0
    actions: tuple[str, ...] = ()


class Transcript(msgspec.Struct, frozen=True, kw_only=True):
    """One evaluated episode, to be looked at."""

    seed: int
    success: bool
    turns: tuple[TranscriptTurn, ...]
    closing_png_b64: str | None = None
    """What the environment showed after the last turn."""


class Evaluation(msgspec.Struct, frozen=True, kw_only=True):
    """What `vagen eval` writes; the curve adds the learner's step and the time."""

    success: float
    interval: tuple[float, float]
    levels: int
    turns_mean: float = 0.0
    format_rate: float = 0.0
    seconds: float = 0.0
    policy_versions: tuple[int, int] = (-1, -1)
    """Oldest and newest version that sampled a token."""
    transcripts: tuple[Transcript, ...] = ()
    step: int | None = None
    time: float | None = None


class TelemetrySample(msgspec.Struct, frozen=True, kw_only=True):
    """Counters summed over restarts, and gauges, of all processes at one moment."""

    time: float
    counters: dict[str, float] = {}
    """`process.name` -> total since the demo started."""
    seconds: dict[str, dict[str, float]] = {}
    """Process -> what it did or waited for -> seconds in total."""
    observed_s: dict[str, float] = {}
    """Process -> seconds over which its counters were watched."""
    gauges: dict[str, float] = {}


class DemoState(msgspec.Struct, kw_only=True):
    """What `vagen demo` itself remembers between starts."""

    config: str
    seed: int
    started_at: float
    engine: str = "local"
    """`local` or `sglang`."""
    finished_at: float | None = None
    exit_reason: str | None = None
    exit_code: int | None = None
    attempts: int = 1
    stage: str = "validate"
    active_s: float = 0.0
    """Wall time over all attempts."""
    stage_seconds: dict[str, float] = {}
    cpu_seconds: dict[str, float] = {}
    """Process -> user and system seconds, over all its starts."""
    events: list[str] = []
    """Deaths, returns and what else a person should know, with their time."""


@dataclass(frozen=True)
class RunDir:
    """Paths inside one run's folder, and what stands there."""

    root: Path

    @property
    def recipe(self) -> Path:
        return self.root / "recipe.yaml"

    @property
    def state(self) -> Path:
        return self.root / "demo.json"

    @property
    def lock(self) -> Path:
        return self.root / "demo.lock"

    @property
    def model(self) -> Path:
        return self.root / "model"

    @property
    def metrics(self) -> Path:
        return self.root / "learner" / "metrics.jsonl"

    @property
    def learner_recipe(self) -> Path:
        return self.root / "learner" / "recipe.yaml"

    @property
    def checkpoints(self) -> Path:
        return self.root / "learner" / "checkpoints"

    @property
    def export(self) -> Path:
        return self.root / "learner" / "export"

    @property
    def telemetry(self) -> Path:
        return self.root / "telemetry.jsonl"

    @property
    def curve(self) -> Path:
        return self.root / "eval" / "curve.jsonl"

    @property
    def audit(self) -> Path:
        return self.root / "buffer" / "audit.json"

    @property
    def summary(self) -> Path:
        return self.root / "summary.json"

    @property
    def report(self) -> Path:
        return self.root / "report.html"

    def evaluation(self, name: str) -> Path:
        """`before` or `after`."""
        return self.root / "eval" / f"{name}.json"

    def ready(self, process: str) -> Path:
        return self.root / process / "ready.json"

    def log(self, process: str) -> Path:
        return self.root / "logs" / f"{process}.log"

    def read_steps(self) -> list[StepRecord]:
        """Steps in order, the last line of a repeated one."""
        by_step = {record.step: record for record in read_lines(self.metrics, StepRecord)}
        return [by_step[step] for step in sorted(by_step)]

    def read_curve(self) -> list[Evaluation]:
        """Points in order of their step, the last of a repeated one."""
        by_step = {point.step: point for point in read_lines(self.curve, Evaluation) if point.step is not None}
        return [by_step[step] for step in sorted(by_step)]

    def read_telemetry(self) -> list[TelemetrySample]:
        return list(read_lines(self.telemetry, TelemetrySample))

    def read_evaluation(self, name: str) -> Evaluation | None:
        return read_json(self.evaluation(name), Evaluation)

    def read_state(self) -> DemoState | None:
        return read_json(self.state, DemoState)

    def read_audit(self) -> dict[str, Any] | None:
        return json.loads(self.audit.read_text()) if self.audit.is_file() else None


def num_steps(records: Sequence[StepRecord]) -> int:
    """Learner steps that ordered records stand for."""
    return records[-1].step + 1 if records else 0


def read_json(path: Path, kind: type[R]) -> R | None:
    """The file as `kind`; None when it is absent or is being written by hand and not whole."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except FileNotFoundError:
        return None
    except msgspec.DecodeError as error:
        logger.warning("%s is left out: %s", path, error)
        return None


def read_lines(path: Path, kind: type[R]) -> Iterator[R]:
    """The lines of a JSON-lines file that are whole; a process killed in a write leaves a torn one."""
    if not path.is_file():
        return
    for number, line in enumerate(path.read_bytes().splitlines(), start=1):
        try:
            # Python's own parser: a metric may be NaN, which strict JSON has no word for.
            yield msgspec.convert(json.loads(line), kind)
        except (json.JSONDecodeError, msgspec.ValidationError) as error:
            logger.warning("%s:%d is left out: %s", path, number, error)


def write_json(path: Path, value: object) -> None:
    """Replace the file by `value` in one step: a reader sees the old or the new content."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_bytes(msgspec.json.format(msgspec.json.encode(value), indent=2) + b"\n")
    temporary.replace(path)


def append_line(path: Path, value: object) -> None:
    """Append one line of JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab") as file:
        file.write(msgspec.json.encode(value) + b"\n")
