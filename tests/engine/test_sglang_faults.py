"""Real SGLang of which either side is stopped or killed in a publish; a local engine takes part in each.

All points are those of `fault_proxy.py`. `test_publish_faults.py` has the same with local engines only, at more points.
"""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import time

import pytest

from vagen.common.engines import INCOMPLETE_VERSION
from vagen.learner.config import BroadcastConfig

pytestmark = [pytest.mark.sglang, pytest.mark.slow, pytest.mark.timeout(900)]
TIMEOUT_S, MARGIN_S = 6.0, 4.0
POINTS = [
    "/init_weights_update_group",
    "/pause_generation",
    "/begin_weight_update",
    "bucket 2",
    "/end_weight_update",
    "/end_weight_update done",
    "/continue_generation",
]


@pytest.fixture(scope="module")
def local(start_engines, lab):
    keys = {"api_key": lab.api_key, "admin_api_key": lab.admin_key}
    return start_engines(1, broadcast_timeout_s=TIMEOUT_S, **keys)[0]


@pytest.fixture
def topology():
    """Overridden by the test that holds in both."""
    return "star"


@pytest.fixture
def fleet(valkey, lab, topology):
    keys = {"api_key": lab.api_key, "admin_api_key": lab.admin_key}
    config = BroadcastConfig(broadcast_topology=topology, broadcast_timeout_s=TIMEOUT_S, bucket_bytes=30_000, **keys)
    made = lab.fleet(valkey.url, config)
    yield made
    made.publisher.close()


@pytest.fixture
def behind_proxy(lab):
    """An engine, as who meets it through a proxy sees it, and the proxy."""
    proxies = []

    def make(engine):
        proxies.append(lab.proxy(engine.url))
        return dataclasses.replace(engine, url=proxies[-1].url), proxies[-1]

    yield make
    for proxy in proxies:
        proxy.close()


def lose_in_a_publish(fleet, lab, survivor, victim, proxy, point, number):
    """Publish while the victim is lost; the survivor must serve the new version. The new model."""
    fleet.announce(*([survivor] if "init" in point else [survivor, victim]))
    model, weights = lab.new_weights(victim)
    assert not fleet.publisher.publish(weights, 0).report.failed
    fleet.announce(survivor, victim)
    model, weights = lab.new_weights(victim)
    proxy.arm(point, lambda: victim.signal(number))
    start = time.monotonic()
    report = fleet.publisher.publish(weights, 1).report
    assert time.monotonic() - start < TIMEOUT_S + MARGIN_S
    assert not proxy.is_armed
    assert report.ok == (survivor.url,) and list(report.failed) == [victim.url]
    assert fleet.serving() == {survivor.url: fleet.publisher.version}
    lab.assert_serves(survivor, model, fleet.publisher.version)
    return model


@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGKILL], ids=["stopped", "killed"])
@pytest.mark.parametrize("point", POINTS)
def test_a_lost_sglang_costs_the_time_out_and_rejoins_by_checksum(
    start_sglang, tiny_model, lab, fleet, local, behind_proxy, point, number
):
    engine = start_sglang(*tiny_model)
    victim, proxy = behind_proxy(engine)
    try:
        model = lose_in_a_publish(fleet, lab, local, victim, proxy, point, number)
    finally:
        if number == signal.SIGSTOP:
            victim.signal(signal.SIGCONT)
        else:
            assert engine.process.wait(60) == 1
            victim = dataclasses.replace(start_sglang.again(engine), url=victim.url)
    fleet.announce(local, victim)
    assert victim.url not in fleet.serving()
    fleet.join(victim)
    assert fleet.serving()[victim.url] == fleet.publisher.version
    lab.assert_serves(victim, model, fleet.publisher.version)


@pytest.mark.parametrize("topology", ["star", "group"])
def test_sglang_serves_the_new_version_while_another_hangs(start_sglang, tiny_model, lab, fleet, local, behind_proxy):
    victim, proxy = behind_proxy(local)
    try:
        lose_in_a_publish(fleet, lab, start_sglang(*tiny_model), victim, proxy, "bucket 2", signal.SIGSTOP)
    finally:
        victim.signal(signal.SIGCONT)
    fleet.announce(start_sglang(*tiny_model), victim)
    fleet.join(victim)


@pytest.fixture
def lose_trainer(lab, tiny_model, tmp_path):
    """Has a trainer publish version 7 to an engine behind a proxy, and loses it at a point."""
    trainers = []

    def lose(victim, proxy, point, number):
        fault = tmp_path / "fault"
        words = [victim.url, str(tiny_model[0]), str(fault), lab.api_key, lab.admin_key]
        trainers.append(lab.fork("trainer_worker.py", words, tmp_path / "trainer.log"))
        proxy.arm(point, lambda: os.kill(trainers[-1].pid, number))
        fault.with_suffix(".partial").write_text(json.dumps({"point": point.replace("bucket", "receiving")}))
        fault.with_suffix(".partial").replace(fault)
        victim.wait_until(lambda: not proxy.is_armed, "the fault", 120)

    yield lose
    for trainer in trainers:
        trainer.kill()
        trainer.wait(30)


@pytest.mark.parametrize(
    ("point", "version"),
    [
        ("/pause_generation done", "6"),
        ("/begin_weight_update done", INCOMPLETE_VERSION),
        ("bucket 2", INCOMPLETE_VERSION),
        ("/end_weight_update done", "7"),
        ("/continue_generation", "7"),
    ],
)
def test_sglang_whose_trainer_dies_goes_on_by_itself(
    start_sglang, tiny_model, lab, fleet, behind_proxy, lose_trainer, point, version
):
    engine = start_sglang(*tiny_model)
    victim, proxy = behind_proxy(engine)
    model, weights = lab.new_weights(victim)
    assert fleet.broadcaster.publish(weights, 6, [engine.url]).ok
    lose_trainer(victim, proxy, point, signal.SIGKILL)
    start = time.monotonic()
    answer = engine.generate(lab.image_prompt(30), [lab.png(6)])
    assert time.monotonic() - start < 2 * lab.sglang_pause_timeout_s + MARGIN_S
    assert lab.spans(answer) == [(version, 0, 12)] and engine.version() == version
    fleet.announce(engine)
    fleet.publisher.publish(weights, 8)
    fleet.join(engine)
    lab.assert_serves(engine, model, fleet.publisher.version)


@pytest.mark.parametrize(
    ("point", "number"), [("bucket 2", signal.SIGSTOP), ("/init_weights_update_group", signal.SIGKILL)]
)
def test_sglang_that_waits_for_a_trainer_in_vain_is_ended(
    start_sglang, tiny_model, lab, behind_proxy, lose_trainer, point, number
):
    """Its supervisor starts it anew: SGLang has no way to give up a wait."""
    engine = start_sglang(*tiny_model)
    lose_trainer(*behind_proxy(engine), point, number)
    start = time.monotonic()
    assert engine.process.wait(120) == 1
    assert time.monotonic() - start < 3 * lab.sglang_pause_timeout_s + MARGIN_S
    start_sglang.forget(engine)
