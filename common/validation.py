"""What a trajectory must satisfy before it may be stored or trained on.

Called by the actor before it journals and by the ingest on arrival; a failure names the field and is counted under it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

import numpy as np
from ulid import ULID

from vagen.common.errors import TrajectoryError
from vagen.common.trajectory import (
    SCHEMA_VERSION,
    BootstrapPrompt,
    End,
    ImageRef,
    Row,
    Trajectory,
    VisionTokens,
    content_hash,
)

MAX_ROWS = 4096
MAX_TOKENS = 1 << 22
MAX_NAME_LENGTH = 256
MAX_ITEMS = 1 << 12
"""Entries of any one list or map of a trajectory."""
MAX_FORBIDDEN_TOKENS = 1024
MAX_STATE_LENGTH = 1 << 14
"""Characters."""
MAX_TURN_INDEX = (1 << 15) - 1
MAX_MERGE_SIZE = 64
_HASH = re.compile("[0-9a-f]{32}")

_ROW_DTYPES = {
    "token_ids": np.dtype(np.int32),
    "policy_mask": np.dtype(np.uint8),
    "behaviour_logprobs": np.dtype(np.float32),
    "policy_versions": np.dtype(np.int32),
    "turn_index": np.dtype(np.int16),
}


def validate_trajectory(trajectory: Trajectory, *, behaviour_known: bool = True) -> None:
    """Check a trajectory completely.

    Without `behaviour_known` it must say of no policy token what sampled it: log-probability NaN, version -1. Such a
    trajectory can be stored and imitated, and no importance ratio can be computed from it. Raises `TrajectoryError`,
    whose `field` is the path of the first field that is wrong.
    """
    _check_identity(trajectory)
    _check_sampling(trajectory)
    _check_sizes(trajectory)
    for index, row in enumerate(trajectory.rows):
        path = f"rows[{index}]"
        _check_row(row, path, trajectory.vision)
        if behaviour_known:
            _check_behaviour(row, path)
        else:
            _check_no_behaviour(row, path)
    _require(trajectory.num_policy_tokens > 0, "rows", "no policy token in any row")
    _check_turns(trajectory)
    _check_rewards(trajectory)
    _check_end(trajectory)
    _check_images(trajectory)


def _require(holds: bool, field: str, problem: str) -> None:
    if not holds:
        raise TrajectoryError(field, problem)


def _check_identity(t: Trajectory) -> None:
    _require(t.schema_version == SCHEMA_VERSION, "schema_version", f"expected {SCHEMA_VERSION}, got {t.schema_version}")
    for name in ("trajectory_id", "episode_id"):
        value = getattr(t, name)
        try:
            ULID.from_str(value)
        except ValueError:
            raise TrajectoryError(name, f"expected a ULID of 26 characters, got {value[:64]!r}") from None
    for name in ("run_id", "actor_id", "task", "group_id", "role", "env_name", "harness_name"):
        length = len(getattr(t, name))
        if not 0 < length <= MAX_NAME_LENGTH:
            raise TrajectoryError(name, f"expected 1-{MAX_NAME_LENGTH} characters, got {length}")
    for name, low in (("actor_seq", 1), ("fragment_index", 0), ("attempt", 0), ("task_index", 0), ("group_size", 1)):
        value = getattr(t, name)
        if value < low:
            raise TrajectoryError(name, f"expected int >= {low}, got {value}")
    _require(0 < len(t.rows) <= MAX_ROWS, "rows", f"expected 1-{MAX_ROWS} rows, got {len(t.rows)}")
    _require(t.num_tokens <= MAX_TOKENS, "rows", f"expected at most {MAX_TOKENS} tokens, got {t.num_tokens}")


def _check_sampling(t: Trajectory) -> None:
    s = t.sampling
    _require(
        np.isfinite(s.temperature) and s.temperature > 0, "sampling.temperature", f"expected > 0, got {s.temperature}"
    )
    _require(s.top_p == 1.0, "sampling.top_p", f"expected 1 (truncated sampling biases the ratio), got {s.top_p}")
    _require(s.top_k == -1, "sampling.top_k", f"expected -1 (truncated sampling biases the ratio), got {s.top_k}")
    _require(s.min_p == 0.0, "sampling.min_p", f"expected 0 (truncated sampling biases the ratio), got {s.min_p}")


def _check_sizes(t: Trajectory) -> None:
    """What can be sent at all, said here so that an actor hears of it before it journals."""
    lists = {"turns": t.turns, "rewards": t.rewards, "images": t.images, "metrics": t.metrics}
    lists |= {f"rows[{index}].images": row.images for index, row in enumerate(t.rows)}
    for name, entries in lists.items():
        _require(len(entries) <= MAX_ITEMS, name, f"expected at most {MAX_ITEMS} entries, got {len(entries)}")
    if t.vision is not None:
        num_forbidden = len(t.vision.forbidden_token_ids)
        expected = f"expected at most {MAX_FORBIDDEN_TOKENS} ids, got {num_forbidden}"
        _require(num_forbidden <= MAX_FORBIDDEN_TOKENS, "vision.forbidden_token_ids", expected)
        ids = (t.vision.image_token_id, *t.vision.forbidden_token_ids)
        _require(all(0 <= token < 1 << 31 for token in ids), "vision", "a token id is not an int32 >= 0")


def _check_row(row: Row, path: str, vision: VisionTokens | None) -> None:
    length = len(row.token_ids)
    _require(length > 0, f"{path}.token_ids", "is empty")
    for name, dtype in _ROW_DTYPES.items():
        array = getattr(row, name)
        if array.dtype == dtype and array.shape == (length,):
            continue  # before the words for what is wrong are put together, which takes longer than the check
        _require(array.dtype == dtype, f"{path}.{name}", f"expected dtype {dtype}, got {array.dtype}")
        _require(False, f"{path}.{name}", f"expected {length} entries, got shape {array.shape}")
    lowest, highest = int(row.token_ids.min()), int(row.policy_mask.max())
    _require(lowest >= 0, f"{path}.token_ids", f"negative token id {lowest}")
    _require(highest <= 1, f"{path}.policy_mask", f"expected 0 or 1, got {highest}")
    mask = row.policy_mask.view(bool)
    outside = bool(((row.behaviour_logprobs != 0) > mask).any())
    _require(not outside, f"{path}.behaviour_logprobs", "non-zero outside the policy mask")
    _check_marks(row.turn_index, mask, f"{path}.turn_index")
    if vision is not None:
        _check_sampled(row.token_ids, mask, vision, path)
    _check_placeholders(row.token_ids, row.images, path, vision)


def _check_marks(values: np.ndarray, mask: np.ndarray, field: str) -> None:
    """`values` must be at least 0 where the policy sampled, and -1 elsewhere."""
    marked = values >= 0
    # Comparing bytes is cheaper than comparing arrays of this length.
    if marked.tobytes() == mask.tobytes() and values.min() >= -1:
        return
    _require(not (mask > marked).any(), field, "negative at a policy token")
    raise TrajectoryError(field, "not -1 outside the policy mask")


def _check_sampled(ids: np.ndarray, mask: np.ndarray, vision: VisionTokens, path: str) -> None:
    if not vision.forbidden_token_ids:
        return
    # Vision tokens usually follow all others.
    high = np.flatnonzero(ids >= min(vision.forbidden_token_ids))
    sampled = mask.take(high)
    if sampled.any():
        forbidden = np.isin(ids.take(high[sampled]), np.asarray(vision.forbidden_token_ids))
        _require(not forbidden.any(), f"{path}.token_ids", "the policy sampled a vision token")


def _check_behaviour(row: Row, path: str) -> None:
    """What an importance ratio needs."""
    logprobs = row.behaviour_logprobs
    # The extremes are NaN where any value is.
    if not (math.isfinite(logprobs.min()) and logprobs.max() <= 1e-4):
        policy = row.policy_mask.view(bool)
        unknown = bool(policy.any()) and bool(np.isnan(logprobs[policy]).all())
        _require(
            not unknown, f"{path}.behaviour_logprobs", "NaN: the behaviour policy is unknown, no ratio can be computed"
        )
        _require(bool(np.isfinite(logprobs).all()), f"{path}.behaviour_logprobs", "non-finite value")
        _require(False, f"{path}.behaviour_logprobs", f"log-probability above 0: {logprobs.max()}")
    _check_marks(row.policy_versions, row.policy_mask.view(bool), f"{path}.policy_versions")


def _check_no_behaviour(row: Row, path: str) -> None:
    policy = row.policy_mask.astype(bool)
    nothing = bool(np.isnan(row.behaviour_logprobs[policy]).all())
    _require(nothing, f"{path}.behaviour_logprobs", "known at some policy tokens, unknown at others")
    _require(bool((row.policy_versions == -1).all()), f"{path}.policy_versions", "not -1 where the policy is unknown")


def _check_placeholders(ids: np.ndarray, images: Sequence[ImageRef], path: str, vision: VisionTokens | None) -> None:
    if vision is None:
        _require(not images, f"{path}.images", "images without `vision`")
        return
    placeholders = np.flatnonzero(ids == vision.image_token_id)
    _require(0 < vision.merge_size <= MAX_MERGE_SIZE, "vision.merge_size", f"expected 1-{MAX_MERGE_SIZE}")
    num_named, end, agree = 0, 0, True
    for index, image in enumerate(images):
        t, h, w = image.grid_thw
        expected, odd = divmod(t * h * w, vision.merge_size**2)
        start = image.start
        # In order, so that hostile images cannot claim the same long span thousands of times.
        if min(t, h, w) <= 0 or odd or image.num_tokens != expected or not end <= start <= len(ids) - expected:
            _explain_image(image, f"{path}.images[{index}]", expected, odd)
        end = start + expected
        first, last = num_named, num_named + expected - 1
        num_named += expected
        # Positions ascend: as many as the image takes, between its first and its last, are all of them.
        agree = agree and num_named <= len(placeholders)
        agree = agree and placeholders[first] == start and placeholders[last] == end - 1
    _require(
        agree and num_named == len(placeholders),
        f"{path}.images",
        f"{len(images)} images take {num_named} placeholders, the row has {len(placeholders)} (or at other positions)",
    )


def _explain_image(image: ImageRef, where: str, expected: int, odd: int) -> None:
    """Raise for an image whose grid, number of tokens or place is wrong."""
    is_grid = min(image.grid_thw) > 0 and not odd
    _require(is_grid, f"{where}.grid_thw", f"not a grid of merged patches: {image.grid_thw}")
    right = image.num_tokens == expected
    _require(right, f"{where}.num_tokens", f"expected {expected} for its grid, got {image.num_tokens}")
    raise TrajectoryError(f"{where}.start", f"{image.start} is outside the row")


def _check_turns(t: Trajectory) -> None:
    _require(len(t.turns) > 0, "turns", "is empty")
    claimed = [np.full(len(row.token_ids), -1, np.int16) for row in t.rows]
    num_claimed, first = 0, t.turns[0].index
    for position, turn in enumerate(t.turns):
        if not (
            0 <= turn.index <= MAX_TURN_INDEX
            and turn.index == first + position
            and 0 <= turn.row < len(claimed)
            and len(turn.state) <= MAX_STATE_LENGTH
            and 0 <= turn.start < turn.end <= len(claimed[turn.row])
        ):
            _explain_turn(t, position)
        claimed[turn.row][turn.start : turn.end] = turn.index
        num_claimed += turn.end - turn.start
    # Rows say of every token which turn it answers, and -1 of those that the policy did not sample. Spans that say the
    # same of every row and overlap nowhere are right; only others are looked at one by one, to name what is wrong.
    agree = all(claim.tobytes() == row.turn_index.tobytes() for claim, row in zip(claimed, t.rows, strict=True))
    if not agree or num_claimed != t.num_policy_tokens:
        _explain_turns(t)


def _check_state(state: str, path: str) -> None:
    _require(len(state) <= MAX_STATE_LENGTH, path, f"expected at most {MAX_STATE_LENGTH} characters, got {len(state)}")


def _explain_turn(t: Trajectory, position: int) -> None:
    """Raise for a turn that is out of order or outside its row."""
    turn, path = t.turns[position], f"turns[{position}]"
    _require(0 <= turn.index <= MAX_TURN_INDEX, f"{path}.index", f"expected int16 >= 0, got {turn.index}")
    _require(turn.index == t.turns[0].index + position, f"{path}.index", f"not consecutive: {turn.index}")
    _require(0 <= turn.row < len(t.rows), f"{path}.row", f"{turn.row} of {len(t.rows)} rows")
    _check_state(turn.state, f"{path}.state")
    raise TrajectoryError(f"{path}.start", f"[{turn.start}, {turn.end}) is empty or outside the row")


def _explain_turns(t: Trajectory) -> None:
    """Raise for the first turn whose span is wrong, or the first row with tokens of no turn."""
    covered = [np.zeros(len(row.token_ids), dtype=bool) for row in t.rows]
    for position, turn in enumerate(t.turns):
        path = f"turns[{position}]"
        row, span = t.rows[turn.row], slice(turn.start, turn.end)
        _require(bool(row.policy_mask[span].all()), f"{path}.start", "covers tokens that the policy did not sample")
        _require(bool((row.turn_index[span] == turn.index).all()), f"{path}.index", "differs from the row's turn_index")
        _require(not covered[turn.row][span].any(), f"{path}.start", "overlaps another turn")
        covered[turn.row][span] = True
    for index, row in enumerate(t.rows):
        _require(
            np.array_equal(covered[index], row.policy_mask.astype(bool)),
            f"rows[{index}].policy_mask",
            "marks tokens that belong to no turn",
        )
    raise TrajectoryError("turns", "do not agree with the rows")


def _check_rewards(t: Trajectory) -> None:
    masks = [row.policy_mask for row in t.rows]
    for index, entry in enumerate(t.rewards):
        if not (
            0 < len(entry.component) <= MAX_NAME_LENGTH
            and math.isfinite(entry.value)
            and 0 <= entry.row < len(masks)
            and 0 <= entry.token < len(masks[entry.row])
            and masks[entry.row][entry.token]
        ):
            _explain_reward(t, index)


def _explain_reward(t: Trajectory, index: int) -> None:
    """Raise for a reward that is wrong."""
    entry, path = t.rewards[index], f"rewards[{index}]"
    _require(0 < len(entry.component) <= MAX_NAME_LENGTH, f"{path}.component", "is empty or too long")
    _require(math.isfinite(entry.value), f"{path}.value", f"non-finite: {entry.value}")
    _require(0 <= entry.row < len(t.rows), f"{path}.row", f"{entry.row} of {len(t.rows)} rows")
    raise TrajectoryError(f"{path}.token", f"{entry.token} is not a policy token of its row")


def _check_end(t: Trajectory) -> None:
    if t.end is End.TERMINATED:
        _require(t.bootstrap is None, "bootstrap", "present although the episode terminated")
        return
    _require(t.bootstrap is not None, "bootstrap", f"required when the episode was {t.end.value}")
    assert isinstance(t.bootstrap, BootstrapPrompt)
    _check_state(t.bootstrap.state, "bootstrap.state")
    ids = t.bootstrap.token_ids
    _require(
        ids.dtype == np.int32 and ids.ndim == 1 and len(ids) > 0, "bootstrap.token_ids", "expected int32 [T], T > 0"
    )
    _check_placeholders(ids, t.bootstrap.images, "bootstrap", t.vision)
    _require((t.end is End.CUT) != t.is_last, "is_last", f"{t.is_last} although the trajectory is {t.end.value}")


def _check_images(t: Trajectory) -> None:
    referenced = {image.content_hash for row in t.rows for image in row.images}
    if t.bootstrap is not None:
        referenced |= {image.content_hash for image in t.bootstrap.images}
    missing = referenced - t.images.keys()
    _require(not missing, "images", f"missing {len(missing)} of {len(referenced)} referenced images")
    _require(not t.images.keys() - referenced, "images", "holds images that no row refers to")
    for name, encoded in t.images.items():
        if content_hash(encoded) == name:
            continue
        # Before a name becomes part of a field, under which refusals are counted.
        _require(_HASH.fullmatch(name) is not None, "images", f"{name[:64]!r} is no content hash")
        raise TrajectoryError(f"images[{name}]", "bytes do not have this content hash")
