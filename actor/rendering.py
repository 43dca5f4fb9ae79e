"""Conversation -> token ids: the chat template, the tokenizer, and the bookkeeping of image placeholders.

Token in, token out: sampled ids pass through untouched, and the template is rendered only for the *edges* between
them. Ids come in two forms. **Collapsed** ids hold one placeholder per image: what an engine takes. **Expanded** ids
hold as many as the image has tokens: what a row of a trajectory holds.

Uses `tokenizers` and `jinja2` directly, as transformers does underneath: importing transformers' tokenizers imports
torch, which an actor has no use for. A test holds both to the same ids.
"""

from __future__ import annotations

import bisect
import json
import re
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
import numpy as np
import xxhash
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from vagen.actor.messages import Conversation, Message, Picture
from vagen.common.errors import ConfigError, ObservationError
from vagen.common.grids import AnyGeometry, image_geometry
from vagen.common.trajectory import ImageRef, VisionTokens
from vagen.common.vocabulary import image_brackets, read_model_json, vision_tokens

_RESPONSE_MARK = "\ue000response\ue001"
_CACHE_ENTRIES = 4096

_Shape = tuple[tuple[str, tuple[str | None, ...]], ...]
"""Messages with None for a picture: what decides the ids of a rendering."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """What a conversation looks like to the engine: collapsed ids and the images of their placeholders, in order."""

    token_ids: list[int]
    pictures: tuple[Picture, ...]
    conversation: Conversation = field(default=(), compare=False, repr=False)
    """What was rendered, for servers that render it themselves."""


class ChatRenderer:
    """Renders conversations for one model. Not thread-safe; belongs to the event loop."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        chat_template: str,
        *,
        special_tokens: dict[str, str],
        stop_token_ids: Sequence[int] = (),
        vision: VisionTokens | None = None,
        geometry: AnyGeometry | None = None,
        image_brackets: tuple[str, str, str] | None = None,
        tokenizer_hash: str = "",
        model_hash: str = "",
    ) -> None:
        """`special_tokens` are the template's variables (`bos_token`, `eos_token`). `image_brackets` are what stands
        around an image and is not in the template (see `vagen.common.vocabulary.image_brackets`).

        Raises `ConfigError` for a template that does not end an assistant's message with one special token.
        """
        self.vision = vision
        self.geometry = geometry
        self.tokenizer_hash = tokenizer_hash
        self.model_hash = model_hash
        self._tokenizer = tokenizer
        self._template = _compile(chat_template)
        self._special_tokens = special_tokens
        self._image_brackets = image_brackets
        added = tokenizer.get_added_tokens_decoder()
        names = sorted((token.content for token in added.values() if token.special), key=len, reverse=True)
        self._control = re.compile("|".join(map(re.escape, names)) or "(?!)")
        self._special_ids = frozenset(index for index, token in added.items() if token.special)
        self._cache: OrderedDict[tuple[bool, _Shape], tuple[int, ...]] = OrderedDict()
        edge = self._encode_edge((("user", ("x",)),))
        if not edge or edge[0] not in self._special_ids:
            raise ConfigError(
                "chat template: expected a special token at the end of an assistant's message, found none"
            )
        self.end_of_turn_id = edge[0]
        self.stop_token_ids = tuple(dict.fromkeys((self.end_of_turn_id, *stop_token_ids)))
        """The policy's own end-of-turn tokens, passed to the engine so that all engines stop alike."""

    @classmethod
    def load(cls, model_dir: str | Path) -> ChatRenderer:
        """Read tokenizer, template and vision vocabulary of a Hugging Face model folder.

        Raises `ConfigError` naming the file that is missing or malformed.
        """
        folder = Path(model_dir)
        if not folder.is_dir():
            raise ConfigError(f"{folder}: no such model folder")
        config = read_model_json(folder / "config.json")
        settings = read_model_json(folder / "tokenizer_config.json")
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise ConfigError(f"{path}: no such file; a fast tokenizer is needed")
        tokenizer = Tokenizer.from_file(str(path))
        template = _find_template(folder, settings)
        vision = vision_tokens(folder)
        geometry = image_geometry(folder) if vision else None
        if vision and geometry and vision.merge_size != geometry.merge_size:
            raise ConfigError(
                f"{folder}: spatial_merge_size {vision.merge_size} of config.json differs from merge_size "
                f"{geometry.merge_size} of preprocessor_config.json"
            )
        return cls(
            tokenizer,
            template,
            special_tokens={key: _token_text(settings[key]) for key in ("bos_token", "eos_token") if settings.get(key)},
            stop_token_ids=_eos_ids(folder, config),
            vision=vision,
            geometry=geometry,
            image_brackets=image_brackets(folder) if vision else None,
            tokenizer_hash=xxhash.xxh3_128_hexdigest(path.read_bytes() + template.encode()),
            model_hash=xxhash.xxh3_128_hexdigest((folder / "config.json").read_bytes()),
        )

    def render(self, conversation: Conversation) -> Prompt:
        """The prompt that asks for the next response.

        Raises `ObservationError` for control tokens in a text, or for pictures that the model cannot take.
        """
        ids: list[int] = []
        pictures: list[Picture] = []
        pending: list[Message] = []
        for item in conversation:
            if isinstance(item, Message):
                pending.append(item)
                pictures.extend(item.pictures)
                continue
            ids += self._edge(ids, pending)
            ids += item.token_ids
            pending = []
        ids += self._edge(ids, pending)
        if pictures and self.vision is None:
            raise ObservationError(f"{len(pictures)} pictures for a model without vision")
        found = ids.count(self.vision.image_token_id) if self.vision else 0
        if found != len(pictures):
            raise ObservationError(f"chat template made {found} placeholders of {len(pictures)} pictures")
        return Prompt(ids, tuple(pictures), conversation)

    def encode_response(self, text: str) -> list[int]:
        """A written response as if the policy had sampled it, its end-of-turn token included.

        Raises `ObservationError` for control tokens in the text.
        """
        self._check_texts((text,))
        return [*self._encode(text), self.end_of_turn_id]

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of a response, without special tokens."""
        text: str = self._tokenizer.decode(list(token_ids), skip_special_tokens=True)
        return text

    def num_tokens_spelling(self, token_ids: Sequence[int], num_characters: int) -> int:
        """The fewest leading tokens of a response whose text begins with its first `num_characters` characters.

        Exact for the ids as sampled, which their text need not encode to: prefixes of the ids are decoded, nothing is
        encoded. A token may end inside a character of several bytes, which then decodes to a replacement; so the last
        character wanted must be ASCII.
        """
        wanted = self.decode(token_ids)[:num_characters]

        def spells(count: int) -> bool:
            return self.decode(token_ids[:count]).startswith(wanted)

        return bisect.bisect_left(range(len(token_ids)), True, key=spells)

    def picture_tokens(self, picture: Picture) -> int:
        """Placeholders that a picture takes in a row."""
        geometry = self._require_geometry()
        return geometry.num_tokens(geometry.grid_thw(picture.size))

    def expanded_length(self, prompt: Prompt) -> int:
        """Tokens of the prompt once its placeholders are expanded."""
        return len(prompt.token_ids) + sum(self.picture_tokens(picture) - 1 for picture in prompt.pictures)

    def expand(
        self, token_ids: Sequence[int], pictures: Sequence[Picture], offset: int = 0
    ) -> tuple[list[int], list[ImageRef]]:
        """Expanded ids of collapsed ones, and where the images went; `offset` is the row's length so far."""
        if not pictures:
            return list(token_ids), []
        assert self.vision is not None
        geometry = self._require_geometry()
        expanded: list[int] = []
        refs: list[ImageRef] = []
        left = iter(pictures)
        for token in token_ids:
            if token != self.vision.image_token_id:
                expanded.append(token)
                continue
            picture = next(left)
            grid = geometry.grid_thw(picture.size)
            count = geometry.num_tokens(grid)
            refs.append(
                ImageRef(
                    content_hash=picture.content_hash, grid_thw=grid, start=offset + len(expanded), num_tokens=count
                )
            )
            expanded.extend([token] * count)
        assert len(refs) == len(pictures), f"{len(refs)} placeholders for {len(pictures)} pictures"
        return expanded, refs

    def _require_geometry(self) -> AnyGeometry:
        if self.geometry is None:
            raise ObservationError("a picture for a model without vision")
        return self.geometry

    def _edge(self, ids: list[int], messages: list[Message]) -> Sequence[int]:
        """Ids from the end of the last response (or from nothing) to the start of the next one."""
        shape = tuple(
            (message.role, tuple(part if isinstance(part, str) else None for part in message.parts))
            for message in messages
        )
        is_edge = bool(ids)
        key = (is_edge, shape)
        rendered = self._cache.get(key)
        if rendered is None:
            for _, parts in shape:
                self._check_texts(parts)
            rendered = tuple(self._encode_edge(shape) if is_edge else self._encode(self._apply(_as_chat(shape))))
            self._cache[key] = rendered
            if len(self._cache) > _CACHE_ENTRIES:
                self._cache.popitem(last=False)
        else:
            self._cache.move_to_end(key)
        # A response that stopped by itself holds its end-of-turn token; one that ran out of budget does not, and then
        # the template's, which the policy did not sample, closes it.
        return rendered[1:] if is_edge and ids[-1] == self.end_of_turn_id else rendered

    def _encode_edge(self, shape: _Shape) -> list[int]:
        chat = [
            {"role": "user", "content": "x"},
            {"role": "assistant", "content": _RESPONSE_MARK},
            *_as_chat(shape),
        ]
        before, mark, edge = self._apply(chat).rpartition(_RESPONSE_MARK)
        if not mark or not before:
            raise ConfigError("chat template: does not show an assistant's message as it is")
        return self._encode(edge)

    def _apply(self, chat: list[dict[str, Any]]) -> str:
        try:
            text = self._template.render(messages=chat, add_generation_prompt=True, **self._special_tokens)
        except jinja2.TemplateError as error:
            raise ConfigError(f"chat template: {error}") from error
        # No text of a message holds the placeholder, which is a control token.
        return (
            text
            if self._image_brackets is None
            else text.replace(self._image_brackets[1], "".join(self._image_brackets))
        )

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def _check_texts(self, parts: tuple[str | None, ...]) -> None:
        for part in parts:
            found = self._control.search(part) if part is not None else None
            if found:
                raise ObservationError(f"text of a message holds the control token {found[0]!r}")


