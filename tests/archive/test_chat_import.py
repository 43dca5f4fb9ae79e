"""Conversations of other programs: the tokens are those of the model's own chat template, the behaviour is unknown."""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
from pathlib import Path

import msgspec
import numpy as np
import pytest
from typer.testing import CliRunner

from vagen.actor.rendering import ChatRenderer
from vagen.buffer.archive.reader import open_archive
from vagen.common.errors import TrajectoryError
from vagen.common.trajectory import End, content_hash
from vagen.common.validation import validate_trajectory
from vagen.common.wire import decode_trajectory, encode_trajectory
from vagen.learner.config import ModelConfig
from vagen.learner.model.tiny import save_tiny_model
from vagen.tools.cli import app
from vagen.tools.tiny_tokenizer import CHAT_TEMPLATE, train_tokenizer

SMALL = ModelConfig(
    hidden_size=64, intermediate_size=96, num_heads=2, num_kv_heads=1, vision_hidden_size=32, vision_num_heads=2
)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "small"
    corpus = ["system user assistant You walk. Where to? Go left. Up, then right!\n"] * 20
    return save_tiny_model(
        SMALL, train_tokenizer(corpus, ["<answer>", "</answer>"], 384), folder, chat_template=CHAT_TEMPLATE
    )


def say(role: str, content, **more) -> dict:
    return {"role": role, "content": content, **more}


def text(words: str) -> dict:
    return {"type": "text", "text": words}


def image(url: str) -> dict:
    return {"type": "image_url", "image_url": {"url": url}}


@pytest.fixture
def run_import(model_dir, tmp_path):
    def run(*chats: dict | str, code: int = 0, more: tuple[str, ...] = ()):
        file = tmp_path / "chats.jsonl"
        lines = [chat if isinstance(chat, str) else json.dumps(chat) for chat in chats]
        file.write_text("\n".join(lines) + "\n\n")
        words = ["buffer", "import", str(file), "--model", str(model_dir), "--out", str(tmp_path / "out"), "--force"]
        done = CliRunner().invoke(app, [*words, *more])
        assert done.exit_code == code, (done.output, done.exception)
        return [record.trajectory for record in open_archive(tmp_path / "out").iterate()] if code == 0 else done.stderr

    return run


@pytest.fixture
def two_turns(tmp_path, png) -> dict:
    """A system prompt, two turns with a picture each (a file, a data URL), rewards of both kinds."""
    (tmp_path / "first.png").write_bytes(png(1))
    data = "data:image/png;base64," + base64.b64encode(png(2, (112, 56))).decode()
    return {
        "messages": [
            say("system", "You walk."),
            say("user", [image("first.png"), text("Where to?")]),
            say("assistant", "<answer>Go left.</answer>", reward={"format": 0.5}),
            say("user", [text("Where to?"), {"type": "image", "image": data}]),
            say("assistant", [text("Up, "), text("then right!")], reward=0.25),
        ],
        "reward": 1.0,
        "success": True,
        "task": "walk",
    }


def test_tokens_are_those_of_transformers_and_of_the_images(run_import, two_turns, model_dir, png):
    from transformers import AutoTokenizer

    (trajectory,) = run_import(two_turns)
    validate_trajectory(trajectory, behaviour_known=False)
    (row,) = trajectory.rows
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    pad = tokenizer.convert_tokens_to_ids("<|image_pad|>")
    plain = [
        {**message, "content": [{"type": "image"} if "image" in str(part.get("type")) else part for part in content]}
        if isinstance(content := message["content"], list) and message["role"] == "user"
        else {**message, "content": message["content"] if isinstance(message["content"], str) else "Up, then right!"}
        for message in two_turns["messages"]
    ]
    theirs = tokenizer.apply_chat_template(plain, return_dict=False)
    sizes = {ref.start: ref.num_tokens for ref in row.images}
    collapsed = [token for position, token in enumerate(row.token_ids.tolist()) if token != pad or position in sizes]
    # The template closes the last message with a line break after its end-of-turn token.
    assert theirs[: len(collapsed)] == collapsed and len(theirs) - len(collapsed) <= 1
    assert list(sizes.values()) == [4, 8]
    assert trajectory.images == {content_hash(one): one for one in (png(1), png(2, (112, 56)))}
    assert [ref.content_hash for ref in row.images] == [content_hash(png(1)), content_hash(png(2, (112, 56)))]


def test_the_policys_tokens_are_what_the_assistant_wrote(run_import, two_turns, model_dir):
    (trajectory,) = run_import(two_turns)
    renderer = ChatRenderer.load(model_dir)
    (row,) = trajectory.rows
    said = [row.token_ids[turn.start : turn.end].tolist() for turn in trajectory.turns]
    assert [renderer.decode(ids) for ids in said] == ["<answer>Go left.</answer>", "Up, then right!"]
    assert all(ids[-1] == renderer.end_of_turn_id for ids in said)
    assert row.policy_mask.sum() == sum(map(len, said))
    policy = row.policy_mask == 1
    assert np.isnan(row.behaviour_logprobs[policy]).all() and not row.behaviour_logprobs[~policy].any()
    assert (row.policy_versions == -1).all()
    ends = [turn.end - 1 for turn in trajectory.turns]
    paid = [(entry.component, entry.token, entry.value) for entry in trajectory.rewards]
    assert paid == [("format", ends[0], 0.5), ("task", ends[1], 1.25)]
    assert trajectory.success and trajectory.task == "walk" and trajectory.end is End.TERMINATED
    assert trajectory.engine.tokenizer_hash == renderer.tokenizer_hash


