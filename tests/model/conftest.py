"""Small random transformers models with every parameter randomised, and packs of rows to run through them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    Glm4vConfig,
    Glm4vForConditionalGeneration,
    Glm46VConfig,
    Glm46VForConditionalGeneration,
    InternVLConfig,
    InternVLForConditionalGeneration,
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

from vagen.common.vision import Grid, ImageSpec, mrope_positions
from vagen.learner.model import parallel
from vagen.learner.model.batch import ImageBatch, PackedBatch

IMAGE, VISION_START, VISION_END = 500, 502, 503
SaveModel = Callable[..., tuple[Any, Path]]


@pytest.fixture(scope="module", autouse=True)
def single_process() -> Iterator[None]:
    torch.set_num_threads(1)
    with parallel.parallel_session():
        yield


TEXT: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
VISION: dict[str, Any] = {
    "depth": 2,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_heads": 2,
    "patch_size": 14,
    "out_hidden_size": 64,
}
TOKENS = {"image_token_id": IMAGE, "video_token_id": 501}
QWEN_TOKENS = TOKENS | {"vision_start_token_id": VISION_START, "vision_end_token_id": VISION_END}


def _rope(theta: float, **options: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": "default", "rope_theta": theta, **options}}


def _randomise(model: Any) -> Any:
    """transformers starts biases at 0 and norms at 1, which would hide a wrong mapping."""
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))
    return model.eval()


def _save(model_class: Any, config: Any, directory: Path) -> tuple[Any, Path]:
    torch.manual_seed(0)
    model = _randomise(model_class(config))
    model.save_pretrained(directory)
    return model, directory


def _save_vl(model_class: Any, config: Any, directory: Path, images: Any = None) -> tuple[Any, Path]:
    """With a chat template and the settings of an image processor, by default Qwen's."""
    saved = _save(model_class, config, directory)
    if images is None:
        ImageSpec().save(directory)
    else:
        images.save_pretrained(directory)
    (directory / "chat_template.jinja").write_text("{{ messages }}")
    return saved


@pytest.fixture
def save_vl(tmp_path: Path) -> SaveModel:
    """Qwen2.5-VL: returns (transformers model, its directory)."""

    def build(*, tied: bool = False, windows: bool = True, name: str = "vl", num_layers: int = 3) -> tuple[Any, Path]:
        text = TEXT | {"num_hidden_layers": num_layers, "tie_word_embeddings": tied}
        text |= {"rms_norm_eps": 1e-6, "bos_token_id": 1, "eos_token_id": 2}
        config = Qwen2_5_VLConfig(
            text_config=text | _rope(1e6, mrope_section=[2, 3, 3]),
            vision_config=VISION | {"window_size": 56, "fullatt_block_indexes": [1] if windows else [0, 1]},
            tie_word_embeddings=tied,
            **QWEN_TOKENS,
        )
        return _save_vl(Qwen2_5_VLForConditionalGeneration, config, tmp_path / name)

    return build


def _qwen3_vl_settings(tied: bool, num_layers: int, **text: Any) -> dict[str, Any]:
    """Features of two inner blocks go into the decoder."""
    text |= {"num_hidden_layers": num_layers, "head_dim": 32}
    inner = {"depth": 4, "num_position_embeddings": 25, "deepstack_visual_indexes": [0, 2]}
    return dict(
        text_config=TEXT | text | _rope(1e6, mrope_section=[6, 5, 5]),
        vision_config=VISION | inner,
        tie_word_embeddings=tied,
        **QWEN_TOKENS,
    )


@pytest.fixture
def save_qwen3_vl(tmp_path: Path) -> SaveModel:
    """Qwen3-VL: returns (transformers model, its directory)."""

    def build(*, tied: bool = False, name: str = "qwen3_vl", num_layers: int = 3) -> tuple[Any, Path]:
        config = Qwen3VLConfig(**_qwen3_vl_settings(tied, num_layers))
        return _save_vl(Qwen3VLForConditionalGeneration, config, tmp_path / name)

    return build


@pytest.fixture
def save_qwen3_vl_moe(tmp_path: Path) -> SaveModel:
    """Qwen3-VL-MoE of four experts, two a token: returns (transformers model, its directory)."""

    def build(*, tied: bool = False, name: str = "qwen3_vl_moe", num_layers: int = 3) -> tuple[Any, Path]:
        experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
        config = Qwen3VLMoeConfig(**_qwen3_vl_settings(tied, num_layers, **experts))
        return _save_vl(Qwen3VLMoeForConditionalGeneration, config, tmp_path / name)

    return build


