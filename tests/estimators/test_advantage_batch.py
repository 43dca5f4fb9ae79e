"""What credit assignment refuses, how an estimator is found, and statistics over data-parallel ranks."""

from __future__ import annotations

import math
import subprocess
import sys
import textwrap
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch

from vagen.common.config import convert
from vagen.common.errors import ConfigError, TrajectoryError
from vagen.learner.advantages.config import AdvantageConfig
from vagen.learner.advantages.estimate import estimate_advantages, whiten_per_task
from vagen.learner.advantages.registry import advantage_estimator, get_estimator

BUILT_IN = {
    "bi_level_gae",
    "default_gae",
    "gtpo",
    "masked_gae",
    "rloo",
    "token_level_gae",
    "trajectory_grpo",
    "turn_level_gae",
    "turn_wise_gae",
    "vl_dac",
}


@pytest.fixture
def inputs(batch, episode):
    return batch(episode([2, 1], [0, 1, 2]), episode([2], [0, 1], group=1), num_groups=2, num_tasks=3)


@pytest.mark.parametrize(
    ("field", "change", "message"),
    [
        ("values", lambda t: t[:-1], r"values: expected torch.float32 \[5\], got torch.float32 \[4\]"),
        ("values", lambda t: t.double(), "values: expected torch.float32"),
        ("turn_ids", lambda t: t.int(), "turn_ids: expected torch.int64"),
        ("group_ids", lambda t: t[:1], r"group_ids: expected torch.int64 \[2\]"),
        ("rewards", lambda t: t.index_fill(0, torch.tensor(1), math.nan), "rewards: expected finite"),
        ("proximal_logprobs", lambda t: t.index_fill(0, torch.tensor(1), -math.inf), "proximal_logprobs: expected fin"),
        ("bootstrap_values", lambda t: t + math.inf, "bootstrap_values: expected finite"),
        ("turn_ids", lambda t: t.flip(0), "turn_ids: expected non-decreasing"),
        ("turn_ids", lambda t: torch.zeros_like(t), "turn_ids: expected turns within one segment"),
        ("segment_ids", lambda t: t.flip(0), r"segment_ids: expected 0..1, non-decreasing"),
        ("segment_ids", lambda t: t * 2, "segment_ids: expected 0..1"),
        ("segment_ids", lambda t: t * 0, "segment_ids: expected 0..1"),
        ("segment_ids", lambda t: t + 1, "segment_ids: expected 0..1"),
        ("group_ids", lambda t: t + 1, "group_ids: expected 0..num_groups-1"),
        ("group_ids", lambda t: t - 1, "group_ids: expected 0..num_groups-1"),
        ("task_ids", lambda t: torch.zeros(2), r"task_ids: expected torch.int64 \[2\], got torch.float32"),
        ("task_ids", lambda t: torch.tensor([0]), r"task_ids: expected torch.int64 \[2\], got torch.int64 \[1\]"),
        ("task_ids", lambda t: torch.tensor([0, 3]), "task_ids: expected 0..num_tasks-1"),
        ("task_ids", lambda t: torch.tensor([-1, 0]), "task_ids: expected 0..num_tasks-1"),
    ],
)
def test_contradictory_inputs_are_refused_by_name(inputs, field, change, message):
    with pytest.raises(TrajectoryError, match=message):
        estimate_advantages(replace(inputs, **{field: change(getattr(inputs, field))}), AdvantageConfig())


def test_an_empty_batch_is_refused(inputs):
    fields = {name: getattr(inputs, name) for name in inputs.__dataclass_fields__}
    nothing = {name: value[:0] for name, value in fields.items() if isinstance(value, torch.Tensor)}

    with pytest.raises(TrajectoryError, match="at least one policy token"):
        estimate_advantages(replace(inputs, **nothing), AdvantageConfig())


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ({"turn_discount": 1.5}, r"\$.learner.advantage.turn_discount: expected float in \[0, 1\], got 1.5"),
        ({"token_lambda": -0.1}, r"\$.learner.advantage.token_lambda: expected float in \[0, 1\], got -0.1"),
        ({"rho_bar": 0.0}, r"\$.learner.advantage.rho_bar: expected float > 0, got 0.0"),
        ({"rho_bar": math.nan}, "rho_bar: expected float > 0"),
        ({"c_bar": -1.0}, "c_bar: expected float >= 0, got -1.0"),
        ({"c_bar": math.nan}, "c_bar: expected float >= 0"),
        ({"name": ""}, "name: expected a registered estimator"),
        ({"turn_ratio": "median"}, "median"),
        ({"whiten_per": "group"}, "group"),
        ({"rho": 1.0}, "rho: unknown key"),
    ],
)
def test_settings_out_of_bounds_are_refused_with_path_value_and_bound(raw, message):
    with pytest.raises(ConfigError, match=message):
        convert(raw, AdvantageConfig, "$.learner.advantage")


