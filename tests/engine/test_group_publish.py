"""Publishes to several local engines in one group; what a lost one costs is in `test_publish_faults.py`."""

from __future__ import annotations

import signal

import pytest

from vagen.learner.broadcast import Broadcaster
from vagen.learner.config import BroadcastConfig

TIMEOUT_S, MARGIN_S = 8.0, 4.0


@pytest.fixture(scope="module")
def engines(start_engines):
    return start_engines(4, broadcast_timeout_s=TIMEOUT_S, max_context=256, max_new_tokens_limit=200)


@pytest.fixture
def broadcaster():
    trainer = Broadcaster(
        BroadcastConfig(broadcast_topology="group", broadcast_timeout_s=TIMEOUT_S, bucket_bytes=30_000)
    )
    yield trainer
    trainer.close()


@pytest.fixture
def groups(monkeypatch):
    """World sizes of the groups that this process joined."""
    sizes = []
    from vagen.learner import engine_links

    join = engine_links.join_group

    def counted(*args, world_size, **more):
        sizes.append(world_size)
        return join(*args, world_size=world_size, **more)

    monkeypatch.setattr(engine_links, "join_group", counted)
    return sizes


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_all_engines_get_the_weights_in_one_group_that_is_kept(engines, lab, broadcaster, groups, count):
    members = engines[:count]
    for version in (1, 2):
        model, weights = lab.new_weights(engines[0])
        report = broadcaster.publish(weights, version, [engine.url for engine in members])
        assert report.ok == tuple(engine.url for engine in members) and not report.failed
        assert 0 < report.stall_s < report.seconds
        for engine in members:
            lab.assert_serves(engine, model, version)
    assert groups == [1 + count]


def test_requests_go_on_with_the_new_version(engines, lab, broadcaster):
    _, weights = lab.new_weights(engines[0])
    urls = [engine.url for engine in engines]
    assert len(broadcaster.publish(weights, 1, urls).ok) == 4
    running = [engine.submit(lab.image_prompt(30), [lab.png(6)], max_new_tokens=200) for engine in engines]
    for engine in engines:
        engine.wait_running()
    assert len(broadcaster.publish(weights, 2, urls).ok) == 4
    for request in running:
        versions = [version for version, _, _ in lab.spans(request.result())]
        assert versions[0] == "1" and versions[-1] == "2"


def test_members_change_at_a_publish_and_a_joiner_pauses_nobody(engines, lab, broadcaster, groups):
    *members, joiner = engines
    urls = [engine.url for engine in members]
    model, weights = lab.new_weights(joiner)
    assert len(broadcaster.publish(weights, 1, urls).ok) == 3
    pauses = [engine.metric("vagen_engine_paused_seconds_total") for engine in members]
    assert broadcaster.publish(weights, 1, [joiner.url]).ok
    lab.assert_serves(joiner, model, 1)
    assert [engine.metric("vagen_engine_paused_seconds_total") for engine in members] == pauses
    model, weights = lab.new_weights(joiner)
    assert len(broadcaster.publish(weights, 2, [*urls, joiner.url]).ok) == 4
    for engine in engines:
        lab.assert_serves(engine, model, 2)
    broadcaster.forget(urls[0])
    assert len(broadcaster.publish(weights, 3, [*urls[1:], joiner.url]).ok) == 3
    assert broadcaster.publish(weights, 4, [joiner.url]).ok
    assert groups == [4, 2, 5, 4, 2]
    assert engines[0].version() == "2" and engines[1].version() == "3"
    trainer = group_names(joiner)[-1].rpartition("-")[0]
    assert len([name for name in group_names(joiner) if name.startswith(trainer)]) == 1, "the groups before are left"


@pytest.mark.slow
@pytest.mark.parametrize("rank", [1, 2, 3, 4])
def test_whoever_hangs_those_that_get_the_bytes_through_it_are_served(engines, lab, broadcaster, rank):
    ranks = sorted(engines, key=lambda engine: engine.url)
    urls = [engine.url for engine in ranks]
    model, weights = lab.new_weights(ranks[0])
    assert len(broadcaster.publish(weights, 1, urls).ok) == 4
    model, weights = lab.new_weights(ranks[0])
    hanging = ranks.pop(rank - 1)
    hanging.arm("receiving 2", signal.SIGSTOP)
    try:
        report = broadcaster.publish(weights, 2, urls)
        assert set(report.ok) == set(urls) - {hanging.url} and list(report.failed) == [hanging.url]
        assert report.seconds < TIMEOUT_S + MARGIN_S
        for engine in ranks:
            lab.assert_serves(engine, model, 2)
    finally:
        hanging.signal(signal.SIGCONT)
    # What it had begun before it was stopped may cost it a time-out.
    assert any(broadcaster.publish(weights, 2, [hanging.url]).ok for _ in range(3))
    lab.assert_serves(hanging, model, 2)


def test_one_that_refuses_is_left_out_and_the_others_are_served(engines, lab, broadcaster, groups):
    urls = [engine.url for engine in engines]
    _, weights = lab.new_weights(engines[0])
    assert len(broadcaster.publish(weights, 1, urls).ok) == 4
    refusing = engines[2]
    for name in group_names(refusing):
        refusing.admin("/destroy_weights_update_group", {"group_name": name})
    model, weights = lab.new_weights(engines[0])
    report = broadcaster.publish(weights, 2, urls)
    assert set(report.ok) == set(urls) - {refusing.url}
    assert "no group" in report.failed[refusing.url]
    for engine in engines:
        if engine is not refusing:
            lab.assert_serves(engine, model, 2)
    assert groups == [5, 4]
    assert len(refusing.generate([10, 11])["output_ids"]) == 12 and refusing.version() == "1"


def group_names(engine):
    """Of the groups that an engine is in, as its refusal of an unknown one says."""
    status, answer = engine.call("/destroy_weights_update_group", {"group_name": "none"}, key=engine.admin_key)
    assert status == 400
    return [name.strip(" '") for name in answer["message"].partition("[")[2].rstrip("]").split(",")]


def test_what_no_engine_takes_fails_all_within_the_time_out(engines, lab, broadcaster):
    _, weights = lab.new_weights(engines[0])
    weights[-1] = (weights[-1][0], weights[-1][1][:-1].clone())
    report = broadcaster.publish(weights, 9, [engine.url for engine in engines])
    assert not report.ok and report.seconds < TIMEOUT_S
    assert all("shapes" in reason for reason in report.failed.values())
    for engine in engines:
        assert not engine.call("/server_info")[1]["paused"]
