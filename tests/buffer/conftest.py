"""A real `vagen-buffer`, a real DEALER client and a store on a real Valkey."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
import zmq
from ulid import ULID

from vagen.buffer.config import BufferConfig
from vagen.buffer.connection import TRANSIENT, make_client
from vagen.buffer.keys import Key, Keys, Shard
from vagen.buffer.learner_store import LearnerStore
from vagen.buffer.requests import Put, read_request
from vagen.buffer.selection.config import FilterConfig, SelectionConfig
from vagen.buffer.selection.priority import Prioritizer
from vagen.buffer.selection.selector import Selector
from vagen.buffer.server import EmbeddedValkey
from vagen.buffer.service import Ready, read_ready, ready_path
from vagen.buffer.sharded_store import connect_store
from vagen.buffer.store import IngestStore, Outcome
from vagen.common.curve import ActorKeys
from vagen.common.trajectory import RewardEntry, Trajectory
from vagen.common.wire import (
    CreditRequest,
    EngineAnnouncement,
    EpisodeFailed,
    Grant,
    Heartbeat,
    Kind,
    Refusal,
    Status,
    decode_message,
    encode_message,
    encode_trajectory,
)

TIMEOUT_S = 60.0
STREAM_TIMEOUT_S = 180.0
WINDOW = 16
RESEND_S = 1.0


def eventually(holds: Callable[[], Any], what: str, timeout_s: float = TIMEOUT_S) -> Any:
    """The first truthy value of `holds`."""
    deadline = time.monotonic() + timeout_s
    while not (value := holds()):
        assert time.monotonic() < deadline, f"not within {timeout_s} s: {what}"
        time.sleep(0.01)
    return value


@pytest.fixture(name="eventually")
def eventually_fixture() -> Callable[..., Any]:
    return eventually


class Client:
    """An actor's side of the protocol, without an actor."""

    def __init__(self, context: zmq.Context, endpoint: str, ipv6: bool, keys: ActorKeys | None) -> None:
        self.socket = context.socket(zmq.DEALER)
        if keys is not None:
            self.socket.curve_publickey, self.socket.curve_secretkey = keys.own
            self.socket.curve_serverkey = keys.server
        self.socket.ipv6 = ipv6
        self.socket.linger = 0
        self.socket.sndhwm = 0
        self.socket.reconnect_ivl = 50
        self.socket.connect(endpoint)
        self.acked: list[str] = []
        self.refused: dict[str, Refusal] = {}
        self.answers: list[Grant | Status] = []

    def put(self, trajectory: Trajectory) -> None:
        self.put_frames(*encode_trajectory(trajectory))

    def put_frames(self, envelope: bytes, payload: bytes) -> None:
        self.socket.send_multipart([Kind.PUT.value, envelope, payload])

    def say(self, message: Heartbeat | CreditRequest | EpisodeFailed) -> None:
        kinds = {Heartbeat: Kind.HEARTBEAT, CreditRequest: Kind.REQUEST, EpisodeFailed: Kind.FAILED}
        self.socket.send_multipart([kinds[type(message)].value, encode_message(message)])

    def poll(self, timeout_s: float = 0.05) -> bool:
        """Take in one answer."""
        if not self.socket.poll(1000 * timeout_s):
            return False
        kind, body = self.socket.recv_multipart()
        if kind == Kind.ACK.value:
            self.acked += [str(ULID.from_bytes(body[i : i + 16])) for i in range(0, len(body), 16)]
        elif kind == Kind.REFUSE.value:
            refusal = decode_message(body, Refusal)
            self.refused[str(ULID.from_bytes(refusal.trajectory_id))] = refusal
        else:
            self.answers.append(decode_message(body, {Kind.GRANT.value: Grant, Kind.STATUS.value: Status}[kind]))
        return True

    def ask(self, message: Heartbeat | CreditRequest) -> Any:
        """The answer to a question."""
        before = len(self.answers)
        self.say(message)
        eventually(lambda: self.poll() and len(self.answers) > before, f"answer to {message}")
        return self.answers[-1]

    def wait_acked(self, trajectory_id: str) -> None:
        eventually(lambda: trajectory_id in self.acked or (self.poll() and False), f"ack of {trajectory_id}")

    def wait_refused(self, trajectory_id: str) -> Refusal:
        eventually(lambda: trajectory_id in self.refused or (self.poll() and False), f"refusal of {trajectory_id}")
        return self.refused[trajectory_id]

    def stream(
        self,
        trajectories: Sequence[Trajectory],
        on_progress: Callable[[int], None] = lambda acked: None,
        until: int | None = None,
    ) -> None:
        """Send with a bounded window and resend what is not acknowledged, until all is, or `until` of them are."""
        waiting = {t.trajectory_id: t for t in trajectories}
        enough = 0 if until is None else len(trajectories) - until
        sent_at: dict[str, float] = {}
        deadline = time.monotonic() + STREAM_TIMEOUT_S
        while True:
            for trajectory_id in self.acked:
                waiting.pop(trajectory_id, None)
            on_progress(len(trajectories) - len(waiting))
            if len(waiting) <= enough:
                return
            assert time.monotonic() < deadline, f"{len(waiting)} never acknowledged"
            now = time.monotonic()
            for trajectory_id in list(waiting)[:WINDOW]:
                if now - sent_at.get(trajectory_id, -RESEND_S) >= RESEND_S:
                    self.put(waiting[trajectory_id])
                    sent_at[trajectory_id] = now
            self.poll(0.05)


