"""Whether a checkpoint is of the model and the settings that a run is started with: said before torch is imported.

Owns the comparison of what a checkpoint tells of itself in JSON: `learner.json`, and under `model/` the config and the
tokenizer of the model that the run started from. What only tensors can tell is `vagen.learner.model.checkpoint_io`'s.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from vagen.common.errors import CheckpointError
from vagen.common.vocabulary import read_model_json
from vagen.learner.config import LearnerConfig

__all__ = ["COMPANIONS", "read_checkpoint_json", "require_matching_checkpoint", "write_checkpoint_json"]

COMPANIONS = "model"
"""Folder of a checkpoint that has the model's config and tokenizer."""
_RECORD_FILE = "learner.json"
_FORMAT = 1
_SECTIONS = ("text_config", "vision_config")
_SHAPE = (
    *("model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "head_dim", "tie_word_embeddings", "num_experts", "num_experts_per_tok"),
    *("moe_intermediate_size", "depth", "num_heads", "out_hidden_size", "patch_size", "spatial_merge_size"),
    *("deepstack_visual_indexes", "image_token_id"),
)
"""What a config says of the tensors and of the ids that go in, in itself and in its sections."""
_NUM_NAMED = 3
"""Differences that a sentence lists."""


def require_matching_checkpoint(checkpoint: Path, model_dir: Path, config: LearnerConfig) -> None:
    """Raises CheckpointError where a checkpoint is of another model than `model_dir`'s, of another tokenizer, or was
    saved with settings that decide what is in it and are not those of `config`.
    """
    record = read_checkpoint_json(checkpoint)
    differences = list(_config_differences(checkpoint / COMPANIONS, model_dir))
    if differences:
        raise CheckpointError(
            f"{checkpoint}: is of another model than --model {model_dir}, {_listed(differences)}; "
            "give the model that the run began with, or another --run-dir"
        )
    token = _first_other_token(checkpoint / COMPANIONS / "tokenizer.json", model_dir / "tokenizer.json")
    if token is not None:
        raise CheckpointError(
            f"{checkpoint}: is of another tokenizer than {model_dir / 'tokenizer.json'}: {token}; "
            "give the model that the run began with, or another --run-dir"
        )
    settings = list(_setting_differences(record, config))
    if settings:
        raise CheckpointError(
            f"{checkpoint}: was saved with other settings, {_listed(settings)}; "
            "set them as the run began, or give another --run-dir"
        )


def read_checkpoint_json(checkpoint: Path) -> dict[str, Any]:
    """`learner.json` of a checkpoint. Raises CheckpointError where there is none, or one of another format."""
    file = checkpoint / _RECORD_FILE
    if not file.is_file():
        raise CheckpointError(f"{file}: no such file; {checkpoint} is not a complete checkpoint")
    record: dict[str, Any] = json.loads(file.read_text())
    if record.get("format") != _FORMAT:
        raise CheckpointError(f"{file}: format must be {_FORMAT}, got {record.get('format')}")
    return record


def write_checkpoint_json(checkpoint: Path, content: Mapping[str, Any]) -> None:
    """What `read_checkpoint_json` reads."""
    (checkpoint / _RECORD_FILE).write_text(json.dumps({"format": _FORMAT, **content}, indent=2))


def _listed(differences: list[str]) -> str:
    more = len(differences) - _NUM_NAMED
    return ", ".join(differences[:_NUM_NAMED]) + (f" and {more} more" if more > 0 else "")


def _config_differences(saved: Path, given: Path) -> Iterator[str]:
    ours, theirs = _shape(read_model_json(saved / "config.json")), _shape(read_model_json(given / "config.json"))
    # Families differ in too much to list.
    names = list(ours) if ours.get("model_type") == theirs.get("model_type") else ["model_type"]
    for name in names:
        if name in theirs and ours[name] != theirs[name]:
            yield f"{name} {json.dumps(ours[name])} and not {json.dumps(theirs[name])}"


def _shape(config: Mapping[str, Any]) -> dict[str, Any]:
    """By path. Defaults that one version of transformers writes and another leaves out are not compared."""
    found = {name: config[name] for name in _SHAPE if name in config}
    for section in _SECTIONS:
        inner = config.get(section) or {}
        found |= {f"{section}.{name}": inner[name] for name in _SHAPE if name in inner}
    return found


def _first_other_token(saved: Path, given: Path) -> str | None:
    """What two tokenizers disagree in; None where they agree, or a file is missing."""
    if not (saved.is_file() and given.is_file()) or saved.read_bytes() == given.read_bytes():
        return None
    ours, theirs = read_model_json(saved), read_model_json(given)
    ours_ids, theirs_ids = _ids(ours), _ids(theirs)
    for token in sorted(ours_ids.keys() | theirs_ids.keys(), key=lambda name: ours_ids.get(name, len(ours_ids))):
        if ours_ids.get(token) != theirs_ids.get(token):
            return f"{json.dumps(token)} has id {ours_ids.get(token)} there and {theirs_ids.get(token)} here"
    if ours.get("model", {}).get("merges") != theirs.get("model", {}).get("merges"):
        return "its merges are others"
    return None


def _ids(tokenizer: Mapping[str, Any]) -> dict[str, int]:
    vocabulary = tokenizer.get("model", {}).get("vocab") or {}
    if isinstance(vocabulary, list):
        vocabulary = {entry[0]: index for index, entry in enumerate(vocabulary)}
    return {**vocabulary, **{token["content"]: token["id"] for token in tokenizer.get("added_tokens", [])}}


def _setting_differences(record: Mapping[str, Any], config: LearnerConfig) -> Iterator[str]:
    before, now = _settings_of_record(record), _settings_of_config(config)
    for name in before:
        if name in now and before[name] != now[name]:
            yield f"$.learner.{name} {json.dumps(before[name])} and not {json.dumps(now[name])}"


def _settings_of_record(record: Mapping[str, Any]) -> dict[str, Any]:
    model, beside = record["model"], record.get("beside", [])
    return _settings(
        bins=(model["value_bins"], model["value_range"]) if "value_bins" in model else None,
        is_separate="critic" in beside,
        moves="reference" in beside,
        adapter=model.get("adapter"),
    )


def _settings_of_config(config: LearnerConfig) -> dict[str, Any]:
    loss, lora = config.loss, config.lora
    adapter = {"rank": lora.rank, "alpha": lora.alpha, "targets": list(lora.targets)}
    return _settings(
        bins=(loss.value_bins, list(loss.value_range)) if loss.value_loss == "two_hot" else None,
        is_separate=config.critic.trunk == "separate",
        moves=config.reference.is_used and config.reference.refresh_every > 0,
        adapter=adapter if lora.rank else None,
    )


def _settings(
    *, bins: tuple[int, Sequence[float]] | None, is_separate: bool, moves: bool, adapter: Mapping[str, Any] | None
) -> dict[str, Any]:
    """What decides which tensors a checkpoint has, under the names of the recipe."""
    settings: dict[str, Any] = {
        "loss.value_loss": "with one output" if bins is None else "two_hot",
        "critic.trunk": "separate" if is_separate else "shared or detached",
        "reference.refresh_every": "above 0 with a KL" if moves else "0",
    }
    if bins is not None:
        settings |= {"loss.value_bins": bins[0], "loss.value_range": list(bins[1])}
    return settings | {f"lora.{name}": value for name, value in (adapter or {"rank": 0}).items()}
