"""A vision module that does not change: what stays, and that a picture is then encoded once per step."""

from __future__ import annotations

import pytest
import torch

from vagen.learner.config import CriticConfig
from vagen.learner.losses.config import ReferenceConfig

pytestmark = pytest.mark.usefixtures("one_process")


def count_encoded(model, counts):
    encoder = model.image_encoder
    encode = encoder._tower

    def spy(patches, grids):
        counts.append(len(grids))
        return encode(patches, grids)

    spy.merge_unit = encode.merge_unit
    encoder._tower = spy


@pytest.mark.parametrize(
    ("frozen", "still"),
    [("none", set()), ("tower", {"tower"}), ("projector", {"projector"}), ("all", {"tower", "projector"})],
)
def test_what_is_frozen_stays_and_the_rest_learns(make_update, batch, frozen, still):
    update, model, _ = make_update(freeze_vision=frozen)
    before = {name: x.detach().clone() for name, x in model.visual.named_parameters()}
    update.run(batch, step=0, version=1)
    parts = {"tower": [], "projector": []}
    for name, x in model.visual.named_parameters():
        parts["projector" if name.startswith("merger.") else "tower"].append(torch.equal(before[name], x))
    for part, kept in parts.items():
        assert all(kept) if part in still else not all(kept)


def test_a_frozen_tower_encodes_each_picture_once_per_step(make_update, batch):
    settings = {
        "reference": ReferenceConfig(model_dir="start", kl_in_loss=0.1),
        "critic": CriticConfig(trunk="separate"),
        "max_tokens_per_microbatch": 40,
    }
    distinct = {name for row in (*batch.rows, *batch.bootstrap_rows) for name in row.images}
    update, model, _ = make_update(freeze_vision="all", **settings)
    counts = []
    for each in (model, update.critic.model, update._reference):
        count_encoded(each, counts)
    update.run(batch, step=0, version=1)
    assert sum(counts) == len(distinct) and max(counts) * 4 <= 40 and len(counts) > 1


def test_known_features_change_no_step(make_update, batch):
    results = []
    for is_known in (True, False):
        update, model, _ = make_update(freeze_vision="all", max_tokens_per_microbatch=40)
        if not is_known:
            type(batch.images).encode, kept = lambda *_: None, type(batch.images).encode
        try:
            stats = update.run(batch, step=0, version=1)
        finally:
            if not is_known:
                type(batch.images).encode = kept
        results.append((stats.losses, dict(model.named_parameters())))
        batch.images._features.clear()
    assert results[0][0] == pytest.approx(results[1][0], abs=1e-6)
    for name, expected in results[1][1].items():
        torch.testing.assert_close(results[0][1][name], expected, atol=2e-5, rtol=1e-4)


def test_a_tower_that_learns_is_not_remembered(make_update, batch):
    update, model, _ = make_update(freeze_vision="projector")
    update.run(batch, step=0, version=1)
    assert not batch.images._features and not model.image_encoder.is_frozen