@pytest.fixture
def connect() -> Iterator[Callable[..., Client]]:
    context: zmq.Context = zmq.Context()
    clients: list[Client] = []

    def make(endpoint: str, ipv6: bool = False, keys: ActorKeys | None = None) -> Client:
        clients.append(Client(context, endpoint, ipv6, keys))
        return clients[-1]

    yield make
    for client in clients:
        client.socket.close(0)
    context.term()


class Service:
    """`vagen-buffer serve` as a process of its own."""

    def __init__(self, run_dir: Path, environment: Mapping[str, str], shard: int, **buffer: Any) -> None:
        self.run_dir = run_dir
        self._shard = shard
        self._environment = {**os.environ, **environment}
        self.recipe = run_dir / "recipe.yaml"
        self.recipe.write_text(yaml.safe_dump({"run": {"name": "run"}, "buffer": buffer}))
        self.process: subprocess.Popen[str] | None = None
        self.ready: Ready

    def spawn(self, *args: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", "from vagen.buffer.cli import app; app()", *args]
        command += ["--config", str(self.recipe), "--run-dir", str(self.run_dir)]
        return subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=self._environment
        )

    def start(self, endpoint: str = "tcp://127.0.0.1:*") -> Service:
        ready_path(self.run_dir, self._shard).unlink(missing_ok=True)
        self.process = self.spawn("serve", "--endpoint", endpoint, "--shard", str(self._shard))

        def is_ready() -> bool:
            assert self.process is not None
            assert self.process.poll() is None, self.process.communicate()[1]
            return ready_path(self.run_dir, self._shard).exists()

        eventually(is_ready, "vagen-buffer is ready")
        self.ready = read_ready(self.run_dir, self._shard)
        return self

    def restart(self) -> None:
        self.start(self.ready.endpoint)

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.communicate()

    def stop(self) -> int:
        assert self.process is not None
        self.process.send_signal(signal.SIGTERM)
        self.process.communicate(timeout=TIMEOUT_S)
        return self.process.returncode

    def audit(self, *args: str) -> tuple[int, str]:
        process = self.spawn("audit", *args)
        out, err = process.communicate(timeout=TIMEOUT_S)
        return process.returncode, out + err

    @property
    def valkey(self) -> EmbeddedValkey:
        """A handle on the embedded server, which the service started."""
        return EmbeddedValkey(self.run_dir / "buffer" / "valkey")

    def kill_valkey(self) -> None:
        """Kill the server, or once it answers, the one that is coming up after the last kill."""

        def pid() -> int | None:
            try:
                return self.valkey.pid
            except TRANSIENT:
                return None

        os.kill(eventually(pid, "a Valkey to kill"), signal.SIGKILL)

    def kill_all(self) -> None:
        """Everything at once, as far as one can; nothing of it runs on return."""
        pid = self.valkey.pid
        self.kill()  # first, or it would start another Valkey
        os.kill(pid, signal.SIGKILL)
        os.close(eventually(lambda: self.valkey._try_lock(), "the end of Valkey"))


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Callable[..., Service]]:
    """Starts a service; keywords are settings of section `buffer`."""
    services: list[Service] = []

    def make(environment: Mapping[str, str] | None = None, shard: int = 0, **buffer: Any) -> Service:
        services.append(Service(tmp_path, environment or {}, shard, **buffer))
        return services[-1].start()

    yield make
    for made in services:
        if made.process is not None and made.process.poll() is None:
            made.stop()
        made.valkey.stop()


@pytest.fixture
def learner(service: Callable[..., Service]) -> Callable[..., tuple[Service, LearnerStore]]:
    """A running service with a registered learner that has published version 1 at step 0; both are returned."""

    def make(**buffer: Any) -> tuple[Service, LearnerStore]:
        running = service(**buffer)
        store = LearnerStore.connect(running.ready.redis_url, "run", timeout_s=20)
        store.register("learner", step=0, batch_size=4, max_staleness=2)
        store.record_version(store.next_version(), "learner", 0, "checksum")
        return running, store

    return make


