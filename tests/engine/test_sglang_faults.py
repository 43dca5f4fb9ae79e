"""Real SGLang of which either side is stopped or killed in a publish; local engines take part in each.

All points are those of `fault_proxy.py`. `test_publish_faults.py` has the same with local engines only, at more points.
"""

from __future__ import annotations

import dataclasses
import os
import signal
import time

import pytest

from vagen.common.engines import INCOMPLETE_VERSION
from vagen.learner.config import BroadcastConfig

pytestmark = [pytest.mark.sglang, pytest.mark.slow, pytest.mark.timeout(900)]
TIMEOUT_S, MARGIN_S = {"star": 6.0, "group": 10.0}, 4.0
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
def locals_(start_engines, lab):
    keys = {"api_key": lab.api_key, "admin_api_key": lab.admin_key}
    return start_engines(2, broadcast_timeout_s=TIMEOUT_S["group"], **keys)


@pytest.fixture
def engine(start_sglang, tiny_model):
    return start_sglang(*tiny_model)


@pytest.fixture(autouse=True)
def supervise(engine, start_sglang, tiny_model):
    """Waits until SGLang has ended and another serves, as its supervisor does.

    The other one starts while the tests before wait for time-outs.
    """
    start_sglang.prepare(*tiny_model)

    def supervised():
        assert engine.process.wait(120) == 1
        start_sglang.forget(engine)
        return start_sglang(*tiny_model)

    return supervised


@pytest.fixture
def topology():
    """Overridden by the tests that hold in both, or in the other."""
    return "star"


@pytest.fixture
def fleet(valkey, lab, topology):
    keys = {"api_key": lab.api_key, "admin_api_key": lab.admin_key}
    timeout_s = TIMEOUT_S[topology]
    config = BroadcastConfig(broadcast_topology=topology, broadcast_timeout_s=timeout_s, bucket_bytes=30_000, **keys)
    made = lab.fleet(valkey.url, config)
    yield made
    made.publisher.close()


@pytest.fixture
def behind_proxies(lab):
    """Engines, each with its proxy, as who meets them through these sees them; in a group their ranks are in order."""
    proxies = []

    def make(*engines):
        made = sorted((lab.proxy(engine.url) for engine in engines), key=lambda proxy: proxy.url)
        proxies.extend(made)
        for engine, proxy in zip(engines, made, strict=True):
            proxy.lead_to(engine.url)
        return [(dataclasses.replace(e, url=proxy.url), proxy) for e, proxy in zip(engines, made, strict=True)]

    yield make
    for proxy in proxies:
        proxy.close()


def lose_in_a_publish(fleet, lab, topology, survivors, victim, proxy, point, number, also_lost=()):
    """Publish while the victim is lost; the survivors must serve the new version. The new model."""
    members = [*survivors, *also_lost]
    fleet.announce(*(members if "init" in point else [*members, victim]))
    model, weights = lab.new_weights(victim)
    assert not fleet.publisher.publish(weights, 0).report.failed
    fleet.announce(*members, victim)
    model, weights = lab.new_weights(victim)
    proxy.arm(point, lambda: victim.signal(number))
    start = time.monotonic()
    report = fleet.publisher.publish(weights, 1).report
    assert time.monotonic() - start < TIMEOUT_S[topology] + MARGIN_S
    assert not proxy.is_armed
    urls = {survivor.url for survivor in survivors}
    assert set(report.ok) == urls and set(report.failed) == {victim.url, *(engine.url for engine in also_lost)}
    assert fleet.serving() == dict.fromkeys(urls, fleet.publisher.version)
    for survivor in survivors:
        lab.assert_serves(survivor, model, fleet.publisher.version)
    return model


def rejoin(fleet, lab, survivors, lost, model):
    """An engine that is there again serves once its checksum has matched, and not before."""
    fleet.announce(*survivors, lost)
    assert lost.url not in fleet.serving()
    fleet.join(lost)
    assert fleet.serving()[lost.url] == fleet.publisher.version
    lab.assert_serves(lost, model, fleet.publisher.version)


def restarted(supervise, victim, proxy):
    """SGLang that its supervisor has started anew, under the URL that it had."""
    again = supervise()
    proxy.lead_to(again.url)
    return dataclasses.replace(again, url=victim.url)


