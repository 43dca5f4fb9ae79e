"""Many runs: the cache of finished ones, the warm starts they share, and the processes that make what is missing.

One JSON file a run below `<out>/runs`, named by everything that decides it, one model a warm start below `<out>/warm`.
An interrupted study goes on where it stopped; the results of one study serve another.
"""

from __future__ import annotations

import logging
import multiprocessing
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from pathlib import Path

import msgspec

from vagen.common.environment import environment_defaults
from vagen.common.errors import ConfigError
from vagen.tools.bench.study import RunResult, RunSpec, run_study
from vagen.tools.launch import ENVIRONMENT
from vagen.tools.runs import write_json

__all__ = ["RunCache", "ensure_runs"]

logger = logging.getLogger(__name__)

Progress = Callable[[RunSpec, RunResult, bool], None]
"""Called with each run that is there, and whether it was found in the cache."""


class RunCache:
    """Results and warm starts below one folder."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def find(self, spec: RunSpec) -> RunResult | None:
        """The result of this run; None where there is none. Raises `ConfigError` for a file that is no result."""
        path = self._path(spec)
        if not path.is_file():
            return None
        try:
            return msgspec.json.decode(path.read_bytes(), type=RunResult)
        except msgspec.DecodeError as error:
            raise ConfigError(f"{path}: not the result of a run: {error}; remove it") from error

    def keep(self, result: RunResult) -> None:
        """Write a result, whole or not at all."""
        write_json(self._path(result.spec), result)

    def warm_model(self, spec: RunSpec) -> Path:
        """Where the warm start of a run is, or will be."""
        return self.root / "warm" / spec.warm_key / "model"

    def _path(self, spec: RunSpec) -> Path:
        return self.root / "runs" / f"{spec.key}.json"


def ensure_runs(cache: RunCache, specs: Sequence[RunSpec], workers: int, progress: Progress) -> list[RunResult]:
    """The results of all `specs`, in order; those not in the cache are made by `workers` processes, first ones first.

    Each worker runs one thread. An error in a run ends the study, with every finished run kept.
    """
    found = {spec.key: cached for spec in specs if (cached := cache.find(spec)) is not None}
    missing = {spec.key: spec for spec in specs if spec.key not in found}
    for spec in specs:
        if spec.key in found:
            progress(spec, found[spec.key], True)
    if missing:
        context = multiprocessing.get_context("spawn")
        num_workers = min(workers, len(missing))
        # Read when a process starts, so it must be there before the pool is.
        with environment_defaults(ENVIRONMENT), ProcessPoolExecutor(num_workers, mp_context=context) as pool:
            try:
                _make_warm_starts(pool, cache, list(missing.values()))
                futures = {pool.submit(_run, cache.root, spec): spec for spec in missing.values()}
                for future in as_completed(futures):
                    result: RunResult = future.result()
                    found[result.key] = result
                    progress(futures[future], result, False)
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                raise
    return [found[spec.key] for spec in specs]


def _make_warm_starts(pool: ProcessPoolExecutor, cache: RunCache, specs: Sequence[RunSpec]) -> None:
    wanted = {spec.warm_key: spec for spec in specs if not cache.warm_model(spec).exists()}
    futures: list[Future[None]] = [pool.submit(_warm_up, cache.root, spec) for spec in wanted.values()]
    for future in futures:
        future.result()


def _warm_up(root: Path, spec: RunSpec) -> None:
    from vagen.tools.sft import run_sft

    run_sft(spec.recipe(), RunCache(root).warm_model(spec), lambda progress: None)


def _run(root: Path, spec: RunSpec) -> RunResult:
    cache = RunCache(root)
    result = run_study(spec, cache.warm_model(spec))
    cache.keep(result)
    return result
