"""The staleness study: exact staleness, equal bits for equal runs, a cache that resumes, and what is reported of it."""

from __future__ import annotations

import json
import os
import shutil
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

from vagen.actor.local_engine.config import EngineConfig
from vagen.actor.rendering import ChatRenderer, Prompt
from vagen.common.errors import ConfigError
from vagen.common.trajectory import SamplingParams
from vagen.common.validation import validate_trajectory
from vagen.learner.advantages.batch import AdvantageInputs
from vagen.learner.advantages.config import AdvantageConfig
from vagen.learner.advantages.estimate import estimate_advantages
from vagen.learner.model.parallel import parallel_session
from vagen.tools.bench import parse_words, run_benchmark
from vagen.tools.bench.documents import replace_parts
from vagen.tools.bench.study import Evaluated, RunResult, RunSpec, StepRecord, StudyTrainer, run_study
from vagen.tools.bench.study_plan import CORRECTIONS, ESTIMATORS, StudyOptions, ablation_runs, grid_runs
from vagen.tools.bench.study_runs import RunCache, ensure_runs
from vagen.tools.bench.study_sampler import StudySampler
from vagen.tools.statistics import t_interval

TINY = ("sft.steps=4", "sft.turns=80", "actor.max_new_tokens=6", "env.config.max_turns=3", "learner.minibatch_rows=8")


def tiny(**fields) -> RunSpec:
    settings = {"variant": "tiny", "overrides": TINY, "steps": 4, "episodes": 4, "levels": 6, "curve_levels": 0}
    return RunSpec(**{**settings, **fields})


@pytest.fixture(scope="module", autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def cache(tmp_path_factory) -> RunCache:
    """With the run of staleness 1 in it, made by a worker process."""
    cache = RunCache(tmp_path_factory.mktemp("study"))
    environment = dict(os.environ)
    ensure_runs(cache, [tiny(staleness=1)], 1, lambda spec, result, was_cached: None)
    assert dict(os.environ) == environment
    return cache


@pytest.fixture(scope="module")
def model(cache):
    return cache.warm_model(tiny())


def without_clock(result: RunResult) -> RunResult:
    return msgspec.structs.replace(result, cpu_s=0.0, wall_s=0.0)


def test_equal_runs_are_equal_bit_by_bit(cache, model):
    spec = tiny(staleness=1)
    again, of_worker = run_study(spec, model), cache.find(spec)
    assert without_clock(again) == without_clock(of_worker)
    assert again.weights != run_study(tiny(staleness=2), model).weights


@pytest.mark.parametrize(("staleness", "versions"), [(0, [0, 1, 2, 3]), (2, [0, 0, 0, 1]), (9, [0, 0, 0, 0])])
def test_staleness_is_exact(model, staleness, versions):
    spec = tiny(staleness=staleness)
    with parallel_session():
        trainer = StudyTrainer(spec, model)
        for step, version in enumerate(versions):
            batch, stats = trainer.step()
            assert set(batch.versions.tolist()) == {version}
            assert set(batch.staleness.tolist()) == {step - version}
            assert len(batch.trajectories) == spec.episodes
            assert [t.task_index for t in batch.trajectories] == list(range(4 * step, 4 * step + 4))
            # The sampler computes with the weights whose version it records.
            assert stats.ratio.fresh.mean_abs_log_ratio < 1e-4
            assert (stats.ratio.stale.num_tokens > 0) == (step > version)
            if step > version:
                assert stats.ratio.stale.mean_abs_log_ratio > 1e-3
            for trajectory in batch.trajectories:
                validate_trajectory(trajectory)


def test_a_response_does_not_depend_on_what_runs_beside_it(model):
    renderer = ChatRenderer.load(model)
    # With a third of the vocabulary as ends, slots empty at every step.
    renderer.stop_token_ids = tuple(range(0, 300, 3))
    forbidden = renderer.vision.forbidden_token_ids
    generator = np.random.default_rng(0)
    prompts = [Prompt(generator.integers(10, 200, size).tolist(), ()) for size in (3, 9, 5, 7, 12, 4, 8, 6) * 3]
    sampling, seeds = SamplingParams(max_new_tokens=12), list(range(24))

    def answers(slots: int):
        sampler = StudySampler(model, renderer, EngineConfig(max_running=slots, max_context=64), forbidden)
        return sampler.generate(prompts, seeds, sampling)

    together, alone = answers(24), answers(1)
    assert len({len(answer.token_ids) for answer in alone}) > 3
    for one, other in zip(together, alone, strict=True):
        assert one.token_ids == other.token_ids
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-5)
        assert (one.finish_reason == "stop") == (one.token_ids[-1] % 3 == 0)


