"""Redis behind a login and TLS: one run's user works on that run alone, and passwords are shown nowhere."""

from __future__ import annotations

import hashlib
import logging
import re
import shutil
import socket
import subprocess
import time
from pathlib import Path
from urllib.parse import quote

import msgspec
import pytest
import redis

from vagen.buffer import acl
from vagen.buffer.accounting import audit
from vagen.buffer.address import PASSWORD_VARIABLE, public_url, resolve_password, with_options
from vagen.buffer.config import BufferConfig
from vagen.buffer.connection import first_contact, make_client, run_script
from vagen.buffer.keys import Key, Keys
from vagen.buffer.learner_store import LearnerStore
from vagen.buffer.lua import source
from vagen.buffer.requests import Ask, Beat, Failure, Put, read_request
from vagen.buffer.settings import change_settings, read_changes
from vagen.buffer.store import IngestStore
from vagen.common.config import section
from vagen.common.errors import ConfigError, TrajectoryError, VagenError
from vagen.common.logging import setup_logging
from vagen.common.redaction import redact
from vagen.common.wire import CreditRequest, EpisodeFailed, Kind, encode_trajectory

PASSWORD = "p:w/with@odd?#%signs"


def openssl(folder, *words):
    subprocess.run(["openssl", *map(str, words)], cwd=folder, check=True, capture_output=True, timeout=60)


@pytest.fixture(scope="module")
def certificates(tmp_path_factory):
    """An authority, and what it signed for a server at 127.0.0.1 and for a client."""
    folder = tmp_path_factory.mktemp("certificates")
    new_key = ("-newkey", "rsa:2048", "-nodes")
    openssl(folder, "req", "-x509", *new_key, "-keyout", "ca.key", "-out", "ca.crt", "-days", 2, "-subj", "/CN=test")
    (folder / "san").write_text("subjectAltName=IP:127.0.0.1\n")
    for name in ("server", "client"):
        openssl(folder, "req", *new_key, "-keyout", f"{name}.key", "-out", f"{name}.csr", "-subj", f"/CN={name}")
        sign = ("-CA", "ca.crt", "-CAkey", "ca.key", "-CAcreateserial", "-days", 2, "-extfile", "san")
        openssl(folder, "x509", "-req", "-in", f"{name}.csr", "-out", f"{name}.crt", *sign)
    return folder


