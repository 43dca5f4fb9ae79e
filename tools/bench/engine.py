"""`vagen bench engine`: tokens a second of the local engine, of SGLang on this CPU, and of transformers' `generate`.

All answer the same requests, one after the other in each round, so that whatever else the machine does meets all of
them. The model is the small one of the recipes, initialised at random.
"""

from __future__ import annotations

import asyncio
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from PIL import Image

from vagen.common.errors import ConfigError
from vagen.tools.bench import Figure, Report, benchmark, parse_options
from vagen.tools.bench.models import bench_model
from vagen.tools.child import ProcessSpec
from vagen.tools.launch import ENVIRONMENT, console_script, free_port
from vagen.tools.supervisor import Supervisor

_SIDE = 224
_READY_S = 400.0
_CALL_S = 600.0
_STOP_S = 60.0


class Options(msgspec.Struct, kw_only=True, frozen=True):
    """Of this benchmark."""

    rounds: int = 5
    concurrency: int = 8
    """Requests at once, each with a picture of 224x224 of its own."""
    new_tokens: int = 128


Run = Callable[[Sequence[bytes]], None]
"""Answers one request for each encoded picture, all at once."""


@benchmark("engine")
def engine(options: Mapping[str, str]) -> Report:
    """Tokens a second: local engine, SGLang on this CPU, transformers."""
    chosen = parse_options(options, Options)
    with tempfile.TemporaryDirectory(prefix="vagen-bench-") as folder:
        model = bench_model(Path(folder) / "model")
        with _engines(model, Path(folder)) as urls:
            runs: dict[str, Run] = {name: _http_run(url, model, chosen) for name, url in urls.items()}
            runs["hf_generate"] = _transformers_run(model, chosen)
            speeds = _measure(runs, chosen)
    return _report(speeds, has_sglang="sglang_cpu" in runs)


def _measure(runs: Mapping[str, Run], chosen: Options) -> dict[str, list[float]]:
    """Name -> tokens a second of each round; the round before the first is not counted."""
    speeds: dict[str, list[float]] = {name: [] for name in runs}
    random = np.random.default_rng(0)
    for number in range(chosen.rounds + 1):
        pictures = [_picture(random) for _ in range(chosen.concurrency)]
        # In turns, also as to who begins.
        order = list(runs.items())
        for name, run in order if number % 2 else reversed(order):
            start = time.perf_counter()
            run(pictures)
            seconds = time.perf_counter() - start
            if number:
                speeds[name].append(chosen.concurrency * chosen.new_tokens / seconds)
    return speeds


def _report(speeds: Mapping[str, Sequence[float]], has_sglang: bool) -> Report:
    figures = {f"{name}_tokens_per_s": _figure(values, "tokens/s") for name, values in speeds.items()}
    others = [name for name in speeds if name != "local"]
    for other in others:
        ratios = [ours / theirs for ours, theirs in zip(speeds["local"], speeds[other], strict=True)]
        figures[f"local_vs_{other}"] = _figure(ratios, "x")
    notes = () if has_sglang else ("Without SGLang: `make sglang-cpu` installs it.",)
    return Report(figures=figures, notes=notes)


def _figure(values: Sequence[float], unit: str) -> Figure:
    return Figure(value=statistics.median(values), unit=unit, spread=(min(values), max(values)))


@contextmanager
def _engines(model: Path, folder: Path) -> Iterator[dict[str, str]]:
    """Name -> URL of the engines, each in a process of its own."""
    from vagen.tools.sglang_cpu.serve import sglang_python

    words = {"local": (console_script("vagen-actor"), "engine")}
    try:
        sglang_python()
        words["sglang_cpu"] = (console_script("vagen"), "sglang")
    except ConfigError:
        pass
    supervisor = Supervisor(restart_grace_s=1.0, stop_timeout_s=_STOP_S)
    urls = {}
    try:
        for name, command in words.items():
            port, ready = free_port(), folder / f"{name}.json"
            arguments = ("--model", str(model), "--port", str(port), "--ready-file", str(ready))
            spec = ProcessSpec(
                name=name, argv=(*command, *arguments), log=folder / f"{name}.log", ready=ready, env=ENVIRONMENT
            )
            supervisor.start(spec)
            urls[name] = f"http://127.0.0.1:{port}"
        for name in words:
            supervisor.wait_ready(name, _READY_S)
        yield urls
    finally:
        supervisor.stop_all()


