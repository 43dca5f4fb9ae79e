"""`vagen-buffer serve` and `audit` as processes: refusals, backpressure, start, adoption, stop, exit codes."""

from __future__ import annotations

import json
import os
import socket
import stat
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import numpy as np
import pytest
from ulid import ULID

from vagen.buffer.server import EmbeddedValkey
from vagen.buffer.service import ready_path
from vagen.common.trajectory import content_hash
from vagen.common.wire import CreditRequest, decode_envelope, encode_trajectory


def bad_trajectories(make):
    """What actors have been seen to send, and the field each must be refused under."""
    replace = msgspec.structs.replace
    good = make()
    row = good.rows[0]

    def with_row(**fields):
        return make(rows=(replace(row, **fields),))

    logprobs = row.behaviour_logprobs.copy()
    logprobs[8] = np.inf
    yield with_row(behaviour_logprobs=logprobs), "rows[0].behaviour_logprobs"
    yield with_row(images=()), "rows[0].images"
    yield with_row(images=(replace(row.images[0], grid_thw=(1, 4, 6)),)), "rows[0].images[0].num_tokens"
    sampled = row.token_ids.copy()
    sampled[8] = 8
    vision = replace(good.vision, forbidden_token_ids=(8, 9))
    yield make(rows=(replace(row, token_ids=sampled),), vision=vision), "rows[0].token_ids"
    yield with_row(behaviour_logprobs=row.behaviour_logprobs[:-1]), "rows[0].behaviour_logprobs"
    yield make(run_id="another"), "run_id"
    yield make(version=77), "policy_versions"
    yield make(images={content_hash(b"a"): b"a"}), "images"
    yield make(sampling=replace(good.sampling, top_p=0.9)), "sampling.top_p"


def test_bad_input_is_refused_by_field_and_the_service_lives(learner, connect, make_trajectory):
    running, store = learner()
    client = connect(running.ready.endpoint)
    expected: dict[str, int] = {}
    for seq, (trajectory, field) in enumerate(bad_trajectories(make_trajectory), 1):
        trajectory = msgspec.structs.replace(trajectory, actor_seq=seq)
        client.put(trajectory)
        refusal = client.wait_refused(trajectory.trajectory_id)
        assert refusal.field == field
        client.refused.clear()
        client.put(trajectory)
        again = client.wait_refused(trajectory.trajectory_id)
        assert (again.field, again.problem) == (refusal.field, refusal.problem)
        label = field.replace("[0]", "[]")
        expected[label] = expected.get(label, 0) + 1
    envelope, payload = encode_trajectory(make_trajectory())
    client.put_frames(envelope, payload[:100])
    client.wait_refused(str_id(envelope))
    expected["payload"] = 1

    garbage = [[b""], [b"P"], [b"P", b"x", b"y"], [b"\xff" * 100] * 7, [b"H", b"\xc1"], [b"C", b"\x91" * 1000], [b"F"]]
    for frames in garbage:
        client.socket.send_multipart(frames)
    good = make_trajectory()
    client.put(good)
    client.wait_acked(good.trajectory_id)
    accounting = store.accounting()
    assert accounting.refused_by_field == expected
    assert accounting.refused == sum(expected.values()), "once an id, whatever is sent again"
    assert accounting.malformed == len(garbage)
    assert accounting.pending == 1
    assert running.process.poll() is None


def str_id(envelope):
    return str(ULID.from_bytes(decode_envelope(envelope).trajectory_id))


def test_wrong_run_is_told_in_the_answer(learner, connect, heartbeat):
    running, _ = learner()
    client = connect(running.ready.endpoint)
    status = client.ask(heartbeat(run_id="another"))
    assert "serves run 'run'" in status.reason
    grant = client.ask(CreditRequest(run_id="another", actor_id="actor-0", want=1))
    assert (grant.tasks, "serves run" in grant.status.reason) == ((), True)


