"""Files open alone in pandas, DuckDB and Hugging Face datasets: the snippets of docs/archive.md, run."""

from __future__ import annotations

import io
import os
import re
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from vagen.buffer.archive.reader import open_archive

DOCS = Path(__file__).resolve().parents[2] / "docs" / "archive.md"


def snippets() -> dict[str, str]:
    """Python code blocks of the document by the heading above them."""
    found: dict[str, str] = {}
    for section in re.split(r"^#+ ", DOCS.read_text(), flags=re.M)[1:]:
        title, _, body = section.partition("\n")
        blocks = re.findall(r"^```python\n(.*?)^```", body, flags=re.M | re.S)
        if blocks:
            found[title] = "\n".join(blocks)
    return found


@pytest.fixture
def archive(archive_of, monkeypatch) -> Path:
    """An archive of several parts, as `archive` in the current folder."""
    folder = archive_of(steps=4, count=6, shades=9)
    monkeypatch.chdir(folder.parent)
    # A library that looks for files on a hub must not wait for a network.
    monkeypatch.setitem(os.environ, "HF_HUB_OFFLINE", "1")
    monkeypatch.setitem(os.environ, "HF_HOME", str(folder.parent / "hf"))
    return folder


def run(title: str) -> dict:
    names: dict = {}
    exec(compile(snippets()[title], f"docs/archive.md, {title}", "exec"), names)
    return names


def success_by_staleness(folder: Path) -> dict[int, float]:
    found: dict[int, list[bool]] = {}
    for record in open_archive(folder).iterate():
        found.setdefault(record.staleness, []).append(record.trajectory.success)
    return {key: float(np.mean(values)) for key, values in sorted(found.items())}


def first_image(folder: Path) -> tuple[str, np.ndarray]:
    record = open_archive(folder).read([0])[0].trajectory
    name = record.rows[0].images[0].content_hash
    return name, np.asarray(Image.open(io.BytesIO(record.images[name])))


def test_pandas(archive):
    names = run("pandas")
    assert names["by_staleness"].to_dict() == pytest.approx(success_by_staleness(archive))
    assert np.array_equal(np.asarray(names["picture"]), first_image(archive)[1])
    logprobs = open_archive(archive).read([0])[0].trajectory.rows[0].behaviour_logprobs
    assert np.array_equal(names["logprobs"], logprobs)


def test_duckdb(archive):
    names = run("DuckDB")
    assert dict(names["by_staleness"]) == pytest.approx(success_by_staleness(archive))
    expected: dict[int, float] = {}
    for record in open_archive(archive).iterate():
        for entry in record.trajectory.rewards:
            if entry.component == "task":
                expected[record.step] = expected.get(record.step, 0.0) + entry.value
    assert dict(names["task_reward"]) == pytest.approx(expected)
    shown = {name: 0 for record in open_archive(archive).iterate() for name in record.trajectory.images}
    for record in open_archive(archive).iterate():
        for row in record.trajectory.rows:
            for image in row.images:
                shown[image.content_hash] += 1
    most = max(shown.values())
    name, count, width, height = names["most_shown"]
    assert count == most == shown[name] and (width, height) == (56, 56)


def test_datasets(archive):
    names = run("Hugging Face datasets")
    assert len(names["trajectories"]) == 24 and len(names["good"]) == sum(
        record.trajectory.success and record.staleness <= 4 for record in open_archive(archive).iterate()
    )
    name, pixels = first_image(archive)
    images = {image["content_hash"]: image["bytes"] for image in names["images"]}
    assert np.array_equal(np.asarray(images[name]), pixels)
    assert names["ids"] == open_archive(archive).read([0])[0].trajectory.rows[0].token_ids.tolist()


def test_the_projects_own_reader(archive):
    names = run("This project")
    assert names["count"] == 24 and [record.step for record in names["batch"]] == [2] * 6
