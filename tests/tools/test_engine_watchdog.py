"""The watchdog over a stand-in for SGLang; `tests/engine/test_sglang_faults.py` has the real one."""

from __future__ import annotations

import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as NotYet
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from vagen.common.errors import EngineUnavailableError
from vagen.tools.engine_watchdog import EngineWatchdog

PAUSE_TIMEOUT_S = 1.0
KEYS = {"api_key": "key", "admin_api_key": "admin"}


class StandIn(ThreadingHTTPServer):
    """Answers as SGLang does: whether a token is made depends on a pause, whether an update can end on its state."""

    daemon_threads = True

    def __init__(self):
        server = self
        self.paused = self.updating = self.blocked = False
        self.mute = threading.Event()
        self.posts = []

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                server.wait_if(server.paused or server.blocked)
                self.answer("key", 200)

            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                server.posts.append((self.path, body))
                server.wait_if(server.blocked)
                self.answer("admin", server.carry_out(self.path))

            def answer(self, key, status):
                self.send_response(status if self.headers["Authorization"] == f"Bearer {key}" else 401)
                self.end_headers()

            def log_message(self, *_):
                pass

        super().__init__(("127.0.0.1", 0), Handler)

    def wait_if(self, held):
        if held:
            self.mute.wait(60)

    def carry_out(self, path):
        if path == "/end_weight_update" and not self.updating:
            return 400
        if path == "/end_weight_update":
            self.updating = False
        if path == "/continue_generation":
            self.paused = False
        return 200


@pytest.fixture
def engine():
    server = StandIn()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.mute.set()
    server.shutdown()
    server.server_close()


@pytest.fixture
def watch(engine):
    """Starts a watchdog; it ends with the test."""
    stopped = threading.Event()
    threads = ThreadPoolExecutor(1)

    def start(**keys):
        url = f"http://127.0.0.1:{engine.server_port}"
        dog = EngineWatchdog(url=url, pause_timeout_s=PAUSE_TIMEOUT_S, **(KEYS | keys))
        return threads.submit(dog.watch, stopped)

    yield start
    stopped.set()
    engine.mute.set()
    threads.shutdown()


def wait_until(holds):
    deadline = time.monotonic() + 20 * PAUSE_TIMEOUT_S
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_pause_ends_after_its_time_out_and_not_before(engine, watch):
    start = time.monotonic()
    engine.paused = True
    watch()
    wait_until(lambda: not engine.paused)
    assert time.monotonic() - start >= PAUSE_TIMEOUT_S
    assert [path for path, _ in engine.posts] == ["/end_weight_update", "/continue_generation"]


def test_weights_of_an_update_that_was_left_open_are_of_no_version(engine, watch):
    engine.paused = engine.updating = True
    watch()
    wait_until(lambda: not engine.paused)
    assert engine.posts == [
        ("/end_weight_update", {}),
        ("/update_weight_version", {"new_version": "incomplete", "abort_all_requests": False}),
        ("/continue_generation", {}),
    ]


def test_an_engine_that_generates_is_left_alone(engine, watch):
    with pytest.raises(NotYet):
        watch().result(3 * PAUSE_TIMEOUT_S)
    assert not engine.posts


def test_an_engine_that_answers_nothing_is_stuck(engine, watch):
    engine.blocked = True
    with pytest.raises(EngineUnavailableError, match="end_weight_update: timed out"):
        watch().result(20 * PAUSE_TIMEOUT_S)


def test_a_key_that_does_not_fit_is_said(engine, watch):
    engine.paused = True
    with pytest.raises(EngineUnavailableError, match="end_weight_update: 401"):
        watch(admin_api_key="other").result(20 * PAUSE_TIMEOUT_S)
