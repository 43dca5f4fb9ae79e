"""Three ways in which a buffer of fixed capacity, groups and checkpoints could wait for each other for ever."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import torch

from vagen.buffer.learner_store import LearnerStore
from vagen.buffer.selection.config import SelectionConfig
from vagen.buffer.selection.selector import Selector
from vagen.common.config import RunConfig
from vagen.common.errors import ConfigError
from vagen.common.metrics import Metrics
from vagen.common.trajectory import RewardEntry, Row, Turn
from vagen.common.wire import encode_trajectory
from vagen.learner.advantages.config import AdvantageConfig
from vagen.learner.batching import RowPreparer
from vagen.learner.checkpoints import CheckpointFolder
from vagen.learner.config import LearnerConfig, ModelConfig
from vagen.learner.feeder import BatchFeeder
from vagen.learner.journal import StepJournal
from vagen.learner.loop import Learner
from vagen.learner.model.optimizer import AdamOptions, Trainer
from vagen.learner.model.parallel import parallel_session
from vagen.learner.model.tiny import save_tiny_model
from vagen.learner.models import load_models
from vagen.learner.sources import BufferSource
from vagen.learner.update import PolicyUpdate
from vagen.tools.tiny_tokenizer import train_tokenizer

WAIT_S = 120.0
SMALL = ModelConfig(
    hidden_size=64, intermediate_size=96, num_heads=2, num_kv_heads=1, vision_hidden_size=32, vision_num_heads=2
)


@pytest.fixture
def start(service, connect):
    """A service, a client of it and a store, with a learner registered and version 1 published."""

    def make(batch_size=4, **buffer):
        running = service(**buffer)
        store = LearnerStore.connect(running.ready.redis_url, "run", timeout_s=30)
        store.register("learner", step=0, batch_size=batch_size, max_staleness=100)
        store.record_version(store.next_version(), "learner", 0, "checksum")
        return running, connect(running.ready.endpoint), store

    return make


@pytest.fixture
def in_background():
    """Runs functions in threads that must end with the test."""
    threads = []

    def run(function):
        threads.append(threading.Thread(target=function, daemon=True))
        threads[-1].start()

    yield run
    for thread in threads:
        thread.join(WAIT_S)
        assert not thread.is_alive()


def test_a_batch_larger_than_what_incomplete_groups_leave_free(start, make_trajectory, in_background):
    """Groups that never complete hold most of the buffer, and 40 puts wait, so that the socket is not read."""
    _, client, store = start(capacity_bytes=100_000, group_timeout_s=2)
    starts = [make_trajectory(actor_seq=i + 1, num_bytes=9000, group_size=4) for i in range(2)]
    client.stream(starts)
    singles = [make_trajectory(actor_seq=i + 3, num_bytes=9000) for i in range(40)]
    in_background(lambda: client.stream(singles))
    for step in range(10):
        manifest = store.claim(step, 4, WAIT_S)
        assert manifest is not None, f"step {step} waits for ever"
        store.done([step])


def test_members_of_a_group_that_never_come(start, make_trajectory):
    _, client, store = start(group_timeout_s=1)
    client.stream([make_trajectory(actor_seq=i + 1, group_id="g", group_size=3) for i in range(2)])
    assert [entry.group_id for entry in store.claim(0, 2, WAIT_S).entries] == ["g", "g"]
    client.stream([make_trajectory(actor_seq=3, group_id="g", group_size=3)])
    assert len(store.claim(1, 1, WAIT_S).entries) == 1, "the one that came too late does not wait for ever either"


def plain_trajectory(make_trajectory, num_tokens, **fields):
    """Without pictures, so that any model can train on it."""
    mask = np.ones(num_tokens, np.uint8)
    mask[0] = 0
    row = Row(
        token_ids=np.arange(num_tokens, dtype=np.int32) % 200 + 20,
        policy_mask=mask,
        behaviour_logprobs=np.where(mask, -5.0, 0).astype(np.float32),
        policy_versions=np.where(mask, 1, -1).astype(np.int32),
        turn_index=np.where(mask, 0, -1).astype(np.int16),
    )
    turn = Turn(index=0, row=0, start=1, end=num_tokens, format_ok=True, action_valid=True)
    reward = RewardEntry(component="task", row=0, token=num_tokens - 1, value=1.0)
    return make_trajectory(rows=(row,), turns=(turn,), rewards=(reward,), images={}, vision=None, **fields)


@pytest.fixture
def make_learner(tmp_path):
    """The learner's real loop, with a small model, without engines."""
    model_dir = save_tiny_model(SMALL, train_tokenizer(["Move to the goal."], [], 384), tmp_path / "model")
    torch.set_num_threads(1)

    def make(source, **settings):
        config = LearnerConfig(
            batch_size=4,
            ppo_epochs=1,
            prefetch=0,
            checkpoint_every=100,
            max_tokens_per_microbatch=2048,
            advantage=AdvantageConfig(),
            **settings,
        )
        model, _ = load_models(model_dir, config)
        trainer = Trainer(model, AdamOptions())
        forbidden = torch.tensor([model.hf_config.image_token_id])
        preparer = RowPreparer.load(model_dir)
        return Learner(
            config=config,
            trainer=trainer,
            update=PolicyUpdate(model, trainer, config, seed=1, forbidden_token_ids=forbidden),
            feeder=BatchFeeder(source, preparer, dp_rank=0, dp_size=1),
            source=source,
            checkpoints=CheckpointFolder(tmp_path / "checkpoints", keep=10),
            journal=StepJournal(tmp_path / "metrics.jsonl", Metrics("vagen_learner", RunConfig().name)),
            stop=threading.Event(),
            first_step=0,
            last_step=config.total_steps,
            is_first_rank=True,
            publisher=None,
            probe=None,
            rescore=lambda probe, url, version: 0.0,
        )

    with parallel_session(seed=1):
        yield make


