"""A transaction is sent at once and answered later: what comes back, and what is left of the connection."""

from __future__ import annotations

import os
import signal

import pytest
from redis.exceptions import ConnectionError, ResponseError

from vagen.buffer.connection import make_client
from vagen.buffer.transaction import Transaction


@pytest.fixture
def client(valkey):
    client = make_client(valkey.url)
    yield client
    client.close()


def queue(client, *commands):
    pipe = client.pipeline(transaction=True)
    for command in commands:
        pipe.execute_command(*command)
    return pipe


def test_it_returns_while_the_server_does_not_answer(valkey, client, eventually):
    pid = valkey.pid
    client.ping()
    os.kill(pid, signal.SIGSTOP)
    try:
        transaction = Transaction(queue(client, ("SET", "k", memoryview(b"v")), ("GET", "k")))
        assert not transaction.is_answered()
    finally:
        os.kill(pid, signal.SIGCONT)
    eventually(transaction.is_answered, "an answer")
    assert transaction.replies() == [b"OK", b"v"]


def test_a_server_that_has_only_taken_note_has_not_answered(valkey, client, eventually):
    """Large commands come in over several turns of the server's loop, each of which answers what was queued."""
    pid = valkey.pid
    first = Transaction(queue(client, *(("SET", f"k{i}", memoryview(bytes(1 << 20))) for i in range(20))))
    eventually(first.is_answered, "an answer")
    os.kill(pid, signal.SIGSTOP)
    try:
        assert first.replies() == [b"OK"] * 20, "without any wait for the server"
    finally:
        os.kill(pid, signal.SIGCONT)


def test_an_error_of_one_command_is_its_reply(client):
    replies = Transaction(queue(client, ("SET", "k", "v"), ("LPUSH", "k", "x"), ("GET", "k"))).replies()
    assert replies[0] == b"OK" and isinstance(replies[1], ResponseError) and replies[2] == b"v"


def test_what_is_not_executed_is_raised_and_the_connection_goes_on(client):
    transaction = Transaction(queue(client, ("SET", "k", "v"), ("NONSENSE",)))
    with pytest.raises(ResponseError, match="unknown command"):
        transaction.replies()
    assert client.get("k") is None
    assert Transaction(queue(client, ("PING",))).replies() == [b"PONG"]


def test_a_server_that_dies_leaves_no_reply_to_be_taken_for_another(valkey, client):
    pid = valkey.pid
    client.ping()
    os.kill(pid, signal.SIGSTOP)
    transaction = Transaction(queue(client, ("SET", "k", "v")))
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(ConnectionError):
        transaction.replies()
    valkey.start()
    assert client.get("k") is None
    assert Transaction(queue(client, ("PING",))).replies() == [b"PONG"]
