"""The report of a whole and of a partial run: well-formed, self-contained, with every section."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser

import pytest

from vagen.common.errors import ConfigError
from vagen.tools.charts import Series, bar_chart, line_chart, number, share_bars, ticks
from vagen.tools.report import write_report
from vagen.tools.runs import Evaluation, RunDir, write_json
from vagen.tools.summary import build_summary

VOID = {"meta", "img", "br", "link", "hr", "input"}
SECTIONS = {"before-after", "curves", "time", "publishes", "accounting", "episodes", "configuration"}


class Page(HTMLParser):
    """Checks nesting, and collects what the page refers to and says."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: set[str] = set()
        self.sources: list[str] = []
        self.counts: dict[str, int] = {}
        self.text = ""
        self.feed(html)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.counts[tag] = self.counts.get(tag, 0) + 1
        for name, value in attrs:
            if name == "id":
                self.ids.add(value)
            if name in ("src", "href"):
                self.sources.append(value)
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.counts[tag] = self.counts.get(tag, 0) + 1

    def handle_endtag(self, tag):
        assert self.open and self.open[-1] == tag, f"</{tag}> closes {self.open[-1:]} at {self.getpos()}"
        self.open.pop()

    def handle_data(self, data):
        self.text += data


@pytest.fixture
def whole(make_run):
    root = make_run()
    return root, Page(write_report(root).read_text())


def test_a_whole_run_has_every_section_and_figure(whole):
    root, page = whole
    assert SECTIONS <= page.ids
    assert "Learned: both targets were met." in page.text
    for title in (
        "Success on held-out levels",
        "Success while training",
        "Reward by component",
        "Staleness at consumption",
        "Losses",
        "Entropy",
        "Importance ratio",
        "Engine against learner",
        "Tokens a second",
    ):
        assert title in page.text
    assert page.counts["svg"] == 10
    assert "0.268" in page.text and "0.842" in page.text
    assert "every trajectory is accounted for" in page.text
    assert "engine is back, pid 4711" in page.text
    assert "<think>down right</think><answer>Right</answer>" in page.text
    assert page.counts["img"] == 2 * (3 + 4 + 5)
    assert "total_steps: 30" in page.text


def test_the_page_needs_no_network(whole):
    root, page = whole
    assert all(source.startswith("data:") for source in page.sources)
    html = (root / "report.html").read_text()
    assert "<script" not in html and "@import" not in html
    assert not re.search(r"url\((?!data:)", html)


def test_a_partial_run_says_what_is_missing(make_run):
    root = make_run(steps=7, finished=False)
    page = Page(write_report(root).read_text())
    assert SECTIONS <= page.ids
    assert "Partial run: interrupted, 7 of 30 steps." in page.text
    assert "The buffer was not audited." in page.text
    assert "Not played." in page.text


def test_a_run_that_was_killed_during_the_warm_start_still_has_a_report(tmp_path):
    (tmp_path / "recipe.yaml").write_text("run: {name: early}\n")
    page = Page(write_report(tmp_path).read_text())
    assert "No learner step was logged." in page.text
    assert "Nothing was published." in page.text


def test_a_missed_target_is_said(make_run):
    root = make_run()
    evaluation = json.loads((root / "eval" / "after.json").read_text())
    write_json(root / "eval" / "after.json", {**evaluation, "success": 0.7, "interval": [0.67, 0.73]})
    page = Page(write_report(root).read_text())
    assert "Target missed: after is below 0.80." in page.text


def test_text_of_the_model_cannot_become_markup(make_run):
    root = make_run()
    evaluation = json.loads((root / "eval" / "before.json").read_text())
    evaluation["transcripts"][0]["turns"][0]["response"] = "<script>alert(1)</script>"
    write_json(root / "eval" / "before.json", evaluation)
    html = write_report(root).read_text()
    assert "<script>" not in html and "&lt;script&gt;" in html


