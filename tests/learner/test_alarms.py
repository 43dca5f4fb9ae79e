"""Each alarm is raised by its own collapse, once, and cleared; a healthy run raises none."""

from __future__ import annotations

import functools
import json
import logging
import math
import random
from types import SimpleNamespace

import pytest

from vagen.buffer.manifest import Manifest, ManifestEntry
from vagen.common.config import convert
from vagen.common.errors import ConfigError
from vagen.common.metrics import Metrics
from vagen.learner.alarms import AlarmConfig, CollapseAlarms
from vagen.learner.journal import StepJournal
from vagen.learner.publish_thread import PublishTally

HEALTHY = {
    "num_trajectories": 96,
    "turns_mean": 4.0,
    "policy_tokens": 3000,
    "reward_std": 0.45,
    "grad_norm": 0.5,
    "entropy": 0.4,
    "format_rate": 0.95,
}
ALARMS = {"reward_std", "grad_norm", "entropy_low", "entropy_high", "length_low", "length_high", "format_rate"}


def line(step: int = 0, **changes: float) -> dict:
    return {"step": step, **HEALTHY, **changes}


def healthy_run(seed: int, steps: int = 200) -> list[dict]:
    """The shape of real runs: entropy .43 to .3, format .92 to .99, spread falling, single spikes of the gradient."""
    rng = random.Random(seed)
    lines = []
    for step in range(steps):
        progress = 1 - math.exp(-step / 15)
        spike = 12.0 if step % 37 == 20 else 1.0
        lines.append(
            line(
                step,
                turns_mean=4.5 - progress,
                policy_tokens=int(3300 - 700 * progress + rng.gauss(0, 60)),
                reward_std=0.6 - 0.3 * progress + abs(rng.gauss(0, 0.05)),
                grad_norm=spike * rng.uniform(0.3, 0.9),
                entropy=0.43 - 0.13 * progress + rng.gauss(0, 0.02),
                format_rate=min(1.0, 0.92 + 0.07 * progress + rng.gauss(0, 0.02)),
            )
        )
    return lines


def names(alarms: CollapseAlarms, lines: list[dict]) -> list[tuple[int, str, bool]]:
    """(step, alarm, raised or cleared)."""
    return [(one["step"], event.name, event.is_raised) for one in lines for event in alarms.observe(one)]


@pytest.mark.parametrize("seed", range(5))
def test_a_healthy_run_raises_none(seed):
    alarms = CollapseAlarms(AlarmConfig())
    assert names(alarms, healthy_run(seed)) == []
    assert alarms.active == []


@pytest.mark.parametrize(
    ("alarm", "collapsed", "hovering"),
    [
        ("reward_std", {"reward_std": 0.0}, {"reward_std": 1.1e-3}),
        ("grad_norm", {"grad_norm": 6.0}, {"grad_norm": 4.6}),
        ("grad_norm", {"grad_norm": math.nan}, {"grad_norm": 4.6}),
        ("entropy_low", {"entropy": 0.07}, {"entropy": 0.09}),
        ("entropy_high", {"entropy": 1.3}, {"entropy": 1.1}),
        ("length_low", {"policy_tokens": 900}, {"policy_tokens": 1100}),
        ("length_high", {"policy_tokens": 9500}, {"policy_tokens": 8500}),
        ("format_rate", {"format_rate": 0.7}, {"format_rate": 0.77}),
    ],
)
def test_each_is_raised_once_and_cleared_once(alarm, collapsed, hovering):
    """15 healthy steps, 20 collapsed, 10 between the bound and where it clears, then healthy again."""
    curve = [{}] * 15 + [collapsed] * 20 + [hovering] * 10 + [{}] * 20
    alarms = CollapseAlarms(AlarmConfig())
    lines = [line(step, **changes) for step, changes in enumerate(curve)]
    # Three steps in a row from steps 15 and 45 on.
    assert names(alarms, lines) == [(17, alarm, True), (47, alarm, False)]


def test_the_alarms_of_the_table_are_all_tested():
    raised = CollapseAlarms(AlarmConfig(patience=1, baseline_steps=1))
    raised.observe(line())
    low = raised.observe(line(reward_std=0.0, grad_norm=50.0, entropy=0.0, policy_tokens=1, format_rate=0.0))
    high = raised.observe(line(entropy=9.0, policy_tokens=99999))
    assert {event.name for event in (*low, *high)} == ALARMS


def test_values_beyond_the_bound_do_not_become_the_norm():
    alarms = CollapseAlarms(AlarmConfig())
    events = names(alarms, [line(step, grad_norm=0.5 if step < 15 else 8.0) for step in range(300)])
    assert events == [(17, "grad_norm", True)]
    assert alarms.active == ["grad_norm"]


def test_patience_counts_steps_in_a_row():
    alarms = CollapseAlarms(AlarmConfig(patience=4))
    curve = ([0.0] * 3 + [0.4]) * 10 + [0.0] * 4
    assert names(alarms, [line(step, reward_std=std) for step, std in enumerate(curve)]) == [(43, "reward_std", True)]


