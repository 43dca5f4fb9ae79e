"""Puts a learner together: process groups, model, checkpoint, buffer, engines. Leaves the loop to
`vagen.learner.loop`.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml
from ulid import ULID

from vagen.buffer.config import BufferConfig
from vagen.buffer.settings import overrides
from vagen.buffer.sharded_store import Store, connect_store, make_selector
from vagen.common.config import RunConfig, section
from vagen.common.errors import ConfigError
from vagen.common.metrics import Metrics
from vagen.common.redaction import redact_settings
from vagen.learner.archiver import StepArchiver
from vagen.learner.batching import RowPreparer
from vagen.learner.broadcast import Broadcaster, ProbeAnswer, probe_engine
from vagen.learner.checkpoints import CheckpointFolder
from vagen.learner.config import LearnerConfig
from vagen.learner.export import export_model
from vagen.learner.feeder import BatchFeeder
from vagen.learner.hub import HubUploader
from vagen.learner.journal import StepJournal
from vagen.learner.loop import Learner
from vagen.learner.model.actor_critic import VisionLanguageActorCritic
from vagen.learner.model.checkpoint_io import load_checkpoint
from vagen.learner.model.collectives import recognise_lost_ranks, sum_over_data_parallel
from vagen.learner.model.optimizer import Trainer
from vagen.learner.model.parallel import ParallelTopology, parallel_session
from vagen.learner.model.spec import require_transformer_engine
from vagen.learner.models import load_trained
from vagen.learner.probe import Probe
from vagen.learner.publish_thread import PublishThread
from vagen.learner.publisher import Publisher
from vagen.learner.sources import BatchSource, BufferSource
from vagen.learner.update import PolicyUpdate

__all__ = ["LearnerParts", "learner_parts", "run_learner"]

logger = logging.getLogger(__name__)

_DRAIN_TIMEOUTS = 5
"""Of the broadcast: what is being sent, what waits and the probe of each cost one at most, one is margin."""


@dataclass(frozen=True, kw_only=True)
class LearnerParts:
    """One rank's model with its checkpoint loaded, and what every learner needs around it."""

    run: RunConfig
    config: LearnerConfig
    folder: Path
    """RUN_DIR/learner."""
    topology: ParallelTopology
    trainer: Trainer
    update: PolicyUpdate
    checkpoints: CheckpointFolder
    first_step: int
    probe: Probe | None
    preparer: RowPreparer
    journal: StepJournal
    metrics: Metrics
    metrics_port: int
    hub: HubUploader | None
    stop: threading.Event
    """Set by SIGTERM and SIGINT."""

    @property
    def is_first(self) -> bool:
        """Whether this rank talks to others."""
        return self.topology.rank == 0

    def feeder(self, source: BatchSource) -> BatchFeeder:
        """Prepares this rank's part of the source's batches."""
        return BatchFeeder(source, self.preparer, dp_rank=self.topology.dp_rank, dp_size=self.topology.dp_size)

    def learner(self, source: BatchSource, feeder: BatchFeeder, **more: Any) -> Learner:
        """The loop over a source; `more` are fields of `Learner`."""
        return Learner(
            config=self.config,
            trainer=self.trainer,
            update=self.update,
            feeder=feeder,
            source=source,
            checkpoints=self.checkpoints,
            journal=self.journal,
            stop=self.stop,
            first_step=self.first_step,
            is_first_rank=self.is_first,
            probe=self.probe,
            on_checkpoint=(lambda path, step: None) if self.hub is None else self.hub.submit,
            **more,
        )

    def announce(self) -> None:
        """Say in ready.json that training begins."""
        if self.is_first:
            content = {"pid": os.getpid(), "metrics_port": self.metrics_port, "first_step": self.first_step}
            _replace(self.folder / "ready.json", json.dumps(content) + "\n")


