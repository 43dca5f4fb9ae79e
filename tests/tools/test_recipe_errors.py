"""Every wrong setting is one line with path, value and bound, and nothing is started for it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from vagen.common.config import read_recipe
from vagen.common.errors import ConfigError
from vagen.tools.recipe import validate_recipe

VAGEN = Path(sys.executable).with_name("vagen")

ERRORS = [
    ("learner.batch_size=0", "$.learner.batch_size: expected int >= 1, got 0"),
    ("learner.batch_size=many", '$.learner.batch_size: expected int, got "many"'),
    ("learner.batchsize=96", "$.learner.batchsize: unknown key"),
    ("learner.optimizer.lr=-1", "$.learner.optimizer.lr: expected float > 0.0, got -1"),
    ("learner.advantage.rho_bar=0", "$.learner.advantage.rho_bar: expected float > 0, got 0"),
    ("learner.advantage.name=magic", "$.learner.advantage.name: unknown estimator 'magic'"),
    ("learner.advantage.name=trajectory_grpo", "$.actor.group_size: expected int >= 2 for the estimator"),
    ("learner.loss.value_weight=0", "$.learner.loss.value_weight: expected float > 0 for the estimator bi_level_gae,"),
    (
        "learner.critic.warmup_steps=80",
        "$.learner.critic.warmup_steps: expected int < learner.total_steps (80), got 80",
    ),
    (
        "learner.critic={trunk: shared, privileged: true}",
        "$.learner.critic.trunk: expected separate with privileged true",
    ),
    ("learner.lora.targets=[]", "$.learner.lora.targets: expected at least one layer, got []"),
    ("learner.reference.refresh_every=-1", "$.learner.reference.refresh_every: expected int >= 0, got -1"),
    ("learner.schedule=step", "$.learner.schedule: "),
    ("actor.reward_placement=turn_start", "$.actor.reward_placement: "),
    ("actor.sampling.top_p=0.95", "$.actor.sampling.top_p: expected 1.0 (truncated sampling"),
    ("actor.concurrency=0", "$.actor.concurrency: expected int >= 1, got 0"),
    ("actor.group_size=5", "$.learner.batch_size: expected a multiple of actor.group_size (5)"),
    ("actor.max_context=4096", "$.actor.max_context: expected int <= engine.max_context (128), got 4096"),
    ("engine.max_new_tokens_limit=8", "$.actor.max_new_tokens: expected int <= engine.max_new_tokens_limit (8)"),
    ("engine.max_context=100000", "$.engine.max_context: expected int <= model.max_position_embeddings (4096)"),
    ("buffer.capacity_bytes=10000000", "$.buffer.capacity_bytes: expected int >= 81788928 = (checkpoint_every +"),
    (
        "buffer.priority.function=magic",
        "$.buffer.priority.function: expected one of num_turns, success, surprise, total",
    ),
    ("buffer.priority.alpha=-1", "$.buffer.priority.alpha: expected float in [0, 10], got -1"),
    ("buffer.partial_groups=keep", "$.buffer.partial_groups: "),
    ("learner.selection.order=random", "$.learner.selection.order: "),
    (
        "learner.selection.order=priority",
        "$.buffer.priority.function: expected a priority function for learner.selection",
    ),
    ("learner.selection.beta=2", "$.learner.selection.beta: expected float in [0, 1], got 2"),
    ("learner.selection.filters=[{name: magic}]", "$.learner.selection.filters[0].name: expected one of all_same,"),
    (
        "learner.selection.filters=[{name: all_same}]",
        "$.learner.selection.filters[0].name: expected a filter of single trajectories with actor.group_size 1",
    ),
    ("learner.selection.replay.share=1", "$.learner.selection.replay.share: expected float < 1.0, got 1"),
    ("buffer.fsync=sometimes", "$.buffer.fsync: "),
    ("env.name=frozen_pond", '$.env.name: expected one of frozen_lake, got "frozen_pond"'),
    ("env.config.size=1", "env.config.size: expected int >= 2, got 1"),
    ("env.config.sise=4", "sise: unknown key"),
    ("harness.name=chat", "$.harness.name: "),
    ("model.hidden_size=130", "$.model.hidden_size: expected a multiple of 2 * num_heads (8), got 130"),
    ("sft.turns=10", "$.sft.turns: expected int >= sft.batch_rows (64), got 10"),
    ("demo.levels=0", "$.demo.levels: expected int >= 1, got 0"),
    ("demo.restart_grace_s=0", "$.demo.restart_grace_s: expected seconds > 0, got 0"),
    ("demo.min_success_after=1.5", "$.demo.min_success_after: expected number in [0, 1], got 1.5"),
    ("run.name=a b", '$.run.name: expected 1-64 of A-Za-z0-9._-, got "a b"'),
    ("learn.batch_size=1", "$.learn: unknown section; known are run, model,"),
]


_MASKED = "learner.advantage.name=masked_gae"


def test_the_shipped_recipe_is_valid():
    recipe = validate_recipe(read_recipe("frozenlake"))
    assert recipe.env.name == "frozen_lake"


@pytest.mark.parametrize(("override", "message"), ERRORS, ids=[override for override, _ in ERRORS])
def test_error_names_path_value_and_bound(override, message):
    with pytest.raises(ConfigError) as caught:
        validate_recipe(read_recipe("frozenlake", [override]))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_estimator_without_a_critic_takes_no_value_loss():
    overrides = ["learner.advantage.name=trajectory_grpo", "actor.group_size=2", "learner.loss.value_weight=0"]
    assert validate_recipe(read_recipe("frozenlake", overrides)).learner.loss.value_weight == 0


def test_an_estimator_without_a_critic_trains_none_apart():
    overrides = ["learner.advantage.name=trajectory_grpo", "actor.group_size=2", "learner.critic.trunk=separate"]
    with pytest.raises(ConfigError, match=r"learner\.critic: expected no separate critic .*trajectory_grpo"):
        validate_recipe(read_recipe("frozenlake", overrides))


def test_rewards_inside_a_turn_warn_where_earlier_turns_lose_credit(caplog):
    section_end = "actor.reward_placement=section_end"
    for overrides in ([], [section_end, "learner.advantage.turn_anchor=start"], [section_end, _MASKED]):
        validate_recipe(read_recipe("frozenlake", overrides))
    assert not caplog.records
    validate_recipe(read_recipe("frozenlake", [section_end]))
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert "no credit to earlier turns" in record.getMessage()


def test_rewards_inside_a_turn_are_refused_where_they_would_be_ignored():
    overrides = ["actor.reward_placement=section_end", "learner.advantage.name=turn_wise_gae"]
    with pytest.raises(ConfigError, match="reward_placement: expected turn_end for the estimator turn_wise_gae"):
        validate_recipe(read_recipe("frozenlake", overrides))
    validate_recipe(read_recipe("frozenlake", [*overrides, "learner.advantage.turn_anchor=start"]))


def test_capacity_bound_is_exact():
    needed = validate_recipe(read_recipe("frozenlake")).learner.required_capacity_bytes
    validate_recipe(read_recipe("frozenlake", [f"buffer.capacity_bytes={needed}"]))
    with pytest.raises(ConfigError):
        validate_recipe(read_recipe("frozenlake", [f"buffer.capacity_bytes={needed - 1}"]))


@pytest.mark.parametrize("command", [["config", "check", "frozenlake"], ["demo", "--run-dir", "run", "--no-screen"]])
def test_a_user_sees_one_line_and_exit_code_2_and_nothing_starts(command, tmp_path):
    done = subprocess.run(
        [VAGEN, *command, "--set", "learner.batch_size=0"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2
    assert done.stderr == "error: $.learner.batch_size: expected int >= 1, got 0\n"
    assert list(tmp_path.iterdir()) == []


def test_a_trajectory_is_not_replayed_without_its_group():
    overrides = [
        f"{key}={value}"
        for key, value in {
            "actor.group_size": 4,
            "learner.advantage.name": "trajectory_grpo",
            "learner.selection.replay.share": 0.2,
        }.items()
    ]
    with pytest.raises(ConfigError, match="selection.replay.share: expected 0 for the estimator trajectory_grpo"):
        validate_recipe(read_recipe("frozenlake", overrides))


def test_priorities_and_filters_fit_together():
    overrides = ["actor.group_size=4", "learner.selection.order=priority", "buffer.priority.function=surprise"]
    overrides += ["learner.selection.filters=[{name: starpo_s, options: {share: 0.5}}]"]
    assert validate_recipe(read_recipe("frozenlake", overrides)).learner.selection.filters[0].name == "starpo_s"
