"""A critic that reads the environment's state: where the text stands, and that values follow it, not the policy."""

from __future__ import annotations

import dataclasses
from collections import defaultdict

import msgspec
import numpy as np
import pytest
import torch
from tokenizers import Tokenizer

from vagen.common.errors import ConfigError, TrajectoryError
from vagen.common.trajectory import ImageRef, Row, Turn
from vagen.learner.batching import RowPreparer, prepare_batch
from vagen.learner.config import CriticConfig
from vagen.learner.privileged import StateText

pytestmark = pytest.mark.usefixtures("one_process")

PRIVILEGED = CriticConfig(trunk="separate", privileged=True)
STATES = ("the goal is near", "a hole", "far away", "nowhere", "x", "to the left")


@pytest.fixture
def make_batch(make_episode, model_dir):
    """Six episodes; `states` are those of the episodes, the same in all of an episode's turns."""

    def make(states, *, privileged=True):
        rng, episodes = np.random.default_rng(0), []
        for index, state in enumerate(states):
            episode = make_episode(index, rng)
            turns = tuple(msgspec.structs.replace(turn, state=f"{state} {turn.index}") for turn in episode.turns)
            prompt = episode.bootstrap and msgspec.structs.replace(episode.bootstrap, state=f"{state} end")
            episodes.append(msgspec.structs.replace(episode, turns=turns, bootstrap=prompt))
        preparer = RowPreparer.load(model_dir, privileged=privileged)
        return prepare_batch(episodes, [0] * 6, {f"g{i}": i for i in range(6)}, preparer)

    return make


def test_the_state_stands_before_each_response_and_nothing_else_changes(model_dir):
    text = StateText.load(model_dir, None)
    tokenizer = Tokenizer.from_file(str(model_dir / "tokenizer.json"))
    mask = np.array([0, 0, 1, 1, 0, 0, 0, 1], np.uint8)
    image = ImageRef(content_hash="0" * 32, grid_thw=(1, 2, 2), start=5, num_tokens=1)
    row = Row(
        token_ids=np.arange(100, 108, dtype=np.int32),
        policy_mask=mask,
        behaviour_logprobs=np.where(mask, -np.arange(8.0), 0).astype(np.float32),
        policy_versions=np.where(mask, 3, -1).astype(np.int32),
        turn_index=np.where(mask, [0] * 4 + [1] * 4, -1).astype(np.int16),
        images=(image,),
    )
    turns = [
        Turn(index=index, row=0, start=start, end=end, format_ok=True, action_valid=True, state=state)
        for index, (start, end, state) in enumerate([(2, 4, "left"), (7, 8, "up and down")])
    ]
    first, second = (tokenizer.encode(turn.state).ids for turn in turns)
    told = text.row(row, turns)
    assert told.token_ids.tolist() == [100, 101, *first, 102, 103, 104, 105, 106, *second, 107]
    assert told.images[0].start == 5 + len(first) and told.token_ids[told.images[0].start] == 105
    added = np.ones(len(told.token_ids), bool)
    added[[*range(2, 2 + len(first)), *range(7 + len(first), 7 + len(first) + len(second))]] = False
    for name in ("token_ids", "policy_mask", "behaviour_logprobs", "policy_versions", "turn_index"):
        before, after = getattr(row, name), getattr(told, name)
        assert after.dtype == before.dtype and np.array_equal(after[added], before), name
    assert not told.policy_mask[~added].any() and (told.turn_index[~added] == -1).all()


def test_values_follow_the_state_and_the_policy_never_sees_it(make_update, make_batch):
    update, model, _ = make_update(critic=PRIVILEGED)
    torch.nn.init.normal_(update.critic.model.value_head.weight, generator=torch.Generator().manual_seed(3))
    one, other = (update.score(make_batch(states)) for states in (STATES, STATES[::-1]))
    for name in ("logprobs", "entropy"):
        assert torch.equal(getattr(one, name), getattr(other, name))
    assert (one.values != other.values).all(), "every token's value is of a state that tells something else"
    truncated = one.bootstrap_values != 0
    assert truncated.tolist() == [True, False] * 3 and (one.bootstrap_values != other.bootstrap_values)[truncated].all()


def test_a_privileged_critic_learns_what_only_the_state_tells(make_update, make_episode, model_dir):
    """One episode twice, with returns that the state decides: a critic that does not read it answers their mean."""
    rng = np.random.default_rng(0)
    episode = make_episode(0, rng)
    twins = []
    for state in ("good", "bad"):
        turns = tuple(msgspec.structs.replace(turn, state=state) for turn in episode.turns)
        prompt = msgspec.structs.replace(episode.bootstrap, state=state)
        twins.append(msgspec.structs.replace(episode, turns=turns, bootstrap=prompt))
    errors = {}
    for privileged in (True, False):
        batch = prepare_batch(twins, [0, 0], {"g0": 0}, RowPreparer.load(model_dir, privileged=privileged))
        critic = CriticConfig(trunk="separate", privileged=privileged, lr=3e-3, warmup_updates=0)
        update, *_ = make_update(critic=critic)
        targets = torch.where(batch.segment_ids == 0, 1.0, -1.0)
        data = update.estimate(batch, update.score(batch))
        data.outputs = dataclasses.replace(
            data.outputs, value_targets=targets, value_mask=torch.ones_like(targets, dtype=torch.bool)
        )
        for _ in range(40):
            update.accumulate(batch, np.arange(2), data, defaultdict(float), critic_alone=True)
            update.critic.step(update._rates(0, 1.0, alone=True))
        errors[privileged] = float((update.score(batch).values - targets).abs().mean())
    assert errors[True] < 0.3 and errors[False] == pytest.approx(1.0, abs=0.2), errors


@pytest.mark.parametrize("state", ["", "look at <|image_pad|>"])
def test_states_that_cannot_be_read_are_refused(make_episode, model_dir, state):
    episode = make_episode(1, np.random.default_rng(0))
    turns = tuple(msgspec.structs.replace(turn, state=state) for turn in episode.turns)
    preparer = RowPreparer.load(model_dir, privileged=True)
    with pytest.raises(TrajectoryError, match=r"turns\[0\]\.state.*(is empty|only a template may place)"):
        prepare_batch([msgspec.structs.replace(episode, turns=turns)], [0], {"g1": 0}, preparer)


def test_a_shared_trunk_may_not_read_the_state():
    with pytest.raises(ConfigError, match=r"learner\.critic\.trunk.*separate with privileged true"):
        CriticConfig(privileged=True)


def test_an_update_with_a_privileged_critic_changes_both_models(make_update, make_batch):
    update, model, _ = make_update(critic=PRIVILEGED, max_tokens_per_microbatch=40)
    stats = update.run(make_batch(STATES), step=0, version=1)
    assert stats.skipped_updates == 0 and stats.losses["value_loss"] > 0
