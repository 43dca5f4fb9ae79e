"""A model folder without weights, and the stand-ins of `tests/fakes.py`."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from tests import fakes as stand_ins
from vagen.actor.rendering import ChatRenderer

CHAT_TEMPLATE = """\
{%- for message in messages %}
{%- if loop.first and message['role'] != 'system' %}
{{- '<|im_start|>system\\nYou are a helpful assistant.<|im_end|>\\n' }}
{%- endif %}
{{- '<|im_start|>' + message['role'] + '\\n' }}
{%- if message['content'] is string %}
{{- message['content'] }}
{%- else %}
{%- for part in message['content'] %}
{%- if part['type'] == 'image' %}
{{- '<|vision_start|><|image_pad|><|vision_end|>' }}
{%- else %}
{{- part['text'] }}
{%- endif %}
{%- endfor %}
{%- endif %}
{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""
CONTROL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>")
TAGS = ("<think>", "</think>", "<answer>", "</answer>")


@pytest.fixture(scope="session")
def fakes() -> ModuleType:
    return stand_ins


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tokenizer, template, configs of a Qwen2.5-VL-like model; patch 14, merge 2: 56x56 px take 4 tokens."""
    folder = tmp_path_factory.mktemp("model")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=300, initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    tokenizer.train_from_iterator(["system user assistant look Walk Left Right Up Down\n"] * 20, trainer)
    tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in CONTROL])
    tokenizer.add_tokens([AddedToken(name, special=False, normalized=False) for name in TAGS])
    tokenizer.save(str(folder / "tokenizer.json"))
    ids = {name: tokenizer.token_to_id(name) for name in CONTROL}
    files = {
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": "<|im_end|>",
            "pad_token": "<|endoftext|>",
        },
        "config.json": {
            "model_type": "qwen2_5_vl",
            "image_token_id": ids["<|image_pad|>"],
            "vision_start_token_id": ids["<|vision_start|>"],
            "vision_end_token_id": ids["<|vision_end|>"],
            "vision_config": {"spatial_merge_size": 2, "patch_size": 14},
        },
        "generation_config.json": {"eos_token_id": [ids["<|im_end|>"], ids["<|endoftext|>"]]},
        "preprocessor_config.json": {
            "image_processor_type": "Qwen2VLImageProcessor",
            "patch_size": 14,
            "merge_size": 2,
            "temporal_patch_size": 2,
            "size": {"shortest_edge": 3136, "longest_edge": 1003520},
        },
    }
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content))
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    return folder


@pytest.fixture
def renderer(model_dir: Path) -> ChatRenderer:
    return ChatRenderer.load(model_dir)