@pytest.fixture
def save_glm4v(tmp_path: Path) -> SaveModel:
    """GLM-4.1V, or with `newer` GLM-4.6V; a quarter of a head rotates. Returns (transformers model, its directory)."""

    def build(*, tied: bool = False, newer: bool = False, num_layers: int = 3, name: str = "glm4v") -> tuple[Any, Path]:
        config_class, model_class = (
            (Glm46VConfig, Glm46VForConditionalGeneration) if newer else (Glm4vConfig, Glm4vForConditionalGeneration)
        )
        text = TEXT | {"model_type": "glm4v_text", "hidden_size": 128, "num_hidden_layers": num_layers}
        vision = {"model_type": "glm4v_vision", "intermediate_size": 96, "image_size": 70, "out_hidden_size": 128}
        config = config_class(
            text_config=text | _rope(1e4, mrope_section=[2, 1, 1], partial_rotary_factor=0.25),
            vision_config=VISION | vision,
            image_start_token_id=VISION_START,
            image_end_token_id=VISION_END,
            tie_word_embeddings=tied,
            **TOKENS,
        )
        return _save_vl(model_class, config, tmp_path / name, Glm4vImageProcessorPil())

    return build


@pytest.fixture
def save_internvl(tmp_path: Path) -> SaveModel:
    """InternVL whose tiles are 4 x 4 patches: returns (transformers model, its directory)."""

    def build(*, tied: bool = False, decoder: str = "qwen3", name: str = "internvl") -> tuple[Any, Path]:
        text = TEXT | {"model_type": decoder} | ({"head_dim": 32} if decoder == "qwen3" else {})
        config = InternVLConfig(
            text_config=text | _rope(1e6),
            vision_config={
                "hidden_size": 32,
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
                "intermediate_size": 64,
                "attention_bias": True,
                "image_size": 56,
                "patch_size": 14,
            },
            image_token_id=IMAGE,
            image_seq_length=4,
            tie_word_embeddings=tied,
        )
        tiles = GotOcr2ImageProcessorPil(size={"height": 56, "width": 56}, max_patches=4)
        return _save_vl(InternVLForConditionalGeneration, config, tmp_path / name, tiles)

    return build


@pytest.fixture
def save_qwen2(tmp_path: Path) -> SaveModel:
    """Qwen2 text model: returns (transformers model, its directory)."""

    def build(*, tied: bool = False, **changes: Any) -> tuple[Any, Path]:
        settings = TEXT | _rope(1e6) | {"tie_word_embeddings": tied} | changes
        return _save(Qwen2ForCausalLM, Qwen2Config(**settings), tmp_path / "qwen2")

    return build


@pytest.fixture
def save_qwen3(tmp_path: Path) -> SaveModel:
    """Qwen3 text model whose heads are wider than its hidden state: returns (transformers model, its directory)."""

    def build(*, tied: bool = False, **changes: Any) -> tuple[Any, Path]:
        settings = TEXT | _rope(1e6) | {"head_dim": 32, "tie_word_embeddings": tied} | changes
        return _save(Qwen3ForCausalLM, Qwen3Config(**settings), tmp_path / "qwen3")

    return build


@pytest.fixture
def vl_rows() -> list[tuple[list[int], list[Grid]]]:
    """Rows (expanded token ids, grids) of unequal lengths, with no, one and two images."""
    return _rows((1, 4, 4), (1, 8, 12))


@pytest.fixture
def tile_rows() -> list[tuple[list[int], list[Grid]]]:
    """The same of a model that cuts images into tiles: one, or five."""
    return _rows((1, 4, 4), (5, 4, 4))


def _rows(small: Grid, wide: Grid) -> list[tuple[list[int], list[Grid]]]:
    rng = np.random.default_rng(3)

    def text(n: int) -> list[int]:
        return [int(x) for x in rng.integers(5, 490, n)]

    def image(grid: Grid) -> list[int]:
        return [VISION_START, *[IMAGE] * (grid[0] * grid[1] * grid[2] // 4), VISION_END]

    return [
        (text(4) + image(small) + text(9), [small]),
        (text(3) + image(wide) + text(5) + image(small) + text(30), [wide, small]),
        (text(11), []),
        (text(2) + image(small) + text(60), [small]),
    ]


@pytest.fixture
def pack() -> Callable[..., PackedBatch]:
    """Pack rows: the last `scored` tokens of each are scored; patches are random, one set for each image.

    Those of a `tiled` model have one frame, and its positions are those of text.
    """

    def build(
        rows: Sequence[tuple[Sequence[int], Sequence[Grid]]],
        *,
        scored: int = 6,
        patches: torch.Tensor | None = None,
        tiled: bool = False,
    ) -> PackedBatch:
        bounds = np.cumsum([0, *(len(ids) for ids, _ in rows)])
        grids = [grid for _, row_grids in rows for grid in row_grids]
        if patches is None:
            generator = torch.Generator().manual_seed(11)
            patches = torch.randn(sum(int(np.prod(g)) for g in grids), 588 if tiled else 1176, generator=generator)
        positions = [
            mrope_positions(np.array(ids), [] if tiled else row_grids, image_token_id=-1 if tiled else IMAGE)
            for ids, row_grids in rows
        ]
        return PackedBatch(
            token_ids=torch.tensor([token for ids, _ in rows for token in ids]),
            position_ids=torch.from_numpy(np.concatenate(positions, axis=1)),
            cu_seqlens=torch.tensor(bounds, dtype=torch.int32),
            score_positions=torch.cat([torch.arange(end - scored, end) for end in bounds[1:].tolist()]),
            images=ImageBatch(patches=patches, grids=torch.tensor(grids)) if grids else None,
        )

    return build
