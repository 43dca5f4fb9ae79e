"""What a group is asked to be: members, ranks, backend. Groups that are built are in `tests/engine`."""

from __future__ import annotations

import os
from contextlib import closing
from datetime import timedelta

import pytest
from torch.distributed import HashStore

from vagen.common.errors import EngineError
from vagen.common.weight_transfer import join_group
from vagen.learner.engine_links import EngineLinks

A, B, C = "http://127.0.0.1:1001", "http://127.0.0.1:1002", "http://127.0.0.1:1003"
GPU, CPU = {"device": "cuda", "port": 1}, {"device": "cpu", "kind": "local", "incarnation": "a"}


def plan(infos, is_cuda=True, **more):
    with closing(EngineLinks(5.0)) as links:
        return links.plan(infos, is_cuda, **more)


@pytest.mark.parametrize(
    ("infos", "is_cuda", "backend"),
    [
        ({A: GPU}, True, "nccl"),
        ({A: GPU, B: GPU}, True, "nccl"),
        ({A: {}}, True, "nccl"),
        ({A: CPU}, True, "gloo"),
        ({A: CPU, B: CPU}, True, "gloo"),
        ({A: GPU}, False, "gloo"),
    ],
)
def test_nccl_is_for_tensors_and_engines_on_gpus(infos, is_cuda, backend):
    planned = plan(infos, is_cuda)
    assert planned.backend == backend
    assert {request["backend"] for request in planned.requests.values()} == {backend}


def test_engines_on_gpus_and_cpus_share_no_group():
    with pytest.raises(EngineError, match="1002 is on a CPU and others are not.*use topology star"):
        plan({A: GPU, B: CPU})


@pytest.mark.parametrize("before", [None, "0"])
def test_waits_of_a_group_raise_and_those_of_training_are_left_alone(monkeypatch, before):
    name = "TORCH_NCCL_BLOCKING_WAIT"
    seen = []
    monkeypatch.delenv(name, raising=False)
    if before is not None:
        monkeypatch.setenv(name, before)

    def build(*args, **more):
        seen.append((os.environ[name], args[3], more["timeout"]))
        raise RuntimeError("no GPU")

    monkeypatch.setattr("torch.distributed.distributed_c10d._new_process_group_helper", build)
    with pytest.raises(RuntimeError, match="no GPU"):
        join_group(HashStore(), "g", rank=0, world_size=2, backend="nccl", timeout_s=3.0)
    assert seen == [("1", "nccl", timedelta(seconds=3))]
    assert os.environ.get(name) == before


def test_ranks_follow_one_another_whatever_their_number():
    infos = {B: GPU | {"tp_size": 2}, A: GPU, C: GPU | {"tp_size": 4}}
    requests = plan(infos).requests
    assert [(url, request["rank_offset"]) for url, request in requests.items()] == [(B, 1), (A, 3), (C, 4)]
    assert {request["world_size"] for request in requests.values()} == {8}
    assert len({request["group_name"] for request in requests.values()}) == 1


def test_only_local_engines_are_told_a_bound_and_only_in_a_shared_group():
    requests = plan({A: CPU, B: {"device": "cpu"}}, timeout_s=2.0).requests
    assert requests[A]["timeout_s"] == 2.0 and "timeout_s" not in requests[B]
    assert "timeout_s" not in plan({A: CPU}).requests[A]


def test_no_name_is_used_twice():
    with closing(EngineLinks(5.0)) as one, closing(EngineLinks(5.0)) as other:
        names = [links.plan({A: CPU}, False).name for links in (one, one, other)]
    assert len(set(names)) == 3


@pytest.mark.parametrize("layout", ["pp_size", "dp_size"])
def test_a_layout_that_cannot_be_served_is_refused(layout):
    with pytest.raises(EngineError, match=f"{layout} is 2"):
        plan({A: GPU | {layout: 2}})
