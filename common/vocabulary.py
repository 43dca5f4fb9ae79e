"""A model's vision vocabulary: the placeholder of images, and every token that only a template may place.

Engine, actor and learner must agree on it exactly: what the engine never samples, the learner leaves out of the
softmax.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from vagen.common.errors import ConfigError
from vagen.common.trajectory import VisionTokens

_NEVER = -1e9
"""An addend to a logit that leaves no probability in float32; JSON has no infinity."""
_TOKEN_NAMES = (
    *("<|vision_start|>", "<|vision_end|>", "<|vision_pad|>", "<|image_pad|>", "<|video_pad|>"),
    *("<img>", "</img>", "<IMG_CONTEXT>"),
)
_CONFIG_KEYS = (
    *("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id"),
    *("image_start_token_id", "image_end_token_id", "video_start_token_id", "video_end_token_id"),
)


def vision_tokens(model_dir: str | Path) -> VisionTokens | None:
    """The vision vocabulary of a transformers model directory; None for a text-only model.

    The ids that config.json names, and those of Qwen's and InternVL's vision tokens in tokenizer.json where there is
    one. Raises
    `ConfigError` for a file that is missing or malformed.
    """
    folder = Path(model_dir)
    config = read_model_json(folder / "config.json")
    image_token_id = config.get("image_token_id")
    if image_token_id is None:
        return None
    tokenizer = folder / "tokenizer.json"
    added = read_model_json(tokenizer).get("added_tokens", []) if tokenizer.is_file() else []
    ids = {token["content"]: token["id"] for token in added}
    forbidden = {config.get(key) for key in _CONFIG_KEYS} | {ids.get(name) for name in _TOKEN_NAMES}
    return VisionTokens(
        image_token_id=image_token_id,
        forbidden_token_ids=tuple(sorted(token for token in forbidden if token is not None)),
        merge_size=merge_size(config),
    )


def merge_size(config: Mapping[str, Any]) -> int:
    """Patches along each side of what becomes one placeholder, from a config.json."""
    if "downsample_ratio" in config:
        return round(1 / config["downsample_ratio"])
    return int((config.get("vision_config") or {}).get("spatial_merge_size", 2))


def image_brackets(model_dir: str | Path) -> tuple[str, str, str] | None:
    """(start, placeholder, end) where the chat template leaves out what stands around an image, as InternVL's does.

    Raises `ConfigError` for a file that is missing or malformed.
    """
    folder = Path(model_dir)
    if read_model_json(folder / "config.json").get("model_type") != "internvl":
        return None
    settings = read_model_json(folder / "tokenizer_config.json")
    named = {**(settings.get("extra_special_tokens") or {}), **settings}
    keys = ("start_image_token", "context_image_token", "end_image_token")
    missing = [key for key in keys if not isinstance(named.get(key), str)]
    if missing:
        raise ConfigError(
            f"{folder / 'tokenizer_config.json'}: expected {missing[0]}, which InternVL's processor reads"
        )
    return named[keys[0]], named[keys[1]], named[keys[2]]


def forbidding_bias(token_ids: Iterable[int]) -> dict[str, float]:
    """`logit_bias` of a generation request under which none of these tokens is sampled, nor counts in the softmax."""
    return {str(token): _NEVER for token in token_ids}


def read_model_json(path: Path) -> dict[str, Any]:
    """One JSON object of a model directory. Raises `ConfigError` for a file that is missing or malformed."""
    if not path.is_file():
        raise ConfigError(f"{path}: no such file; a model directory needs it")
    try:
        raw = json.loads(path.read_text())
    except ValueError as error:
        raise ConfigError(f"{path}: not valid json: {error}") from error
    if not isinstance(raw, dict):
        raise ConfigError(f"{path}: expected an object, got {type(raw).__name__}")
    return raw
