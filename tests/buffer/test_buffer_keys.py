"""CURVE between actors and buffer: who has an allowed key works, everybody else gets nothing and disturbs nobody."""

from __future__ import annotations

import asyncio
import logging
import shutil
import stat
import threading
import time
import urllib.request
from contextlib import asynccontextmanager

import pytest
import zmq

from vagen.actor.config import ActorSecurity
from vagen.actor.sender import Presence, Sender
from vagen.actor.spool import Spool
from vagen.buffer.config import BufferConfig
from vagen.buffer.gate import Gate
from vagen.buffer.loop import Ingest, bind_router
from vagen.common.config import section
from vagen.common.curve import create_key_pair, load_key_pair
from vagen.common.errors import BufferUnavailableError, ConfigError, InfrastructureError
from vagen.common.metrics import Metrics


class Keyring:
    """Key files of a buffer and of actors, and the folder of allowed ones."""

    def __init__(self, folder):
        self.folder = folder
        self.allowed = folder / "allowed"
        self.allowed.mkdir(parents=True)
        create_key_pair(folder, "buffer")

    def actor(self, name, allow=True, server="buffer"):
        """A key pair, made at the first call; its settings in section `actor`."""
        if not (self.folder / f"{name}.key").exists():
            create_key_pair(self.folder, name)
        if allow:
            shutil.copy(self.folder / f"{name}.key", self.allowed)
        return ActorSecurity(
            key_file=str(self.folder / f"{name}.key_secret"), server_key_file=str(self.folder / f"{server}.key")
        )

    def deny(self, name):
        (self.allowed / f"{name}.key").unlink()

    @property
    def settings(self):
        return {"key_file": str(self.folder / "buffer.key_secret"), "allowed_dir": str(self.allowed)}


@pytest.fixture
def keyring(tmp_path):
    return Keyring(tmp_path / "keys")


@asynccontextmanager
async def sending(endpoint, folder, security):
    """The actor's own sender at work."""
    spool = Spool(folder, "run", 1 << 30)
    metrics = Metrics("vagen_actor", "run")
    sender = Sender(
        endpoint, spool, Presence(), metrics, run_id="run", window=4, heartbeat_s=0.05, keys=security.load()
    )
    sender.open()
    work = asyncio.create_task(sender.run())
    try:
        yield sender
    finally:
        work.cancel()
        await asyncio.gather(work, return_exceptions=True)
        await sender.close()
        await spool.close()


async def until(holds, what, timeout_s=20.0):
    deadline = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < deadline, what
        await asyncio.sleep(0.02)


def test_allowed_key_delivers_through_the_real_sender(learner, keyring, make_trajectory, tmp_path):
    running, store = learner(security=keyring.settings)

    async def main():
        async with sending(running.ready.endpoint, tmp_path / "spool", keyring.actor("good")) as sender:
            await sender.wait_for_buffer(20.0)
            for index in range(3):
                await sender.put(make_trajectory(task_index=index))
            assert await sender.flush(20.0)

    asyncio.run(main())
    assert store.status().ready == 3


@pytest.mark.parametrize(
    ("security", "error", "message"),
    [
        (lambda keys: keys.actor("unknown", allow=False), ConfigError, "does not allow this actor's key"),
        (lambda keys: ActorSecurity(), ConfigError, r"\$.actor.security.key_file and"),
        (lambda keys: keys.actor("good", server="good"), BufferUnavailableError, "is not its public key"),
    ],
)
def test_wrong_key_gets_nothing_but_a_reason_and_disturbs_nobody(
    learner, connect, keyring, make_trajectory, heartbeat, tmp_path, security, error, message
):
    running, store = learner(security=keyring.settings)
    healthy = connect(running.ready.endpoint, keys=keyring.actor("healthy").load())
    assert healthy.ask(heartbeat()).reason == ""

    async def main():
        async with sending(running.ready.endpoint, tmp_path / "spool", security(keyring)) as sender:
            await sender.put(make_trajectory())
            started = time.monotonic()
            with pytest.raises(error, match=message):
                await sender.wait_for_buffer(1.0 if error is BufferUnavailableError else 20.0)
            assert time.monotonic() - started < 10
            assert (sender.status, sender.in_window) == (None, 0)

    asyncio.run(main())
    mine = make_trajectory()
    healthy.put(mine)
    healthy.wait_acked(mine.trajectory_id)
    accounting = store.accounting()
    assert (accounting.ready, accounting.malformed, len(accounting.actors)) == (1, 0, 1)


def test_keys_against_a_buffer_without_keys_say_so(learner, keyring, tmp_path):
    running, _ = learner()

    async def main():
        async with sending(running.ready.endpoint, tmp_path / "spool", keyring.actor("good")) as sender:
            with pytest.raises(ConfigError, match="takes no encrypted connections"):
                await sender.wait_for_buffer(20.0)

    asyncio.run(main())


def test_running_actor_is_shut_out_when_its_key_is_removed_and_let_in_again(
    learner, keyring, make_trajectory, tmp_path, caplog
):
    running, store = learner(security=keyring.settings)

    async def main():
        async with sending(running.ready.endpoint, tmp_path / "spool", keyring.actor("good")) as sender:
            await sender.wait_for_buffer(20.0)
            keyring.deny("good")
            await until(
                lambda: b'refused_peers_total{run="run",what="message"}' in scrape(running), "the gate looked again"
            )
            await sender.put(make_trajectory())
            sender._socket.connect_again()
            await until(lambda: "does not allow this actor's key" in caplog.text, "the reason is logged")
            assert store.accounting().pending == 0
            keyring.actor("good")
            assert await sender.flush(20.0), "what was put meanwhile arrives"

    with caplog.at_level(logging.ERROR):
        asyncio.run(main())
    assert store.status().ready == 1


