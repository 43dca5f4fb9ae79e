"""The copy that is published: it stays when the weights change, lies as it is sent, and costs memory once."""

from __future__ import annotations

import pytest
import torch

from vagen.common.weight_transfer import flatten_bucket, joined_bytes
from vagen.learner.snapshot import SnapshotBuffer


@pytest.fixture
def weights():
    whole = torch.randn(6, 4)
    return [("rows", torch.randn(3, 5)), ("columns", whole.t()), ("half", whole[1::2])]


def tensors_of(snapshot):
    return [tensor for _, tensor in snapshot.tensors]


def test_the_copy_does_not_follow_the_weights(weights):
    snapshot = SnapshotBuffer()
    for _ in range(2):
        snapshot.take(weights)
        expected = [(name, tensor.clone()) for name, tensor in weights]
        for _, tensor in weights:
            tensor.add_(1)
        assert [name for name, _ in snapshot.tensors] == [name for name, _ in expected]
        for (_, copied), (_, before) in zip(snapshot.tensors, expected, strict=True):
            assert torch.equal(copied, before) and copied.is_contiguous()


def test_the_next_copy_lies_in_the_same_memory(weights):
    snapshot = SnapshotBuffer()
    places = []
    for _ in range(2):
        snapshot.take(iter(weights))
        places.append([tensor.data_ptr() for tensor in tensors_of(snapshot)])
    assert places[0] == places[1]


def test_it_is_sent_from_where_it_lies(weights):
    snapshot = SnapshotBuffer()
    snapshot.take(weights)
    tensors = tensors_of(snapshot)
    for part in (tensors, tensors[1:], tensors[:1]):
        joined = joined_bytes(part)
        assert joined is not None and joined.data_ptr() == part[0].data_ptr()
        assert torch.equal(joined, flatten_bucket(part))
    assert joined_bytes([tensors[0], tensors[2]]) is None
    assert joined_bytes([tensors[0].t()]) is None


@pytest.mark.parametrize(
    "others",
    [
        [("rows", torch.ones(3, 5))],
        [("rows", torch.ones(3, 5)), ("columns", torch.ones(5, 4)), ("half", torch.ones(3, 4))],
        [("rows", torch.ones(3, 5)), ("renamed", torch.ones(4, 6))],
        [("rows", torch.ones(3, 5, dtype=torch.bfloat16)), ("columns", torch.ones(4, 6, dtype=torch.float64))],
        [],
    ],
)
def test_other_weights_get_a_layout_of_their_own(weights, others):
    snapshot = SnapshotBuffer()
    snapshot.take(weights)
    snapshot.take(iter(others))
    assert [(name, tensor.dtype, tensor.shape) for name, tensor in snapshot.tensors] == [
        (name, tensor.dtype, tensor.shape) for name, tensor in others
    ]
    assert all(bool((tensor == 1).all()) for tensor in tensors_of(snapshot))


def test_of_mixed_dtypes_each_is_aligned_and_the_bucket_is_made():
    weights = [("half", torch.ones(3, dtype=torch.bfloat16)), ("whole", torch.full((2,), 2.0))]
    snapshot = SnapshotBuffer()
    snapshot.take(weights)
    assert joined_bytes(tensors_of(snapshot)) is None
    assert flatten_bucket(tensors_of(snapshot)).tolist() == flatten_bucket([tensor for _, tensor in weights]).tolist()
