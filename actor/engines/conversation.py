"""A conversation that SGLang keeps (a session of its `/generate`): a turn sends only what the turns before did not.

    open -> a turn is answered -> another is answered -> ... -> close
                  | aborted, failed, not answered, or a prompt that does not go on from it
                  +-> left: whoever asks next opens another, with the whole prompt

SGLang keeps token ids and pictures, which it need not decode and preprocess again; its KV cache is where it is without
sessions, emptied by a publish as ever. Only turns that ended with all their tokens are built upon: SGLang 0.5.23 has
let go of an aborted turn's pictures, and its scheduler ends when a request with a picture goes on from one.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from vagen.actor.engines.http import EngineHttp
from vagen.actor.messages import Picture
from vagen.common.errors import EngineError

__all__ = ["Addition", "Conversation"]

logger = logging.getLogger(__name__)

_UNUSED_CAPACITY = 1
"""`capacity_of_str_len` is mandatory, and nothing in SGLang 0.5.23 reads it."""


@dataclass(frozen=True, slots=True)
class Addition:
    """What a request adds to a conversation: collapsed ids, and the images of their placeholders."""

    token_ids: Sequence[int]
    pictures: Sequence[Picture]
    session_params: Mapping[str, str | None]


class Conversation:
    """One session of one start of SGLang; one request at a time."""

    def __init__(self, http: EngineHttp, session_id: str) -> None:
        self.http = http
        self._session_id = session_id
        self._last_rid: str | None = None
        self._token_ids: list[int] = []
        self._pictures: tuple[Picture, ...] = ()

    @classmethod
    async def open(cls, http: EngineHttp, idle_s: float) -> Conversation:
        """A new one, which SGLang forgets `idle_s` after its last request began. Raises an `EngineError`."""
        body = {"capacity_of_str_len": _UNUSED_CAPACITY, "timeout": idle_s}
        return cls(http, http.decode(await http.call("POST", "/open_session", body), str))

    @property
    def is_begun(self) -> bool:
        """Whether a turn of it was answered."""
        return self._last_rid is not None

    def is_continued_by(self, token_ids: Sequence[int], pictures: Sequence[Picture]) -> bool:
        """Whether a prompt begins with all that was said here."""
        return (
            list(token_ids[: len(self._token_ids)]) == self._token_ids
            and tuple(pictures[: len(self._pictures)]) == self._pictures
        )

    def addition(self, token_ids: Sequence[int], pictures: Sequence[Picture]) -> Addition:
        """What is to be sent of a prompt that goes on from here."""
        return Addition(
            token_ids[len(self._token_ids) :],
            pictures[len(self._pictures) :],
            {"id": self._session_id, "rid": self._last_rid},
        )

    def note_answer(self, rid: str, token_ids: Sequence[int], pictures: Sequence[Picture]) -> None:
        """A request was answered in full: `token_ids` are its whole prompt and the answer."""
        self._last_rid = rid
        self._token_ids = list(token_ids)
        self._pictures = tuple(pictures)

    async def close(self) -> None:
        """Have SGLang forget it; best effort. No request of it may run: SGLang takes the pictures away under it."""
        try:
            await self.http.call("POST", "/close_session", {"session_id": self._session_id})
        except EngineError as error:
            logger.info("close of a conversation at %s: %s", self.http.url, error)
