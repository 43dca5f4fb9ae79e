"""What a person sees while a demo runs."""

from __future__ import annotations

import io
import logging

import pytest
from rich.console import Console

from vagen.tools.runs import Evaluation, Publish, StepRecord
from vagen.tools.screen import (
    LiveView,
    LogView,
    ProcessView,
    Snapshot,
    clock,
    render,
    shares_text,
    sparkline,
    status_line,
)

SNAPSHOT = Snapshot(
    title="vagen demo · frozenlake · seed 1",
    stage="train",
    elapsed_s=83,
    total_steps=60,
    steps=[
        StepRecord(
            step=step,
            time=float(step),
            version=step + 1,
            success=0.25 + 0.03 * step,
            staleness={"1": 60, "4": 36},
            publishes=(Publish(version=step + 1, ok=("http://e",)),),
        )
        for step in range(20)
    ],
    before=Evaluation(success=0.27, interval=(0.24, 0.30), levels=1000),
    curve=[Evaluation(success=0.82, interval=(0.76, 0.87), levels=200, step=20)],
    target=0.8,
    gauges={"ready": 120.0, "claimed": 96.0, "running": 64.0, "in_flight": 3.0},
    generated_per_s=3120.4,
    trained_per_s=2210.0,
    trajectories_per_s=31.0,
    processes=[
        ProcessView(name="engine", state="serving", pid=4711, cpu_s=33.2, shares={"busy": 0.73, "paused": 0.05}),
        ProcessView(name="learner", state="lost", cpu_s=10, shares={"wait_data": 0.6}),
    ],
)


def shown(snapshot: Snapshot, width: int = 110) -> str:
    console = Console(width=width, file=io.StringIO(), record=True)
    console.print(render(snapshot))
    return console.export_text()


def test_the_screen_shows_everything_at_once():
    text = shown(SNAPSHOT)
    for part in (
        "step 20/60",
        "1:23",
        "0.270 [0.240, 0.300] of 1000 levels",
        "0.820 [0.760, 0.870] of 200 levels",
        "1:▅62%",
        "4:▃38%",
        "3,120 tokens/s",
        "2,210 tokens/s",
        "busy 73 % · paused 5 %",
        "4711",
        "lost",
        "wait_data 60 %",
    ):
        assert part in text, part
    assert len(text.splitlines()) <= 24


def test_the_screen_before_the_first_step():
    text = shown(Snapshot(title="t", stage="warm start", elapsed_s=0, total_steps=60))
    assert "no step and no evaluation yet" in text and "step 0/60" in text


@pytest.mark.parametrize("width", [60, 200])
def test_the_screen_fits_other_widths(width):
    assert max(map(len, shown(SNAPSHOT, width).splitlines())) <= width


def test_the_status_line_says_the_same_in_one_line():
    line = status_line(SNAPSHOT)
    assert "\n" not in line
    for part in (
        "step 20/60",
        "version 20",
        "held-out 0.82 at step 20",
        "ready/claimed/running 120/96/64",
        "2.1 (max 4)",
    ):
        assert part in line, part


def test_the_log_view_speaks_at_a_change_of_stage_and_is_quiet_between(caplog):
    caplog.set_level(logging.INFO)
    with LogView(every_s=1000) as view:
        for stage in ("start", "start", "train", "train"):
            view.update(Snapshot(title="t", stage=stage, elapsed_s=0, total_steps=1))
        view.event("engine died")
    assert [record.getMessage().split("  ")[-1] for record in caplog.records] == ["start", "train", "engine died"]


def test_the_live_view_keeps_events_on_the_terminal():
    console = Console(width=100, file=io.StringIO(), force_terminal=True)
    with LiveView(console) as view:
        view.update(SNAPSHOT)
        view.event("engine was killed by SIGKILL [bold]")
        view.update(SNAPSHOT)
    output = console.file.getvalue()
    assert "engine was killed by SIGKILL [bold]" in output and "4711" in output


def test_small_parts():
    assert sparkline([0.0, 0.5, None, 1.0], 10) == "▁▅ █"
    assert sparkline([0.0] * 50, 10) == "▁" * 10
    assert clock(3723) == "1:02:03" and clock(59) == "0:59"
    assert shares_text({"a": 0.2, "b": 0.7, "c": 0.001}) == "b 70 % · a 20 %"
