"""What may not be trained on is refused, by the name of the field."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from vagen.common.errors import TrajectoryError
from vagen.common.trajectory import End, SamplingParams, Trajectory
from vagen.common.validation import validate_trajectory


def with_row(trajectory: Trajectory, **changes) -> Trajectory:
    row = msgspec.structs.replace(trajectory.rows[0], **changes)
    return msgspec.structs.replace(trajectory, rows=(row, *trajectory.rows[1:]))


def edited(array: np.ndarray, position: int, value: float) -> np.ndarray:
    copy = array.copy()
    copy[position] = value
    return copy


def first_policy(trajectory: Trajectory) -> int:
    return int(np.flatnonzero(trajectory.rows[0].policy_mask)[0])


def break_logprob(t):
    return with_row(t, behaviour_logprobs=edited(t.rows[0].behaviour_logprobs, first_policy(t), np.nan))


def break_positive_logprob(t):
    return with_row(t, behaviour_logprobs=edited(t.rows[0].behaviour_logprobs, first_policy(t), 0.5))


def break_prompt_logprob(t):
    return with_row(t, behaviour_logprobs=edited(t.rows[0].behaviour_logprobs, 0, -1.0))


def break_version(t):
    return with_row(t, policy_versions=edited(t.rows[0].policy_versions, first_policy(t), -1))


def break_prompt_version(t):
    return with_row(t, policy_versions=edited(t.rows[0].policy_versions, 0, 3))


def break_length(t):
    return with_row(t, policy_versions=t.rows[0].policy_versions[:-1])


def break_dtype(t):
    return with_row(t, token_ids=t.rows[0].token_ids.astype(np.int64))


def sample_image_token(t):
    return with_row(t, token_ids=edited(t.rows[0].token_ids, first_policy(t), t.vision.forbidden_token_ids[-1]))


def drop_image_ref(t):
    return with_row(t, images=())


def break_grid(t):
    image = msgspec.structs.replace(t.rows[0].images[0], grid_thw=(1, 4, 8))
    return with_row(t, images=(image,))


def drop_image_bytes(t):
    return msgspec.structs.replace(t, images={})


def swap_image_bytes(t):
    return msgspec.structs.replace(t, images=dict.fromkeys(t.images, b"other"))


def break_sampling(t):
    return msgspec.structs.replace(t, sampling=SamplingParams(top_p=0.9))


def break_end(t):
    return msgspec.structs.replace(t, end=End.TRUNCATED, bootstrap=None)


def break_reward(t):
    entry = msgspec.structs.replace(t.rewards[0], value=float("inf"))
    return msgspec.structs.replace(t, rewards=(entry,))


def misplace_reward(t):
    entry = msgspec.structs.replace(t.rewards[0], token=0)
    return msgspec.structs.replace(t, rewards=(entry,))


def break_turn(t):
    turn = msgspec.structs.replace(t.turns[0], start=t.turns[0].start - 1)
    return msgspec.structs.replace(t, turns=(turn, *t.turns[1:]))


def drop_turn(t):
    return msgspec.structs.replace(t, turns=())


def shorten_turn(t):
    turn = msgspec.structs.replace(t.turns[0], end=t.turns[0].end - 1)
    return msgspec.structs.replace(t, turns=(turn,))


def break_ulid(t):
    return msgspec.structs.replace(t, trajectory_id="no")


def break_schema(t):
    return msgspec.structs.replace(t, schema_version=99)


@pytest.mark.parametrize(
    ("damage", "field"),
    [
        (break_logprob, "rows[0].behaviour_logprobs"),
        (break_positive_logprob, "rows[0].behaviour_logprobs"),
        (break_prompt_logprob, "rows[0].behaviour_logprobs"),
        (break_version, "rows[0].policy_versions"),
        (break_prompt_version, "rows[0].policy_versions"),
        (break_length, "rows[0].policy_versions"),
        (break_dtype, "rows[0].token_ids"),
        (sample_image_token, "rows[0].token_ids"),
        (drop_image_ref, "rows[0].images"),
        (break_grid, "rows[0].images[0].num_tokens"),
        (drop_image_bytes, "images"),
        (swap_image_bytes, "images["),
        (break_sampling, "sampling.top_p"),
        (break_end, "bootstrap"),
        (break_reward, "rewards[0].value"),
        (misplace_reward, "rewards[0].token"),
        (break_turn, "turns[0].start"),
        (drop_turn, "turns"),
        (shorten_turn, "rows[0].policy_mask"),
        (break_ulid, "trajectory_id"),
        (break_schema, "schema_version"),
    ],
)
def test_each_damage_is_refused_under_its_field(make_trajectory, damage, field):
    good = make_trajectory()
    validate_trajectory(good)
    with pytest.raises(TrajectoryError) as caught:
        validate_trajectory(damage(good))
    assert caught.value.field.startswith(field)


def with_two_turns(t: Trajectory, *spans: tuple[int, int], says: tuple[int, int, int] = (0, 1, 1)) -> Trajectory:
    """The three policy tokens, of which the row says that they answer `says`, claimed by two turns."""
    turn_index = t.rows[0].turn_index.copy()
    turn_index[7:10] = says
    row = msgspec.structs.replace(t.rows[0], turn_index=turn_index)
    turns = [
        msgspec.structs.replace(t.turns[0], index=index, start=start, end=end)
        for index, (start, end) in enumerate(spans)
    ]
    return msgspec.structs.replace(t, rows=(row,), turns=tuple(turns))


def test_turns_share_no_token_and_are_those_of_the_row(make_trajectory):
    t = make_trajectory()
    validate_trajectory(with_two_turns(t, (7, 8), (8, 10)))
    # What the second turn takes from the first is what the row says, so that only the number of tokens is wrong.
    with pytest.raises(TrajectoryError, match="index"):
        validate_trajectory(with_two_turns(t, (7, 9), (8, 10)))
    with pytest.raises(TrajectoryError, match="index"):
        validate_trajectory(with_two_turns(t, (7, 9), (9, 10)))
    with pytest.raises(TrajectoryError, match="belong to no turn"):
        validate_trajectory(with_two_turns(t, (7, 8), (8, 9)))


def test_one_vision_token_among_others_is_refused(make_trajectory):
    t = make_trajectory()
    vision = msgspec.structs.replace(t.vision, forbidden_token_ids=(9, 60))
    ids = t.rows[0].token_ids.copy()
    validate_trajectory(msgspec.structs.replace(t, vision=vision))
    ids[8] = 60
    row = msgspec.structs.replace(t.rows[0], token_ids=ids)
    with pytest.raises(TrajectoryError, match="sampled a vision token"):
        validate_trajectory(msgspec.structs.replace(t, vision=vision, rows=(row,)))
    # One that is smaller than others of the vocabulary, and greater than what else was sampled.
    vision = msgspec.structs.replace(t.vision, forbidden_token_ids=(52,))
    with pytest.raises(TrajectoryError, match="sampled a vision token"):
        validate_trajectory(msgspec.structs.replace(t, vision=vision))
