"""`vagen bench broadcast`: publishing to a local engine against a bare gloo broadcast of as many bytes.

In each round, one after the other and in turns as to which comes first: a bare broadcast to another process, and a
publish in each pause mode to an engine that generates. `vs_bare_broadcast` compares the transfer alone: from the first
announcement until the engine has the last bucket, against the time until the other process has everything, in memory
that it used before. What comes around the transfer is in `publish_s`.
"""

from __future__ import annotations

import asyncio
import functools
import statistics
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
import yaml

from vagen.common.config import Section, require
from vagen.common.errors import EngineError
from vagen.tools.bench import Figure, Figures, Report, benchmark, parse_options
from vagen.tools.bench.bare_broadcast import BareBroadcast
from vagen.tools.bench.buffer_docs import update_part
from vagen.tools.child import ProcessSpec
from vagen.tools.launch import ENVIRONMENT, console_script, free_port
from vagen.tools.supervisor import Supervisor

if TYPE_CHECKING:
    from torch import Tensor

    from vagen.learner.broadcast import Broadcaster, PublishReport

_READY_S = 180.0
_STOP_S = 20.0
_TIMEOUT_S = 60.0
_PROMPT_TOKENS, _NEW_TOKENS, _MAX_CONTEXT = 64, 400, 512
_GOALS = {"vs_bare_broadcast": ">= 0.9"}
_MODES: tuple[Literal["retract", "in_place"], ...] = ("retract", "in_place")

PositiveInt = Annotated[int, msgspec.Meta(ge=1)]


class BroadcastOptions(Section, frozen=True, kw_only=True):
    """Options of `vagen bench broadcast`."""

    rounds: PositiveInt = 11
    """Counted, of the largest model; a smaller one has as many more as it is smaller. One more before them is not."""
    megabytes: str = "100,1000"
    """Sizes of the model, float32, separated by commas."""
    requests: PositiveInt = 4
    """Generating when a publish begins."""
    docs: str = ""
    """A document whose part `broadcast` the result replaces."""

    def __post_init__(self) -> None:
        parts = self.megabytes.split(",")
        is_valid = all(part.isdigit() and int(part) >= 4 for part in parts)
        require(is_valid, "megabytes", self.megabytes, "whole numbers >= 4, separated by commas")

    @property
    def sizes(self) -> tuple[int, ...]:
        """In megabytes, ascending."""
        return tuple(sorted({int(part) for part in self.megabytes.split(",")}))


@benchmark("broadcast")
def broadcast(options: Mapping[str, str]) -> Report:
    """Publishing weights to a local engine against a bare gloo broadcast; --rounds, --megabytes, --docs."""
    config = parse_options(options, BroadcastOptions)
    by_size = {_label(size): _measure(size, config) for size in config.sizes}
    report = Report(figures=_figures(by_size), notes=_notes(config))
    if config.docs:
        update_part(Path(config.docs), "broadcast", report, _GOALS)
    return report