@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGKILL], ids=["stopped", "killed"])
@pytest.mark.parametrize("point", POINTS)
def test_a_lost_sglang_costs_the_time_out_and_rejoins_by_checksum(
    engine, lab, fleet, topology, locals_, behind_proxies, point, number, supervise
):
    ((victim, proxy),) = behind_proxies(engine)
    try:
        model = lose_in_a_publish(fleet, lab, topology, locals_[:1], victim, proxy, point, number)
    finally:
        if number == signal.SIGSTOP:
            victim.signal(signal.SIGCONT)
        else:
            victim = restarted(supervise, victim, proxy)
    rejoin(fleet, lab, locals_[:1], victim, model)


@pytest.mark.parametrize("topology", ["group"])
def test_a_killed_sglang_costs_those_nothing_that_get_the_bytes_through_it(
    engine, lab, fleet, topology, locals_, behind_proxies, supervise
):
    """Gloo's tree of four: rank 1 passes on to rank 3, rank 2 to nobody."""
    (victim, proxy), *others = behind_proxies(engine, *locals_)
    survivors = [survivor for survivor, _ in others]
    model = lose_in_a_publish(fleet, lab, topology, survivors, victim, proxy, "bucket 2", signal.SIGKILL)
    rejoin(fleet, lab, survivors, restarted(supervise, victim, proxy), model)


@pytest.mark.parametrize("topology", ["star", "group"])
def test_sglang_serves_the_new_version_while_another_hangs(engine, lab, fleet, topology, locals_, behind_proxies):
    ((victim, proxy),) = behind_proxies(locals_[0])
    try:
        lose_in_a_publish(fleet, lab, topology, [engine], victim, proxy, "bucket 2", signal.SIGSTOP)
    finally:
        victim.signal(signal.SIGCONT)
    fleet.announce(engine, victim)
    fleet.join(victim)


@pytest.mark.parametrize("topology", ["group"])
def test_sglang_behind_an_engine_that_hangs_is_ended_and_rejoins_by_checksum(
    engine, lab, fleet, topology, locals_, behind_proxies, supervise
):
    """Its wait for rank 1 has no bound, so that it is lost to the publish as well; rank 2 is served."""
    (victim, proxy), (survivor, _), (blocked, to_blocked) = behind_proxies(*locals_, engine)
    try:
        model = lose_in_a_publish(
            fleet, lab, topology, [survivor], victim, proxy, "bucket 2", signal.SIGSTOP, also_lost=[blocked]
        )
        # Ended by its watchdog, while the engine that it waits for still hangs.
        again = restarted(supervise, blocked, to_blocked)
    finally:
        victim.signal(signal.SIGCONT)
    rejoin(fleet, lab, [survivor], again, model)


@pytest.fixture
def lose_trainer(lab, tiny_model, tmp_path):
    """Has a trainer publish version 7 to an engine behind a proxy, and loses it at a point."""
    trainers = []

    def lose(victim, proxy, point, number):
        fault = tmp_path / f"{len(trainers)}.fault"
        words = [victim.url, str(tiny_model[0]), str(fault), lab.api_key, lab.admin_key]
        trainers.append(lab.fork("trainer_worker.py", words, fault.with_suffix(".log")))
        trainer = trainers[-1]
        proxy.arm(point, lambda: os.kill(trainer.pid, number))
        fault.with_suffix(".partial").write_text(f'{{"point": "{point.replace("bucket", "receiving")}"}}')
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
def test_sglang_whose_trainer_dies_goes_on_by_itself(engine, lab, fleet, behind_proxies, lose_trainer, point, version):
    ((victim, proxy),) = behind_proxies(engine)
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


def test_sglang_that_waits_for_a_trainer_in_vain_is_ended(
    engine, start_sglang, tiny_model, lab, behind_proxies, lose_trainer
):
    """Its supervisor starts it anew: SGLang has no way to give up a wait. Two of them wait at the same time."""
    start_sglang.forget(engine)
    waiting = [engine, start_sglang(*tiny_model)]
    faults = [("bucket 2", signal.SIGSTOP), ("/init_weights_update_group", signal.SIGKILL)]
    for (victim, proxy), (point, number) in zip(behind_proxies(*waiting), faults, strict=True):
        lose_trainer(victim, proxy, point, number)
    start = time.monotonic()
    for stuck in waiting:
        assert stuck.process.wait(120) == 1
    assert time.monotonic() - start < 3 * lab.sglang_pause_timeout_s + MARGIN_S
    start_sglang.forget(waiting[1])
