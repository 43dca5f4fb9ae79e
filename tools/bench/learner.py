"""`vagen bench learner`: tokens a second of an optimizer step, against the same model in transformers.

Both sides start from one model directory and train on the same rows with the same loss, optimizer and clipping, one
after the other in each round, so that whatever else the machine does meets both. A step is forward and backward over
all rows, clip and AdamW; each side makes its batches within it. Pictures are decoded before.

Tokens are those of the rows: padding does not count for the side that pads.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import msgspec

from vagen.common.config import require
from vagen.tools.bench import Figure, Report, benchmark, parse_options
from vagen.tools.bench.buffer_docs import table
from vagen.tools.bench.documents import replace_parts
from vagen.tools.bench.models import bench_model

if TYPE_CHECKING:
    from vagen.common.trajectory import Row
    from vagen.tools.bench.learner_rows import BenchRows

_GOALS = {"unpacked_vs_hf": ">= 1", "packed_vs_hf": ">= 1.5", "mfu": ">= 0.45"}
_EQUAL_LOSS = 1e-3
_IMAGE_TOKENS = 4


class Options(msgspec.Struct, kw_only=True, frozen=True):
    """Of this benchmark."""

    archive: str | None = None
    """Saved buffer whose rows give the length mix; without one the script of the recipe plays."""
    recipe: str = "frozenlake"
    harness: str = "concat"
    """How scripted episodes become rows."""
    rows: int = 96
    """Of one optimizer step."""
    equal_tokens: int = 128
    """Length of every row of `unpacked_vs_hf`."""
    max_tokens: int = 4096
    """Of one microbatch, padding included."""
    hidden_size: int = 128
    num_layers: int = 2
    rounds: int = 7
    threads: int = 1
    seed: int = 0
    docs: str | None = None
    """Document whose part `learner` is replaced by the figures."""

    def __post_init__(self) -> None:
        for name in ("rows", "equal_tokens", "max_tokens", "num_layers", "rounds", "threads"):
            require(getattr(self, name) >= 1, f"bench.{name}", getattr(self, name), "int >= 1")
        require(self.equal_tokens > _IMAGE_TOKENS + 1, "bench.equal_tokens", self.equal_tokens, "int >= 6")
        require(self.hidden_size % 64 == 0, "bench.hidden_size", self.hidden_size, "a multiple of 64")


class Side(Protocol):
    """Trains a model of its own."""

    def step(self, rows: BenchRows) -> float:
        """One optimizer step on all rows; returns the mean negative log-likelihood of the scored tokens."""
        ...


@benchmark("learner")
def learner(options: Mapping[str, str]) -> Report:
    """Tokens a second of an optimizer step, against transformers; and the share of peak on a GPU."""
    chosen = parse_options(options, Options)
    import torch

    from vagen.learner.config import ModelConfig
    from vagen.learner.model.parallel import parallel_session
    from vagen.tools.bench.learner_mfu import measure_mfu
    from vagen.tools.bench.learner_rows import equal_rows

    torch.set_num_threads(chosen.threads)
    size = ModelConfig(
        hidden_size=chosen.hidden_size,
        intermediate_size=3 * chosen.hidden_size,
        num_layers=chosen.num_layers,
        max_position_embeddings=1 << 16,
        max_pixels=1 << 24,
    )
    figures: dict[str, Figure] = {}
    notes = [f"hidden_size {chosen.hidden_size}, {chosen.num_layers} layers, {chosen.threads} threads"]
    with tempfile.TemporaryDirectory(prefix="vagen-bench-") as folder, parallel_session(seed=chosen.seed + 1):
        model_dir = bench_model(Path(folder) / "model", size)
        equal = equal_rows(chosen.rows, chosen.equal_tokens, _IMAGE_TOKENS)
        for key, rows in (("unpacked", equal), ("packed", _mixed_rows(chosen, notes))):
            found, note = _compare(key, rows, model_dir, chosen)
            figures |= found
            notes.append(note)
        if torch.cuda.is_available():
            figures |= measure_mfu(Path(folder) / "large")
    report = Report(figures=figures, notes=tuple(notes))
    if chosen.docs is not None:
        path = Path(chosen.docs)
        path.write_text(replace_parts(path, {"learner": table(report.figures, report.notes, _GOALS)}))
    return report


def _mixed_rows(chosen: Options, notes: list[str]) -> list[Row]:
    from vagen.tools.bench.learner_rows import archived_rows, scripted_rows

    if chosen.archive is not None:
        notes.append(f"packed: the length mix of the archive {chosen.archive}")
        return archived_rows(chosen.archive, chosen.rows)
    notes.append(
        f"packed: the length mix of scripted episodes of {chosen.recipe}, whose rows the harness {chosen.harness} made"
    )
    return scripted_rows(chosen.recipe, chosen.harness, chosen.rows)


def _compare(key: str, rows: Sequence[Row], model_dir: Path, chosen: Options) -> tuple[dict[str, Figure], str]:
    """Figures of both sides on the same rows, and what these are. The round before the first is not counted."""
    from vagen.tools.bench.learner_rows import prepare
    from vagen.tools.bench.learner_sides import LearnerSide, TransformersSide

    prepared = prepare(rows, model_dir, chosen.seed)
    sides: dict[str, Side] = {
        "learner": LearnerSide(model_dir, chosen.max_tokens),
        "hf": TransformersSide(model_dir, chosen.max_tokens),
    }
    speeds: dict[str, list[float]] = {name: [] for name in sides}
    for number in range(chosen.rounds + 1):
        losses = []
        # In turns, also as to who begins.
        order = list(sides.items())
        for name, side in order if number % 2 else reversed(order):
            start = time.perf_counter()
            losses.append(side.step(prepared))
            seconds = time.perf_counter() - start
            if number:
                speeds[name].append(prepared.num_tokens / seconds)
        assert abs(losses[0] - losses[1]) < _EQUAL_LOSS * (1 + number), f"the sides train differently: {losses}"
    ratios = [ours / theirs for ours, theirs in zip(speeds["learner"], speeds["hf"], strict=True)]
    figures = {f"{key}_{name}_tokens_per_s": _figure(values, "tokens/s") for name, values in speeds.items()}
    return {f"{key}_vs_hf": _figure(ratios, "x"), **figures}, f"{key}: {prepared.describe()}"


def _figure(values: Sequence[float], unit: str) -> Figure:
    return Figure(value=statistics.median(values), unit=unit, spread=(min(values), max(values)))