def test_grant_carries_engines_version_and_reason(learner, connect, heartbeat):
    running, store = learner()
    client = connect(running.ready.endpoint)
    ask = CreditRequest(run_id="run", actor_id="actor-0", want=2)
    assert client.ask(ask).status.reason == "no engine is admitted"
    client.ask(heartbeat(journalled=3, in_flight=1))
    assert store.admit_engine("http://engine", "e1", 1)
    grant = client.ask(ask)
    assert [task.task_index for task in grant.tasks] == [0, 1]
    (engine,) = grant.status.engines
    assert (engine.url, engine.policy_version) == ("http://engine", 1)
    assert (grant.status.learner_step, grant.status.policy_version, grant.status.reason) == (0, 1, "")
    assert (store.accounting().produced, store.accounting().in_flight) == (3, 1)


def test_two_actors_with_one_connection_each_get_their_own_acks(learner, connect, make_trajectory):
    running, store = learner()
    clients = [connect(running.ready.endpoint) for _ in range(2)]
    sent = [make_trajectory(actor_id=f"actor-{i}") for i in range(2)]
    for client, trajectory in zip(clients, sent, strict=True):
        client.put(trajectory)
    for client, trajectory in zip(clients, sent, strict=True):
        client.wait_acked(trajectory.trajectory_id)
        assert client.acked == [trajectory.trajectory_id]
    assert store.status().ready == 2


