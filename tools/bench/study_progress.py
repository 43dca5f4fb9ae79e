"""The runs of a study with a progress bar on stderr: what is cached at once, the rest as it is made."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from vagen.tools.bench.study import RunResult, RunSpec
from vagen.tools.bench.study_plan import StudyOptions
from vagen.tools.bench.study_runs import RunCache, ensure_runs

__all__ = ["collect"]

logger = logging.getLogger(__name__)


def collect(specs: Sequence[RunSpec], options: StudyOptions) -> list[RunResult]:
    """All results in order; with `options.cached` those that are there."""
    cache = RunCache(options.root)
    if options.cached:
        return [result for spec in specs if (result := cache.find(spec)) is not None]
    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task("runs", total=len(specs))

        def report(spec: RunSpec, result: RunResult, was_cached: bool) -> None:
            name = f"{spec.variant} k={spec.staleness} seed {spec.seed}"
            bar.update(task, advance=1, description=f"{name}: {result.final.success:.3f}")
            if not console.is_terminal and not was_cached:
                console.print(f"{name}: success {result.final.success:.3f}, {result.cpu_s:.0f} CPU-s", highlight=False)

        return ensure_runs(cache, specs, options.workers, report)