def test_an_unknown_estimator_is_refused_with_the_known_names():
    with pytest.raises(ConfigError, match="unknown estimator 'gae'") as error:
        get_estimator("gae")

    assert all(name in str(error.value) for name in BUILT_IN)


def test_what_the_estimators_declare():
    declared = {name: get_estimator(name) for name in BUILT_IN}

    assert {n for n, e in declared.items() if not e.needs_critic} == {"gtpo", "rloo", "trajectory_grpo"}
    assert {n for n, e in declared.items() if e.needs_groups} == {"gtpo", "rloo", "trajectory_grpo"}
    assert {n for n, e in declared.items() if e.whole_episode} == {"gtpo", "rloo", "trajectory_grpo", "default_gae"}
    assert not any(e.row_local for e in declared.values())


def test_a_taken_name_is_refused():
    get_estimator("rloo")
    with pytest.raises(ConfigError, match="'rloo' is already registered"):
        advantage_estimator("rloo", needs_critic=False)(lambda inputs, config, reduce: None)


USERS_MODULE = """
from vagen.learner.advantages.batch import AdvantageOutputs
from vagen.learner.advantages.registry import advantage_estimator

@advantage_estimator("immediate_reward", needs_critic=False, row_local=True)
def immediate_reward(inputs, config, reduce):
    inputs.checked()
    return AdvantageOutputs(inputs.rewards, inputs.values, inputs.rewards.isnan())

def undecorated(inputs, config, reduce): ...
"""


def test_an_estimator_of_your_own_by_import_path(inputs, tmp_path, monkeypatch):
    (tmp_path / "my_estimators.py").write_text(textwrap.dedent(USERS_MODULE))
    monkeypatch.syspath_prepend(tmp_path)

    out = estimate_advantages(inputs, AdvantageConfig(name="my_estimators:immediate_reward", whiten=False))

    assert out.advantages.tolist() == [0, 1, 2, 0, 1]
    assert get_estimator("my_estimators:immediate_reward").row_local
    assert get_estimator("immediate_reward") is get_estimator("my_estimators:immediate_reward")
    for path, problem in [
        ("my_estimators:undecorated", "decorate it"),
        ("my_estimators:missing", "cannot import"),
        ("no_such_module:f", "cannot import"),
        (":f", "cannot import"),
    ]:
        with pytest.raises(ConfigError, match=problem):
            get_estimator(path)


def test_settings_and_registry_import_without_torch():
    code = (
        "import sys; import vagen.learner.advantages.config, vagen.learner.advantages.registry, "
        "vagen.learner.losses.config; sys.exit('torch' in sys.modules)"
    )

    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


def over_ranks(ranks, config):
    """Estimate every rank's inputs in its own thread, with sums taken across a barrier."""
    barrier = threading.Barrier(len(ranks), timeout=20)
    slots = [torch.zeros(0)] * len(ranks)

    def run(rank):
        def reduce(local):
            slots[rank] = local
            barrier.wait()
            total = sum(slots[1:], start=slots[0])
            barrier.wait()
            return total

        return estimate_advantages(ranks[rank], config, reduce)

    with ThreadPoolExecutor(len(ranks)) as pool:
        return list(pool.map(run, range(len(ranks))))


@pytest.mark.parametrize("name", ["bi_level_gae", "turn_wise_gae", "trajectory_grpo", "rloo", "gtpo"])
def test_ranks_together_are_one_batch(batch, episode, name):
    """Groups spread over the ranks, unequal numbers of tokens, a group of which one rank has nothing."""
    generator = torch.Generator().manual_seed(0)
    episodes = []
    for group, turns in [(0, [2, 3]), (1, [1]), (0, [4]), (1, [2, 2]), (2, [3]), (2, [1, 1])]:
        rewards, values, ratios = torch.randn(3, sum(turns), generator=generator).tolist()
        episodes.append(episode(turns, rewards, values, ratios, group=group))
    config = AdvantageConfig(name=name)

    whole = estimate_advantages(batch(*episodes, num_groups=3), config)
    parts = over_ranks([batch(*episodes[:3], num_groups=3), batch(*episodes[3:], num_groups=3)], config)

    together = torch.cat([part.advantages for part in parts])
    assert together.tolist() == pytest.approx(whole.advantages.tolist(), abs=1e-6)


