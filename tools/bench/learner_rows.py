"""The rows that the learner's benchmark trains on: lengths, masks and pictures of real trajectories, other content.

Owns where lengths come from: a saved buffer, or episodes that a recipe's script plays. Token ids and pixels are drawn
at random, since neither decides how long a step takes and the benchmark's model has a vocabulary of its own.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image

from vagen.buffer.archive.reader import open_archive
from vagen.common.errors import ConfigError
from vagen.common.trajectory import ImageRef, Row
from vagen.envs.base import encode_png
from vagen.learner.batching import PreparedRow, RowPreparer
from vagen.learner.images import ImageStore

__all__ = ["BenchRows", "archived_rows", "equal_rows", "prepare", "scripted_rows"]

_EVERY = 16
"""Trajectories of an archive per row that is wanted, at most: what is read of a large one."""


@dataclass(frozen=True, kw_only=True)
class BenchRows:
    """Rows ready for the model, and the encoded pictures by content hash, for a side that preprocesses itself."""

    rows: list[PreparedRow]
    images: ImageStore
    encoded: dict[str, bytes]

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.rows))

    @property
    def num_scored(self) -> int:
        return sum(len(row.slots) for row in self.rows)

    def describe(self) -> str:
        """Lengths in words."""
        low, median, high = np.percentile([len(row) for row in self.rows], [0, 50, 100])
        pictures = sum(len(row.images) for row in self.rows)
        return (
            f"{len(self.rows)} rows of {low:.0f} to {high:.0f} tokens (median {median:.0f}), {self.num_scored} of "
            f"{self.num_tokens} tokens sampled by the policy, {pictures} pictures, {len(self.encoded)} of them distinct"
        )


def archived_rows(archive_dir: str, count: int) -> list[Row]:
    """The first `count` rows of trajectories taken evenly from an archive. Raises `ConfigError` where it has fewer."""
    archive = open_archive(archive_dir)
    every = max(1, min(_EVERY, archive.num_trajectories // count))
    rows: list[Row] = []
    for number, record in enumerate(archive.iterate()):
        if number % every == 0:
            rows += [row for row in record.trajectory.rows if row.policy_mask.any()]
        if len(rows) >= count:
            return rows[:count]
    raise ConfigError(f"--rows: expected at most the {len(rows)} rows of {archive_dir}, got {count}")


def scripted_rows(recipe_name: str, harness: str, count: int) -> list[Row]:
    """`count` rows of episodes that the script of a shipped recipe's environment plays, laid out by a harness."""
    from vagen.common.config import read_recipe
    from vagen.tools.sft import script_rows

    recipe = read_recipe(recipe_name, [f"harness.name={harness}", f"sft.turns={8 * count}"])
    with tempfile.TemporaryDirectory(prefix="vagen-bench-") as folder:
        rows = asyncio.run(script_rows(recipe, Path(folder) / "model"))
    if len(rows) < count:
        raise ConfigError(f"--rows: expected at most the {len(rows)} rows of the script, got {count}")
    return rows[:count]


def equal_rows(count: int, tokens: int, image_tokens: int) -> list[Row]:
    """Rows of one length, each with a picture of its own, all of whose text the policy wrote but the first token."""
    side = 2 * round(image_tokens**0.5)
    rows = []
    for number in range(count):
        mask = np.ones(tokens, np.uint8)
        mask[: 1 + image_tokens] = 0
        image = ImageRef(content_hash=f"{number:032x}", grid_thw=(1, side, side), start=1, num_tokens=image_tokens)
        rows.append(
            Row(
                token_ids=np.zeros(tokens, np.int32),
                policy_mask=mask,
                behaviour_logprobs=np.zeros(tokens, np.float32),
                policy_versions=np.where(mask, 0, -1).astype(np.int32),
                turn_index=np.where(mask, 0, -1).astype(np.int16),
                images=(image,),
            )
        )
    return rows


def prepare(rows: Sequence[Row], model_dir: Path, seed: int) -> BenchRows:
    """Rows of the same shapes for the model of `model_dir`, with ids and pixels drawn at random."""
    random, preparer = np.random.default_rng(seed), RowPreparer.load(model_dir)
    assert preparer.vision is not None
    image_token, lowest_special = preparer.vision.image_token_id, min(preparer.vision.forbidden_token_ids)
    images, encoded = preparer.new_store(), dict(_pictures(rows, random))
    prepared, first = [], 0
    for row in rows:
        ids = random.integers(0, lowest_special, len(row.token_ids)).astype(np.int32)
        for image in row.images:
            ids[image.start : image.start + image.num_tokens] = image_token
        size = int(row.policy_mask.sum())
        same_shape = Row(
            token_ids=ids,
            policy_mask=row.policy_mask,
            behaviour_logprobs=row.behaviour_logprobs,
            policy_versions=row.policy_versions,
            turn_index=row.turn_index,
            images=row.images,
        )
        prepared.append(preparer.policy_row(same_shape, np.arange(first, first + size), encoded, images))
        first += size
    return BenchRows(rows=prepared, images=images, encoded=encoded)


def _pictures(rows: Sequence[Row], random: np.random.Generator) -> Iterator[tuple[str, bytes]]:
    for image in {image.content_hash: image for row in rows for image in row.images}.values():
        _, height, width = image.grid_thw
        pixels = random.integers(0, 256, (height * 14, width * 14, 3), dtype=np.uint8)
        yield image.content_hash, encode_png(Image.fromarray(pixels))
