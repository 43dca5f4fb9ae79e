"""README.md and curves of an exported model: what trained it, from the folder of its run.

Owns what is shown. Keys and passwords of the recipe are left out, since a card is made to be published.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import jinja2
import yaml
from huggingface_hub import ModelCardData

from vagen.common.redaction import redact_settings
from vagen.tools.charts import Series, line_figure, number
from vagen.tools.runs import RunDir, StepRecord
from vagen.tools.summary import versions

__all__ = ["write_model_card"]

_CURVES_FILE = "training_curves.svg"
_MEAN_OF_STEPS = 10


def write_model_card(folder: Path, run: RunDir | None, step: int, dtype: str) -> None:
    """Write README.md, and the curves where there are any, into an exported model's folder.

    `run` is the folder of its run, None where it is not known; only steps below `step` count.
    """
    steps = [record for record in run.read_steps() if record.step < step] if run else []
    curves = _curves(steps)
    if curves:
        (folder / _CURVES_FILE).write_text(curves, encoding="utf-8")
    config = json.loads((folder / "config.json").read_text())
    sees = "vision_config" in config
    data = ModelCardData(
        library_name="transformers",
        pipeline_tag="image-text-to-text" if sees else "text-generation",
        tags=["reinforcement-learning", "agent", "vagen"],
    )
    recipe = _recipe(run) if run else {}
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("vagen.tools", "templates"),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    text = environment.get_template("model_card.md").render(
        title=_title(recipe, run),
        model_type=config["model_type"],
        step=step,
        curves=_CURVES_FILE if curves else None,
        facts=_facts(run, steps) if run else [],
        dtype=dtype,
        auto_class="AutoModelForImageTextToText" if sees else "AutoModelForCausalLM",
        processor_class="AutoProcessor" if sees else "AutoTokenizer",
        recipe=yaml.safe_dump(redact_settings(recipe), sort_keys=False).strip() if recipe else None,
        versions=versions(),
    )
    (folder / "README.md").write_text(f"---\n{data.to_yaml()}\n---\n\n{text}", encoding="utf-8")


def _recipe(run: RunDir) -> dict[str, object]:
    for path in (run.recipe, run.learner_recipe):
        if path.is_file():
            recipe: dict[str, object] = yaml.safe_load(path.read_text())
            return recipe
    return {}


def _title(recipe: dict[str, object], run: RunDir | None) -> str:
    section = recipe.get("run")
    name = section.get("name") if isinstance(section, dict) else None
    return str(name or (run.root.resolve().name if run else "model"))


def _curves(steps: Sequence[StepRecord]) -> str:
    def curve(name: str, value: Callable[[StepRecord], float | None]) -> Series:
        return Series(name=name, points=[(float(r.step), y) for r in steps if (y := value(r)) is not None])

    parts = sorted({name for record in steps for name in record.loss})
    return line_figure(
        {
            "Success": [curve("success", lambda record: record.success)],
            "Reward": [curve("reward", lambda record: record.reward_mean)],
            "Loss": [curve(name, lambda record, name=name: record.loss.get(name)) for name in parts],  # type: ignore[misc]
        }
    )


def _facts(run: RunDir, steps: Sequence[StepRecord]) -> list[tuple[str, str]]:
    facts = [
        (f"{name}, held-out success", f"{found.success:.3f} [{found.interval[0]:.3f}, {found.interval[1]:.3f}]")
        for name in ("before", "after")
        if (found := run.read_evaluation(name)) is not None
    ]
    if not steps:
        return facts
    last = steps[-_MEAN_OF_STEPS:]
    for name, values in (
        ("success while training", [record.success for record in last]),
        ("reward", [record.reward_mean for record in last]),
        ("entropy in nats", [record.entropy for record in last]),
    ):
        known = [value for value in values if value is not None]
        if known:
            facts.append((f"{name}, mean of the last {len(known)} steps", number(sum(known) / len(known))))
    stalest = max((int(key) for record in steps for key in record.staleness), default=0)
    return [
        *facts,
        ("episodes trained", str(sum(record.num_trajectories for record in steps))),
        ("policy tokens trained", str(sum(record.policy_tokens for record in steps))),
        ("largest staleness in learner steps", str(stalest)),
    ]