class SecureRedis:
    """A redis-server that takes TLS with client certificates only, and whose default user can nothing."""

    def __init__(self, folder, certificates):
        binary = shutil.which("redis-server")
        if binary is None:
            pytest.skip("this machine has no redis-server")
        self.certificates = certificates
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        folder.mkdir()
        conf = folder / "redis.conf"
        files = {"cert-file": "server.crt", "key-file": "server.key", "ca-cert-file": "ca.crt"}
        conf.write_text(
            f'port 0\ntls-port {self.port}\nbind 127.0.0.1\ndir "{folder}"\nsave ""\nappendonly yes\n'
            "appendfsync always\nuser default off\nuser admin on >admin ~* &* +@all\n"
            + "".join(f'tls-{name} "{certificates / file}"\n' for name, file in files.items())
        )
        self.process = subprocess.Popen([binary, str(conf)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        self.admin = make_client(self.config("admin:admin").redis_address)
        first_contact(self.admin, "admin", 30.0)

    def config(self, login, **fields):
        files = {
            name: str(self.certificates / file)
            for name, file in (
                ("redis_ca_file", "ca.crt"),
                ("redis_cert_file", "client.crt"),
                ("redis_key_file", "client.key"),
            )
        }
        options = {"redis_url": f"rediss://{login}@127.0.0.1:{self.port}/0", **files, **fields}
        return section({"buffer": {k: v for k, v in options.items() if v is not None}}, "buffer", BufferConfig)

    def add_user(self, run, password=PASSWORD):
        self.admin.execute_command(*acl.acl_line(run, password).split())

    def close(self):
        self.admin.close()
        self.process.terminate()
        self.process.wait(30)


@pytest.fixture
def secure(tmp_path, certificates):
    server = SecureRedis(tmp_path / "secure", certificates)
    yield server
    server.close()


@pytest.fixture
def password_file(tmp_path):
    file = tmp_path / "redis.password"
    file.write_text(PASSWORD + "\n")
    return str(file)


def arrive(trajectory):
    """A put as the ingest reads it."""
    frames = (b"p", Kind.PUT.value, *encode_trajectory(trajectory))
    return read_request([memoryview(frame) for frame in frames], "run", 1 << 30)


def play(address, config, make, heartbeat):
    """Uses everything that buffer and learner ask of Redis at least once."""
    store, learner = IngestStore(address, "run", config), LearnerStore.connect(address, "run", timeout_s=10)
    now = time.time()
    store.ping()
    store.check_durability()
    store.announce()
    learner.register("learner", step=0, batch_size=2, max_staleness=2)
    learner.record_version(learner.next_version(), "learner", 0, "checksum")
    assert learner.version_steps([1]) == {1: 0}
    store.commit([Beat(b"p", heartbeat())], now)
    assert learner.engines() and learner.admit_engine("http://engine", "e1", 1)
    ask = Ask(b"p", CreditRequest(run_id="run", actor_id="actor-0", want=3))
    (granted,) = store.commit([ask], now).outcomes
    assert len(granted.tasks) == 3
    failed = EpisodeFailed(run_id="run", actor_id="actor-0", task_index=2, attempt=0, error="x")
    store.commit([Failure(b"p", failed), ask], now)
    requests = []
    for seq in range(1, 9):
        group = {"group_id": "g", "group_size": 2} if seq in (3, 4) else {}
        group |= {"version": 9} if seq == 5 else {"run_id": "other"} if seq == 6 else {}
        requests.append(arrive(make(actor_seq=seq, task_index=seq - 1, **group)))
    requests.append(read_request([memoryview(b"p"), memoryview(b"?")], "run", 1 << 30))
    assert store.fitting([request for request in requests if isinstance(request, Put)]) == [True] * 7
    verdicts = [outcome.verdict for outcome in store.commit([*requests, requests[0]], now).outcomes]
    assert verdicts == ["stored"] * 4 + ["refused"] * 2 + ["stored"] * 2 + ["ok", "duplicate"]
    store.tick(now + 1e6, leases_end=True)
    store.renew_all(now)
    manifest = learner.claim(0, 2, 0)
    assert manifest is not None and learner.fetch(manifest.ids)
    learner.mark_trained(0)
    assert learner.done([0]) == len(manifest.ids)
    assert learner.claim(5, 4, 0) is None, "the others are stale by then"
    assert learner.claim(1, 1, 0.05) is None
    learner.record_version(learner.next_version(), "learner", 5, "checksum")
    store.commit([arrive(make(version=2, actor_seq=9))], now)
    assert learner.claim(7, 1, 1.0) is not None
    learner.rollback(0)
    client = make_client(address)
    change_settings(client, Keys("run"), {"max_running": 9}, "test")
    assert [change.new for change in read_changes(client, Keys("run"))] == [9]
    learner.withdraw_engine("http://engine", "e1")
    assert learner.status().capacity_bytes and learner.accounting().trained == len(manifest.ids)


def test_listed_commands_are_enough(secure, password_file, make_trajectory, heartbeat, caplog):
    secure.add_user("run")
    config = secure.config("vagen-run", redis_password_file=password_file)
    secure.admin.config_resetstat()
    with caplog.at_level(logging.ERROR):
        play(config.redis_address, config, make_trajectory, heartbeat)
        audit(config.redis_address, "run")
    assert "Redis refused" not in caplog.text
    stats = secure.admin.info("commandstats")
    used = {name.removeprefix("cmdstat_") for name, stat in stats.items() if stat["calls"] > stat["rejected_calls"]}
    handshake = {name for name in used if name.startswith(("client|", "config|", "hello", "auth", "info"))}
    assert used - handshake <= set(acl.commands())
    denied = {name.removeprefix("cmdstat_") for name, stat in stats.items() if stat["rejected_calls"]}
    assert denied <= {"config|get", "client|setinfo", "client|maint_notifications"}


def test_every_command_that_a_client_sends_is_listed_and_no_other():
    """Calls of a pipeline or a client in the buffer's code, but for the embedded server's own."""
    called = set()
    for file in Path(acl.__file__).parent.rglob("*.py"):
        if file.name != "server.py":
            called |= set(re.findall(r"\b_?(?:pipe|client)\.([a-z_]+)\b", file.read_text()))
    plumbing = {"close", "execute", "pipeline", "execute_command", "config_get"}
    names = {"script_load": "script|load", "incr": "incrby"}
    sent = {names.get(call, call) for call in called - plumbing}
    assert sent <= set(acl.commands())
    assert acl.CLIENT_COMMANDS - sent == {"multi", "exec"}, "which a transaction sends by itself"


def test_user_of_another_run_sees_and_changes_nothing(secure, password_file, make_trajectory, heartbeat):
    for run in ("run", "other"):
        secure.add_user(run)
    config = secure.config("vagen-run", redis_password_file=password_file)
    play(config.redis_address, config, make_trajectory, heartbeat)
    before = dump(secure.admin)
    stranger = make_client(secure.config("vagen-other", redis_password_file=password_file).redis_address)
    keys = Keys("run")
    for name in acl.script_names():
        with pytest.raises(redis.exceptions.NoPermissionError):
            run_script(stranger, keys, name, *["1"] * 12)
        with pytest.raises(redis.exceptions.ResponseError, match="can't access at least one of the keys"):
            inside = source(name).text.replace("KEYS[1]", f"'{keys.prefix}'")
            stranger.eval(inside, 1, Keys("other").prefix, *["1"] * 12)
    key = keys[Key.STAT]
    keyless = {"ping", "multi", "exec", "script|load", "eval", "evalsha", "evalsha_ro", "cluster|slots", "time"}
    for command in sorted(set(acl.commands()) - keyless):
        (spec,) = secure.admin.execute_command("COMMAND", "INFO", command).values()
        arguments = [key, *["1"] * (abs(spec["arity"]) - 2)]
        with pytest.raises(redis.exceptions.NoPermissionError):
            stranger.execute_command(command, *arguments)
    for command in ("KEYS *", "SCAN 0", "FLUSHALL", "CONFIG GET *", "ACL LIST", "MONITOR", "SHUTDOWN", "SCRIPT FLUSH"):
        with pytest.raises(redis.exceptions.NoPermissionError):
            stranger.execute_command(*command.split())
    assert dump(secure.admin) == before


def dump(admin):
    return {key: admin.dump(key) for key in admin.scan_iter("*")}


def test_wrong_or_missing_password_is_a_config_error_that_says_whence(secure, monkeypatch, tmp_path):
    secure.add_user("run")
    wrong = tmp_path / "wrong"
    wrong.write_text("guess")
    cases = [
        (secure.config("vagen-run", redis_password_file=str(wrong)), str(wrong)),
        (secure.config("vagen-run:guess"), "the password in the URL"),
        (secure.config("vagen-run"), "no password; set buffer.redis_password_file or VAGEN_REDIS_PASSWORD"),
    ]
    for config, message in cases:
        with pytest.raises(ConfigError, match="refused the login") as caught:
            LearnerStore.connect(config.redis_address, "run")
        assert message in str(caught.value) and "guess" not in str(caught.value)
    monkeypatch.setenv(PASSWORD_VARIABLE, PASSWORD)
    LearnerStore.connect(secure.config("vagen-run").redis_address, "run").close()


def test_certificates_that_do_not_fit_are_a_config_error(secure, password_file, certificates):
    secure.add_user("run")
    strange_authority = {"redis_ca_file": str(certificates / "server.crt")}
    no_certificate = {"redis_cert_file": None, "redis_key_file": None}
    for fields in (strange_authority, no_certificate):
        config = secure.config("vagen-run", redis_password_file=password_file, **fields)
        started = time.monotonic()
        with pytest.raises(ConfigError, match="TLS with .* failed"):
            LearnerStore.connect(config.redis_address, "run")
        assert time.monotonic() - started < 5


def test_service_and_audit_over_tls_show_no_password(secure, service, connect, heartbeat, password_file, tmp_path):
    secure.add_user("run")
    config = secure.config(f"vagen-run:{quote(PASSWORD, safe='')}")
    running = service(**{k: v for k, v in msgspec.to_builtins(config).items() if k.startswith("redis_") and v})
    client = connect(running.ready.endpoint)
    assert client.ask(heartbeat()).reason == ""
    code, out = running.audit()
    assert code == 0, "the recipe has the password that ready.json lacks: " + out
    running.stop()
    written = [out, *(path.read_text() for path in (tmp_path / "buffer").iterdir() if path.is_file())]
    assert any("rediss://vagen-run@127.0.0.1" in text for text in written)
    for text in written:
        assert PASSWORD not in text and quote(PASSWORD, safe="") not in text


SECRET = "hunter2@/:x"


def test_no_error_and_no_log_line_shows_the_password_of_a_url(tmp_path, capsys):
    urls = [f"redis://user:{SECRET}@host:1/0", f"rediss://:{SECRET}@host", f"unix:///x.sock?password={SECRET}&db=1"]
    for url in urls:
        for kind in every_error():
            error = kind("field", url) if kind is TrajectoryError else kind(f"no {url} here")
            assert "hunter2" not in str(error) and "***" in str(error)
        setup_logging("INFO", tmp_path / "log")
        try:
            raise RuntimeError(f"at {url}, x@y")
        except RuntimeError:
            logging.getLogger("somebody").exception("lost %s", url)
    logged = (tmp_path / "log").read_text() + capsys.readouterr().err
    assert "hunter2" not in logged
    assert logged.count("***") == len(urls) * 2 * 2, "message and traceback, in the file and on stderr"


def every_error(kind=VagenError):
    yield kind
    for inner in kind.__subclasses__():
        yield from every_error(inner)


@pytest.mark.parametrize("url", [f"http://u:{SECRET}@h", f"redis://u:{SECRET}@h", "redis://u:hunter2@h:port"])
def test_bad_url_is_refused_without_its_password(url):
    with pytest.raises(ConfigError, match=r"\$.buffer.redis_url") as caught:
        make_client(section({"buffer": {"redis_url": url}}, "buffer", BufferConfig).redis_address)
    assert "hunter2" not in str(caught.value)


def test_redaction_leaves_other_text_alone():
    text = "tcp://127.0.0.1:5600: refused, mail a@b; redis://user@host:6379/0?password_file=/x&db=1"
    assert redact(text) == text


def test_addresses(monkeypatch, tmp_path):
    file = tmp_path / "p"
    file.write_text("secret\n")
    assert public_url("redis://u:p@h:1/0?password=x&db=2") == "redis://u@h:1/0?db=2"
    assert public_url("unix:///a/b.sock") == "unix:///a/b.sock"
    full = with_options("redis://u@h", password_file=str(file), ssl_ca_certs=None)
    assert full == f"redis://u@h?password_file={file}"
    assert resolve_password(full) == ("redis://u@h", "secret")
    monkeypatch.setenv(PASSWORD_VARIABLE, "other")
    assert resolve_password(full) == ("redis://u@h", "secret"), "the file goes before the environment"
    assert resolve_password("redis://u@h") == ("redis://u@h", "other")
    assert resolve_password("redis://u:p@h") == ("redis://u:p@h", None)
    assert resolve_password("unix:///embedded.sock")[1] is None
    file.write_text("\n")
    with pytest.raises(ConfigError, match="empty first line"):
        resolve_password(full)
    config = section({"buffer": {"redis_url": "redis://u:p@h", "redis_password_file": None}}, "buffer", BufferConfig)
    assert config.complete("redis://u@h") == "redis://u:p@h", "the recipe's own"
    assert config.complete("redis://u@elsewhere") == "redis://u@elsewhere"
    assert BufferConfig(redis_password_file="/x").complete("unix:///embedded.sock") == "unix:///embedded.sock"


def test_acl_line_holds_no_password_and_names_every_shard():
    line = acl.acl_line("a", "secret", shards=2)
    assert "secret" not in line and hashlib.sha256(b"secret").hexdigest() in line
    assert line.count(" ~vagen:{a/") == 2
    with pytest.raises(ConfigError, match="run.name"):
        acl.acl_line("a* ~*", "secret")
