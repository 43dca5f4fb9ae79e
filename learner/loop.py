"""The learner's one loop.

    wait      consumes the batch of step s from the feeder; unblocked by `claim` sealing a manifest. While waiting,
    engines
              that joined get the last version, so that a fleet that starts late or again can make the data waited for.
    request   the feeder claims step s + 1 while step s trains (prefetch 1).
    update    score, advantages, PPO epochs. Waits for nobody.
    publish   every `publish_every` steps: a copy of the weights becomes the version of step s + 1. A thread sends it
              while the loop goes on, unless `overlap_publish` is off. Where it is there before the next update, the
              probe compares engine and learner at exactly that version; one is waited for where four in a row were not.
    record    one line and the metrics of the step, before the checkpoint that makes it durable.
    save      every `checkpoint_every` steps, or when claimed batches fill half of the buffer or the rest is full while
    waiting:
              a snapshot, which threads write beside the next steps. Once it is durable, `done` frees the steps it
              contains, with `learner.archive` once they are archived. At most one is in the making.

A kill at any point is repaired at start: the newest checkpoint says the step, later manifests are claimed again
identically. Rank 0 alone talks to engines and marks progress; every rank claims the same sealed manifest. A replay is
the same loop over another source, without a publisher: `publish` and the probe are left out.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from vagen.common.errors import ConfigError
from vagen.learner.broadcast import ProbeAnswer
from vagen.learner.checkpointer import Checkpointer, DurableCheckpoint
from vagen.learner.checkpoints import CheckpointFolder
from vagen.learner.config import LearnerConfig
from vagen.learner.feeder import BatchFeeder, Feed
from vagen.learner.journal import StepJournal
from vagen.learner.model.collectives import broadcast_object, count_votes
from vagen.learner.model.optimizer import Trainer
from vagen.learner.probe import Probe
from vagen.learner.publish_thread import PublishTally, PublishThread
from vagen.learner.publisher import Published
from vagen.learner.sources import BatchSource
from vagen.learner.step_time import StepTime
from vagen.learner.summary import BatchSummary
from vagen.learner.update import PolicyUpdate, UpdateStats

__all__ = ["Learner"]

logger = logging.getLogger(__name__)

_TEND_EVERY_S = 0.25
_REMIND_EVERY_S = 15.0
_PROBE_EVERY = 4
"""Publishes: so many in a row that end too late to be probed, and the next is waited for."""
_STUCK_S = 10.0
"""A reading of the buffer may be older than what the ingest does at that moment."""


@dataclass
class Learner:
    """Everything one rank needs; made by `vagen.learner.startup`."""

    config: LearnerConfig
    trainer: Trainer
    update: PolicyUpdate
    feeder: BatchFeeder
    source: BatchSource
    checkpoints: CheckpointFolder
    journal: StepJournal
    stop: threading.Event
    first_step: int
    last_step: int
    """At most `config.total_steps`; a saved buffer may end before."""
    is_first_rank: bool
    probe: Probe | None
    publisher: PublishThread | None = None
    """None for a replay, which has no engines."""
    rescore: Callable[[Probe, list[ProbeAnswer]], float] | None = None
    """Mean |engine - learner| log-probability of what an engine sampled for a probe from the weights of this moment.
    Collective over all ranks."""
    changed_settings: Callable[[], Mapping[str, Any]] = dict
    """Live settings of the buffer that have changed since the last call."""
    on_checkpoint: Callable[[Path, int], None] = lambda path, step: None
    """Is given each durable checkpoint and its step, on the first rank."""
    on_step: Callable[[dict[str, Any]], None] = lambda line: None
    """Is given each line of the journal."""
    _trained: list[int] = field(default_factory=list)
    _published: list[Published] = field(default_factory=list)
    """Since the last recorded step."""
    _unprobed: int = 0
    """Publishes in a row."""
    _skipped_in_a_row: int = 0
    _stuck_since: float | None = None

    def __post_init__(self) -> None:
        self._step_time = StepTime()
        self._saves = Checkpointer(
            self.checkpoints,
            self.trainer,
            asynchronous=self.config.asynchronous_checkpoints,
            on_durable=self._on_durable,
        )

    def run(self) -> int:
        """Train up to `last_step`, or until `stop`; returns the step reached. Leaves a checkpoint of it."""
        with closing(self._saves):
            return self._run()

    def _run(self) -> int:
        config = self.config
        step = self.first_step
        if self.publisher is not None:
            frozen = self.trainer.model.frozen_weights()
            if self.is_first_rank:
                self.publisher.freeze(frozen)
        self._publish(step)
        while step < self.last_step:
            clock = _Clock()
            with clock.stage("wait_data"):
                feed = self._wait_for(step)
            if feed is None:
                break
            if config.prefetch and step + 1 < self.last_step:
                self.feeder.request(step + 1)
            if self.publisher is not None and self.probe is None and config.probe_prompts:
                self.probe = broadcast_object(Probe.of(feed.batch.trajectories, config.probe_prompts))
            with clock.stage("probe"):
                self._look_at_publishes(step)
            with clock.stage("update"):
                stats = self.update.run(feed.batch, step, self._version(feed))
                self._give_up_on_skips(stats)
            self.source.mark_trained(step, self._step_time.after_step(clock.seconds["wait_data"]))
            self._trained.append(step)
            if (step + 1) % config.publish_every == 0 or step + 1 == self.last_step:
                with clock.stage("publish"):
                    self._publish(step + 1)
            with clock.stage("probe"):
                self._look_at_publishes(step + 1)
            self._record(step, feed, stats, clock)
            step += 1
            self._saves.poll()
            if self._is_checkpoint_due(step):
                self._save(step)
        if self._trained:
            self._save(step)
        self._saves.drain()
        return step

    def _wait_for(self, step: int) -> Feed | None:
        """The batch of a step, or None when told to stop. All ranks decide alike, whoever is told or ready first."""
        self.feeder.request(step)
        started = reminded = time.monotonic()
        feed: Feed | None = None
        while True:
            if feed is None:
                feed = self.feeder.wait(_TEND_EVERY_S)
            is_missing = feed is None
            may_save = is_missing and bool(self._trained) and not self._saves.is_writing
            must_save = may_save and self._needs_checkpoint(is_waiting=True)
            stopped, missing, saving = count_votes(self.stop.is_set(), is_missing, must_save)
            if stopped:
                return None
            if not missing:
                return feed
            if saving:
                self._save(step)
            self._saves.poll()
            if not is_missing or not self.is_first_rank:
                continue
            self._give_up_on_a_batch_that_cannot_come()
            self.source.tend()
            if self.publisher is not None:
                self.publisher.check()
                if time.monotonic() - reminded > _REMIND_EVERY_S:
                    reminded = time.monotonic()
                    self._remind(step, reminded - started, self.publisher)

    def _remind(self, step: int, seconds: float, publisher: PublishThread) -> None:
        members = len(publisher.members)
        hint = "" if members else "; no engine is announced: start `vagen-actor run`"
        logger.info(
            "step %d: waiting for data for %.0f s, %d engines serve version %d%s",
            step,
            seconds,
            members,
            publisher.version,
            hint,
        )

    def _give_up_on_a_batch_that_cannot_come(self) -> None:
        """Raises `ConfigError` when nothing that anybody still does can complete the batch."""
        problem = self.source.why_stuck()
        if problem is None:
            self._stuck_since = None
        elif self._stuck_since is None:
            self._stuck_since = time.monotonic()
        elif time.monotonic() - self._stuck_since > _STUCK_S:
            raise ConfigError(problem)

    def _version(self, feed: Feed) -> int:
        """Of the present weights, -1 where no version has them."""
        if feed.version is not None:
            return feed.version
        return -1 if self.publisher is None else self.publisher.version

    def _publish(self, step: int) -> None:
        """Have the weights published as those of `step`. Collective over all ranks; the first sends."""
        if self.publisher is None:
            return
        weights = self.trainer.model.engine_weights()
        if self.is_first_rank:
            self.publisher.submit(weights, step, self.probe)
            if not self.config.overlap_publish or step == self.last_step:
                self.publisher.drain()
        else:
            deque(weights, maxlen=0)

    def _look_at_publishes(self, step: int) -> None:
        """Collect what has been published; the model has the weights of `step`, which a probe of that step needs.

        Collective over all ranks; the first knows.
        """
        if self.publisher is None:
            return
        finished: list[Published] = []
        if self.is_first_rank:
            if self.probe is not None and self._unprobed >= _PROBE_EVERY:
                self.publisher.drain()
                self._unprobed = 0
            finished = self.publisher.finished()
        for published in broadcast_object(finished):
            mismatch = None
            if self.probe is not None and self.rescore is not None and published.answers and published.step == step:
                mismatch = self.rescore(self.probe, published.answers)
            self._unprobed = 0 if mismatch is not None else self._unprobed + 1
            # What a start publishes belongs to no step: whether it finds an engine, or one joins later, is chance.
            if self.is_first_rank and published.step > self.first_step:
                self._published.append(replace(published, answers=None, mismatch=mismatch))

    def _is_checkpoint_due(self, step: int) -> bool:
        is_regular = step % self.config.checkpoint_every == 0 or step == self.last_step
        (early,) = count_votes(not is_regular and self._needs_checkpoint(is_waiting=False))
        if early and self._saves.is_writing:
            # What it holds is claimed until it is durable, and may be enough.
            self._saves.drain()
            (early,) = count_votes(self._needs_checkpoint(is_waiting=False))
        return is_regular or early > 0

    def _needs_checkpoint(self, *, is_waiting: bool) -> bool:
        """As the first rank reads it: the buffer may change between two readings, and a save is collective."""
        return self.is_first_rank and self.source.needs_checkpoint(is_waiting=is_waiting)

    def _save(self, step: int) -> None:
        """Begin a checkpoint before `step`.

        What was submitted is published first, within the bound of a drain: a learner that goes on from the checkpoint
        follows a version that engines have.
        """
        if self.publisher is not None and self.is_first_rank:
            self.publisher.drain()
        record = {
            "step": step,
            "num_updates": self.update.num_updates,
            "num_critic_updates": self.update.num_critic_updates,
            "probe": None if self.probe is None else self.probe.to_plain(),
        }
        self._saves.save(step, self._trained, record, self.update.beside_policy())
        self._trained.clear()

    def _on_durable(self, checkpoint: DurableCheckpoint, steps: Sequence[int]) -> None:
        if self.is_first_rank:
            self.source.done(steps)
            self.checkpoints.prune()
            self.journal.note_checkpoint(checkpoint)
            self.on_checkpoint(self.checkpoints.path_of(checkpoint.step), checkpoint.step)

    def _give_up_on_skips(self, stats: UpdateStats) -> None:
        if stats.skipped_updates < stats.num_updates:
            self._skipped_in_a_row = stats.skipped_updates
        else:
            self._skipped_in_a_row += stats.skipped_updates
        if self._skipped_in_a_row >= self.config.max_skipped_updates:
            raise FloatingPointError(
                f"{self._skipped_in_a_row} optimizer steps in a row had a non-finite gradient "
                f"(learner.max_skipped_updates {self.config.max_skipped_updates}); the last checkpoint is good"
            )

    def _record(
        self,
        step: int,
        feed: Feed,
        stats: UpdateStats,
        clock: _Clock,
    ) -> None:
        summary = BatchSummary.of_all_ranks(feed.batch)
        if not self.is_first_rank:
            return
        seconds = {
            **clock.seconds,
            **stats.seconds,
            "prepare": feed.seconds["prepare"],
            "checkpoint": self._saves.take_blocked_s(),
            "total": clock.total,
        }
        published, self._published = self._published, []
        tally = PublishTally() if self.publisher is None else self.publisher.take_tally()
        line = self.journal.write(step, feed, summary, stats, published, tally, seconds, self.changed_settings())
        logger.info(
            "step %d version %d: success %.3f, reward %.3f, staleness %s, ess %.2f, %.2f s",
            step,
            self._version(feed),
            line["success"],
            line["reward_mean"],
            line["staleness"],
            line["ratio"]["ess"],
            clock.total,
        )
        self.on_step(line)


class _Clock:
    """Seconds of a step, by stage."""

    def __init__(self) -> None:
        self._started = time.perf_counter()
        self.seconds: dict[str, float] = {}

    @property
    def total(self) -> float:
        return time.perf_counter() - self._started

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        started = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - started
