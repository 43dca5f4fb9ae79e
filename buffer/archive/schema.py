"""Columns of the two kinds of files, and what is written into each file's metadata.

Maps are lists of (name, value): Hugging Face `datasets` has no map type, DuckDB makes one with `map_from_entries`.
"""

from __future__ import annotations

import pyarrow as pa

__all__ = ["FORMAT", "FORMAT_KEY", "IMAGES", "LIGHT", "ROW_ARRAYS", "TRAJECTORIES"]

FORMAT = 1
"""Version of this layout, apart from the trajectories' own `schema_version`."""
FORMAT_KEY = b"vagen.archive"

ROW_ARRAYS = {
    "token_ids": pa.int32(),
    "policy_mask": pa.uint8(),
    "behaviour_logprobs": pa.float32(),
    "policy_versions": pa.int32(),
    "turn_index": pa.int16(),
}
"""Arrays of a row, each as long as the row."""


def _entries(value: pa.DataType) -> pa.DataType:
    return pa.list_(pa.struct([("name", pa.string()), ("value", value)]))


_IMAGE_REFS = pa.list_(
    pa.struct(
        [
            ("content_hash", pa.string()),
            ("grid_thw", pa.list_(pa.int32())),
            ("start", pa.int32()),
            ("num_tokens", pa.int32()),
        ]
    )
)
_TURN = pa.struct(
    [
        *((name, pa.int32()) for name in ("index", "row", "start", "end")),
        *((name, pa.bool_()) for name in ("format_ok", "action_valid")),
        ("actions", pa.list_(pa.string())),
        ("finish_reason", pa.string()),
        *((name, pa.float64()) for name in ("engine_s", "env_s")),
        ("metrics", _entries(pa.float64())),
        ("judge", _entries(pa.string())),
        ("state", pa.string()),
    ]
)
_REWARD = pa.struct([("component", pa.string()), ("row", pa.int32()), ("token", pa.int32()), ("value", pa.float64())])
_SAMPLING = pa.struct(
    [
        ("temperature", pa.float64()),
        ("top_p", pa.float64()),
        ("top_k", pa.int64()),
        ("min_p", pa.float64()),
        ("max_new_tokens", pa.int64()),
    ]
)
_ENGINE = pa.struct([(name, pa.string()) for name in ("kind", "incarnation", "model_hash", "tokenizer_hash")])
_VISION = pa.struct(
    [("image_token_id", pa.int64()), ("forbidden_token_ids", pa.list_(pa.int64())), ("merge_size", pa.int64())]
)

_OF_THE_LEARNER = [
    *((name, pa.int64()) for name in ("step", "position", "oldest_step", "staleness")),
    ("version_steps", pa.list_(pa.struct([("version", pa.int64()), ("step", pa.int64())]))),
    ("weight", pa.float64()),
]
_OF_THE_TRAJECTORY = [
    ("trajectory_id", pa.string()),
    ("run_id", pa.string()),
    ("actor_id", pa.string()),
    ("actor_seq", pa.int64()),
    ("episode_id", pa.string()),
    ("fragment_index", pa.int64()),
    ("is_last", pa.bool_()),
    ("attempt", pa.int64()),
    ("schema_version", pa.int64()),
    ("task", pa.string()),
    ("task_index", pa.int64()),
    ("seed", pa.int64()),
    ("group_id", pa.string()),
    ("group_size", pa.int64()),
    ("role", pa.string()),
    ("env_name", pa.string()),
    ("harness_name", pa.string()),
    ("splits_episode_across_rows", pa.bool_()),
    ("end", pa.string()),
    ("success", pa.bool_()),
    ("metrics", _entries(pa.float64())),
    ("started_at", pa.float64()),
    ("finished_at", pa.float64()),
    ("sampling", _SAMPLING),
    ("engine", _ENGINE),
    ("vision", _VISION),
]
_DERIVED = [
    ("total_reward", pa.float64()),
    ("reward_by_component", _entries(pa.float64())),
    *((name, pa.int64()) for name in ("num_turns", "num_tokens", "num_policy_tokens")),
    *((name, pa.int64()) for name in ("oldest_version", "newest_version")),
    ("behaviour_known", pa.bool_()),
]
"""For queries; readers take none of these from the file."""
_HEAVY = [
    (
        "rows",
        pa.list_(pa.struct([*((name, pa.list_(kind)) for name, kind in ROW_ARRAYS.items()), ("images", _IMAGE_REFS)])),
    ),
    ("turns", pa.list_(_TURN)),
    ("rewards", pa.list_(_REWARD)),
    ("bootstrap", pa.struct([("token_ids", pa.list_(pa.int32())), ("images", _IMAGE_REFS), ("state", pa.string())])),
]

_METADATA = {FORMAT_KEY: str(FORMAT).encode()}

TRAJECTORIES = pa.schema([*_OF_THE_LEARNER, *_OF_THE_TRAJECTORY, *_DERIVED, *_HEAVY], metadata=_METADATA)

IMAGES = pa.schema(
    [
        ("content_hash", pa.string()),
        ("bytes", pa.binary()),
        ("num_bytes", pa.int64()),
        ("width", pa.int32()),
        ("height", pa.int32()),
        ("format", pa.string()),
    ],
    metadata=_METADATA,
)

LIGHT = tuple(name for name, _ in (*_OF_THE_LEARNER, *_OF_THE_TRAJECTORY, *_DERIVED))
"""Columns without tokens, turns and single rewards: what a selection may look at."""
