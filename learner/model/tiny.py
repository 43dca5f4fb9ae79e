"""A small Qwen2.5-VL or Qwen3 with random weights, for laptops and tests, written as a transformers model directory.

Owns its sizes. The tokenizer (whose special tokens it needs by name) and the chat template belong to the caller.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from transformers import (
    PreTrainedTokenizerFast,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from transformers.utils.logging import disable_progress_bar

from vagen.common.errors import ConfigError
from vagen.common.vision import ImageSpec
from vagen.learner.config import ModelConfig

__all__ = ["Channels", "save_tiny_model"]

Channels = tuple[float, float, float]


def save_tiny_model(
    config: ModelConfig,
    tokenizer: Tokenizer | PreTrainedTokenizerFast,
    model_dir: str | Path,
    *,
    seed: int = 0,
    chat_template: str | None = None,
    sees_pictures: bool = True,
    pixel_statistics: tuple[Channels, Channels] | None = None,
) -> Path:
    """Write the model (float32, seeded), its tokenizer and its image processor config; returns `model_dir`.

    A Qwen2.5-VL, or a Qwen3 (text) of the same decoder sizes unless it `sees_pictures`.
    The tokenizer must know `<|im_end|>`, `<|vision_start|>`, `<|vision_end|>`, `<|image_pad|>` and `<|video_pad|>`
    (ConfigError otherwise). A `Tokenizer` is saved with `<|im_end|>` as its end-of-sequence token. `pixel_statistics`
    are mean and standard deviation of the pictures it will see, per RGB channel in [0, 1]; CLIP's by default.
    """
    target = Path(model_dir)
    target.mkdir(parents=True, exist_ok=True)
    if isinstance(tokenizer, Tokenizer):
        tokenizer = PreTrainedTokenizerFast(
            tokenizer_object=tokenizer,
            eos_token="<|im_end|>",
            # SGLang's processor of pictures asks for one.
            pad_token="<|im_end|>",
            clean_up_tokenization_spaces=False,
        )
    if chat_template is not None:
        tokenizer.chat_template = chat_template
    vocabulary = tokenizer.get_vocab()
    names = ("<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
    missing = [name for name in names if name not in vocabulary]
    if missing:
        raise ConfigError(f"tokenizer lacks the special tokens {missing}")
    make = _vision_language_model if sees_pictures else _text_model
    vocab_size = -(-len(tokenizer) // config.vocab_multiple) * config.vocab_multiple
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = make(config, {name: vocabulary[name] for name in names}, vocab_size).float()
    disable_progress_bar()
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)
    if sees_pictures:
        _image_spec(config, pixel_statistics).save(target)
    return target


def _image_spec(config: ModelConfig, pixel_statistics: tuple[Channels, Channels] | None) -> ImageSpec:
    spec = ImageSpec(
        patch_size=config.patch_size,
        merge_size=config.merge_size,
        min_pixels=config.min_pixels,
        max_pixels=config.max_pixels,
    )
    if pixel_statistics is not None:
        return replace(spec, mean=pixel_statistics[0], std=pixel_statistics[1])
    return spec


def _decoder(config: ModelConfig, special: dict[str, int], vocab_size: int, **rope: Any) -> dict[str, Any]:
    """What both models' configs say of the decoder."""
    return {
        "vocab_size": vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "max_position_embeddings": config.max_position_embeddings,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta, **rope},
        "initializer_range": config.initializer_range,
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": special["<|im_end|>"],
        "pad_token_id": None,
    }


def _text_model(config: ModelConfig, special: dict[str, int], vocab_size: int) -> Any:
    head_dim = config.hidden_size // config.num_heads
    return Qwen3ForCausalLM(Qwen3Config(**_decoder(config, special, vocab_size), head_dim=head_dim))


def _vision_language_model(config: ModelConfig, special: dict[str, int], vocab_size: int) -> Any:
    hf_config = Qwen2_5_VLConfig(
        text_config=_decoder(config, special, vocab_size, mrope_section=config.mrope_section),
        vision_config={
            "depth": config.vision_num_layers,
            "hidden_size": config.vision_hidden_size,
            "intermediate_size": config.vision_intermediate_size,
            "num_heads": config.vision_num_heads,
            "out_hidden_size": config.hidden_size,
            "patch_size": config.patch_size,
            "spatial_merge_size": config.merge_size,
            "temporal_patch_size": 2,
            "window_size": 112,
            "fullatt_block_indexes": list(range(config.vision_num_layers)),
            "initializer_range": config.initializer_range,
        },
        image_token_id=special["<|image_pad|>"],
        video_token_id=special["<|video_pad|>"],
        vision_start_token_id=special["<|vision_start|>"],
        vision_end_token_id=special["<|vision_end|>"],
        tie_word_embeddings=True,
    )
    return Qwen2_5_VLForConditionalGeneration(hf_config)
