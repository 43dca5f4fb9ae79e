"""How much success old data costs: equal episodes at staleness 0 to 32, with and without the corrections.

Owns the command; what a run is, is `vagen.tools.bench.study`'s.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from vagen.tools.bench import Figures, benchmark, parse_options


@benchmark("staleness")
def staleness(options: Mapping[str, str]) -> Figures:
    """Success kept at staleness 4 to 32; --seeds N, --full, --out DIR, --workers N, --cached, --docs FILE."""
    from vagen.tools.bench.study_docs import update_staleness
    from vagen.tools.bench.study_plan import CORRECTIONS, StudyOptions, grid_runs
    from vagen.tools.bench.study_progress import collect
    from vagen.tools.bench.study_summary import Results

    config = parse_options(options, StudyOptions)
    results = Results(collect(grid_runs(config), config), CORRECTIONS)
    if config.docs:
        update_staleness(Path(config.docs), results)
    figures = results.staleness_figures()
    return figures | results.grid_figures(CORRECTIONS) if config.full else figures
