"""A service under a flood: memory stays bounded, healthy actors are served, and another run sees nothing of it."""

from __future__ import annotations

import os
import socket
import threading
import time
from urllib.parse import urlsplit

import psutil
import pytest
import zmq

from vagen.buffer.connection import make_client
from vagen.buffer.keys import Key, Keys
from vagen.buffer.loop import MAX_UNREAD_ANSWERS, bind_router
from vagen.common.wire import MAX_PAYLOAD_BYTES, CreditRequest, Kind, encode_message, encode_trajectory

MAX_RESIDENT_BYTES = 500 << 20
PUT_S = 20.0


GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)
_COMMAND = b"\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER"
READY = bytes([4, len(_COMMAND)]) + _COMMAND


def resident_bytes(pid):
    return psutil.Process(pid).memory_info().rss


class Hostile:
    """Everything at once, until told to stop."""

    def __init__(self, endpoint, make_trajectory, heartbeat):
        self._endpoint = endpoint
        self._context = zmq.Context()
        self._stop = threading.Event()
        envelope, payload = encode_trajectory(make_trajectory(actor_id="hostile"))
        beat = encode_message(heartbeat(run_id="x" * 400))
        garbage = [[b"P"], [b"P", b"x", b"y"], [b"\xff" * 100] * 7, [b"H", b"\xc1"], [b"C", b"\x91" * 1000], [b""]]
        garbage += [[b"P", envelope, payload[:-1]], [b"P", envelope, b"\xdd\xff\xff\xff\xff"], [b"H", beat]]
        works = [lambda: self._flood(garbage), lambda: self._flood([[b"H", beat]]), self._oversize, self._half_open]
        self._threads = [threading.Thread(target=work, daemon=True) for work in works]
        self.sent = 0
        self.refused_sizes = 0
        self.half_open = 0

    def __enter__(self):
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_):
        self._stop.set()
        for thread in self._threads:
            thread.join(30)
        self._context.destroy(0)

    def _dealer(self):
        dealer = self._context.socket(zmq.DEALER)
        dealer.linger, dealer.rcvhwm, dealer.sndhwm = 0, 1, 1000
        dealer.connect(self._endpoint)
        return dealer

    def _flood(self, messages):
        """Sends as fast as the socket takes it and reads no answer."""
        dealer = self._dealer()
        while not self._stop.is_set():
            for frames in messages:
                if dealer.poll(100, zmq.POLLOUT):
                    dealer.send_multipart(frames)
                    self.sent += 1
        dealer.close(0)

    def _oversize(self):
        dealer = self._dealer()
        monitor = dealer.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        while not self._stop.is_set():
            dealer.send_multipart([Kind.PUT.value, b"x" * 64, bytes(MAX_PAYLOAD_BYTES + 1)], zmq.NOBLOCK)
            if monitor.poll(5000):
                monitor.recv_multipart()
                self.refused_sizes += 1
        dealer.disable_monitor()
        dealer.close(0)

    def _half_open(self):
        """200 connections that begin a handshake and never end it."""
        address = urlsplit(self._endpoint)
        connections = []
        for _ in range(200):
            connection = socket.create_connection((address.hostname, address.port), timeout=10)
            connection.sendall(b"\xff\x00\x00\x00\x00\x00\x00\x00\x01\x7f\x03")
            connections.append(connection)
            self.half_open += 1
        self._stop.wait()
        for connection in connections:
            connection.close()


@pytest.fixture
def stranger(make_trajectory):
    """Fills another run in the same Redis and tells whether it was touched."""

    class Stranger:
        def __init__(self, url):
            self.client = make_client(url)
            self.prefix = Keys("other").prefix
            for key in (Key.STAT, Key.ACTORS, Key.LIVE):
                self.client.hset(Keys("other")[key], "field", "1")
            self.client.set(Keys("other").of(Key.PAYLOAD, "id"), b"payload")
            self.before = self.dump()

        def dump(self):
            keys = sorted(self.client.scan_iter(self.prefix.replace("{", "[{]") + "*"))
            return {key: self.client.dump(key) for key in keys}

        def is_untouched(self):
            """Also that nobody wrote outside of the two runs' prefixes."""
            prefixes = (self.prefix.encode(), Keys("run").prefix.encode())
            assert [key for key in self.client.scan_iter("*") if not key.startswith(prefixes)] == []
            return self.dump() == self.before

    return Stranger


