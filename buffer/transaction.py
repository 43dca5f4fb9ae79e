"""A MULTI/EXEC whose replies are read later, so that the caller works while the server executes and fsyncs."""

from __future__ import annotations

from typing import Any

from redis.client import Pipeline
from redis.exceptions import ConnectionError, ExecAbortError, ResponseError


class Transaction:
    """The commands of a pipeline, sent in one transaction; `replies` must be called, once."""

    def __init__(self, pipeline: Pipeline) -> None:
        """Send what is queued. Raises a `ConnectionError` or `TimeoutError` of redis-py; nothing is held then."""
        commands = [command for command, _ in pipeline.command_stack]
        self._pool: Any = pipeline.connection_pool
        self._num_commands = len(commands)
        self._num_queued = -1
        """Commands that the server has taken note of; before the first it answers MULTI."""
        self._refused: list[ResponseError] = []
        self._connection: Any = self._pool.get_connection()
        try:
            packed = self._connection.pack_commands([("MULTI",), *commands, ("EXEC",)])
            self._connection.send_packed_command(packed)
        except BaseException:
            self._give_up()
            raise

    def is_answered(self) -> bool:
        """Whether `replies` need not wait for the server, also because the connection has ended."""
        try:
            while self._connection.can_read(0):
                if self._num_queued == self._num_commands:
                    return True
                self._read_queued()
        except ConnectionError:
            return True  # `replies` meets it again
        return False

    def fileno(self) -> int:
        """Can be read whenever `is_answered` may have changed; only while that is false."""
        return int(self._connection._sock.fileno())

    def replies(self) -> list[Any]:
        """The replies as the server gave them, in order; an error of one command is its reply.

        Raises what the server says of a transaction that it does not execute, and a `ConnectionError` or
        `TimeoutError` when it does not answer: whether it took effect is unknown then.
        """
        try:
            while self._num_queued < self._num_commands:
                self._read_queued()
            replies: list[Any] = self._connection.read_response()
        except ExecAbortError:
            self._pool.release(self._connection)
            if self._refused:
                raise self._refused[0] from None
            raise
        except BaseException:
            self._give_up()
            raise
        self._pool.release(self._connection)
        assert len(replies) == self._num_commands, f"{len(replies)} replies to {self._num_commands} commands"
        return replies

    def _read_queued(self) -> None:
        try:
            self._connection.read_response()
        except ResponseError as error:
            self._refused.append(error)
        self._num_queued += 1

    def _give_up(self) -> None:
        # Whatever is left to be read must not be taken for the answer to something else.
        self._connection.disconnect()
        self._pool.release(self._connection)
