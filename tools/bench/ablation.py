"""What the advantage estimator decides: equal episodes on fresh data, one estimator against another.

Owns the command; what a run is, is `vagen.tools.bench.study`'s.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from vagen.tools.bench import Figures, benchmark, parse_options


@benchmark("ablation")
def ablation(options: Mapping[str, str]) -> Figures:
    """Held-out success by advantage estimator, on-policy; options as of staleness."""
    from vagen.tools.bench.study_docs import update_estimators
    from vagen.tools.bench.study_plan import ESTIMATORS, StudyOptions, ablation_runs
    from vagen.tools.bench.study_progress import collect
    from vagen.tools.bench.study_summary import Results

    config = parse_options(options, StudyOptions)
    results = Results(collect(ablation_runs(config), config), ESTIMATORS)
    if config.docs:
        update_estimators(Path(config.docs), results)
    samples = {variant.name: results.success(variant, 0) for variant in ESTIMATORS}
    return {
        f"{name}_success": sample.figure("share of levels") for name, sample in samples.items() if sample is not None
    }
