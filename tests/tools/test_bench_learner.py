"""The benchmark of the learner's step: both sides train alike, on an archive's rows, and operations are counted."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from vagen.buffer.archive.record import ArchivedTrajectory
from vagen.buffer.archive.writer import ArchiveWriter
from vagen.common.errors import ConfigError
from vagen.learner.batching import PreparedRow
from vagen.learner.model.parallel import parallel_session
from vagen.tools.bench import learner_sides, run_benchmark
from vagen.tools.bench.learner_mfu import measure_mfu, training_flops
from vagen.tools.bench.learner_rows import archived_rows, equal_rows

TINY = ["--rows", "4", "--rounds", "1", "--hidden-size", "64", "--num-layers", "1", "--equal-tokens", "12"]
SHAPE = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 128,
}


@pytest.fixture
def archive(tmp_path, make_trajectory):
    """Six trajectories of one row of 10 tokens, 3 of them the policy's, with one picture."""
    records = [
        ArchivedTrajectory(
            trajectory=make_trajectory(), step=0, position=position, oldest_step=0, staleness=0, version_steps={1: 0}
        )
        for position in range(6)
    ]
    with ArchiveWriter(tmp_path / "archive") as writer:
        writer.write_part(records)
    return str(tmp_path / "archive")


def test_both_sides_are_measured_and_the_document_gets_the_table(archive, tmp_path):
    document = tmp_path / "performance.md"
    document.write_text("<!-- begin learner -->old<!-- end learner -->\n")
    words = [*TINY, "--archive", archive, "--docs", str(document)]
    answer = json.loads(run_benchmark("learner", (), words, as_json=True))
    figures = answer["figures"]
    for key in ("unpacked", "packed"):
        low, high = figures[f"{key}_vs_hf"]["spread"]
        assert 0 < low <= figures[f"{key}_vs_hf"]["value"] <= high
        assert figures[f"{key}_learner_tokens_per_s"]["value"] > 0
    assert ("mfu" in figures) == torch.cuda.is_available()
    assert any("4 rows of 10 to 10 tokens (median 10), 12 of 40 tokens sampled" in note for note in answer["notes"])
    assert "old" not in document.read_text() and "| packed_vs_hf |" in document.read_text()


def test_sides_that_train_differently_are_no_comparison(archive, monkeypatch):
    step = learner_sides.TransformersSide.step
    monkeypatch.setattr(learner_sides.TransformersSide, "step", lambda side, rows: 1.1 * step(side, rows))
    with pytest.raises(AssertionError, match="the sides train differently"):
        run_benchmark("learner", (), [*TINY, "--archive", archive], as_json=True)


def test_rows_come_evenly_from_an_archive_that_has_enough(archive):
    assert len(archived_rows(archive, 6)) == 6
    with pytest.raises(ConfigError, match="expected at most the 6 rows"):
        archived_rows(archive, 7)


def test_equal_rows_score_all_text_behind_the_picture():
    for row in equal_rows(2, 12, 4):
        assert row.policy_mask.tolist() == [0] * 5 + [1] * 7
        assert row.images[0].grid_thw == (1, 4, 4)


def test_a_padded_batch_holds_what_fits_and_a_longer_row_alone():
    def row(size):
        empty = np.zeros(0, np.int64)
        ids = np.zeros(size, np.int64)
        return PreparedRow(token_ids=ids, position_ids=ids, score_positions=empty, slots=empty, images=())

    batches = list(learner_sides._padded([row(size) for size in (4, 6, 2, 30, 9, 10)], 20))
    assert [[len(member) for member in batch] for batch in batches] == [[4, 6, 2], [30], [9, 10]]


def test_operations_are_those_of_every_matrix_product():
    q, kv, o, mlp = 64 * 64, 2 * 64 * 32, 64 * 64, 3 * 64 * 96
    products = 2 * (q + kv + o + mlp) + 64 * 128
    attention = 2 * 2 * 64 * 10 * 10 / 2
    assert training_flops(SHAPE, rows=3, tokens=10) == 6 * 3 * (products * 10 + attention)


def test_the_share_of_the_ceiling_is_of_this_device(tmp_path):
    with parallel_session():
        figures = measure_mfu(tmp_path, SHAPE, rows=2, tokens=16, steps=2, side=64, bf16=False)
    speed, ceiling = figures["mfu_tokens_per_s"].value, 1e12 * figures["matmul_ceiling"].value
    expected = training_flops(SHAPE, 2, 16) / 32 * speed / ceiling
    assert figures["mfu"].value == pytest.approx(expected, rel=1e-6) and 0 < expected < 1