def test_full_buffer_holds_the_actor_back_and_resumes(learner, connect, make_trajectory, eventually, heartbeat):
    capacity = 1 << 20
    running, store = learner(capacity_bytes=capacity, lease_s=3, heartbeat_timeout_s=3)
    client = connect(running.ready.endpoint)
    client.ask(heartbeat())
    store.admit_engine("http://engine", "e1", 1)
    assert len(client.ask(CreditRequest(run_id="run", actor_id="actor-0", want=1)).tasks) == 1
    trajectories = [make_trajectory(actor_seq=i + 1, task_index=i + 1, num_bytes=60_000) for i in range(60)]
    for trajectory in trajectories:
        client.put(trajectory)
    fit = capacity // (len(encode_trajectory(trajectories[0])[1]))
    eventually(lambda: (client.poll(), len(client.acked) == fit)[1], "as many acks as fit")
    # Long enough for every lease to end, had the silence been the actor's.
    deadline = time.monotonic() + 6
    while time.monotonic() < deadline:
        assert not client.poll(0.1), "nothing is acknowledged while the buffer is full"
    status = store.status()
    assert status.num_bytes <= capacity
    assert (status.running, status.engines) == (1, 1), "leases outlast the backpressure"
    resident = int(Path(f"/proc/{running.process.pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    assert resident < 300 << 20
    step = 0
    while len(client.acked) < len(trajectories):
        if store.claim(step, 4, 1.0) is not None:
            store.done([step])
            step += 1
        while client.poll():
            pass
    assert sorted(client.acked) == sorted(t.trajectory_id for t in trajectories), "each once, none lost"


def test_audit_is_exact_when_drained_and_says_so_when_not(learner, connect, make_trajectory, heartbeat):
    running, store = learner()
    client = connect(running.ready.endpoint)
    code, out = running.audit()
    assert (code, "the identity holds" in out) == (0, True)
    for seq in (1, 2, 3):
        trajectory = make_trajectory(actor_seq=seq, version=99 if seq == 3 else 1)
        client.put(trajectory)
        client.wait_refused(trajectory.trajectory_id) if seq == 3 else client.wait_acked(trajectory.trajectory_id)
    code, out = running.audit()
    assert (code, "DOES NOT HOLD" in out) == (1, True), "the actor has not reported yet"
    client.ask(heartbeat(journalled=4, in_flight=1))
    store.claim(0, 1, 1)
    store.done([0])
    code, out = running.audit("--json")
    told = json.loads(out)
    assert code == 0 and told["identity_holds"]
    assert {name: told[name] for name in ("produced", "trained", "ready", "refused", "in_flight")} == {
        "produced": 4,
        "trained": 1,
        "ready": 1,
        "refused": 1,
        "in_flight": 1,
    }
    assert told["actors"][0]["age_s"] < 30
    client.ask(heartbeat(journalled=5, in_flight=1))
    assert running.audit()[0] == 1


def test_ready_file_private_socket_and_clean_stop(service):
    running = service()
    assert running.ready.pid == running.process.pid
    valkey = running.valkey
    assert stat.S_IMODE(valkey.socket.parent.stat().st_mode) == 0o700
    assert stat.S_IMODE(valkey.socket.stat().st_mode) == 0o700
    assert b"vagen_buffer_ready" in http_get(running.ready.metrics_port)
    started = time.monotonic()
    assert running.stop() == 0
    assert time.monotonic() - started < 10
    assert not ready_path(running.run_dir).exists()
    lock = valkey._try_lock()
    assert lock is not None, "Valkey is gone as well"
    os.close(lock)
    assert running.audit()[0] == 2


def http_get(port):
    with socket.create_connection(("127.0.0.1", port), timeout=5) as connection:
        connection.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
        return b"".join(iter(lambda: connection.recv(65536), b""))


def test_killed_service_adopts_the_running_valkey(learner, connect, make_trajectory):
    running, store = learner()
    pid = running.valkey.pid
    client = connect(running.ready.endpoint)
    first = make_trajectory()
    client.put(first)
    client.wait_acked(first.trajectory_id)
    running.kill()
    running.restart()
    assert running.valkey.pid == pid
    second = make_trajectory(actor_seq=2)
    client.put(second)
    client.wait_acked(second.trajectory_id)
    assert store.status().ready == 2
    assert running.stop() == 0, "an adopted server is stopped like one's own"
    lock = running.valkey._try_lock()
    assert lock is not None
    os.close(lock)


def test_taken_endpoint_and_bad_settings_are_said_at_once(service, tmp_path):
    running = service()
    for args, message in [
        (("--endpoint", running.ready.endpoint), "$.buffer.endpoint: cannot listen"),
        (("--endpoint", "tcp://127.0.0.1:*", "--redis", "unix:///nowhere.sock"), "no Redis answers"),
        (("--redis", "http://x"), "$.buffer.redis_url"),
        (("--set", "buffer.capacity_bytes=many"), "$.buffer.capacity_bytes: expected int"),
        (("--set", "buffer.capacity=3"), "$.buffer.capacity: unknown key"),
    ]:
        started = time.monotonic()
        process = running.spawn("serve", *args)
        _, err = process.communicate(timeout=30)
        assert process.returncode == 2
        assert message in err and "Traceback" not in err
        assert time.monotonic() - started < 20
    assert running.process.poll() is None


def test_external_redis_must_keep_the_promise(service, tmp_path):
    weak = EmbeddedValkey(tmp_path / "weak", fsync="everysec")
    weak.start()
    try:
        running = service()
        args = ("serve", "--endpoint", "tcp://127.0.0.1:*", "--redis", weak.url)
        process = running.spawn(*args)
        _, err = process.communicate(timeout=20)
        assert process.returncode == 2
        assert '$.buffer.fsync: expected a Redis with `appendonly yes`, `appendfsync always`, got "everysec"' in err
    finally:
        weak.stop()


def test_long_folder_gets_a_short_private_socket(tmp_path):
    folder = tmp_path / ("deep" * 20) / ("er" * 20)
    first = EmbeddedValkey(folder)
    assert len(str(first.socket)) <= 100
    first.start()
    try:
        second = EmbeddedValkey(folder)
        second.start()
        assert second.pid == first.pid, "whoever comes later finds the same socket"
        assert stat.S_IMODE(first.socket.parent.stat().st_mode) == 0o700
    finally:
        first.stop()
        first.socket.parent.rmdir()


def test_help_says_what_fsync_risks(tmp_path):
    command = [sys.executable, "-c", "from vagen.buffer.cli import app; app()", "serve", "--help"]
    out = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout
    assert "everysec" in out and "lost" in out


def has_ipv6():
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True


@pytest.mark.skipif(not has_ipv6(), reason="this machine has no IPv6 loopback")
def test_serves_ipv6(service, connect, heartbeat):
    running = service()
    running.stop()
    running.start("tcp://[::1]:*")
    client = connect(running.ready.endpoint, ipv6=True)
    assert client.ask(heartbeat()).reason == ""


def test_audit_by_the_run_folder_alone(service):
    running = service()
    command = [sys.executable, "-c", "from vagen.tools.cli import app; app()", "buffer", "audit"]
    done = subprocess.run([*command, "--run-dir", running.run_dir], capture_output=True, text=True, timeout=60)
    assert (done.returncode, "the identity holds" in done.stdout) == (0, True)
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (2, "error: expected --run-dir DIR or --config RECIPE\n")