def test_a_torn_last_line_is_left_out(make_run):
    root = make_run(steps=5)
    with (root / "learner" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 5, "time": 10')
    assert [record.step for record in RunDir(root).read_steps()] == [0, 1, 2, 3, 4]


def test_a_metric_that_is_not_a_number_does_not_cost_the_line(make_run):
    root = make_run(steps=5)
    text = (root / "learner" / "metrics.jsonl").read_text()
    (root / "learner" / "metrics.jsonl").write_text(text.replace('"entropy": 0.6', '"entropy": NaN'))
    steps = RunDir(root).read_steps()
    assert len(steps) == 5 and steps[0].entropy != steps[0].entropy
    write_report(root)


def test_of_a_repeated_step_the_last_line_counts(make_run):
    root = make_run(steps=5)
    lines = (root / "learner" / "metrics.jsonl").read_text().splitlines()
    repeated = {**json.loads(lines[3]), "success": 0.123}
    (root / "learner" / "metrics.jsonl").write_text("\n".join([*lines, json.dumps(repeated)]) + "\n")
    steps = RunDir(root).read_steps()
    assert len(steps) == 5 and steps[3].success == 0.123


def test_folder_of_something_else_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="not the folder of a run"):
        write_report(tmp_path)


def test_summary_figures(make_run):
    summary = build_summary(RunDir(make_run()))
    assert summary["heldout_success_before"] == 0.268
    assert summary["heldout_success_after"] == 0.842
    assert summary["heldout_success_after_interval"] == (0.818, 0.863)
    assert summary["targets"]["passed"] is True
    assert summary["steps"] == 30 and summary["episodes_trained"] == 30 * 96
    assert summary["versions_published"] == 30
    # Telemetry saw tokens until second 1118, the last step was published at 1116.
    assert summary["versions_published_while_running"] == 30
    assert summary["staleness"] == {"0": 120, "1": 1560, "2": 900, "3": 300}
    assert summary["accounting"]["identity_holds"] is True
    assert summary["cpu_seconds"]["total"] == pytest.approx(229.75)
    assert summary["minutes"] == pytest.approx(3.5)
    assert 5e-7 < summary["logprob_mismatch_max"] < 3e-6


def test_versions_published_after_the_episodes_are_not_counted_as_while_running(make_run):
    root = make_run()
    lines = (root / "telemetry.jsonl").read_text().splitlines()
    (root / "telemetry.jsonl").write_text("\n".join(lines[:21]) + "\n")  # up to second 1040: steps 0 to 10
    assert build_summary(RunDir(root))["versions_published_while_running"] == 11


def test_charts_leave_gaps_for_what_is_not_finite():
    svg = line_chart([Series(name="x", points=[(0, 1.0), (1, float("nan")), (2, 3.0)])])
    assert svg.count("<title>") == 2
    assert line_chart([Series(name="x", points=[])]) == ""
    assert bar_chart({}, x_label="x") == ""
    assert share_bars({}) == ""


def test_ticks_cover_the_range_in_round_numbers():
    assert ticks(0, 1) == pytest.approx([0, 0.25, 0.5, 0.75, 1])
    assert ticks(-0.03, 0.09) == pytest.approx([-0.03, 0, 0.03, 0.06, 0.09]) or ticks(-0.03, 0.09)[0] <= -0.03
    low, *_, high = ticks(5, 5)
    assert low < 5 < high


@pytest.mark.parametrize(
    ("value", "shown"), [(0, "0"), (1234, "1234"), (43210, "43.2k"), (2_500_000, "2.5M"), (1.5e-6, "1.5e-06")]
)
def test_numbers_are_short(value, shown):
    assert number(value) == shown


def test_an_evaluation_survives_the_file(tmp_path):
    path = tmp_path / "e.json"
    write_json(path, Evaluation(success=0.5, interval=(0.4, 0.6), levels=100))
    assert json.loads(path.read_text())["interval"] == [0.4, 0.6]
