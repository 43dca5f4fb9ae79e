from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer

from vagen.actor.client import HttpEngineClient
from vagen.actor.config import ActorConfig, HarnessConfig
from vagen.actor.episode import EpisodeLimits, EpisodeResult, EpisodeTask, run_episode
from vagen.actor.harness import make_harness
from vagen.actor.rendering import ChatRenderer, collapse
from vagen.common.config import convert
from vagen.common.errors import ConfigError, EngineError, EnvironmentFailure
from vagen.common.trajectory import End, SamplingParams
from vagen.common.validation import validate_trajectory

LIMITS = EpisodeLimits(sampling=SamplingParams(max_new_tokens=8), max_context=4096, turn_timeout_s=5.0)
GOES_ON = ({"task": 0.0, "format": 0.02}, False, False)
WON = ({"task": 1.0, "format": 0.02}, True, False)
OUT_OF_TIME = ({"format": 0.02}, False, True)


def responses(renderer: ChatRenderer) -> list[tuple[list[int], str]]:
    """Stopped and cut responses, with ids that no text encodes to."""
    eot = renderer.end_of_turn_id
    return [([70, 5, 5, eot], "stop"), ([5] * 8, "length"), ([9, 9], "stop"), ([6, eot], "stop"), ([7] * 8, "length")]


def play(
    fakes: ModuleType,
    renderer: ChatRenderer,
    turns: Any,
    harness: HarnessConfig | None = None,
    limits: EpisodeLimits = LIMITS,
    answers: Any = None,
    reward_placement: Any = "turn_end",
    **env_options: Any,
) -> tuple[EpisodeResult, Any, Any]:
    """One episode against a scripted engine; versions grow by one each turn."""
    answers = answers or responses(renderer)

    def script(body: dict[str, Any], number: int) -> Any:
        ids, reason = answers[number % len(answers)]
        return fakes.generated(ids, reason, [(number, 0, len(ids))])

    async def main() -> tuple[EpisodeResult, Any, Any]:
        env = fakes.ScriptedEnvironment(turns, **env_options)
        async with fakes.ScriptedEngine(script) as engine:
            client = HttpEngineClient(engine.url, renderer)
            try:
                await client.connect(5.0)
                task = EpisodeTask(seed=11, task="walk", env_name="walk")
                config = harness or HarnessConfig()
                result = await run_episode(task, env, make_harness(config), client, renderer, limits, reward_placement)
            finally:
                await client.close()
            return result, env, engine

    result, env, engine = asyncio.run(main())
    validate_trajectory(result.trajectory)
    return result, env, engine


def seen_and_sampled(engine: Any, renderer: ChatRenderer, count: int) -> list[list[int]]:
    """What each request held, followed by what it was answered."""
    answers = responses(renderer)
    return [engine.requests[i]["input_ids"] + answers[i % len(answers)][0] for i in range(count)]


def test_concat_is_one_row_of_exactly_what_the_engine_saw_and_produced(
    fakes: ModuleType, renderer: ChatRenderer
) -> None:
    result, env, engine = play(fakes, renderer, [GOES_ON] * 4 + [WON], sizes=[(56, 56), (140, 84)])
    (row,) = result.trajectory.rows
    contexts = seen_and_sampled(engine, renderer, 5)
    assert collapse(row.token_ids, row.images) == contexts[-1]
    for earlier, later in zip(contexts, contexts[1:], strict=False):
        assert later[: len(earlier)] == earlier  # every request continues all that was seen and sampled
    for turn, (ids, reason) in zip(result.trajectory.turns, responses(renderer), strict=True):
        span = slice(turn.start, turn.end)
        assert row.token_ids[span].tolist() == ids
        assert row.behaviour_logprobs[span] == pytest.approx([-(i + 1) / 10 for i in range(len(ids))])
        assert set(row.policy_versions[span]) == {turn.index}
        assert turn.finish_reason == reason
    assert int(row.policy_mask.sum()) == sum(len(ids) for ids, _ in responses(renderer))
    assert [ref.num_tokens for ref in row.images] == [4, 15, 4, 15, 4]
    assert not result.trajectory.splits_episode_across_rows
    assert env.seeds == [11]


