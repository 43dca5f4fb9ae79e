"""The buffer against other ways to carry trajectories, against the disk, and the cost of a claim.

Owns the order of the runs and what is made of them. Every round runs each side once, one after the other, so that
what else happens on the machine falls on all of them alike; a ratio is that of two runs of the same round.
"""

from __future__ import annotations

import contextlib
import logging
import statistics
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated

import msgspec

from vagen.common.config import Section, require
from vagen.common.errors import ConfigError
from vagen.tools.bench import Figure, Figures, Report, benchmark, parse_options
from vagen.tools.bench.buffer_claim import claims
from vagen.tools.bench.buffer_docs import update_buffer
from vagen.tools.bench.buffer_peers import PEERS
from vagen.tools.bench.buffer_pool import write_pool
from vagen.tools.bench.buffer_sides import Setting, run_durable, run_fsync, run_memory, run_redis
from vagen.tools.bench.workers import WorkerError

logger = logging.getLogger(__name__)

PositiveInt = Annotated[int, msgspec.Meta(ge=1)]
_MEMORY = Path("/dev/shm")
_OURS = ("memory", "durable", "durable_spool")
_SIDES = (*_OURS, "redis", "fsync", *(peer.name for peer in PEERS), "claim")
_CLAIM_RUNS = 3
_SMALL_CLAIM = 2000
_SMALL_BYTES = (1024, 282_000)
_RATE = "trajectories/s"


class BufferOptions(Section, frozen=True, kw_only=True):
    """Options of `vagen bench buffer`. `tokens`, `images` and `image_bytes` are those of one trajectory."""

    trajectories: PositiveInt = 1500
    """A run."""
    runs: PositiveInt = 5
    producers: PositiveInt = 2
    tokens: PositiveInt = 2500
    images: Annotated[int, msgspec.Meta(ge=0)] = 10
    image_bytes: PositiveInt = 25_000
    claim_entries: PositiveInt = 200_000
    claim_bytes: PositiveInt = 256
    only: str = ""
    """Sides to run, separated by commas; all when empty."""
    peers: str = ".peers"
    """Where `make bench-peers` put the Pythons of the other systems."""
    folder: str = "."
    """On the file system whose durability is measured."""
    docs: str = ""
    """A document whose part `buffer` the result replaces."""

    def __post_init__(self) -> None:
        unknown = [name for name in self.only.split(",") if self.only and name not in _SIDES]
        require(not unknown, "only", self.only, f"names out of {', '.join(_SIDES)}")
        require(Path(self.folder).is_dir(), "folder", self.folder, "a folder that exists")

    @property
    def sides(self) -> tuple[str, ...]:
        """What to run, in order."""
        return tuple(side for side in _SIDES if not self.only or side in self.only.split(","))


class Rounds:
    """Rates by side and round, and why a side has none."""

    def __init__(self) -> None:
        self.rates: dict[str, list[float]] = defaultdict(list)
        self.missing: dict[str, str] = {}

    def figure(self, side: str) -> Figure:
        """Median and spread."""
        return spread(self.rates[side], _RATE)

    def ratio(self, side: str, other: str) -> Figure:
        """Of the two runs of each round."""
        return spread([a / b for a, b in zip(self.rates[side], self.rates[other], strict=True)], "ratio")


def spread(values: Sequence[float], unit: str) -> Figure:
    """The median of repeated runs, with the least and the greatest."""
    return Figure(value=statistics.median(values), unit=unit, spread=(min(values), max(values)))


@benchmark("buffer")
def buffer(options: Mapping[str, str]) -> Report:
    """The buffer against Reverb, Ray and TransferQueue, fsync and Redis; --only, --runs, --trajectories, --folder."""
    config = parse_options(options, BufferOptions)
    with _setting(config) as (setting, payload_bytes):
        rounds = _run_rounds(config, setting)
        figures: Figures = {"payload_bytes": Figure(value=payload_bytes, unit="bytes")}
        figures |= _ratios(rounds)
        if "claim" in config.sides:
            figures |= _claims(config, setting)
    report = Report(figures=figures, notes=(*_facts(config, setting), *_notes(rounds)))
    if config.docs:
        update_buffer(Path(config.docs), report)
    return report


@contextlib.contextmanager
def _setting(config: BufferOptions) -> Iterator[tuple[Setting, int]]:
    memory = str(_MEMORY) if _MEMORY.is_dir() else None
    with (
        tempfile.TemporaryDirectory(dir=memory, prefix="vb") as in_memory,
        tempfile.TemporaryDirectory(dir=config.folder, prefix="vagen-bench-") as on_disk,
    ):
        pool = Path(in_memory) / "pool"
        pool.mkdir()
        size = write_pool(pool, tokens=config.tokens, images=config.images, image_bytes=config.image_bytes)
        setting = Setting(
            pool=pool,
            disk=Path(on_disk),
            memory=Path(in_memory),
            count=config.trajectories,
            producers=config.producers,
        )
        yield setting, size