class Bench:
    """Both stores on one Valkey, with the clock in the test's hand."""

    def __init__(self, valkey: EmbeddedValkey, make: Callable[..., Trajectory], **config: Any) -> None:
        self.valkey = valkey
        self.config = BufferConfig(**config)
        self.store = IngestStore(valkey.url, "run", self.config)
        self.learner = LearnerStore.connect(valkey.url, "run", timeout_s=10)
        self.prioritizer = Prioritizer(self.config.priority)
        self.make = make
        self.now = time.time()
        self.seq = 0
        self.peers = 0

    def learn(self, step: int = 0, batch_size: int = 4, max_staleness: int = 2, **more: int) -> None:
        """A learner registers and publishes version `step + 1` of its step to an engine."""
        self.learner.register("learner", step=step, batch_size=batch_size, max_staleness=max_staleness, **more)
        self.publish(step)

    def publish(self, step: int) -> int:
        version = self.learner.next_version()
        self.learner.record_version(version, "learner", step, "checksum")
        return version

    def put(self, **fields: Any) -> Put:
        self.seq = fields.setdefault("actor_seq", self.seq + 1)
        request = self.read(self.make(**fields))
        assert isinstance(request, Put), request
        return request

    def read(self, trajectory: Trajectory) -> Any:
        """The request that the ingest makes of a trajectory's message."""
        envelope, payload = encode_trajectory(trajectory)
        frames = [memoryview(frame) for frame in (b"peer", Kind.PUT.value, envelope, payload)]
        return read_request(frames, "run", self.config.capacity_bytes, self.prioritizer)

    def commit(self, *requests: Any) -> list[Outcome]:
        return self.store.commit(requests, self.now).outcomes

    def bytes_in_redis(self, key: Key = Key.PAYLOAD) -> int:
        """Payload bytes that are really there."""
        client = make_client(self.valkey.url)
        return sum(client.strlen(name) for name in client.scan_iter(Keys("run").of(key, "*")))

    def store_one(self, **fields: Any) -> str:
        put = self.put(**fields)
        assert [outcome.verdict for outcome in self.commit(put)] == ["stored"]
        return put.trajectory_id

    def store_group(self, successes: str, **fields: Any) -> list[str]:
        """A whole group: `1` is a success of reward 1, `0` a failure of reward 0."""
        group = fields.pop("group_id", str(ULID()))
        size = fields.pop("group_size", len(successes))
        return [self.store_scored(one == "1", group_id=group, group_size=size, **fields) for one in successes]

    def store_scored(self, success: bool, reward: float | None = None, **fields: Any) -> str:
        """One trajectory of a total reward, that of its success by default."""
        value = float(success) if reward is None else reward
        return self.store_one(success=success, rewards=self.reward(value), **fields)

    def reward(self, value: float) -> tuple[RewardEntry, ...]:
        """Rewards of a total."""
        return (RewardEntry(component="task", row=0, token=9, value=value),)

    def selector(self, filters: Sequence[Any] = (), *, remind_s: float = 15.0, **config: Any) -> Selector:
        """A selector with its own connection; filters are names, or names with options."""
        pairs = [(entry, {}) if isinstance(entry, str) else entry for entry in filters]
        chosen = tuple(FilterConfig(name=name, options=options) for name, options in pairs)
        return Selector(self.learner, SelectionConfig(filters=chosen, **config), seed=0, remind_s=remind_s)

    def tick(self, after_s: float = 0.0) -> tuple[int, int, int]:
        self.now += after_s
        return self.store.tick(self.now, leases_end=True)


@pytest.fixture
def bench(valkey: EmbeddedValkey, make_trajectory: Callable[..., Trajectory]) -> Callable[..., Bench]:
    return lambda **config: Bench(valkey, make_trajectory, **config)


@pytest.fixture
def heartbeat() -> Callable[..., Heartbeat]:
    """A heartbeat of actor-0 that announces one engine."""

    def make(**fields: Any) -> Heartbeat:
        values: dict[str, Any] = {
            "run_id": "run",
            "actor_id": "actor-0",
            "incarnation": "first",
            "journalled": 0,
            "in_flight": 0,
            "engines": (EngineAnnouncement(url="http://engine", kind="local", incarnation="e1"),),
        }
        return Heartbeat(**(values | fields))

    return make


class TwoShards:
    """The ingests' stores of two shards on one Valkey and the learner's over both, at step 0 and version 1."""

    def __init__(self, valkey: EmbeddedValkey, make: Callable[..., Trajectory], **config: Any) -> None:
        self.url = valkey.url
        self.benches = [Bench(valkey, make, shards=2, **config) for _ in range(2)]
        self.places = [(make_client(valkey.url), Keys("run", Shard(index, 2))) for index in range(2)]
        for index, bench in enumerate(self.benches):
            bench.store = IngestStore(valkey.url, "run", bench.config, index)
            bench.store.announce()
        self.learner = connect_store(valkey.url, "run", num_shards=2)
        self.learner.register("learner", step=0, batch_size=4, max_staleness=2)
        self.learner.record_version(self.learner.next_version(), "learner", 0, "checksum")


@pytest.fixture
def two_shards(valkey: EmbeddedValkey, make_trajectory: Callable[..., Trajectory]) -> Callable[..., TwoShards]:
    return lambda **config: TwoShards(valkey, make_trajectory, **config)