def test_a_cut_response_is_closed_by_a_token_that_is_not_the_policys(fakes: ModuleType, renderer: ChatRenderer) -> None:
    result, _, _ = play(fakes, renderer, [GOES_ON, GOES_ON, WON])
    (row,) = result.trajectory.rows
    stopped, cut, _ = result.trajectory.turns
    eot = renderer.end_of_turn_id
    assert row.token_ids[stopped.end - 1] == eot and row.policy_mask[stopped.end - 1] == 1
    assert row.token_ids[stopped.end] != eot
    assert row.token_ids[cut.end] == eot and row.policy_mask[cut.end] == 0


def test_no_concat_is_a_row_for_each_turn(fakes: ModuleType, renderer: ChatRenderer) -> None:
    result, _, engine = play(fakes, renderer, [GOES_ON, GOES_ON, WON], HarnessConfig(name="no_concat"))
    rows = result.trajectory.rows
    assert [collapse(row.token_ids, row.images) for row in rows] == seen_and_sampled(engine, renderer, 3)
    assert [turn.row for turn in result.trajectory.turns] == [0, 1, 2]
    assert [len(body["image_data"]) for body in engine.requests] == [1, 1, 1]
    assert result.trajectory.splits_episode_across_rows
    assert len(result.trajectory.images) == 3


def test_a_window_makes_a_row_of_each_distinct_context(fakes: ModuleType, renderer: ChatRenderer) -> None:
    result, _, engine = play(fakes, renderer, [GOES_ON] * 3 + [WON], HarnessConfig(window=2))
    rows, turns = result.trajectory.rows, result.trajectory.turns
    contexts = seen_and_sampled(engine, renderer, 4)
    # Turns 0 and 1 fit the window and share a row; from then on each context drops a turn.
    assert [turn.row for turn in turns] == [0, 0, 1, 2]
    assert [collapse(row.token_ids, row.images) for row in rows] == [contexts[1], contexts[2], contexts[3]]
    assert [len(body["image_data"]) for body in engine.requests] == [1, 2, 2, 2]
    # Turn 1's response is context in row 1, and a policy token nowhere but in row 0.
    ids = responses(renderer)[1][0]
    assert contexts[2].count(ids[0]) >= len(ids)
    assert rows[1].policy_mask.sum() == len(responses(renderer)[2][0])
    assert result.trajectory.splits_episode_across_rows


def test_a_window_of_one_sees_what_no_concat_sees(fakes: ModuleType, renderer: ChatRenderer) -> None:
    windowed, _, first = play(fakes, renderer, [GOES_ON, GOES_ON, WON], HarnessConfig(window=1))
    alone, _, second = play(fakes, renderer, [GOES_ON, GOES_ON, WON], HarnessConfig(name="no_concat"))
    assert [body["input_ids"] for body in first.requests] == [body["input_ids"] for body in second.requests]
    assert len(windowed.trajectory.rows) == len(alone.trajectory.rows) == 3


def test_each_component_is_paid_at_the_last_token_of_its_turn(fakes: ModuleType, renderer: ChatRenderer) -> None:
    for config in (HarnessConfig(), HarnessConfig(name="no_concat")):
        result, _, _ = play(fakes, renderer, [GOES_ON, ({"task": -1.0}, False, False), WON], config)
        turns = result.trajectory.turns
        paid = [(entry.component, entry.row, entry.token, entry.value) for entry in result.trajectory.rewards]
        assert paid == [
            ("task", turns[0].row, turns[0].end - 1, 0.0),
            ("format", turns[0].row, turns[0].end - 1, 0.02),
            ("task", turns[1].row, turns[1].end - 1, -1.0),
            ("task", turns[2].row, turns[2].end - 1, 1.0),
            ("format", turns[2].row, turns[2].end - 1, 0.02),
        ]