def test_flood_of_every_kind_costs_bounded_memory_and_delays_nobody_for_long(
    learner, connect, make_trajectory, heartbeat, eventually, stranger
):
    running, store = learner()
    other = stranger(running.ready.redis_url)
    healthy = connect(running.ready.endpoint)
    healthy.ask(heartbeat())
    peak = 0
    with Hostile(running.ready.endpoint, make_trajectory, heartbeat) as hostile:
        eventually(lambda: hostile.half_open == 200 and hostile.refused_sizes, "the flood is on", 60)
        for seq in range(1, 11):
            started = time.monotonic()
            trajectory = make_trajectory(actor_seq=seq)
            healthy.put(trajectory)
            healthy.wait_acked(trajectory.trajectory_id)
            assert time.monotonic() - started < PUT_S
            peak = max(peak, resident_bytes(running.process.pid))
        assert hostile.sent > 1000
    assert running.process.poll() is None
    assert peak < MAX_RESIDENT_BYTES, f"{peak >> 20} MB"
    assert store.status().ready >= 10
    assert store.accounting().malformed > 100
    assert other.is_untouched()


NAMES = ["}:stat", "{other}", "vagen:{other}:stat", "a\nb", "*", "[a-z]?", "g:1:2", "\x00", "'] --", "../p:", "%s%d"]
NAMES.append("é" * 200)


def test_names_that_look_like_keys_or_patterns_stay_names(learner, connect, make_trajectory, heartbeat, stranger):
    running, store = learner()
    other = stranger(running.ready.redis_url)
    client = connect(running.ready.endpoint)
    for name in NAMES:
        put = make_trajectory(actor_id=name, group_id=name, task=name, role=name, actor_seq=1)
        client.put(put)
        client.wait_acked(put.trajectory_id)
        assert client.ask(heartbeat(actor_id=name, incarnation=name, journalled=1)).reason == ""
        client.ask(CreditRequest(run_id="run", actor_id=name, want=1))
    assert store.status().ready == len(NAMES)
    assert {actor.actor_id for actor in store.accounting().actors} == set(NAMES)
    manifest = store.claim(0, len(NAMES), 1)
    assert sorted(entry.group_id for entry in manifest.entries) == sorted(NAMES)
    assert len(store.fetch(manifest.ids)) == len(NAMES)
    assert store.done([0]) == len(NAMES)
    foreign = make_trajectory(run_id="other")
    client.put(foreign)
    assert client.wait_refused(foreign.trajectory_id).field == "run_id"
    assert other.is_untouched()


def test_answers_that_nobody_reads_are_bounded():
    context = zmq.Context()
    router = bind_router(context, "tcp://127.0.0.1:*")
    peers = []
    for _ in range(2):
        dealer = context.socket(zmq.DEALER)
        dealer.linger, dealer.rcvhwm = 0, 1
        dealer.setsockopt(zmq.RCVBUF, 1 << 16)
        dealer.connect(router.get_string(zmq.LAST_ENDPOINT))
        dealer.send(b"hello")
        assert router.poll(10_000)
        peers.append((dealer, router.recv_multipart()[0]))
    (_, deaf), (reader, healthy) = peers
    before = resident_bytes(os.getpid())
    for number in range(200_000):
        router.send_multipart([deaf, b"S", b"x" * 1000], zmq.NOBLOCK)
        if number % 20_000 == 0:
            router.send_multipart([healthy, b"S", b"%d" % number], zmq.NOBLOCK)
            assert reader.poll(10_000)
            assert reader.recv_multipart() == [b"S", b"%d" % number]
    assert resident_bytes(os.getpid()) - before < 60 << 20, "of 200 MB that were answered"
    assert MAX_UNREAD_ANSWERS >= 100, "more than an actor leaves unread"
    context.destroy(0)


def test_message_without_end_is_dropped_before_it_takes_all_memory(
    learner, connect, make_trajectory, heartbeat, eventually
):
    """ZeroMQ keeps the parts of a message until the last one comes, however many there are."""
    limit = 400 << 20
    running, store = learner(max_memory_bytes=limit)
    healthy = connect(running.ready.endpoint)
    healthy.ask(heartbeat())
    peak, sent, part = 0, 0, b"\x03" + (8 << 20).to_bytes(8, "big") + bytes(8 << 20)
    address, log = urlsplit(running.ready.endpoint), running.run_dir / "buffer" / "buffer.log"
    with socket.create_connection((address.hostname, address.port), timeout=60) as hostile, pytest.raises(OSError):
        hostile.sendall(GREETING + READY)
        while True:
            hostile.sendall(part)
            sent += 1
            peak = max(peak, resident_bytes(running.process.pid))
            assert sent < 400, f"3 GB were taken, {peak >> 20} MB at most"
    assert "all connections are dropped" in log.read_text()
    assert peak < 3 * limit
    eventually(lambda: resident_bytes(running.process.pid) < limit, "the memory is given back", 30)
    trajectory = make_trajectory()
    healthy.put(trajectory)
    deadline = time.monotonic() + 60
    while trajectory.trajectory_id not in healthy.acked:
        assert time.monotonic() < deadline
        if not healthy.poll(1.0):
            healthy.put(trajectory)  # as an actor does on a new connection
    assert store.status().ready == 1
    assert running.process.poll() is None