def scrape(running):
    with urllib.request.urlopen(f"http://127.0.0.1:{running.ready.metrics_port}/metrics", timeout=10) as answer:
        return answer.read()


@pytest.fixture
def gate(keyring):
    """A gate with its router, in this process: (gate, router, context)."""
    context = zmq.Context()
    gate = Gate(
        context,
        load_key_pair(keyring.settings["key_file"], "key_file"),
        keyring.allowed,
        Metrics("vagen_buffer", "run"),
    )
    router = bind_router(context, "tcp://127.0.0.1:*", gate)
    yield gate, router, context
    router.close(0)
    gate.close()
    context.term()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_death_of_the_gate_is_noticed_and_lets_nobody_in(gate, keyring, connect, heartbeat, eventually, monkeypatch):
    gate, router, _ = gate
    gate.check()
    keys = keyring.actor("good").load()

    def die(request):
        raise MemoryError("no memory")

    monkeypatch.setattr(gate, "_answer", die)
    endpoint = router.get_string(zmq.LAST_ENDPOINT)
    connect(endpoint, keys=keys).say(heartbeat())
    eventually(lambda: not gate._thread.is_alive(), "the thread ends")
    with pytest.raises(InfrastructureError, match="no memory"):
        gate.check()
    for client_keys in (keys, keyring.actor("unknown", allow=False).load(), None):
        connect(endpoint, keys=client_keys).say(heartbeat())
    assert not router.poll(1000), "without a handler nobody gets in"


def test_folder_that_vanishes_admits_nobody_and_one_broken_file_only_itself(gate, keyring, connect, heartbeat):
    gate, router, _ = gate
    endpoint = router.get_string(zmq.LAST_ENDPOINT)
    (keyring.allowed / "broken.key").write_text("no key")
    keys = keyring.actor("good").load()
    connect(endpoint, keys=keys).say(heartbeat())
    assert router.poll(10_000)
    frame = router.recv_multipart(copy=False)[-1]
    assert gate.admits(frame)
    shutil.rmtree(keyring.allowed)
    connect(endpoint, keys=keys).say(heartbeat())
    assert not router.poll(1000)
    assert not gate.admits(frame)
    gate.check()


def test_secret_that_others_may_read_is_refused(service, keyring, tmp_path):
    running = service(security=keyring.settings)
    secret = keyring.folder / "buffer.key_secret"
    assert stat.S_IMODE(secret.stat().st_mode) == 0o600
    secret.chmod(0o640)
    process = running.spawn("serve", "--endpoint", "tcp://127.0.0.1:*")
    _, err = process.communicate(timeout=30)
    assert (process.returncode, "chmod 600" in err, "Traceback" in err) == (2, True, False)
    actor = keyring.actor("good")
    (keyring.folder / "good.key_secret").chmod(0o604)
    with pytest.raises(ConfigError, match=r"\$.actor.security.key_file: .* has mode 604"):
        actor.load()
    public = keyring.allowed / "good.key"
    public.chmod(0o600)
    with pytest.raises(ConfigError, match="has no secret key"):
        load_key_pair(public, "setting")


def test_secret_key_is_not_in_the_representation(keyring):
    pair = keyring.actor("good").load()
    assert pair.own.secret.decode() not in repr(pair) + str(pair)


@pytest.mark.parametrize("endpoint", ["tcp://0.0.0.0:5600", "tcp://*:5600", "tcp://[::]:5600", "tcp://10.0.0.1:5600"])
def test_network_without_keys_needs_an_explicit_word(endpoint, keyring):
    with pytest.raises(ConfigError, match=r"\$.buffer.endpoint: .*`vagen keys new`.*insecure: true"):
        section({"buffer": {"endpoint": endpoint}}, "buffer", BufferConfig)
    for security in (keyring.settings, {"insecure": True}):
        section({"buffer": {"endpoint": endpoint, "security": security}}, "buffer", BufferConfig)


def test_half_of_the_settings_is_no_security(keyring):
    with pytest.raises(ConfigError, match=r"\$.buffer.security: .*together"):
        section({"buffer": {"security": {"key_file": "x"}}}, "buffer", BufferConfig)
    with pytest.raises(ConfigError, match=r"\$.actor.security: .*together"):
        section({"security": {"server_key_file": "x"}}, "security", ActorSecurity)


def test_service_ends_with_an_error_when_its_gate_dies(keyring, bench, monkeypatch):
    bench = bench()
    context = zmq.Context()
    pair = load_key_pair(keyring.settings["key_file"], "key_file")
    metrics = Metrics("vagen_buffer", "run")
    gate = Gate(context, pair, keyring.allowed, metrics)
    router = bind_router(context, "tcp://127.0.0.1:*", gate)
    ingest = Ingest(
        router, bench.store, metrics, run_name="run", config=bench.config, gate=gate, stopping=lambda: False
    )
    threading.Timer(0.3, gate.close).start()
    try:
        with pytest.raises(InfrastructureError, match="checks actors' keys has ended"):
            ingest.run()
    finally:
        router.close(0)
        gate.close()
        context.term()