def test_before_the_baseline_only_the_fixed_bound_speaks():
    alarms = CollapseAlarms(AlarmConfig(baseline_steps=10))
    wild = [line(step, entropy=10.0**step, grad_norm=10.0**step, reward_std=0.0) for step in range(9)]
    assert names(alarms, wild) == [(2, "reward_std", True)]


def test_switched_off_it_says_nothing():
    alarms = CollapseAlarms(AlarmConfig(enabled=False))
    assert names(alarms, [line(step, reward_std=0.0) for step in range(20)]) == []


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ({"patience": 0}, r"\$.learner.alarms.patience"),
        ({"clear_margin": 1.0}, r"\$.learner.alarms.clear_margin: expected float in \[0, 1\), got 1.0"),
        ({"max_entropy_factor": 0.5}, r"\$.learner.alarms.max_entropy_factor: expected float > 1, got 0.5"),
        ({"min_reward_std": -1.0}, r"\$.learner.alarms.min_reward_std: expected >= 0, got -1.0"),
        ({"on": True}, "on: unknown key"),
    ],
)
def test_settings_out_of_bounds_are_refused(raw, message):
    with pytest.raises(ConfigError, match=message):
        convert(raw, AlarmConfig, "$.learner.alarms")


STATS = SimpleNamespace(
    losses={
        "policy_surrogate": 0.0,
        "value_loss": 0.1,
        "behaviour_kl": 0.01,
        "total_loss": 0.1,
        "rejected_share": 0.0,
        "clip_share": 0.02,
    },
    ratio=SimpleNamespace(
        mean=1.0,
        max=2.0,
        p99=1.5,
        effective_sample_size=0.9,
        capped_share=0.0,
        clamped_share=0.0,
        fresh=SimpleNamespace(num_tokens=0),
        stale=SimpleNamespace(num_tokens=0),
    ),
    grad_norm=0.5,
    lr=1e-4,
    critic_lr=None,
    entropy=0.4,
    explained_variance=0.3,
    num_updates=1,
    skipped_updates=0,
)


def write(file, steps, metrics, settings=None) -> list[dict]:
    """Journal steps whose batches have these reward spreads, and return their lines; `settings` changed by step."""
    journal = StepJournal(file, metrics, AlarmConfig())
    entry = ManifestEntry(trajectory_id="t", num_bytes=1, oldest_step=0, staleness=0, group_id="g")
    feed = SimpleNamespace(manifest=Manifest(step=0, entries=(entry,), sealed_at=0.0), notes=None)
    lines = []
    for step, reward_std in enumerate(steps):
        summary = SimpleNamespace(staleness=[0], fields=functools.partial(_batch_fields, reward_std))
        changed = (settings or {}).get(step)
        lines.append(journal.write(step, feed, summary, STATS, [], PublishTally(), {"total": 1.0}, changed))
    journal.close()
    return lines


def _batch_fields(reward_std: float) -> dict:
    rest = {"success": 0.3, "reward_mean": 0.3, "mixed_version_trajectories": 0, "context_tokens": 1}
    return {**{key: HEALTHY[key] for key in HEALTHY if key not in ("grad_norm", "entropy")}, **rest} | {
        "reward_std": reward_std
    }


def test_the_journal_warns_counts_and_lists(tmp_path, caplog):
    metrics = Metrics("vagen_learner", "run")
    with caplog.at_level(logging.INFO, "vagen.learner.journal"):
        lines = write(tmp_path / "metrics.jsonl", [0.4, 0.0, 0.0, 0.0, 0.0, 0.4, 0.4, 0.4], metrics)
    assert [one["alarms"] for one in lines] == [[], [], [], ["reward_std"], *[["reward_std"]] * 3, []]
    assert [json.loads(text)["alarms"] for text in (tmp_path / "metrics.jsonl").read_text().splitlines()] == [
        one["alarms"] for one in lines
    ]
    assert [(record.levelname, record.getMessage()) for record in caplog.records] == [
        ("WARNING", "step 3: alarm reward_std raised: 0, bound 0.001"),
        ("INFO", "step 7: alarm reward_std cleared: 0.4, bound 0.001"),
    ]
    labels = {"run": "run", "alarm": "reward_std"}
    assert metrics.registry.get_sample_value("vagen_learner_alarms_total", labels) == 1


def test_a_restart_goes_on_from_the_lines_on_disk(tmp_path):
    file = tmp_path / "metrics.jsonl"
    write(file, [0.4, 0.0, 0.0], Metrics("vagen_learner", "run"))
    with file.open("a") as torn:
        torn.write('{"step": 3, "rew')
    metrics = Metrics("vagen_learner", "run")
    (line,) = write(file, [0.0], metrics)
    assert line["alarms"] == ["reward_std"]
    assert len([json.loads(text) for text in file.read_text().splitlines()]) == 4, "a torn line is not continued"


def test_settings_are_in_the_line_of_the_step_after_which_they_were_changed(tmp_path):
    changed = {1: {"max_staleness": {"value": 5, "source": "live"}}, 2: {}}
    write(tmp_path / "metrics.jsonl", [0.4] * 3, Metrics("vagen_learner", "run"), changed)
    lines = [json.loads(text) for text in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line.get("settings") for line in lines] == [None, changed[1], None]