def _run_rounds(config: BufferOptions, setting: Setting) -> Rounds:
    rounds = Rounds()
    peers = {peer.name: peer for peer in PEERS if peer.name in config.sides}
    for name, peer in peers.items():
        problem = peer.missing(Path(config.peers))
        if problem is not None:
            rounds.missing[name] = problem
    for number in range(config.runs):
        for side in _measured(config):
            if side in rounds.missing:
                continue
            try:
                rate = peers[side].run(setting, Path(config.peers)) if side in peers else _run(side, setting, rounds)
            except WorkerError as error:
                if side not in peers:
                    raise
                rounds.missing[side] = str(error)
                rounds.rates.pop(side, None)
                continue
            rounds.rates[side].append(rate)
            logger.info("round %d of %d, %s: %.0f trajectories/s", number + 1, config.runs, side, rate)
    return rounds


def _measured(config: BufferOptions) -> list[str]:
    """Sides of a round; the disk is compared with a durable run, so that neither is without the other."""
    sides = [side for side in config.sides if side != "claim"]
    if "fsync" in sides and "durable" not in sides:
        raise ConfigError('bench: only: "fsync" writes in batches of "durable", which must run too')
    return sides


def _run(side: str, setting: Setting, rounds: Rounds) -> float:
    if side in ("durable", "durable_spool"):
        rate, batch = run_durable(setting, setting.memory if side == "durable" else setting.disk)
        rounds.rates[f"{side}_batch"].append(batch)
        return rate
    if side == "fsync":
        return run_fsync(setting, rounds.rates["durable_batch"][-1])
    runs: dict[str, Callable[[Setting], float]] = {"memory": run_memory, "redis": run_redis}
    return runs[side](setting)


def _ratios(rounds: Rounds) -> Figures:
    figures: Figures = {}
    present = [peer.name for peer in PEERS if peer.name in rounds.rates]
    if present and "memory" in rounds.rates:
        figures["memory_vs_best_peer"] = rounds.ratio("memory", _best(rounds, present))
        for name in present:
            figures[f"memory_vs_{name}"] = rounds.ratio("memory", name)
    if "fsync" in rounds.rates:
        figures["durable_vs_fsync_limit"] = rounds.ratio("durable", "fsync")
    if "memory" in rounds.rates and "redis" in rounds.rates:
        figures["memory_vs_redis"] = rounds.ratio("memory", "redis")
    for side in rounds.rates:
        is_batch = side.endswith("_batch")
        key = f"{side}_size" if is_batch else f"{side}_per_s"
        figures[key] = spread(rounds.rates[side], "trajectories/commit") if is_batch else rounds.figure(side)
    return figures


def _best(rounds: Rounds, names: Sequence[str]) -> str:
    return max(names, key=lambda name: statistics.median(rounds.rates[name]))


def _claims(config: BufferOptions, setting: Setting) -> Figures:
    """Server time of a claim of 512, of the many and, for two sizes of payload, of the few."""
    unit = "ms of server time"
    small = min(_SMALL_CLAIM, config.claim_entries)
    figures = {
        f"claim_512_of_{small}_of_{size}_bytes_ms": spread(claims(setting, small, size, _CLAIM_RUNS), unit)
        for size in _SMALL_BYTES
    }
    count = config.claim_entries
    name = f"claim_512_of_{count // 1000}k_ms" if count % 1000 == 0 else f"claim_512_of_{count}_ms"
    return {name: spread(claims(setting, count, config.claim_bytes, _CLAIM_RUNS), unit), **figures}


def _facts(config: BufferOptions, setting: Setting) -> tuple[str, ...]:
    in_memory = setting.memory.is_relative_to(_MEMORY)
    return (
        f"{config.runs} rounds of {config.trajectories} trajectories by {config.producers} producers; median, least"
        " and greatest; ratios are of runs of one round",
        "a rate is from the producers' start until the consumer has decoded the last one, all on this machine",
        f"memory: Valkey without AOF, actors' spools in {'memory' if in_memory else 'the temporary folder'};"
        " durable: fsync always, spools as in memory, since an actor's disk is another machine's;"
        " durable_spool: both on the measured file system",
        "ours validates, deduplicates and acknowledges each trajectory; durable also fsyncs before it does;"
        " no peer validates, deduplicates or writes anything, and none has an actor's spool",
    )


def _notes(rounds: Rounds) -> tuple[str, ...]:
    present = [peer.name for peer in PEERS if peer.name in rounds.rates]
    notes = [f"{peer.name}: {peer.about}" for peer in PEERS if peer.name in present]
    if present:
        notes.append(f"best peer: {_best(rounds, present)}, out of {', '.join(present)}")
    return (*notes, *(f"{name}: missing, {problem}" for name, problem in rounds.missing.items()))
