"""`vagen buffer import`: conversations that other programs wrote, as trajectories of a model's own tokens.

One JSON object a line: `messages` as OpenAI's chat API has them, and optionally rewards. The project's renderer makes
the tokens and the actor's recorder the rows, so that an import looks like an episode played here; every assistant
message is a turn whose tokens count as the policy's. What sampled them is unknown: their log-probabilities are NaN and
their policy versions -1, which everything that needs an importance ratio refuses.
"""

from __future__ import annotations

import base64
import binascii
import io
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import xxhash
from PIL import Image
from ulid import ULID

from vagen.actor.client import Generation
from vagen.actor.messages import Conversation, Message, Picture, Response
from vagen.actor.recorder import Recorder
from vagen.actor.rendering import ChatRenderer
from vagen.buffer.archive.record import ArchivedTrajectory
from vagen.common.errors import ArchiveError, ObservationError, TrajectoryError
from vagen.common.trajectory import End, EngineIdentity, SamplingParams, Trajectory
from vagen.common.validation import validate_trajectory
from vagen.envs.base import ParsedResponse

__all__ = ["ChatImporter"]

Rewards = float | dict[str, float]
"""One number is a reward of the component `task`."""

_COMPONENT = "task"
_HARNESS = "concat"


class _Message(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    role: str
    content: str | list[dict[str, Any]]
    reward: Rewards = {}
    """Of an assistant's message, paid at its last token."""


class _Conversation(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    messages: list[_Message]
    id: str = ""
    """Kept as the engine's incarnation."""
    task: str = "imported"
    group: str = ""
    """Conversations of one group answer the same task."""
    reward: Rewards = {}
    """Final one, paid at the last token of the last assistant's message."""
    success: bool = False


class _OnlyGroup(msgspec.Struct, frozen=True):
    group: str = ""


class ChatImporter:
    """Reads JSON-lines files of conversations for one model."""

    def __init__(self, renderer: ChatRenderer, *, skip_invalid: bool = False, run_id: str = "imported") -> None:
        """`skip_invalid` leaves out lines that cannot be imported and collects them in `skipped`."""
        self._renderer = renderer
        self._skip_invalid = skip_invalid
        self._run_id = run_id
        self.skipped: list[str] = []
        """What was wrong with lines that were left out, with file and line."""

    def read(self, file: Path) -> Iterator[ArchivedTrajectory]:
        """The conversations of a file, one a line, in order.

        Raises `ArchiveError` that names file, line and field for one that cannot be imported.
        """
        sizes = self._group_sizes(file)
        for number, line in _lines(file):
            try:
                conversation = msgspec.json.decode(line, type=_Conversation)
                trajectory = self._trajectory(conversation, line, number, file.parent, sizes)
                validate_trajectory(trajectory, behaviour_known=False)
            except (msgspec.DecodeError, ObservationError, TrajectoryError) as error:
                problem = f"{file}:{number}: {error}"
                if not self._skip_invalid:
                    raise ArchiveError(problem) from None
                self.skipped.append(problem)
            else:
                yield ArchivedTrajectory(trajectory=trajectory)

    def _group_sizes(self, file: Path) -> Counter[str]:
        sizes: Counter[str] = Counter()
        for _, line in _lines(file):
            try:
                sizes[msgspec.json.decode(line, type=_OnlyGroup).group] += 1
            except msgspec.DecodeError:
                continue  # the line's own turn comes
        return sizes

    def _trajectory(
        self, chat: _Conversation, line: bytes, number: int, folder: Path, sizes: Mapping[str, int]
    ) -> Trajectory:
        recorder, conversation = self._record(chat, folder)
        prompt = self._renderer.render(conversation) if conversation and isinstance(conversation[-1], Message) else None
        # The same line for the same tokenizer is the same trajectory: imported twice, it is known.
        name = str(ULID(xxhash.xxh3_128_digest(self._renderer.tokenizer_hash.encode() + line)))
        return Trajectory(
            trajectory_id=name,
            run_id=self._run_id,
            actor_id="import",
            actor_seq=number,
            episode_id=name,
            task=chat.task,
            task_index=number - 1,
            seed=0,
            group_id=chat.group or name,
            group_size=sizes[chat.group] if chat.group else 1,
            env_name="imported",
            harness_name=_HARNESS,
            splits_episode_across_rows=False,
            sampling=SamplingParams(),
            engine=EngineIdentity(
                kind="imported",
                incarnation=chat.id,
                model_hash=self._renderer.model_hash,
                tokenizer_hash=self._renderer.tokenizer_hash,
            ),
            vision=self._renderer.vision,
            rows=recorder.rows(),
            turns=recorder.turns(),
            rewards=recorder.rewards(),
            end=End.TERMINATED if prompt is None else End.TRUNCATED,
            bootstrap=None if prompt is None else recorder.bootstrap(prompt),
            success=chat.success,
            images=recorder.images(prompt),
        )

    def _record(self, chat: _Conversation, folder: Path) -> tuple[Recorder, Conversation]:
        """The turns of a conversation, and all of it as the renderer takes it."""
        recorder = Recorder(self._renderer)
        conversation: list[Message | Response] = []
        turns = [index for index, message in enumerate(chat.messages) if message.role == "assistant"]
        if not turns:
            raise TrajectoryError("messages", "no assistant's message, nothing to learn from")
        for index, message in enumerate(chat.messages):
            path = f"messages[{index}]"
            if message.role != "assistant":
                if message.reward != {}:
                    raise TrajectoryError(f"{path}.reward", f"only assistants are rewarded, not {message.role}")
                conversation.append(Message(message.role, tuple(_parts(message.content, folder, path))))
                continue
            if not conversation or isinstance(conversation[-1], Response):
                raise TrajectoryError(path, "an assistant's message without a message to answer before it")
            ids = self._renderer.encode_response(_text(message.content, path))
            recorder.add_response(self._renderer.render(tuple(conversation)), _written(ids))
            reward = _sum(message.reward, chat.reward if index == turns[-1] else {})
            recorder.add_outcome(ParsedResponse(format_ok=True, action_valid=True, actions=()), reward, {}, 0.0)
            conversation.append(Response(tuple(ids)))
        return recorder, tuple(conversation)


def _written(ids: list[int]) -> Generation:
    """A response of which nobody knows what sampled it."""
    unknown = [float("nan")] * len(ids)
    return Generation(token_ids=ids, logprobs=unknown, versions=[-1] * len(ids), finish_reason="stop", engine_s=0.0)


def _sum(*rewards: Rewards) -> dict[str, float]:
    """By component."""
    total: dict[str, float] = {}
    for reward in rewards:
        for component, value in (reward if isinstance(reward, dict) else {_COMPONENT: reward}).items():
            total[component] = total.get(component, 0.0) + value
    return total


def _lines(file: Path) -> Iterator[tuple[int, bytes]]:
    """Lines that are not blank, with their number from 1."""
    try:
        with file.open("rb") as stream:
            yield from ((number, line) for number, line in enumerate(stream, start=1) if line.strip())
    except OSError as error:
        raise ArchiveError(f"{file}: cannot be read: {error.strerror}") from error


def _text(content: str | list[dict[str, Any]], path: str) -> str:
    if isinstance(content, str):
        return content
    texts = [part.get("text") for part in content if part.get("type") == "text"]
    if len(texts) != len(content) or not all(isinstance(text, str) for text in texts):
        raise TrajectoryError(f"{path}.content", "an assistant's message may hold text only")
    return "".join(str(text) for text in texts)


def _parts(content: str | list[dict[str, Any]], folder: Path, path: str) -> Iterator[str | Picture]:
    if isinstance(content, str):
        yield content
        return
    for index, part in enumerate(content):
        where = f"{path}.content[{index}]"
        match part:
            case {"type": "text", "text": str(text)}:
                yield text
            case {"type": "image_url", "image_url": {"url": str(url)}} | {"type": "image", "image": str(url)}:
                yield _picture(url, folder, where)
            case _:
                raise TrajectoryError(
                    where, 'expected {"type": "text", "text": ..} or {"type": "image_url", "image_url": {"url": ..}}'
                )


def _picture(url: str, folder: Path, where: str) -> Picture:
    encoded = _image_bytes(url, folder, where)
    try:
        with Image.open(io.BytesIO(encoded)) as image:
            return Picture(encoded, image.size)
    except OSError as error:
        raise TrajectoryError(where, f"is no picture: {error}") from None


def _image_bytes(url: str, folder: Path, where: str) -> bytes:
    if url.startswith("data:"):
        head, comma, body = url.partition(",")
        if not comma or not head.endswith(";base64"):
            raise TrajectoryError(where, "expected a data URL in base64")
        try:
            return base64.b64decode(body, validate=True)
        except binascii.Error as error:
            raise TrajectoryError(where, f"not base64: {error}") from None
    if "://" in url and not url.startswith("file://"):
        raise TrajectoryError(where, f"expected a data URL or a path, nothing is fetched from {url[:64]!r}")
    path = folder / url.removeprefix("file://")
    try:
        return path.read_bytes()
    except OSError as error:
        raise TrajectoryError(where, f"{path}: {error.strerror}") from None
