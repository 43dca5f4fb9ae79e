"""`vagen demo`: one whole training run on this machine, from nothing to a report.

    validate -> warm start -> engine, buffer -> eval before -> learner, actor -> eval after -> audit -> stop -> report
                                                                  |
                                        every tick: processes, metrics, screen, a small eval now and then

Owns the order of the stages and the run's folder. The processes are the same that a person starts by hand; they are
watched by `vagen.tools.supervisor` and stopped in order whatever ends the demo.
"""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec
import yaml

from vagen.common.config import read_recipe, require
from vagen.common.errors import ConfigError, VagenError
from vagen.tools.child import Death, ProcessSpec, Stage
from vagen.tools.launch import Launcher, assign_ports
from vagen.tools.monitor import Monitor
from vagen.tools.recipe import Recipe, validate_recipe
from vagen.tools.report import write_report
from vagen.tools.runs import DemoState, Evaluation, RunDir, append_line, read_json, write_json
from vagen.tools.screen import View, clock
from vagen.tools.sglang_cpu.serve import sglang_python
from vagen.tools.summary import build_summary, verdict
from vagen.tools.supervisor import InterruptedByUserError, Supervisor, stop_leftover

logger = logging.getLogger(__name__)

ENGINES = ("local", "sglang")
EXIT_FAILED, EXIT_TARGET_MISSED, EXIT_INTERRUPTED = 1, 3, 130

_LEFTOVER_ORDER = ("learner", "actor", "buffer", "engine")
"""Who makes and consumes data first: a learner without its buffer would not stop in order."""
_TICK_S = 1.0
_EVALUATION_TIMEOUT_S = 3600.0
_SEED_STRIDE = 1_000_000
"""Training levels of different demo seeds do not share labels."""


@dataclass(frozen=True, kw_only=True)
class DemoOptions:
    """The command line of `vagen demo`."""

    config: str = "frozenlake"
    seed: int = 0
    run_dir: Path | None = None
    resume: bool = False
    fresh: bool = False
    overrides: Sequence[str] = ()
    engine: str | None = None
    """`local` or `sglang`; None takes that of the run that is resumed, else local."""

    def __post_init__(self) -> None:
        if self.seed < 0:
            raise ConfigError(f"--seed: expected int >= 0, got {self.seed}")
        if self.resume and self.fresh:
            raise ConfigError("--resume and --fresh: expected at most one of them")
        if self.engine not in (None, *ENGINES):
            raise ConfigError(f"--engine: expected {' or '.join(ENGINES)}, got {self.engine!r}")

    @property
    def folder(self) -> Path:
        return (self.run_dir or Path("runs") / f"demo-seed{self.seed}").absolute()


@dataclass(frozen=True, kw_only=True)
class PreparedRun:
    """A run's folder with its recipe validated and written, and what earlier attempts came to."""

    run: RunDir
    recipe: Recipe
    state: DemoState


@contextmanager
def prepare(options: DemoOptions) -> Iterator[PreparedRun]:
    """Validate everything and hold the run's folder, before any process starts.

    Raises `ConfigError` for a bad recipe, and for a folder that another demo uses or that holds a run which the
    options say nothing about.
    """
    run = RunDir(options.folder)
    with ExitStack() as held:
        if run.lock.exists():
            held.enter_context(_lock(run))
        state = _existing_state(run, options)
        if state is None:
            raw = read_recipe(options.config, [*_seed_overrides(options.seed), *options.overrides])
            state = DemoState(config=Path(options.config).stem, seed=options.seed, started_at=time.time())
        elif options.overrides:
            raise ConfigError("--set: a resumed run keeps its recipe; edit its recipe.yaml, or start with --fresh")
        else:
            raw = read_recipe(run.recipe)
            state.attempts += 1
        recipe = validate_recipe(raw)
        require(
            recipe.buffer.shards == 1, "buffer.shards", recipe.buffer.shards, "1 for the demo, which runs one actor"
        )
        timeout_s = recipe.demo.stop_timeout_s
        if not run.lock.exists():
            held.enter_context(_lock(run))
        for process in _LEFTOVER_ORDER:
            stop_leftover(run.ready(process), run.root, timeout_s)
        if options.fresh:
            _clear(run)
        state.engine = options.engine or state.engine
        if state.engine == "sglang":
            sglang_python()
        assign_ports(raw)
        run.recipe.write_text(yaml.safe_dump(raw, sort_keys=False))
        write_json(run.state, state)
        yield PreparedRun(run=run, recipe=validate_recipe(raw), state=state)


def run_demo(prepared: PreparedRun, view: View) -> int:
    """Run all stages, stop everything, write summary and report; the exit code for the shell."""
    return _Demo(prepared, view).run()