def run_learner(recipe: Mapping[str, Any], model_dir: Path, run_dir: Path, redis_url: str) -> int:
    """Train until the recipe's last step, SIGTERM or SIGINT, and return the step reached.

    Resumes from the newest checkpoint under `run_dir`. Raises `ConfigError` for what cannot work and
    `BufferUnavailableError` when the buffer's Redis does not answer.
    """
    config = section(recipe, "learner", LearnerConfig)
    with ExitStack() as stack:
        group_size = int(recipe.get("actor", {}).get("group_size", 1))
        connect = _connector(redis_url, recipe, config, group_size, stack)
        store = connect()
        _check_buffer(store, config)
        parts = stack.enter_context(learner_parts(recipe, model_dir, run_dir))
        archiver = _open_archive(parts, run_dir, connect, stack)
        learner = stack.enter_context(_live_learner(parts, store, connect, archiver, group_size))
        reached = learner.run()
        if learner.is_first_rank:
            logger.info("stopped at step %d of %d", reached, config.total_steps)
        if reached == config.total_steps:
            export_model(learner.trainer.model, parts.folder / "export", reached)
    return reached


@contextmanager
def learner_parts(recipe: Mapping[str, Any], model_dir: Path, run_dir: Path) -> Iterator[LearnerParts]:
    """Process groups, model, newest checkpoint, journal and metrics; ends them with the block.

    SIGTERM and SIGINT set `stop` meanwhile. Raises `ConfigError` for what cannot work, `CheckpointError` for a
    checkpoint of another model, and `RankLostError`, also in the block, when another rank is gone.
    """
    run, config = section(recipe, "run", RunConfig), section(recipe, "learner", LearnerConfig)
    torch.set_num_threads(config.num_threads)
    if config.require_transformer_engine:
        require_transformer_engine()
    folder = run_dir / "learner"
    preparer = RowPreparer.load(model_dir, privileged=config.critic.privileged)
    with (
        _stopped_by_signals() as stop,
        parallel_session(config.layout, seed=run.seed + 1) as topology,
        recognise_lost_ranks(),
    ):
        model, trainer, update = _make_update(run, config, model_dir, preparer.forbidden_token_ids, topology)
        checkpoints = CheckpointFolder.of_run(run_dir, config.keep_checkpoints)
        if topology.rank == 0:
            checkpoints.clear_incomplete()
        first_step, probe = 0, None
        newest = checkpoints.newest()
        if newest is not None:
            record = load_checkpoint(newest, model, trainer, update.beside_policy())
            first_step, update.num_updates = record["step"], record["num_updates"]
            update.num_critic_updates = record.get("num_critic_updates", update.num_updates)
            probe = Probe.from_plain(record["probe"]) if record["probe"] else None
            logger.info("resumed from %s", newest)
        metrics = Metrics("vagen_learner", run.name)
        port = metrics.serve(config.metrics_port) if topology.rank == 0 else 0
        if topology.rank == 0:
            _replace(folder / "recipe.yaml", yaml.safe_dump(redact_settings(recipe), sort_keys=False))
        with ExitStack() as stack:
            hub = None
            if config.hub_every is not None and topology.rank == 0:
                hub = stack.enter_context(closing(HubUploader(run_dir, config, metrics)))
            journal = stack.enter_context(closing(StepJournal(folder / "metrics.jsonl", metrics, config.alarms)))
            yield LearnerParts(
                run=run,
                config=config,
                folder=folder,
                topology=topology,
                trainer=trainer,
                update=update,
                checkpoints=checkpoints,
                first_step=first_step,
                probe=probe,
                preparer=preparer,
                journal=journal,
                metrics=metrics,
                metrics_port=port,
                hub=hub,
                stop=stop,
            )


