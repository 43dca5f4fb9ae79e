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
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from ulid import ULID

from vagen.buffer.learner_store import LearnerStore
from vagen.common.config import RunConfig, section
from vagen.common.errors import ConfigError
from vagen.common.metrics import Metrics
from vagen.common.vocabulary import vision_tokens
from vagen.learner.batching import RowPreparer
from vagen.learner.broadcast import Broadcaster, probe_engine
from vagen.learner.checkpoints import CheckpointFolder
from vagen.learner.config import LearnerConfig
from vagen.learner.feeder import BatchFeeder
from vagen.learner.journal import StepJournal
from vagen.learner.loop import Learner
from vagen.learner.model.actor_critic import VisionLanguageActorCritic
from vagen.learner.model.checkpoint_io import load_checkpoint
from vagen.learner.model.optimizer import Trainer
from vagen.learner.model.parallel import ParallelTopology, parallel_session, sum_over_data_parallel
from vagen.learner.probe import Probe
from vagen.learner.publisher import Publisher
from vagen.learner.sft import adam_options
from vagen.learner.update import PolicyUpdate, load_models

__all__ = ["run_learner"]

logger = logging.getLogger(__name__)


def run_learner(recipe: Mapping[str, Any], model_dir: Path, run_dir: Path, redis_url: str) -> int:
    """Train until the recipe's last step, SIGTERM or SIGINT, and return the step reached.

    Resumes from the newest checkpoint under `run_dir`. Raises `ConfigError` for what cannot work and
    `BufferUnavailableError` when the buffer's Redis does not answer.
    """
    run, config = section(recipe, "run", RunConfig), section(recipe, "learner", LearnerConfig)
    torch.set_num_threads(config.num_threads)
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    with ExitStack() as stack:
        connect = _connector(redis_url, run.name, config, stack)
        store = connect()
        _check_capacity(store, config)
        topology = stack.enter_context(
            parallel_session(tensor_parallel_size=config.tensor_parallel_size, seed=run.seed + 1)
        )
        learner = stack.enter_context(_assemble(run, config, model_dir, run_dir, store, connect(), topology, stop))
        reached = learner.run()
        if learner.is_first_rank:
            logger.info("stopped at step %d of %d", reached, config.total_steps)
        if reached == config.total_steps:
            _export(learner.trainer.model, run_dir / "learner" / "export")
    return reached


def _connector(redis_url: str, run_name: str, config: LearnerConfig, stack: ExitStack) -> Callable[[], LearnerStore]:
    def connect() -> LearnerStore:
        store = LearnerStore.connect(redis_url, run_name, timeout_s=config.store_timeout_s)
        stack.callback(store.close)
        return store

    return connect


@contextmanager
def _assemble(
    run: RunConfig,
    config: LearnerConfig,
    model_dir: Path,
    run_dir: Path,
    store: LearnerStore,
    feeder_store: LearnerStore,
    topology: ParallelTopology,
    stop: threading.Event,
) -> Iterator[Learner]:
    folder = run_dir / "learner"
    vision = vision_tokens(model_dir)
    if vision is None:
        raise ConfigError(f"{model_dir}: expected a vision-language model, config.json has no image_token_id")
    forbidden = torch.tensor(vision.forbidden_token_ids)
    model, trainer, update = _make_update(run, config, model_dir, forbidden, topology)
    checkpoints = CheckpointFolder(folder / "checkpoints", config.keep_checkpoints)
    first_step, probe = 0, None
    newest = checkpoints.newest()
    if newest is not None:
        record = load_checkpoint(newest, model, trainer)
        first_step, update.num_updates = record["step"], record["num_updates"]
        probe = Probe.from_plain(record["probe"]) if record["probe"] else None
        logger.info("resumed from %s", newest)
    preparer = RowPreparer.load(model_dir, vision.image_token_id, model.hf_config.text_config.vocab_size)
    is_first = topology.rank == 0
    incarnation = str(ULID())
    if is_first:
        _announce(store, config, incarnation, first_step)
    metrics = Metrics("vagen_learner", run.name)
    port = metrics.serve(config.metrics_port) if is_first else 0
    journal = StepJournal(folder / "metrics.jsonl", metrics, config.alarms)
    feeder = BatchFeeder(
        feeder_store,
        preparer,
        batch_size=config.batch_size,
        order=config.order,
        dp_rank=topology.dp_rank,
        dp_size=topology.dp_size,
    )

    def rescore(probe: Probe, url: str, version: int) -> float:
        answers = probe_engine(url, probe.requests(vision), version, config.broadcast)
        return probe.mismatch(model, preparer, answers, forbidden)

    learner = Learner(
        config=config,
        trainer=trainer,
        update=update,
        feeder=feeder,
        store=store,
        checkpoints=checkpoints,
        journal=journal,
        stop=stop,
        first_step=first_step,
        is_first_rank=is_first,
        publisher=Publisher(store, Broadcaster(config.broadcast), incarnation),
        probe=probe,
        rescore=rescore,
    )
    if is_first:
        _write_ready(folder / "ready.json", {"pid": os.getpid(), "metrics_port": port, "first_step": first_step})
    try:
        yield learner
    finally:
        feeder.close()
        learner.publisher.close()
        journal.close()


def _make_update(
    run: RunConfig, config: LearnerConfig, model_dir: Path, forbidden: torch.Tensor, topology: ParallelTopology
) -> tuple[VisionLanguageActorCritic, Trainer, PolicyUpdate]:
    reduce = sum_over_data_parallel if topology.dp_size > 1 else None
    if reduce is not None and config.advantage.whiten_per == "task":
        raise ConfigError("$.learner.advantage.whiten_per: expected batch with several data-parallel ranks, got task")
    model, reference = load_models(model_dir, config)
    trainer = Trainer(model, adam_options(config.optimizer))
    update = PolicyUpdate(
        model, trainer, config, seed=run.seed, forbidden_token_ids=forbidden, reduce=reduce, reference=reference
    )
    return model, trainer, update


def _announce(store: LearnerStore, config: LearnerConfig, incarnation: str, first_step: int) -> None:
    """Finish what the checkpoint has made durable, and say where the run goes on."""
    store.done([step for step in store.pending_manifests() if step < first_step])
    store.register(
        incarnation,
        step=first_step,
        batch_size=config.batch_size,
        max_staleness=config.max_staleness,
        publish_every=config.publish_every,
        total_steps=config.total_steps,
    )
    store.rollback(first_step - 1)


def _check_capacity(store: LearnerStore, config: LearnerConfig) -> None:
    capacity = store.status().capacity_bytes
    if 0 < capacity < config.required_capacity_bytes:
        raise ConfigError(
            f"$.buffer.capacity_bytes: expected int >= {config.required_capacity_bytes} = (checkpoint_every + "
            f"prefetch + 2) * batch_size * expected_trajectory_bytes of $.learner, got {capacity}"
        )


def _export(model: VisionLanguageActorCritic, target: Path) -> None:
    if not target.exists():
        model.save_hf(target)


def _write_ready(file: Path, content: dict[str, Any]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    partial = file.with_name(file.name + ".partial")
    partial.write_text(json.dumps(content) + "\n")
    partial.replace(file)