def _measure(megabytes: int, config: BroadcastOptions) -> dict[str, list[float]]:
    """Figure -> its value in each round."""
    values: dict[str, list[float]] = defaultdict(list)
    with tempfile.TemporaryDirectory(prefix="vagen-bench-") as folder, ExitStack() as stack:
        model = Path(folder) / "model"
        weights = _make_model(model, megabytes * 10**6)
        num_bytes = sum(tensor.nbytes for _, tensor in weights)
        url = stack.enter_context(_engine(model, Path(folder)))
        bare = stack.enter_context(closing(BareBroadcast(num_bytes, _TIMEOUT_S)))
        publishing = stack.enter_context(closing(_Publishing(url, weights, config.requests)))
        sides: list[Callable[[], dict[str, float]]] = [lambda: {"bare_s": bare.run()}]
        sides += [functools.partial(publishing.run, mode) for mode in _MODES]
        for number in range(config.rounds * (config.sizes[-1] // megabytes) + 1):
            measured: dict[str, float] = {}
            for side in sides if number % 2 else reversed(sides):
                measured |= side()
            if number:
                for name, value in _of_round(measured, num_bytes).items():
                    values[name].append(value)
    return values


def _of_round(measured: Mapping[str, float], num_bytes: int) -> dict[str, float]:
    return {
        "vs_bare_broadcast": measured["bare_s"] / measured["transfer_s_retract"],
        "publish_s": measured["publish_s_retract"],
        "stall_ms_retract": 1e3 * measured["stall_s_retract"],
        "stall_ms_in_place": 1e3 * measured["stall_s_in_place"],
        "snapshot_s": measured["snapshot_s_retract"],
        "transfer_gb_per_s": num_bytes / 1e9 / measured["transfer_s_retract"],
        "bare_gb_per_s": num_bytes / 1e9 / measured["bare_s"],
    }


class _Publishing:
    """Publishes to one engine while it generates."""

    def __init__(self, url: str, weights: Sequence[tuple[str, Tensor]], num_requests: int) -> None:
        from vagen.learner.broadcast import Broadcaster
        from vagen.learner.config import BroadcastConfig
        from vagen.learner.snapshot import SnapshotBuffer

        self._url = url
        self._weights = weights
        self._num_requests = num_requests
        self._snapshot = SnapshotBuffer()
        self._version = 0
        self._broadcasters: dict[str, Broadcaster] = {
            mode: Broadcaster(BroadcastConfig(pause_mode=mode, broadcast_timeout_s=_TIMEOUT_S)) for mode in _MODES
        }

    def run(self, mode: str) -> dict[str, float]:
        """Seconds of the parts of one publish. Raises EngineError when it does not succeed."""
        self._version += 1
        for _, tensor in self._weights[-1:]:
            tensor.add_(1e-3)  # so that a publish that changes nothing would not pass for one
        with _Load(self._url, self._num_requests):
            start = time.perf_counter()
            self._snapshot.take(self._weights)
            snapshot_s = time.perf_counter() - start
            report: PublishReport = self._broadcasters[mode].publish(self._snapshot.tensors, self._version, [self._url])
            seconds = time.perf_counter() - start
        if not report.ok:
            raise EngineError(f"bench broadcast: {dict(report.failed)}")
        parts = {"snapshot_s": snapshot_s, "publish_s": seconds}
        parts |= {"stall_s": report.stall_s, "transfer_s": report.transfer_s}
        return {f"{name}_{mode}": value for name, value in parts.items()}

    def close(self) -> None:
        """Leave the groups."""
        for broadcaster in self._broadcasters.values():
            broadcaster.close()


class _Load:
    """Requests that an engine works at for as long as the block lasts."""

    def __init__(self, url: str, num_requests: int) -> None:
        self._url = url
        self._num_requests = num_requests
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="load")
        self._running = threading.Event()
        self._answers: Future[None] | None = None

    def __enter__(self) -> None:
        self._answers = self._thread.submit(lambda: asyncio.run(self._generate()))
        if not self._running.wait(_TIMEOUT_S):
            raise EngineError(f"bench broadcast: {self._num_requests} requests do not run after {_TIMEOUT_S} s")

    def __exit__(self, *exception: object) -> None:
        from vagen.learner.engine_control import EngineControl, open_session

        async def abort() -> None:
            async with open_session() as session, asyncio.timeout(_TIMEOUT_S):
                await EngineControl(session, self._url).post("/abort_request", {"abort_all": True})

        asyncio.run(abort())
        assert self._answers is not None
        self._answers.result(_TIMEOUT_S)
        self._thread.shutdown()

    async def _generate(self) -> None:
        from vagen.learner.engine_control import EngineControl, open_session

        body = {
            "input_ids": list(range(1, _PROMPT_TOKENS + 1)),
            "sampling_params": {"max_new_tokens": _NEW_TOKENS, "temperature": 1.0, "ignore_eos": True},
            "return_logprob": True,
        }
        async with open_session() as session, asyncio.timeout(_TIMEOUT_S):
            control = EngineControl(session, self._url)
            requests = [asyncio.ensure_future(control.post("/generate", body)) for _ in range(self._num_requests)]
            while await _num_running(session, self._url) < self._num_requests:
                if any(request.done() for request in requests):
                    raise EngineError("bench broadcast: a request ended before the publish")
            self._running.set()
            await asyncio.gather(*requests)


async def _num_running(session: Any, url: str) -> float:
    async with session.get(f"{url}/metrics") as answer:
        lines = (await answer.text()).splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith("vagen_engine_running_requests{"))


