"""Publishes through files on a disk: to engines that work and to those that do not, and what becomes of the files."""

from __future__ import annotations

import json
import os
import re
import resource
import signal
import threading
import time
from contextlib import closing, contextmanager

import msgspec
import pytest
import torch
from safetensors.torch import load_file

from vagen.common.config import convert
from vagen.common.errors import BroadcastError, ConfigError, EngineRefusedError
from vagen.common.weight_transfer import tensor_checksum
from vagen.learner import weight_folders
from vagen.learner.broadcast import Broadcaster
from vagen.learner.config import BroadcastConfig
from vagen.learner.weight_buckets import Buckets
from vagen.learner.weight_folders import WeightFolders

TIMEOUT_S, PAUSE_TIMEOUT_S, MARGIN_S = 8.0, 5.0, 4.0
BUCKET_BYTES = 30_000


@pytest.fixture(scope="module")
def engines(start_engines):
    """Two, and one in bfloat16."""
    limits = {"max_context": 1024, "max_new_tokens_limit": 600, "broadcast_timeout_s": TIMEOUT_S}
    limits["pause_timeout_s"] = PAUSE_TIMEOUT_S
    return [*start_engines(2, **limits), *start_engines(1, dtype="bfloat16", **limits)]


@pytest.fixture
def config(tmp_path):
    return BroadcastConfig(
        broadcast_topology="disk",
        disk_dir=str(tmp_path / "weights"),
        broadcast_timeout_s=TIMEOUT_S,
        bucket_bytes=BUCKET_BYTES,
    )


@pytest.fixture
def broadcaster(config):
    with closing(Broadcaster(config)) as trainer:
        yield trainer


@pytest.fixture
def fleet(valkey, lab, config):
    made = lab.fleet(valkey.url, config)
    yield made
    made.publisher.close()


def folders(tmp_path):
    """Names of what is in the folder, without what makes them unique."""
    return sorted(item.name.rsplit("-", 1)[0] for item in (tmp_path / "weights").iterdir())