def test_groups_share_a_level_and_nothing_else(model):
    spec = tiny(overrides=(*TINY, "actor.group_size=2", "learner.advantage.name=trajectory_grpo"))
    with parallel_session():
        batch, _ = StudyTrainer(spec, model).step()
    assert batch.group_ids.tolist() == [0, 0, 1, 1] and batch.num_groups == 2
    first, second, third, _ = batch.trajectories
    assert first.seed == second.seed != third.seed
    assert first.rows[0].images[0].content_hash == second.rows[0].images[0].content_hash
    sampled = [
        trajectory.rows[0].token_ids[trajectory.rows[0].policy_mask != 0].tolist() for trajectory in (first, second)
    ]
    assert sampled[0] != sampled[1]


def test_a_batch_of_broken_groups_is_refused(model):
    with parallel_session(), pytest.raises(ConfigError, match=r"study.episodes: expected a multiple of .* \(3\)"):
        StudyTrainer(tiny(overrides=(*TINY, "actor.group_size=3")), model)


def test_what_is_there_is_not_made_again(cache, tmp_path):
    copy = RunCache(tmp_path / "copy")
    shutil.copytree(cache.root, copy.root)
    specs = [tiny(staleness=1), tiny(staleness=0, steps=1)]
    seen = []
    ensure_runs(copy, specs, 1, lambda spec, result, was_cached: seen.append((spec.staleness, was_cached)))
    assert seen == [(1, True), (0, False)]
    # Without a warm start nothing could be trained.
    shutil.rmtree(copy.root / "warm")
    found = ensure_runs(copy, specs, 1, lambda spec, result, was_cached: None)
    assert [result.spec for result in found] == specs
    assert not (copy.root / "warm").exists()


def test_a_damaged_result_is_named(cache, tmp_path):
    copy = RunCache(tmp_path / "copy")
    shutil.copytree(cache.root, copy.root)
    path = copy.root / "runs" / f"{tiny(staleness=1).key}.json"
    path.write_text("{}")
    with pytest.raises(ConfigError, match=path.name):
        copy.find(tiny(staleness=1))


def test_the_key_is_of_what_decides_a_run():
    base = tiny()
    assert msgspec.structs.replace(base, variant="another").key == base.key
    # Said or left to the default, it is the same run.
    assert tiny(overrides=(*TINY, "learner.loss.behaviour_kl=0.1", "learner.max_staleness=9")).key == base.key
    others = [
        tiny(seed=1),
        tiny(staleness=1),
        tiny(steps=5),
        tiny(levels=7),
        tiny(overrides=(*TINY, "learner.loss.behaviour_kl=0.2")),
        tiny(overrides=(*TINY, "actor.group_size=2")),
        tiny(overrides=(*TINY, "env.config.hole_probability=0.3")),
    ]
    assert len({base.key, *(other.key for other in others)}) == 8
    assert tiny(overrides=(*TINY, "learner.loss.behaviour_kl=0.2")).warm_key == base.warm_key
    assert tiny(overrides=(*TINY, "sft.steps=5")).warm_key != base.warm_key != tiny(seed=1).warm_key


def test_plans_hold_every_run_once():
    options = StudyOptions(full=True)
    runs = grid_runs(options)
    keys = [run.key for run in runs]
    assert len(set(keys)) == len(keys)
    assert [(run.seed, run.staleness) for run in runs[:6]] == [(0, 0), (0, 4), (0, 8), (0, 16), (0, 32), (1, 0)]
    assert {run.seed for run in runs if run.staleness == 8 and run.variant == "uncorrected"} == set(range(6))
    assert {run.variant for run in runs} == {variant.name for variant in CORRECTIONS}
    few = {run.variant for run in grid_runs(StudyOptions(full=True, only="plain_ppo,root_damping"))}
    assert few == {"default", "plain_ppo", "root_damping"}
    with pytest.raises(ConfigError, match="study.only: expected names out of default, uncorrected"):
        StudyOptions(only="defualt")
    # The estimator of the recipe on fresh data is the on-policy run of the study.
    assert runs[0].key == ablation_runs(options)[0].key


SUCCESS = {0: (0.8, 0.8, 0.8), 4: (0.8, 0.8, 0.8), 8: (0.72, 0.8, 0.76), 16: (0.7, 0.7, 0.7), 32: (0.4, 0.6, 0.8)}


def invented(spec: RunSpec, success: float, warm: str = "warm") -> RunResult:
    numbers = set(StepRecord.__struct_fields__) - {"step", "sampled_at"}
    return RunResult(
        spec=spec,
        key=spec.key,
        final=Evaluated(version=spec.steps, solved=round(1000 * success), levels=1000, format_rate=1.0),
        curve=(),
        steps=(StepRecord(step=0, sampled_at=0, **dict.fromkeys(numbers, 0.5)),),
        warm=warm,
        weights="",
        torch="2",
        cpu_s=60.0,
        wall_s=60.0,
    )


@pytest.fixture
def study(tmp_path) -> RunCache:
    """Invented results of the default study and of the ablation."""
    cache = RunCache(tmp_path / "study")
    for spec in grid_runs(StudyOptions()):
        cache.keep(invented(spec, SUCCESS[spec.staleness][spec.seed]))
    for spec in ablation_runs(StudyOptions()):
        if spec.variant != ESTIMATORS[0].name:
            cache.keep(invented(spec, 0.5))
    return cache