def test_a_section_is_paid_at_its_closing_tag(fakes: ModuleType, renderer: ChatRenderer, model_dir: Path) -> None:
    tokenizer = Tokenizer.from_file(str(model_dir / "tokenizer.json"))
    think = tokenizer.encode("<think>right</think>").ids
    answers = [([*think, *tokenizer.encode("<answer>Up</answer>").ids, renderer.end_of_turn_id], "stop")]
    reward = ({"task": 1.0, "think": 0.5}, True, False)
    for placement, paid_after in (("turn_end", len(answers[0][0])), ("section_end", len(think))):
        result, _, _ = play(
            fakes,
            renderer,
            [reward],
            answers=answers,
            limits=replace(LIMITS, sampling=SamplingParams(max_new_tokens=64)),
            reward_placement=placement,
            sections={"think": "right", "answer": "Up"},
        )
        (turn,) = result.trajectory.turns
        paid = {entry.component: entry.token for entry in result.trajectory.rewards}
        assert paid == {"task": turn.end - 1, "think": turn.start + paid_after - 1}


def test_a_terminated_episode_has_no_bootstrap(fakes: ModuleType, renderer: ChatRenderer) -> None:
    result, _, _ = play(fakes, renderer, [GOES_ON, WON])
    assert result.trajectory.end is End.TERMINATED
    assert result.trajectory.bootstrap is None
    assert result.trajectory.success
    assert result.trajectory.metrics == {"steps": 2.0}
    assert len(result.trajectory.images) == 2  # the closing observation was never in a prompt


@pytest.mark.parametrize("harness", [HarnessConfig(), HarnessConfig(name="no_concat"), HarnessConfig(window=2)])
def test_the_bootstrap_prompt_is_what_the_engine_would_have_seen_next(
    fakes: ModuleType, renderer: ChatRenderer, harness: HarnessConfig
) -> None:
    short, _, _ = play(fakes, renderer, [GOES_ON, GOES_ON, OUT_OF_TIME], harness)
    _, _, longer = play(fakes, renderer, [GOES_ON, GOES_ON, GOES_ON, WON], harness)
    assert short.trajectory.end is End.TRUNCATED
    bootstrap = short.trajectory.bootstrap
    assert bootstrap is not None and bootstrap.token_ids.dtype == np.int32
    assert collapse(bootstrap.token_ids, bootstrap.images) == longer.requests[3]["input_ids"]
    assert {image.content_hash for image in bootstrap.images} <= short.trajectory.images.keys()


def test_our_limit_of_turns_truncates(fakes: ModuleType, renderer: ChatRenderer) -> None:
    result, env, engine = play(fakes, renderer, [GOES_ON] * 9, limits=replace(LIMITS, max_turns=2))
    assert result.trajectory.end is End.TRUNCATED
    assert len(result.trajectory.turns) == len(env.responses) == len(engine.requests) == 2


def test_a_late_episode_is_truncated_between_turns(fakes: ModuleType, renderer: ChatRenderer) -> None:
    result, _, _ = play(fakes, renderer, [GOES_ON] * 9, limits=replace(LIMITS, episode_timeout_s=1e-9))
    assert result.trajectory.end is End.TRUNCATED
    assert len(result.trajectory.turns) == 1


def test_an_episode_out_of_context_is_truncated_before_the_prompt_that_exceeds_it(
    fakes: ModuleType, renderer: ChatRenderer
) -> None:
    whole, _, engine = play(fakes, renderer, [GOES_ON] * 3 + [WON])
    third = len(engine.requests[2]["input_ids"]) + 3 * 3 + 8  # three images of 4 tokens, and the response
    for room, turns in ((third, 3), (third - 1, 2)):
        result, _, cut = play(fakes, renderer, [GOES_ON] * 3 + [WON], limits=replace(LIMITS, max_context=room))
        assert len(result.trajectory.turns) == len(cut.requests) == turns
        assert result.trajectory.end is End.TRUNCATED
        bootstrap = result.trajectory.bootstrap
        assert bootstrap is not None
        assert collapse(bootstrap.token_ids, bootstrap.images) == engine.requests[turns]["input_ids"]


