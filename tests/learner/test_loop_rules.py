"""Rules of the learner's loop that need no buffer: when it gives up, and that the next batch is made meanwhile."""

from __future__ import annotations

import threading
from dataclasses import replace

import numpy as np
import pytest

from vagen.buffer.manifest import Manifest, ManifestEntry
from vagen.learner.batching import RowPreparer
from vagen.learner.config import LearnerConfig
from vagen.learner.feeder import BatchFeeder
from vagen.learner.loop import Learner
from vagen.learner.step_time import StepTime

pytestmark = pytest.mark.usefixtures("one_process")


def test_skipped_updates_in_a_row_stop_the_run(make_update, batch, tmp_path):
    update, model, _ = make_update(ppo_epochs=1, minibatch_rows=1000)
    bad = next(model.parameters()).register_hook(lambda gradient: gradient * float("nan"))
    learner = Learner(
        config=LearnerConfig(max_skipped_updates=3),
        trainer=update.critic._policy,
        update=update,
        **dict.fromkeys(("feeder", "source", "checkpoints", "journal", "stop", "probe")),
        first_step=0,
        last_step=1,
        is_first_rank=True,
    )
    skipped = update.run(batch, step=0, version=1)
    bad.remove()
    fine = update.run(batch, step=1, version=1)
    assert (skipped.skipped_updates, fine.skipped_updates) == (1, 0)
    for stats in (skipped, skipped, fine, skipped, skipped):
        learner._give_up_on_skips(stats)
    with pytest.raises(FloatingPointError, match=r"3 optimizer steps in a row .*max_skipped_updates 3"):
        learner._give_up_on_skips(skipped)
    several = replace(fine, num_updates=4, skipped_updates=2)
    learner._skipped_in_a_row = 0
    learner._give_up_on_skips(several)
    with pytest.raises(FloatingPointError):
        learner._give_up_on_skips(skipped)


def test_the_time_of_a_step_leaves_out_what_was_waited_for_data():
    ends = iter([10.0, 13.0, 15.5, 16.0, 56.0])
    step_time = StepTime(lambda: next(ends))
    assert [step_time.after_step(waited_s) for waited_s in (9.0, 2.0, 0.5, 0.0, 0.0)] == [None, 1.0, 1.5, 1.0, 1.5]


class Saved:
    """One batch, which is there when training has begun."""

    def __init__(self, episodes):
        self._episodes = episodes
        self.training, self.read_by = threading.Event(), None

    def take(self, step, timeout_s):
        if not self.training.wait(timeout_s):
            return None
        entries = [
            ManifestEntry(trajectory_id=e.trajectory_id, num_bytes=1, oldest_step=0, staleness=0, group_id=e.group_id)
            for e in self._episodes
        ]
        return Manifest(step=step, entries=tuple(entries), sealed_at=0.0)

    def read(self, entries):
        self.read_by = threading.current_thread()
        return self._episodes

    def version_before(self, manifest):
        return None

    def notes(self, manifest):
        return None


def test_the_next_batch_is_made_while_a_step_trains(make_update, make_episode, batch, model_dir):
    rng = np.random.default_rng(1)
    source = Saved([make_episode(index, rng) for index in range(4)])
    feeder = BatchFeeder(source, RowPreparer.load(model_dir), dp_rank=0, dp_size=1)
    update, *_ = make_update(ppo_epochs=1, minibatch_rows=1000)
    feeds = []
    apply = update.critic._policy.apply

    def apply_when_the_next_is_ready(norm, lr, *, critic_lr=None):
        source.training.set()
        feeds.append(feeder.wait(60.0))
        apply(norm, lr, critic_lr=critic_lr)

    update.critic._policy.apply = apply_when_the_next_is_ready
    try:
        feeder.request(1)
        update.run(batch, step=0, version=1)
    finally:
        feeder.close()
    (feed,) = feeds
    assert feed is not None and len(feed.batch.trajectories) == 4
    assert source.read_by is not threading.main_thread()