def collapse(token_ids: Sequence[int] | np.ndarray, images: Sequence[ImageRef]) -> list[int]:
    """Inverse of `ChatRenderer.expand`: one placeholder for each image."""
    ids = [int(token) for token in token_ids]
    for image in sorted(images, key=lambda image: image.start, reverse=True):
        del ids[image.start + 1 : image.start + image.num_tokens]
    return ids


def _as_chat(shape: _Shape) -> list[dict[str, Any]]:
    chat: list[dict[str, Any]] = []
    for role, parts in shape:
        if None in parts:
            content: Any = [{"type": "image"} if part is None else {"type": "text", "text": part} for part in parts]
        else:
            # Templates of text-only models take nothing but a string.
            content = "".join(part for part in parts if part is not None)
        chat.append({"role": role, "content": content})
    return chat


def _compile(source: str) -> jinja2.Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = lambda layout: datetime.now().strftime(layout)
    try:
        return environment.from_string(source)
    except jinja2.TemplateError as error:
        raise ConfigError(f"chat template: {error}") from error


def _tojson(value: object, ensure_ascii: bool = False, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent)


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)


def _find_template(folder: Path, settings: dict[str, Any]) -> str:
    path = folder / "chat_template.jinja"
    if path.is_file():
        return path.read_text()
    if (folder / "chat_template.json").is_file():
        settings = read_model_json(folder / "chat_template.json")
    template = settings.get("chat_template")
    if not isinstance(template, str):
        raise ConfigError(f"{path}: no such file, and tokenizer_config.json has no chat_template")
    return template


def _token_text(token: object) -> str:
    return str(token["content"]) if isinstance(token, dict) else str(token)


def _eos_ids(folder: Path, config: dict[str, Any]) -> list[int]:
    path = folder / "generation_config.json"
    sources = [read_model_json(path)] if path.is_file() else []
    for source in (*sources, config, config.get("text_config") or {}):
        eos = source.get("eos_token_id")
        if eos is not None:
            return [int(token) for token in (eos if isinstance(eos, list) else [eos])]
    return []
