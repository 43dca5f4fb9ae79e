"""Tiny models with tokenizers for the engines under test, and transformers' own forward pass as the reference."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    Glm4vConfig,
    Glm4vForConditionalGeneration,
    InternVLConfig,
    InternVLForConditionalGeneration,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
    Qwen3VLMoeConfig,
    Qwen3VLMoeForConditionalGeneration,
)
from transformers.models.glm4v.image_processing_pil_glm4v import Glm4vImageProcessorPil
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil

from vagen.common.vision import ImageSpec, preprocess_image
from vagen.tools.tiny_tokenizer import CHAT_TEMPLATE

PAD, IMAGE, VIDEO, VISION_START, VISION_END, EOS, START = 0, 1, 2, 3, 4, 5, 6
SPECIAL = {
    PAD: "<|endoftext|>",
    IMAGE: "<|image_pad|>",
    VIDEO: "<|video_pad|>",
    VISION_START: "<|vision_start|>",
    VISION_END: "<|vision_end|>",
    EOS: "<|im_end|>",
    START: "<|im_start|>",
}
VOCAB = 96


def text_settings(**rope: Any) -> dict[str, Any]:
    """Of the decoder, in both models."""
    return dict(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        rope_parameters=dict(rope_type="default", rope_theta=10000.0, **rope),
        initializer_range=0.08,
        bos_token_id=None,
        eos_token_id=EOS,
        pad_token_id=None,
    )


def build_model(folder: Path, seed: int = 0) -> Qwen2_5_VLForConditionalGeneration:
    """A tiny model with one windowed block."""
    torch.manual_seed(seed)
    config = Qwen2_5_VLConfig(
        text_config=text_settings(mrope_section=[2, 3, 3]),
        vision_config=dict(
            depth=2,
            hidden_size=32,
            intermediate_size=64,
            num_heads=2,
            out_hidden_size=64,
            patch_size=14,
            window_size=56,
            fullatt_block_indexes=[1],
            initializer_range=0.08,
        ),
        image_token_id=IMAGE,
        video_token_id=VIDEO,
        vision_start_token_id=VISION_START,
        vision_end_token_id=VISION_END,
        tie_word_embeddings=True,
    )
    ImageSpec(max_pixels=56 * 56 * 8).save(folder)
    return save(Qwen2_5_VLForConditionalGeneration(config), folder)


def build_text_model(folder: Path) -> Qwen2ForCausalLM:
    """A tiny model without a vision tower and with a head of its own."""
    torch.manual_seed(1)
    return save(Qwen2ForCausalLM(Qwen2Config(**text_settings(), tie_word_embeddings=False)), folder)


def build_qwen3(folder: Path) -> Qwen3ForCausalLM:
    """A tiny text model whose heads are wider than its hidden state."""
    torch.manual_seed(2)
    return save(Qwen3ForCausalLM(Qwen3Config(**text_settings(), head_dim=32, tie_word_embeddings=True)), folder)


def build_qwen3_vl(folder: Path) -> Qwen3VLForConditionalGeneration:
    """A tiny model whose first decoder layer adds features of an inner vision block."""
    return _build_qwen3_vl(folder, Qwen3VLConfig, Qwen3VLForConditionalGeneration)


def build_qwen3_vl_moe(folder: Path) -> Qwen3VLMoeForConditionalGeneration:
    """The same with four experts, two a token."""
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
    return _build_qwen3_vl(folder, Qwen3VLMoeConfig, Qwen3VLMoeForConditionalGeneration, **experts)


def _build_qwen3_vl(folder: Path, config_class: Any, model_class: Any, **text: Any) -> Any:
    torch.manual_seed(3)
    config = config_class(
        text_config=text_settings(mrope_section=[6, 5, 5]) | {"head_dim": 32} | text,
        vision_config=dict(
            depth=2,
            hidden_size=32,
            intermediate_size=64,
            num_heads=2,
            out_hidden_size=64,
            patch_size=16,
            num_position_embeddings=25,
            deepstack_visual_indexes=[0],
            initializer_range=0.08,
        ),
        image_token_id=IMAGE,
        video_token_id=VIDEO,
        vision_start_token_id=VISION_START,
        vision_end_token_id=VISION_END,
        tie_word_embeddings=True,
    )
    ImageSpec(patch_size=16, max_pixels=64 * 64 * 8, mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, 0.5)).save(folder)
    return save(model_class(config), folder)


def build_glm4v(folder: Path) -> Glm4vForConditionalGeneration:
    """A tiny model, half of whose heads rotates."""
    torch.manual_seed(5)
    config = Glm4vConfig(
        text_config=text_settings(mrope_section=[2, 1, 1], partial_rotary_factor=0.5),
        vision_config=dict(
            depth=2,
            hidden_size=32,
            intermediate_size=96,
            num_heads=2,
            patch_size=14,
            image_size=70,
            out_hidden_size=64,
            initializer_range=0.08,
        ),
        image_token_id=IMAGE,
        video_token_id=VIDEO,
        image_start_token_id=VISION_START,
        image_end_token_id=VISION_END,
        video_start_token_id=VISION_START,
        video_end_token_id=VISION_END,
        tie_word_embeddings=False,
    )
    folder.mkdir(exist_ok=True)
    Glm4vImageProcessorPil(size={"shortest_edge": 2 * 28 * 28, "longest_edge": 2 * 56 * 56 * 8}).save_pretrained(folder)
    return save(Glm4vForConditionalGeneration(config), folder)


def build_internvl(folder: Path) -> InternVLForConditionalGeneration:
    """A tiny model of tiles of 56 x 56 pixels, whose chat template leaves out what stands around an image."""
    torch.manual_seed(4)
    config = InternVLConfig(
        text_config=text_settings() | {"head_dim": 32, "model_type": "qwen3"},
        vision_config=dict(
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=64,
            attention_bias=True,
            image_size=56,
            patch_size=14,
            initializer_range=0.08,
        ),
        image_token_id=IMAGE,
        image_seq_length=4,
        tie_word_embeddings=False,
    )
    folder.mkdir(exist_ok=True)
    GotOcr2ImageProcessorPil(size={"height": 56, "width": 56}, max_patches=4).save_pretrained(folder)
    model = save(InternVLForConditionalGeneration(config), folder)
    around, image = (SPECIAL[VISION_START], SPECIAL[VISION_END]), SPECIAL[IMAGE]
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE.replace(image.join(around), image))
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings["extra_special_tokens"] = {
        "start_image_token": around[0],
        "context_image_token": image,
        "end_image_token": around[1],
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return model


def save(model: PreTrainedModel, folder: Path) -> Any:
    """Write a model and its tokenizer, with random biases and norms, which transformers would leave 0 and 1."""
    model = model.float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    tokenizer = Tokenizer(
        models.WordLevel({SPECIAL.get(i, f"w{i}"): i for i in range(VOCAB)}, unk_token=f"w{VOCAB - 1}")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    # SGLang looks for the placeholders of images in what the ids decode to.
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(list(SPECIAL.values()))
    saved = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=SPECIAL[EOS], pad_token=SPECIAL[PAD])
    saved.chat_template = CHAT_TEMPLATE
    saved.save_pretrained(folder)
    return model


def forbidden_of(model: PreTrainedModel) -> tuple[int, ...]:
    """Tokens that only a template may place."""
    return () if is_text(model) else (IMAGE, VIDEO, VISION_START, VISION_END)


def is_text(model: PreTrainedModel) -> bool:
    """Whether it has no vision tower."""
    return not hasattr(model.config, "vision_config")


def make_png(seed: int, width: int = 56, height: int = 56) -> bytes:
    """An encoded image of random blocks."""
    blocks = np.random.default_rng(seed).integers(0, 256, (height // 14, width // 14, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(blocks.repeat(14, 0).repeat(14, 1)).save(file, "PNG")
    return file.getvalue()


def engine_weights(model: torch.nn.Module) -> list[tuple[str, torch.Tensor]]:
    """Parameters under SGLang's names, spelt out here a second time on purpose."""
    return [
        (name.replace("model.language_model.", "model.").replace("model.visual.", "visual."), parameter.data)
        for name, parameter in model.named_parameters()
    ]