def test_a_first_prompt_out_of_context_is_a_failure_that_says_so(fakes: ModuleType, renderer: ChatRenderer) -> None:
    with pytest.raises(EnvironmentFailure, match="max_context 20"):
        play(fakes, renderer, [WON], limits=replace(LIMITS, max_context=20))


def test_the_environment_gets_text_without_control_tokens(
    fakes: ModuleType, renderer: ChatRenderer, model_dir: Path
) -> None:
    tokenizer = Tokenizer.from_file(str(model_dir / "tokenizer.json"))
    think = tokenizer.encode("<think>right</think><answer>Right</answer>").ids
    answers = [([*think, renderer.end_of_turn_id], "stop"), (think[:6], "length")]
    result, env, _ = play(
        fakes,
        renderer,
        [GOES_ON, WON],
        answers=answers,
        limits=replace(LIMITS, sampling=SamplingParams(max_new_tokens=64)),
    )
    assert env.responses[0] == "<think>right</think><answer>Right</answer>"
    assert [turn.response for turn in result.transcript.turns] == env.responses


def test_the_transcript_shows_pictures_and_words(fakes: ModuleType, renderer: ChatRenderer) -> None:
    result, _, engine = play(fakes, renderer, [GOES_ON, WON])
    transcript = result.transcript
    assert [turn.text for turn in transcript.turns] == ["look 0", "look 1"]
    assert [turn.pictures[0].base64 for turn in transcript.turns] == engine.requests[1]["image_data"]
    assert transcript.turns[1].reward == {"task": 1.0, "format": 0.02}
    assert transcript.closing.parts[-1] == "look 2"
    assert (transcript.end, transcript.success, transcript.system_prompt) == (End.TERMINATED, True, "Walk.")


def test_a_failing_environment_is_a_failure_and_no_reward(fakes: ModuleType, renderer: ChatRenderer) -> None:
    async def dies(turn: int) -> None:
        raise EnvironmentFailure("simulator died")

    with pytest.raises(EnvironmentFailure, match="simulator died"):
        play(fakes, renderer, [WON], on_step=dies)


def test_a_hanging_environment_costs_its_time_out(fakes: ModuleType, renderer: ChatRenderer) -> None:
    async def hangs(turn: int) -> None:
        await asyncio.sleep(60)

    with pytest.raises(EnvironmentFailure, match="step: no answer within 0.2 s"):
        play(fakes, renderer, [WON], on_step=hangs, limits=replace(LIMITS, turn_timeout_s=0.2))


def test_an_engine_that_fails_is_a_failure_and_no_reward(fakes: ModuleType, renderer: ChatRenderer) -> None:
    with pytest.raises(EngineError):
        play(fakes, renderer, [WON], answers=[([], "stop")])


@pytest.mark.parametrize(
    ("sampling", "path"),
    [
        ({"top_p": 0.9}, "top_p"),
        ({"top_k": 20}, "top_k"),
        ({"min_p": 0.05}, "min_p"),
        ({"temperature": 0}, "temperature"),
    ],
)
def test_truncated_sampling_is_refused_with_its_reason(sampling: dict[str, float], path: str) -> None:
    reason = "" if path == "temperature" else "biases the importance ratio"
    with pytest.raises(ConfigError, match=rf"\$\.actor\.sampling\.{path}: .*{reason}"):
        convert({"sampling": sampling}, ActorConfig, "$.actor")


def test_states_are_recorded_with_their_turns_and_never_sent(fakes: ModuleType, renderer: ChatRenderer) -> None:
    result, _, engine = play(fakes, renderer, [GOES_ON, GOES_ON, OUT_OF_TIME])
    trajectory = result.trajectory
    assert [turn.state for turn in trajectory.turns] == ["at 0", "at 1", "at 2"]
    assert trajectory.bootstrap is not None and trajectory.bootstrap.state == "at 3"
    for request in engine.requests:
        assert "at 0" not in renderer.decode(request["input_ids"])
    limited, _, _ = play(fakes, renderer, [GOES_ON] * 4, limits=replace(LIMITS, max_turns=2))
    assert limited.trajectory.bootstrap is not None and limited.trajectory.bootstrap.state == "at 2"