def test_a_conversation_that_ends_with_a_question_is_truncated(run_import, two_turns, model_dir):
    asked = {**two_turns, "messages": [*two_turns["messages"], say("user", "Where to?")]}
    (trajectory,) = run_import(asked)
    assert trajectory.end is End.TRUNCATED and trajectory.bootstrap is not None
    (row,) = trajectory.rows
    assert trajectory.bootstrap.token_ids[: len(row.token_ids)].tolist() == row.token_ids.tolist()
    assert len(trajectory.bootstrap.images) == 2


def test_what_needs_a_ratio_refuses_it_and_says_why(run_import, two_turns):
    (trajectory,) = run_import(two_turns)
    with pytest.raises(TrajectoryError, match="behaviour_logprobs: NaN: the behaviour policy is unknown"):
        validate_trajectory(trajectory)
    # Nor does it pass where the payload has been over the wire.
    with pytest.raises(TrajectoryError, match="the behaviour policy is unknown"):
        validate_trajectory(decode_trajectory(encode_trajectory(trajectory)[1]))
    (row,) = trajectory.rows
    half = row.behaviour_logprobs.copy()
    half[trajectory.turns[0].start] = -1.0
    mixed = msgspec.structs.replace(trajectory, rows=(msgspec.structs.replace(row, behaviour_logprobs=half),))
    for known in (True, False):
        with pytest.raises(TrajectoryError, match="behaviour_logprobs"):
            validate_trajectory(mixed, behaviour_known=known)
    versioned = msgspec.structs.replace(row, policy_versions=np.where(row.policy_mask, 1, -1).astype(np.int32))
    with pytest.raises(TrajectoryError, match="policy_versions: not -1"):
        validate_trajectory(msgspec.structs.replace(trajectory, rows=(versioned,)), behaviour_known=False)


def test_the_same_line_is_the_same_trajectory(run_import, two_turns):
    first = run_import(two_turns, {**two_turns, "success": False})
    again = run_import(two_turns)
    assert first[0].trajectory_id == again[0].trajectory_id != first[1].trajectory_id


def test_members_of_a_group_know_its_size(run_import, two_turns):
    grouped = [{**two_turns, "group": name, "success": flag} for name, flag in (("a", True), ("b", True), ("a", False))]
    trajectories = run_import(*grouped, {**two_turns, "id": "x"})
    assert [t.group_size for t in trajectories] == [2, 1, 2, 1]
    assert trajectories[0].group_id == trajectories[2].group_id == "a"


@pytest.mark.parametrize(
    ("chat", "message"),
    [
        ("{", "Input data was truncated"),
        ({"messages": [say("user", "x")]}, "no assistant's message"),
        ({"messages": [say("assistant", "x")]}, "messages[0]: an assistant's message without a message"),
        ({"messages": [say("user", "x"), say("assistant", "y", tool_calls=[])]}, "unknown field `tool_calls`"),
        ({"messages": [say("user", "x", reward=1), say("assistant", "y")]}, "messages[0].reward: only assistants"),
        ({"messages": [say("user", "x"), say("assistant", "<|im_end|>")]}, "control token '<|im_end|>'"),
        ({"messages": [say("user", "<|image_pad|>"), say("assistant", "y")]}, "control token '<|image_pad|>'"),
        (
            {"messages": [say("user", [image("http://x/y.png")]), say("assistant", "y")]},
            "messages[0].content[0]: expected a data URL or a path, nothing is fetched from 'http://x/y.png'",
        ),
        ({"messages": [say("user", [image("none.png")]), say("assistant", "y")]}, "none.png: No such file"),
        ({"messages": [say("user", [image("data:image/png,x")]), say("assistant", "y")]}, "a data URL in base64"),
        (
            {"messages": [say("user", [image("data:image/png;base64,eHh4")]), say("assistant", "y")]},
            "messages[0].content[0]: is no picture",
        ),
        ({"messages": [say("user", [{"type": "audio"}]), say("assistant", "y")]}, 'expected {"type": "text"'),
        ({"messages": [say("user", "x"), say("assistant", "y", reward="much")]}, "$.messages[1].reward"),
    ],
)
def test_a_line_that_cannot_be_imported_is_named(run_import, two_turns, chat, message):
    error = run_import(two_turns, chat, code=2)
    assert error.startswith("error: ") and "chats.jsonl:2: " in error and error.count("\n") == 1
    assert message in error


def test_lines_may_be_skipped_aloud(run_import, two_turns, tmp_path):
    trajectories = run_import("{", two_turns, {"messages": []}, more=("--skip-invalid",))
    assert len(trajectories) == 1


def test_an_imported_archive_is_imitated_row_by_row(run_import, two_turns, model_dir):
    from vagen.learner.batching import RowPreparer

    (trajectory,) = run_import(two_turns)
    assert trajectory.vision is not None
    preparer = RowPreparer.load(model_dir)
    (row,) = trajectory.rows
    count = int(row.policy_mask.sum())
    prepared = preparer.policy_row(row, np.arange(count), trajectory.images, preparer.new_store())
    assert len(prepared.score_positions) == count and len(prepared.images) == 2


def test_an_import_needs_no_torch():
    code = "import sys, vagen.tools.chat_import; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=os.environ, timeout=60)
    assert done.stdout.strip() == "False", done.stderr