@contextmanager
def _stopped_by_signals() -> Iterator[threading.Event]:
    """An event that SIGTERM and SIGINT set while the block runs."""
    stop = threading.Event()
    earlier = {number: signal.signal(number, lambda *_: stop.set()) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield stop
    finally:
        for number, handler in earlier.items():
            signal.signal(number, handler)


def _connector(
    redis_url: str, recipe: Mapping[str, Any], config: LearnerConfig, group_size: int, stack: ExitStack
) -> Callable[[], Store]:
    run_name, num_shards = section(recipe, "run", RunConfig).name, section(recipe, "buffer", BufferConfig).shards

    def connect() -> Store:
        store = connect_store(
            redis_url, run_name, num_shards=num_shards, group_size=group_size, timeout_s=config.store_timeout_s
        )
        stack.callback(store.close)
        return store

    return connect


def _open_archive(
    parts: LearnerParts, run_dir: Path, connect: Callable[[], Store], stack: ExitStack
) -> StepArchiver | None:
    if parts.config.archive is None or not parts.is_first:
        return None
    archiver = StepArchiver(run_dir / parts.config.archive, connect(), parts.metrics, first_step=parts.first_step)
    stack.callback(archiver.close)
    return archiver


@contextmanager
def _live_learner(
    parts: LearnerParts, store: Store, connect: Callable[[], Store], archiver: StepArchiver | None, group_size: int
) -> Iterator[Learner]:
    config = parts.config
    incarnation = str(ULID())
    if parts.is_first:
        _announce(store, archiver, config, incarnation, parts.first_step, group_size)
    feeder_store = connect()
    selector = make_selector(feeder_store, config.selection, parts.run.seed) if parts.is_first else None
    source = BufferSource(store, feeder_store, batch_size=config.batch_size, selector=selector, archiver=archiver)

    def sample(probe: Probe, url: str, version: int) -> list[ProbeAnswer]:
        return probe_engine(url, probe.requests(parts.preparer.vision), version, config.broadcast)

    def rescore(probe: Probe, answers: list[ProbeAnswer]) -> float:
        return probe.mismatch(parts.trainer.model, parts.preparer, answers)

    publishing = PublishThread(
        Publisher(connect(), Broadcaster(config.broadcast), incarnation),
        sample,
        drain_timeout_s=_DRAIN_TIMEOUTS * config.broadcast.broadcast_timeout_s,
    )
    with (
        closing(publishing) as publisher,
        closing(parts.feeder(source)) as feeder,
    ):
        learner = parts.learner(
            source,
            feeder,
            last_step=config.total_steps,
            publisher=publisher,
            rescore=rescore,
            changed_settings=store.changed_settings,
        )
        parts.announce()
        yield learner


def _make_update(
    run: RunConfig, config: LearnerConfig, model_dir: Path, forbidden: torch.Tensor, topology: ParallelTopology
) -> tuple[VisionLanguageActorCritic, Trainer, PolicyUpdate]:
    trained = load_trained(model_dir, config)
    update = PolicyUpdate(
        trained.policy.model,
        trained.policy,
        config,
        seed=run.seed,
        forbidden_token_ids=forbidden,
        reduce=sum_over_data_parallel if topology.dp_size > 1 else None,
        reference=trained.reference,
        critic=trained.critic,
    )
    return trained.policy.model, trained.policy, update


def _announce(
    store: Store,
    archiver: StepArchiver | None,
    config: LearnerConfig,
    incarnation: str,
    first_step: int,
    group_size: int,
) -> None:
    """Finish what the checkpoint has made durable, and say where the run goes on."""
    replay = config.selection.replay
    durable = [step for step in store.pending_manifests() if step < first_step]
    if archiver is not None:
        archiver.submit(durable)
    else:
        store.done(durable)
    store.register(
        incarnation,
        step=first_step,
        batch_size=config.batch_size,
        max_staleness=config.max_staleness,
        publish_every=config.publish_every,
        total_steps=config.total_steps,
        required_capacity_bytes=config.required_capacity_bytes,
        replay_max_bytes=replay.max_bytes if replay.share > 0 else 0,
        replay_max_staleness=replay.max_staleness,
        group_size=group_size,
        selection=config.selection,
    )
    store.rollback(first_step - 1)
    for line in overrides(store.settings()):
        logger.warning("%s", line)


def _check_buffer(store: Store, config: LearnerConfig) -> None:
    status = store.status()
    capacity = status.capacity_bytes
    if capacity > 0 and config.selection.order == "priority" and not status.priority_function:
        raise ConfigError(
            "$.buffer.priority.function: expected a priority function for $.learner.selection.order priority, "
            "the buffer that serves this run has none"
        )
    if 0 < capacity < config.required_capacity_bytes:
        raise ConfigError(
            f"$.buffer.capacity_bytes: expected int >= {config.required_capacity_bytes} = (checkpoint_every + "
            f"prefetch + 2) * batch_size * expected_trajectory_bytes of $.learner, got {capacity} "
            "(`vagen buffer settings` tells whether it was set live)"
        )


def _replace(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    partial = file.with_name(file.name + ".partial")
    partial.write_text(text)
    partial.replace(file)