def test_reduced_groups_need_their_global_number(inputs):
    with pytest.raises(TrajectoryError, match="num_groups: expected the global number of groups"):
        estimate_advantages(replace(inputs, num_groups=None), AdvantageConfig(name="rloo"), lambda local: local)


def test_weights_are_outside_the_gradient(inputs):
    proximal = inputs.proximal_logprobs.clone().requires_grad_()
    values = inputs.values.clone().requires_grad_()

    out = estimate_advantages(replace(inputs, proximal_logprobs=proximal, values=values), AdvantageConfig())

    assert not out.advantages.requires_grad and not out.value_targets.requires_grad


def test_whitened_per_task_each_task_has_its_own_moments(batch, episode):
    """Literal numbers: task 0 has 1, 2, 3; task 1 has 100, 300 (unbiased variance 20000); task 2 one token."""
    inputs = batch(
        episode([1, 1], [1.0, 2.0], task=0),
        episode([1], [100.0], task=1),
        episode([1], [3.0], task=0),
        episode([1], [300.0], task=1),
        episode([1], [7.0], task=2),
        episode([2], [5.0, 5.0], task=3),
    )
    config = AdvantageConfig(
        name="masked_gae", token_lambda=0.0, importance_correction="none", whiten_per="task", token_discount=0.0
    )

    out = estimate_advantages(inputs, config)

    half = math.sqrt(0.5)
    assert out.advantages.tolist() == pytest.approx([-1, 0, -half, 1, half, 0, 0, 0], abs=1e-6)
    assert out.advantages[5:].tolist() == [0, 0, 0]


def test_a_task_without_variance_among_the_counted_tokens_gets_zero():
    advantages, tasks = torch.tensor([1.0, 5.0, 2.0, 4.0, 7.0]), torch.tensor([0, 0, 1, 1, 2])
    counted = torch.tensor([True, False, True, True, False])

    out = whiten_per_task(advantages, tasks, 3, lambda local: local, counted)

    assert out.tolist() == pytest.approx([0, 0, -math.sqrt(0.5), math.sqrt(0.5), 0], abs=1e-6)


@pytest.mark.parametrize("name", ["bi_level_gae", "turn_wise_gae"])
def test_one_task_is_the_whole_batch(batch, episode, name):
    episodes = [episode([2, 3], [0.1, -1, 2, 0, 1], task=0), episode([1], [0.5], task=0)]

    per_batch = estimate_advantages(batch(*episodes), AdvantageConfig(name=name))
    per_task = estimate_advantages(batch(*episodes), AdvantageConfig(name=name, whiten_per="task"))

    assert per_task.advantages.tolist() == pytest.approx(per_batch.advantages.tolist(), abs=1e-6)


@pytest.mark.parametrize("name", ["bi_level_gae", "turn_wise_gae"])
def test_ranks_together_whiten_per_task_as_one_batch(batch, episode, name):
    """A rank without any token of task 1 or 3 takes part in their sums; task 2 has one token, task 4 none."""
    generator = torch.Generator().manual_seed(0)
    episodes = []
    for task, turns in [(0, [2, 3]), (2, [1]), (0, [4]), (1, [2, 2]), (0, [3]), (3, [1, 1])]:
        rewards, values, ratios = torch.randn(3, sum(turns), generator=generator).tolist()
        episodes.append(episode(turns, rewards, values, ratios, task=task))
    config = AdvantageConfig(name=name, whiten_per="task")

    whole = estimate_advantages(batch(*episodes, num_tasks=5), config)
    parts = over_ranks([batch(*episodes[:3], num_tasks=5), batch(*episodes[3:], num_tasks=5)], config)

    together = torch.cat([part.advantages for part in parts])
    assert together.isfinite().all()
    assert together.tolist() == pytest.approx(whole.advantages.tolist(), abs=1e-6)
    assert whole.advantages[5] == 0


def test_whitening_per_task_needs_the_tasks(inputs):
    config = AdvantageConfig(whiten_per="task")
    with pytest.raises(TrajectoryError, match="task_ids: expected the task of every segment"):
        estimate_advantages(inputs, config)
    known = replace(inputs, task_ids=torch.tensor([0, 1]), num_tasks=None)
    with pytest.raises(TrajectoryError, match="num_tasks: expected the run's number of tasks"):
        estimate_advantages(known, config, lambda local: local)
    assert estimate_advantages(known, config).advantages.isfinite().all()