def _http_run(url: str, model: Path, chosen: Options) -> Run:
    from vagen.learner.engine_control import EngineControl, open_session

    prompt, forbidden = _prompt(model)

    async def ask(pictures: Sequence[bytes]) -> None:
        async with open_session() as session, asyncio.timeout(_CALL_S):
            control = EngineControl(session, url)
            answers = await asyncio.gather(
                *(
                    control.post("/generate", _body(prompt, forbidden, picture, chosen.new_tokens))
                    for picture in pictures
                )
            )
        for answer in answers:
            assert len(answer["output_ids"]) == chosen.new_tokens, answer

    return lambda pictures: asyncio.run(ask(pictures))


def _body(prompt: Sequence[int], forbidden: Sequence[int], picture: bytes, new_tokens: int) -> dict[str, Any]:
    import base64

    from vagen.common.vocabulary import forbidding_bias

    return {
        "input_ids": list(prompt),
        "image_data": [base64.b64encode(picture).decode()],
        "sampling_params": {
            "max_new_tokens": new_tokens,
            "temperature": 1.0,
            "ignore_eos": True,
            "logit_bias": forbidding_bias(forbidden),
        },
        "return_logprob": True,
        "logprob_start_len": -1,
    }


def _prompt(model: Path) -> tuple[list[int], tuple[int, ...]]:
    """A prompt with one picture, and the tokens that may not be sampled."""
    from vagen.actor.messages import Message, Picture
    from vagen.actor.rendering import ChatRenderer

    renderer = ChatRenderer.load(model)
    picture = Picture(_picture(np.random.default_rng(0)), (_SIDE, _SIDE))
    assert renderer.vision is not None
    return renderer.render((Message("user", (picture, "look")),)).token_ids, renderer.vision.forbidden_token_ids


def _transformers_run(model: Path, chosen: Options) -> Run:
    """The same requests as one batch of transformers' own `generate`, with its scores as log-probabilities."""
    import torch
    from transformers import Qwen2_5_VLForConditionalGeneration

    from vagen.common.vision import ImageSpec, preprocess_image

    torch.set_num_threads(1)
    policy = Qwen2_5_VLForConditionalGeneration.from_pretrained(model, dtype=torch.float32).eval()
    prompt, forbidden = _prompt(model)
    spec, image_token = ImageSpec.load(model), policy.config.image_token_id

    @torch.no_grad()
    def run(pictures: Sequence[bytes]) -> None:
        decoded = [preprocess_image(picture, spec) for picture in pictures]
        rows = []
        for _, grid in decoded:
            counts = [spec.num_tokens(grid) if token == image_token else 1 for token in prompt]
            rows.append(np.repeat(prompt, counts))
        ids = torch.tensor(np.array(rows))
        answer = policy.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            mm_token_type_ids=(ids == image_token).int(),
            pixel_values=torch.cat([patches for patches, _ in decoded]),
            image_grid_thw=torch.tensor([grid for _, grid in decoded]),
            do_sample=True,
            top_k=0,
            suppress_tokens=list(forbidden),
            min_new_tokens=chosen.new_tokens,
            max_new_tokens=chosen.new_tokens,
            pad_token_id=policy.config.text_config.eos_token_id,
            output_scores=True,
            return_dict_in_generate=True,
        )
        scores = torch.stack(answer.scores, 1).log_softmax(-1)
        sampled = answer.sequences[:, ids.shape[1] :]
        assert scores.gather(2, sampled[..., None]).isfinite().all()

    return run


def _picture(random: np.random.Generator) -> bytes:
    from vagen.envs.base import encode_png

    pixels = random.integers(0, 256, (_SIDE // 14, _SIDE // 14, 3), dtype=np.uint8)
    return encode_png(Image.fromarray(pixels.repeat(14, 0).repeat(14, 1)))