def figures_of(name: str, cache: RunCache, *words: str) -> dict:
    answer = run_benchmark(name, (), ["--cached", "--out", str(cache.root), *words], as_json=True)
    return json.loads(answer)["figures"]


def test_staleness_reports_ratios_with_intervals(study):
    figures = figures_of("staleness", study)
    assert {f"success_at_{k}_vs_on_policy" for k in (4, 8, 16, 32)} < set(figures)
    assert figures["success_on_policy"]["value"] == pytest.approx(0.8)
    assert figures["success_at_4_vs_on_policy"] == {"value": 1.0, "unit": "ratio", "interval": [1.0, 1.0]}
    # Ratios .9, 1, .95: mean .95, standard error .05 / sqrt(3), t quantile 4.303.
    assert figures["success_at_8_vs_on_policy"]["value"] == pytest.approx(0.95)
    assert figures["success_at_8_vs_on_policy"]["interval"] == pytest.approx([0.8258, 1.0742], abs=1e-4)


def test_runs_of_two_warm_starts_are_not_compared(study):
    study.keep(invented(grid_runs(StudyOptions())[1], 0.8, warm="another"))
    with pytest.raises(ConfigError, match="seed 0 began with other weights"):
        figures_of("staleness", study)


def test_ablation_reports_every_estimator(study):
    figures = figures_of("ablation", study)
    assert set(figures) == {f"{variant.name}_success" for variant in ESTIMATORS}
    assert figures["bi_level_gae_success"]["value"] == pytest.approx(0.8)
    assert figures["masked_gae_success"]["value"] == pytest.approx(0.5)


def test_documents_get_tables_and_a_figure(study, tmp_path):
    document = tmp_path / "staleness.md"
    names = ("headline", "runs", "correction", "grid", "figure", "cost")
    document.write_text("by hand\n" + "".join(f"<!-- begin {name} -->old<!-- end {name} -->\n" for name in names))
    for _ in range(2):
        figures_of("staleness", study, "--docs", str(document))
        text = document.read_text()
        assert text.startswith("by hand\n") and "old" not in text
        assert text.count("| 8 | 0.760 |") == 1 and "| 0.950 | 0.826 to 1.074 |" in text
    assert ElementTree.parse(tmp_path / "staleness.svg").getroot().tag.endswith("svg")


def test_a_document_without_the_part_is_refused(tmp_path):
    document = tmp_path / "x.md"
    document.write_text("<!-- begin a -->x")
    with pytest.raises(ConfigError, match="expected one part <!-- begin a -->"):
        replace_parts(document, {"a": "y"})


def test_advantages_agree_with_the_reference():
    words = ["--episodes", "4", "--tokens", "40", "--turns", "5", "--repeats", "1", "--step", "false"]
    figures = json.loads(run_benchmark("advantages", (), words, as_json=True))["figures"]
    assert figures["largest_difference"]["value"] < 1e-5
    assert "speedup_vs_python_reference" in figures


def test_options_after_the_name():
    assert parse_words(["--seeds", "2", "--write-all", "--out=a=b"]) == {
        "seeds": "2",
        "write_all": "true",
        "out": "a=b",
    }
    with pytest.raises(ConfigError, match="expected --key value, got '2'"):
        parse_words(["2"])
    with pytest.raises(ConfigError, match="--sees: unknown"):
        run_benchmark("staleness", (), ["--sees", "2"], as_json=True)
    with pytest.raises(ConfigError, match="seeds"):
        run_benchmark("staleness", (), ["--seeds", "0"], as_json=True)


def test_t_interval_of_three():
    assert t_interval([1.0, 2.0, 3.0]) == pytest.approx((2 - 4.303 / 3**0.5, 2 + 4.303 / 3**0.5))
    assert t_interval([1.0]) == (-float("inf"), float("inf"))


def test_the_documented_estimator_works(tmp_path, monkeypatch):
    text = (Path(__file__).parents[2] / "docs" / "estimators.md").read_text()
    code = text.partition("```python\n")[2].partition("```")[0]
    (tmp_path / "documented_credit.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    tokens = torch.zeros(5)
    inputs = AdvantageInputs(
        rewards=torch.tensor([1.0, 0.0, 2.0, 0.0, 4.0]),
        values=tokens,
        behaviour_logprobs=tokens,
        proximal_logprobs=tokens,
        turn_ids=torch.tensor([0, 0, 1, 2, 2]),
        segment_ids=torch.tensor([0, 0, 0, 1, 1]),
        bootstrap_values=torch.zeros(2),
        group_ids=torch.arange(2),
    )
    config = AdvantageConfig(name="documented_credit:reward_to_go", whiten=False)
    assert estimate_advantages(inputs, config).advantages.tolist() == [3.0, 2.0, 2.0, 4.0, 4.0]