def make_source(store, running, batch_size):
    """The learner's source over a running service, as the first rank has it."""
    feeding = LearnerStore.connect(running.ready.redis_url, "run")
    selector = Selector(feeding, SelectionConfig())
    return BufferSource(store, feeding, batch_size=batch_size, selector=selector)


def test_claimed_batches_that_fill_the_buffer_before_the_checkpoint_is_due(
    start, make_trajectory, in_background, make_learner
):
    """The first batch takes less than half of the buffer, the second does not fit into the rest: only a checkpoint
    frees the first."""
    small = [plain_trajectory(make_trajectory, 600, actor_seq=i + 1) for i in range(4)]
    large = [plain_trajectory(make_trajectory, 1000, actor_seq=i + 5) for i in range(8)]
    first, second = (sum(len(encode_trajectory(t)[1]) for t in batch) for batch in (small, large[:4]))
    running, client, store = start(capacity_bytes=first + second - 1000)
    assert first < (first + second - 1000) / 2
    source = make_source(store, running, 4)
    client.stream(small)
    assert store.claim(0, 4, WAIT_S) is not None
    in_background(lambda: client.stream(large))
    learner = make_learner(source, total_steps=3)
    assert learner.run() == 3
    assert learner.checkpoints.steps() == [1, 2, 3]
    assert store.accounting().trained == 12


def test_a_batch_that_can_never_fit_is_an_error_that_says_what_to_change(
    start, make_trajectory, in_background, make_learner
):
    trajectories = [plain_trajectory(make_trajectory, 2000, actor_seq=i + 1) for i in range(4)]
    running, client, store = start(capacity_bytes=3 * len(encode_trajectory(trajectories[0])[1]))
    source = make_source(store, running, 4)
    learner = make_learner(source, total_steps=1)
    in_background(lambda: client.stream(trajectories, until=3))
    with pytest.raises(ConfigError, match=r"\$.buffer.capacity_bytes.* 3 of 4 trajectories"):
        learner.run()