@contextmanager
def files_of_at_most(num_bytes):
    """The kernel's own limit; a write beyond it fails like one to a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def spoil(monkeypatch, damage):
    """Have the files of the next publish damaged after they were written, before an engine reads them."""
    write, spoiled = WeightFolders.write, []

    def write_and_spoil(*args):
        folder = write(*args)
        if not spoiled:
            spoiled.append(folder)
            damage(folder)
        return folder

    monkeypatch.setattr(WeightFolders, "write", write_and_spoil)


def cut(folder):
    file = sorted(folder.glob("*.safetensors"))[1]
    os.truncate(file, file.stat().st_size - 100)


def change_one_bit(folder):
    file = min(folder.glob("*.safetensors"))
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


def drop_a_file(folder):
    min(folder.glob("*.safetensors")).unlink()


def test_engines_read_versions_while_they_generate(engines, lab, fleet, tmp_path):
    *members, joiner = engines
    fleet.announce(*members)
    first = fleet.publisher.publish(lab.new_weights(engines[0])[1], 0)
    assert not first.report.failed
    running = [engine.submit(lab.image_prompt(30), [lab.png(6)], max_new_tokens=600) for engine in members]
    for engine in members:
        engine.wait_running()
    model, weights = lab.new_weights(engines[0])
    second = fleet.publisher.publish(weights, 1)
    assert set(second.report.ok) == {engine.url for engine in members}
    assert 0 < second.report.transfer_s < second.report.stall_s < second.report.seconds
    for request in running:
        assert [span[0] for span in lab.spans(request.result())] == [str(first.version), str(second.version)]
    (newest,) = (tmp_path / "weights").glob(f"v{second.version:06d}-*")
    files = sorted(newest.glob("*.safetensors"))
    assert len(files) > 1 and {file.name for file in files} == set(
        json.loads((newest / "model.safetensors.index.json").read_text())["weight_map"].values()
    )
    read = {name: tensor for file in files for name, tensor in load_file(file).items()}
    assert read.keys() == dict(weights).keys() and all(torch.equal(read[name], tensor) for name, tensor in weights)
    # A joiner in another dtype gets files of its own, and one like the members theirs.
    fleet.announce(*engines)
    fleet.join(joiner)
    rounded = {name: tensor_checksum(tensor.to(torch.bfloat16)) for name, tensor in weights}
    assert joiner.checksums() == rounded
    before = folders(tmp_path)
    fleet.leave_all_but(members[1], joiner)
    fleet.publisher.tend_members()
    fleet.announce(*engines)
    fleet.join(members[0])
    assert folders(tmp_path) == before == [f"v{first.version:06d}"] + 2 * [f"v{second.version:06d}"]
    for engine in members:
        lab.assert_serves(engine, model, second.version)
    third = fleet.publisher.publish(weights, 2)
    assert not third.report.failed
    assert folders(tmp_path) == 2 * [f"v{second.version:06d}"] + 2 * [f"v{third.version:06d}"]


@pytest.mark.parametrize("topology", ["star", "group"])
def test_some_engines_read_and_the_others_share_groups(engines, lab, config, topology, tmp_path):
    *others, reader = engines[2], engines[0], engines[1]
    others = others if topology == "star" else others[1:]
    settings = {"disk_dir": config.disk_dir, "broadcast_timeout_s": TIMEOUT_S, "disk_engines": (reader.url,)}
    with closing(Broadcaster(BroadcastConfig(broadcast_topology=topology, **settings))) as broadcaster:
        model, weights = lab.new_weights(reader)
        weights.append(("lm_head.weight", model.lm_head.weight.data))
        report = broadcaster.publish(weights, 70, [*(engine.url for engine in others), reader.url])
        assert set(report.ok) == {reader.url, *(engine.url for engine in others)}, report.failed
    assert folders(tmp_path) == ["v000070"]
    lab.assert_serves(reader, model, 70)
    lab.assert_serves(engines[0], model, 70)


@pytest.mark.parametrize(
    ("damage", "message", "is_refused"),
    [
        (cut, r"model-00002-of-\d+.safetensors: ", True),
        (drop_a_file, r"model-00001-of-\d+.safetensors: No such file", True),
        (change_one_bit, "checksum: 1 of .* tensors differ", False),
    ],
)
def test_damaged_files_give_no_traffic_and_are_written_anew(
    engines, lab, fleet, monkeypatch, damage, message, is_refused
):
    engine = engines[0]
    fleet.announce(engine)
    first = fleet.publisher.publish(lab.new_weights(engine)[1], 0)
    assert not first.report.failed
    before = engine.checksums()
    model, weights = lab.new_weights(engine)
    spoil(monkeypatch, damage)
    second = fleet.publisher.publish(weights, 1)
    assert re.search(message, second.report.failed[engine.url])
    assert fleet.serving() == {} and not engine.call("/server_info")[1]["paused"]
    if is_refused:
        assert engine.checksums() == before and engine.version() == str(first.version)
    fleet.join(engine)
    assert fleet.serving() == {engine.url: second.version}
    lab.assert_serves(engine, model, second.version)


@pytest.mark.parametrize("number", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.slow)])
def test_an_engine_lost_while_it_reads_costs_the_others_nothing_and_rejoins(engines, lab, fleet, start_engines, number):
    survivor, victim, _ = engines
    fleet.announce(survivor, victim)
    assert not fleet.publisher.publish(lab.new_weights(victim)[1], 0).report.failed
    model, weights = lab.new_weights(victim)
    victim.arm("reading 2", number)
    start = time.monotonic()
    published = fleet.publisher.publish(weights, 1)
    seconds = time.monotonic() - start
    try:
        assert not victim.fault.exists() and seconds < TIMEOUT_S + MARGIN_S
        assert published.report.ok == (survivor.url,)
        assert published.report.failed[victim.url].startswith("load: ")
        assert published.report.stall_s < PAUSE_TIMEOUT_S
        assert fleet.serving() == {survivor.url: published.version}
        lab.assert_serves(survivor, model, published.version)
    finally:
        if number == signal.SIGSTOP:
            os.kill(victim.process.pid, signal.SIGCONT)
        else:
            victim.process.wait(30)
            victim = engines[1] = start_engines.again(victim)
    fleet.announce(survivor, victim)
    fleet.join(victim)
    assert fleet.serving()[victim.url] == published.version
    lab.assert_serves(victim, model, published.version)


def test_a_disk_that_takes_no_more_costs_the_version_and_nothing_else(engines, lab, fleet, tmp_path):
    engine = engines[0]
    fleet.announce(engine)
    model, weights = lab.new_weights(engine)
    first = fleet.publisher.publish(weights, 0)
    with files_of_at_most(BUCKET_BYTES // 2):
        second = fleet.publisher.publish(lab.new_weights(engine)[1], 1)
    assert re.search(r"files: .*/v\d+-\w+: could not be written: .*File too large", second.report.failed[engine.url])
    assert fleet.serving() == {} and folders(tmp_path) == [f"v{first.version:06d}"]
    lab.assert_serves(engine, model, first.version)
    fleet.join(engine)
    assert fleet.serving() == {engine.url: second.version}


def test_what_takes_longer_than_the_time_out_to_write_never_appears(engines, lab, config, monkeypatch, tmp_path):
    ended, save_file = threading.Event(), weight_folders.save_file

    def save_later(*args, **kwargs):
        assert ended.wait(60)
        save_file(*args, **kwargs)

    monkeypatch.setattr(weight_folders, "save_file", save_later)
    settings = msgspec.structs.replace(config, broadcast_timeout_s=1.0)
    with closing(Broadcaster(settings)) as broadcaster:
        weights = lab.new_weights(engines[0])[1]
        before = engines[0].metric("vagen_engine_paused_seconds_total")
        report = broadcaster.publish(weights, 80, [engines[0].url])
        assert report.failed[engines[0].url].startswith("files: not finished 0.8 s after the start")
        assert engines[0].metric("vagen_engine_paused_seconds_total") == before
        ended.set()
        engines[0].wait_until(lambda: folders(tmp_path) == [], "nothing is left")
        assert broadcaster.publish(weights, 80, [engines[0].url]).ok


@pytest.fixture
def store(tmp_path):
    return WeightFolders(tmp_path / "weights", keep=2)


@pytest.fixture
def write(store):
    """Writes a version of two small tensors in two files."""
    tensors = [("model.a", torch.zeros(3)), ("model.b", torch.zeros(2, dtype=torch.bfloat16))]
    return lambda version: store.write(str(version), "", Buckets(tensors, 12, 1), threading.Event())


def test_a_folder_stays_while_an_engine_may_read_it(store, write):
    with pytest.raises(TimeoutError), store.reading("http://slow", write(1)):
        raise TimeoutError
    read = write(1)
    kept = [write(version) for version in (2, 3, 4)]
    assert read.is_dir() and not kept[0].exists() and kept[1].is_dir()
    with store.reading("http://slow", kept[2]):
        pass
    write(5)
    assert not read.exists()


def test_an_engine_that_never_answers_holds_two_folders_at_most(store, write, tmp_path):
    for version in range(1, 9):
        with pytest.raises(TimeoutError), store.reading("http://stuck", write(version)):
            raise TimeoutError
    assert folders(tmp_path) == ["v000006", "v000007", "v000008"]


def test_what_a_dead_learner_left_makes_room_and_other_files_stay(write, tmp_path):
    for name in ("v000900-00000000", "v000901-00000000", "v000902-00000000.partial", "notes"):
        (tmp_path / "weights" / name).mkdir()
    os.utime(tmp_path / "weights" / "v000900-00000000", (0, 0))
    newest = write(3)
    assert folders(tmp_path) == ["notes", "v000003", "v000901"]
    assert write(3) == newest and write(4).is_dir() and newest.is_dir()


def test_a_refused_folder_is_written_anew(store, write):
    refused = write(1)
    with pytest.raises(EngineRefusedError), store.reading("http://a", refused):
        raise EngineRefusedError("no")
    assert write(1) != refused and not refused.exists()


def test_a_version_that_is_no_number_has_no_folder(write):
    with pytest.raises(BroadcastError, match="version latest is no number"):
        write("latest")


def test_a_folder_that_nobody_can_write_to_is_refused(tmp_path):
    (tmp_path / "file").touch()
    config = BroadcastConfig(disk_dir=str(tmp_path / "file" / "weights"))
    with pytest.raises(ConfigError, match=r"\$.learner.broadcast.disk_dir: .*file/weights: File exists"):
        Broadcaster(config)


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ({"broadcast_topology": "disk"}, 'disk_dir: expected an absolute path, got ""'),
        ({"disk_engines": ["http://10."]}, r"disk_dir: expected an absolute path"),
        ({"disk_dir": "weights"}, 'disk_dir: expected an absolute path, got "weights"'),
        ({"disk_dir": "/w", "disk_engines": ["10.0.0.1"]}, r"disk_engines\[0\]: expected http://"),
        ({"disk_dir": "/w", "disk_keep": 0}, r"disk_keep: expected int >= 1, got 0"),
    ],
)
def test_bad_settings_are_refused(raw, message):
    with pytest.raises(ConfigError, match=message):
        convert(raw, BroadcastConfig, "$.learner.broadcast")