def _make_model(folder: Path, num_bytes: int) -> list[tuple[str, Tensor]]:
    """Save a Qwen2 of nearly `num_bytes` of random float32 weights; returns them under the engines' names."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    num_weights = num_bytes // 4
    hidden = next(width for width in (1024, 512, 128) if num_weights >= 20 * width**2)
    queries, keys, inner = hidden * hidden, hidden * hidden // 4, hidden * 11 // 4
    layer = 2 * queries + hidden + 2 * (keys + hidden // 4) + 3 * hidden * inner + 2 * hidden
    num_layers = max(1, (num_weights - 4 * hidden * hidden) // layer)
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(
        Qwen2Config(
            # Tied: what the layers leave is the embedding's.
            vocab_size=(num_weights - num_layers * layer - hidden) // hidden,
            hidden_size=hidden,
            intermediate_size=inner,
            num_hidden_layers=num_layers,
            num_attention_heads=hidden // 64,
            num_key_value_heads=max(1, hidden // 256),
            max_position_embeddings=1024,
            tie_word_embeddings=True,
        )
    ).float()
    model.save_pretrained(folder)
    return [(name, parameter.detach()) for name, parameter in model.named_parameters()]


@contextmanager
def _engine(model: Path, folder: Path) -> Iterator[str]:
    """URL of a local engine in a process of its own."""
    supervisor = Supervisor(restart_grace_s=1.0, stop_timeout_s=_STOP_S)
    port, ready = free_port(), folder / "engine.json"
    settings = {"max_running": 8, "max_context": _MAX_CONTEXT, "broadcast_timeout_s": _TIMEOUT_S}
    recipe = folder / "engine.yaml"
    recipe.write_text(yaml.safe_dump({"engine": settings}))
    words = ("--config", str(recipe), "--model", str(model), "--port", str(port), "--ready-file", str(ready))
    argv = (console_script("vagen-actor"), "engine", *words)
    try:
        supervisor.start(ProcessSpec(name="engine", argv=argv, log=folder / "engine.log", ready=ready, env=ENVIRONMENT))
        supervisor.wait_ready("engine", _READY_S)
        yield f"http://127.0.0.1:{port}"
    finally:
        supervisor.stop_all()


def _figures(by_size: Mapping[str, Mapping[str, Sequence[float]]]) -> Figures:
    """Of each size, and those that stand for all: the worst ratio, and the rest of the largest size."""
    units = {"vs_bare_broadcast": "ratio", "transfer_gb_per_s": "GB/s", "bare_gb_per_s": "GB/s"}
    figures: Figures = {}
    for label, values in by_size.items():
        for name, rounds in values.items():
            unit = units.get(name, "ms" if name.startswith("stall_ms") else "s")
            spread = (min(rounds), max(rounds))
            figures[f"{name}_{label}"] = Figure(value=statistics.median(rounds), unit=unit, spread=spread)
    largest = list(by_size)[-1]
    ratios = [figures[f"vs_bare_broadcast_{label}"] for label in by_size]
    headline: Figures = {"vs_bare_broadcast": min(ratios, key=lambda figure: figure.value)}
    for name in ("publish_s", "stall_ms_retract", "stall_ms_in_place"):
        headline[name] = figures[f"{name}_{largest}"]
    return headline | figures


def _notes(config: BroadcastOptions) -> tuple[str, ...]:
    return (
        f"{config.rounds} rounds after one that is not counted, one engine, gloo over loopback, float32.",
        "A smaller model has more rounds, which move as many bytes.",
        "vs_bare_broadcast is the least of the sizes; publish_s and the stalls are those of the largest.",
        "publish_s is from the first byte of the snapshot until the engine's checksums are compared.",
        "A stall is how long the engine is paused; after it, retract computes the cache of running requests anew.",
    )


def _label(megabytes: int) -> str:
    return f"{megabytes // 1000}gb" if megabytes % 1000 == 0 else f"{megabytes}mb"