def logprobs_of(
    model: PreTrainedModel,
    ids: Sequence[int],
    images: Sequence[bytes],
    output: Sequence[int],
    *,
    temperature: float = 1.0,
    forbidden: Sequence[int] = (),
) -> list[float]:
    """Log-probabilities of `output` after the prompt, by transformers' own forward pass."""
    with torch.no_grad():
        inputs = model_inputs(model, ids, images, output)
        logits = model(**inputs).logits[0]
    return gather_logprobs(logits[-len(output) - 1 : -1], output, temperature, forbidden)


def gather_logprobs(
    logits: torch.Tensor, output: Sequence[int], temperature: float, forbidden: Sequence[int]
) -> list[float]:
    """Of the tokens `output` [T] under logits [T, V]."""
    logits = logits.clone()
    logits[:, list(forbidden)] = -torch.inf
    scored = torch.log_softmax(logits / temperature, -1)
    return scored.gather(1, torch.tensor(output)[:, None])[:, 0].tolist()


def model_inputs(
    model: PreTrainedModel, ids: Sequence[int], images: Sequence[bytes], output: Sequence[int]
) -> dict[str, Any]:
    if is_text(model):
        return {"input_ids": torch.tensor([[*ids, *output]])}
    spec = ImageSpec(max_pixels=56 * 56 * 8)
    decoded = [preprocess_image(image, spec) for image in images]
    expanded: list[int] = []
    grids = iter(grid for _, grid in decoded)
    for token in ids:
        expanded += [token] * (spec.num_tokens(next(grids)) if token == IMAGE else 1)
    return picture_inputs(model, [*expanded, *output], decoded)


def picture_inputs(
    model: PreTrainedModel, row: Sequence[int], pictures: Sequence[tuple[torch.Tensor, tuple[int, int, int]]]
) -> dict[str, Any]:
    """As transformers' model takes a row whose placeholders are expanded, and the patches and grids of its pictures."""
    ids = torch.tensor([row])
    if not pictures:
        return {"input_ids": ids}
    patches = torch.cat([patches for patches, _ in pictures])
    if model.config.model_type == "internvl":
        tiles = patches.unflatten(0, (-1, 4, 4)).unflatten(-1, (3, 14, 14)).permute(0, 3, 1, 4, 2, 5)
        return {"input_ids": ids, "pixel_values": tiles.reshape(-1, 3, 56, 56)}
    return {
        "input_ids": ids,
        "mm_token_type_ids": (ids == IMAGE).int(),
        "pixel_values": patches,
        "image_grid_thw": torch.tensor([grid for _, grid in pictures]),
    }