class _Demo:
    def __init__(self, prepared: PreparedRun, view: View) -> None:
        self._run = prepared.run
        self._recipe = prepared.recipe
        self._config = prepared.recipe.demo
        self._state = prepared.state
        self._view = view
        self._launch = Launcher(self._run)
        self._started = time.monotonic()
        self._active_before = self._state.active_s
        self._cpu_before = dict(self._state.cpu_seconds)
        self._ticked_at = 0.0
        self._next_point = 0
        self._point: tuple[int, Path] | None = None
        self._supervisor = Supervisor(
            restart_grace_s=self._config.restart_grace_s,
            stop_timeout_s=self._config.stop_timeout_s,
            on_death=self._on_death,
            on_return=lambda name, pid: self._event(f"{name} is back, pid {pid}"),
            on_tick=self._tick,
        )
        self._monitor = Monitor(prepared.run, prepared.recipe, self._supervisor)

    def run(self) -> int:
        code, reason = EXIT_FAILED, "failed"
        with self._supervisor.signals(), self._view:
            try:
                self._stages()
                code, reason = 0, "finished"
            except InterruptedByUserError:
                code, reason = EXIT_INTERRUPTED, "interrupted"
                self._event("interrupted: stopping all processes; a second Ctrl-C kills them")
            except VagenError as error:
                reason = str(error)
                self._event(f"stopping: {reason}")
            finally:
                self._shut_down()
                code = self._conclude(code, reason)
        return code

    def _stages(self) -> None:
        if "warm start" not in self._state.stage_seconds:
            with self._stage("warm start"):
                self._supervisor.run(self._launch.warm_start(), self._config.train_timeout_s)
        with self._stage("start"):
            self._serve(self._launch.buffer(), self._engine())
        if not self._run.evaluation("before").is_file():
            with self._stage("eval before"):
                self._evaluate("before")
        with self._stage("train"):
            # Together: the learner serves once an actor has announced an engine to it.
            self._serve(self._launch.learner(self._monitor.is_trained), self._launch.actor())
            self._train()
        with self._stage("eval after"):
            self._evaluate("after")

    def _engine(self) -> ProcessSpec:
        config = self._recipe.engine
        if self._state.engine == "local":
            return self._launch.engine(config.port)
        keys = {"VAGEN_API_KEY": config.api_key, "VAGEN_ADMIN_API_KEY": config.admin_api_key}
        return self._launch.sglang(config.port, config.max_running, keys)

    def _serve(self, *specs: ProcessSpec) -> None:
        for spec in specs:
            self._supervisor.start(spec)
        for spec in specs:
            self._supervisor.wait_ready(spec.name, max(self._config.ready_timeout_s, spec.ready_timeout_s))

    def _train(self) -> None:
        learner = self._supervisor.processes["learner"]
        every = self._config.eval_every_steps
        self._next_point = (self._monitor.steps_taken // every + 1) * every if every else 0
        self._supervisor.wait(
            lambda: learner.stage is Stage.DONE, self._config.train_timeout_s, "the learner takes all steps"
        )
        self._next_point = 0
        self._supervisor.stop("eval")
        # What episodes would be played from now on nobody trains on, and they would slow the evaluation down.
        self._monitor.look()
        self._supervisor.stop("actor")
        self._event(f"the learner has taken {self._monitor.steps_taken} steps")

    def _evaluate(self, name: str) -> None:
        """The large evaluation, in a process of its own."""
        out = self._run.evaluation(name)
        config = self._config
        self._supervisor.run(self._launch.evaluation(out, config.levels, config.transcripts), _EVALUATION_TIMEOUT_S)
        result = read_json(out, Evaluation)
        if result is None:
            raise VagenError(f"{out}: the evaluation wrote no result")
        low, high = result.interval
        self._event(f"held-out success {name}: {result.success:.3f} [{low:.3f}, {high:.3f}] of {result.levels} levels")

    def _tick(self) -> None:
        """Called at every look at the processes; does its work once a second."""
        now = time.monotonic()
        if now - self._ticked_at < _TICK_S:
            return
        self._ticked_at = now
        self._monitor.look()
        self._extend_curve()
        self._save_state()
        self._view.update(self._monitor.snapshot(self._state, time.monotonic() - self._started))

    def _extend_curve(self) -> None:
        """Start a small evaluation when one is due, and take in the one that has ended."""
        process = self._supervisor.processes.get("eval")
        if self._point is not None and process is not None and not process.alive:
            step, out = self._point
            self._point = None
            result = read_json(out, Evaluation) if process.stage is Stage.DONE else None
            if result is None:
                self._event(f"the evaluation at step {step} failed, see {process.spec.log}")
            else:
                append_line(self._run.curve, msgspec.structs.replace(result, step=step))
        steps = self._monitor.steps_taken
        is_due = 0 < self._next_point <= steps < self._recipe.learner.total_steps
        if is_due and (process is None or not process.alive) and self._monitor.serves("engine"):
            self._next_point = (steps // self._config.eval_every_steps + 1) * self._config.eval_every_steps
            self._point = (steps, self._run.root / "eval" / f"step-{steps}.json")
            self._supervisor.start(self._launch.evaluation(self._point[1], self._config.eval_levels, 0))

    def _shut_down(self) -> None:
        """Stop in the order in which nothing is lost: who makes data first, who holds it last."""
        self._monitor.look()
        self._supervisor.stop("sft", "eval", "learner", "actor")
        if self._monitor.serves("buffer"):
            try:
                write_json(self._run.audit, self._monitor.audit())
            except VagenError as error:
                self._event(f"the buffer could not be audited: {error}")
        self._supervisor.stop_all()

    def _conclude(self, code: int, reason: str) -> int:
        """Write down what came of it; returns the exit code, which also says whether the targets were met."""
        state = self._state
        state.finished_at = time.time()
        state.exit_code, state.exit_reason = code, reason
        self._save_state()
        if code == 0 and not build_summary(self._run)["targets"]["passed"]:
            state.exit_code = EXIT_TARGET_MISSED
            self._save_state()
        summary = build_summary(self._run)
        write_json(self._run.summary, summary)
        path = write_report(self._run.root)
        self._event(f"{verdict(summary)[1]} Report: {path}")
        return state.exit_code

    @contextmanager
    def _stage(self, name: str) -> Iterator[None]:
        self._state.stage = name
        started = time.monotonic()
        yield
        seconds = time.monotonic() - started
        self._state.stage_seconds[name] = self._state.stage_seconds.get(name, 0.0) + seconds
        logger.debug("stage %s took %.1f s", name, seconds)

    def _on_death(self, death: Death) -> None:
        lines = [f"{death.name} {death.cause}; the other processes go on. Its last lines:"]
        lines += [f"  | {line}" for line in death.log_tail]
        lines += [f"Start it again within {self._config.restart_grace_s:g} s with:", f"  {death.command}"]
        self._event("\n".join(lines))

    def _event(self, text: str) -> None:
        stamped = f"[{clock(time.monotonic() - self._started)}] {text}"
        self._state.events.append(stamped)
        self._view.event(stamped)

    def _save_state(self) -> None:
        state = self._state
        state.active_s = self._active_before + time.monotonic() - self._started
        times = os.times()
        spent = {**self._supervisor.cpu_seconds(), "demo": times.user + times.system}
        state.cpu_seconds = {
            name: self._cpu_before.get(name, 0.0) + spent.get(name, 0.0) for name in {**self._cpu_before, **spent}
        }
        write_json(self._run.state, state)


def _seed_overrides(seed: int) -> list[str]:
    """One number decides the model's weights, the scripts, the levels and the samples."""
    return [f"run.seed={seed}", f"engine.seed={seed}", f"actor.base_seed={seed * _SEED_STRIDE}"]


def _existing_state(run: RunDir, options: DemoOptions) -> DemoState | None:
    """The state to resume from, None for a new run.

    Raises `ConfigError` where the folder and the options do not go together.
    """
    if not run.root.exists() or not any(path != run.lock for path in run.root.iterdir()):
        if options.resume:
            raise ConfigError(f"{run.root}: no run to resume there")
        return None
    state = run.read_state()
    if state is None:
        raise ConfigError(f"{run.root}: not empty and not the folder of a demo; choose another --run-dir")
    if options.fresh:
        return None
    if state.exit_reason == "finished":
        raise ConfigError(
            f"{run.root}: holds a finished run, report {run.report}; --fresh removes it and starts over, "
            "--run-dir DIR or --seed N start another"
        )
    if not options.resume:
        raise ConfigError(
            f"{run.root}: holds an unfinished run (stage {state.stage}); --resume continues it, "
            "--fresh removes it and starts over"
        )
    return state


@contextmanager
def _lock(run: RunDir) -> Iterator[None]:
    """Hold the run's folder. Raises `ConfigError` when another demo does."""
    run.root.mkdir(parents=True, exist_ok=True)
    with run.lock.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(f"{run.root}: another `vagen demo` uses this folder now") from None
        yield


def _clear(run: RunDir) -> None:
    """Remove what a run left, the held lock aside."""
    for path in run.root.iterdir():
        if path.is_dir():
            shutil.rmtree(path)
        elif path != run.lock:
            path.unlink()
