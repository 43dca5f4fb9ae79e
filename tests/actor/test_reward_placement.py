"""At which sampled token each reward component is paid."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import Tokenizer

from vagen.actor.client import Generation
from vagen.actor.messages import Message
from vagen.actor.recorder import Recorder
from vagen.actor.rendering import ChatRenderer
from vagen.common.trajectory import RewardEntry
from vagen.envs.base import ParsedResponse
from vagen.envs.parsing import FORMATS, judged_section_end

REWARD = {"task": 1.0, "format": 0.02, "state_estimation": 0.5, "transition_modeling": 0.25}
RESPONSE = (
    "<think><observation>up</observation><reasoning>go</reasoning><prediction>at</prediction></think>"
    "<answer>Up</answer>"
)


@pytest.fixture
def tokenizer(model_dir: Path) -> Tokenizer:
    return Tokenizer.from_file(str(model_dir / "tokenizer.json"))


def pay(
    renderer: ChatRenderer, ids: list[int], placement: str, response_format: str = "grounding_worldmodeling"
) -> tuple[int, list[RewardEntry]]:
    """The row's position of the first sampled token, and what was paid where for a response of these ids."""
    recorder = Recorder(renderer, placement)  # type: ignore[arg-type]
    prompt = renderer.render((Message(role="user", parts=("look",)),))
    generation = Generation(
        token_ids=ids, logprobs=[0.0] * len(ids), versions=[0] * len(ids), finish_reason="stop", engine_s=0.0
    )
    recorder.add_response(prompt, generation)
    sections = FORMATS[response_format].match(renderer.decode(ids))
    parsed = ParsedResponse(format_ok=sections is not None, action_valid=True, actions=("Up",), sections=sections or {})
    recorder.add_outcome(parsed, REWARD, {}, 0.0)
    return len(prompt.token_ids), list(recorder.rewards())


def paid_at(renderer: ChatRenderer, ids: list[int], placement: str, response_format: str = "grounding_worldmodeling"):
    """Component -> number of the sampled token, from 0."""
    first, entries = pay(renderer, ids, placement, response_format)
    assert {entry.component: entry.value for entry in entries} == REWARD
    return {entry.component: entry.token - first for entry in entries}


def byte_ids(tokenizer: Tokenizer, text: str) -> list[int]:
    """One token a byte: ids that the text would never be encoded to."""
    words = tokenizer.pre_tokenizer.pre_tokenize_str(text)
    return [tokenizer.token_to_id(symbol) for word, _ in words for symbol in word]


def test_a_section_component_is_paid_at_the_closing_tag_and_the_others_at_the_end(renderer, tokenizer):
    ids = [*byte_ids(tokenizer, RESPONSE), renderer.end_of_turn_id]
    assert renderer.decode(ids) == RESPONSE and len(ids) == 116
    # <think> 7, <observation> 13, its text 2, </observation> 14: tokens 0..35. Then 25 of the reasoning and 27 of the
    # prediction.
    assert paid_at(renderer, ids, "section_end") == {
        "task": 115,
        "format": 115,
        "state_estimation": 35,
        "transition_modeling": 87,
    }
    assert set(paid_at(renderer, ids, "turn_end").values()) == {115}


def test_a_character_of_several_tokens_before_the_tag_counts_with_all_of_them(renderer, tokenizer):
    text = "<perception>é→🙂</perception><reasoning></reasoning><prediction>é</prediction><answer>Up</answer>"
    ids = byte_ids(tokenizer, text)
    assert len(ids) == len(text.encode()) > len(text)
    # 12 for the opening tag, 2 + 3 + 4 bytes of text, 13 for the closing tag: tokens 0..33.
    paid = paid_at(renderer, ids, "section_end", "wm")
    assert paid["state_estimation"] == 33
    # Then 11 + 12, and 12 + 2 + 13 of the prediction.
    assert paid["transition_modeling"] == 33 + 23 + 27
    assert paid["task"] == len(ids) - 1


def test_bytes_that_are_no_text_do_not_shift_the_token(renderer, tokenizer):
    """The first two of the three bytes of an arrow decode to a replacement, with whatever stands after them."""
    before, after = byte_ids(tokenizer, "<perception>a"), byte_ids(tokenizer, "</perception><reasoning></reasoning>")
    broken = byte_ids(tokenizer, "→")[:2]
    rest = byte_ids(tokenizer, "<prediction></prediction><answer>Up</answer>")
    ids = [*before, *broken, *after, *rest]
    assert "\ufffd" in renderer.decode(ids)
    assert paid_at(renderer, ids, "section_end", "wm")["state_estimation"] == 13 + 2 + 13 - 1


def test_a_token_that_holds_the_end_of_the_tag_and_more_is_the_one_paid(renderer, tokenizer, model_dir):
    """BPE merges `>` with what follows; the closing tag then ends inside a token."""
    tokenizer.add_tokens([">\n<", "observation"])
    text = RESPONSE.replace("</observation><", "</observation>\n<")
    template = (model_dir / "chat_template.jinja").read_text()
    merged = ChatRenderer(tokenizer, template, special_tokens={"eos_token": "<|im_end|>"})
    ids = tokenizer.encode(text).ids
    pieces = [merged.decode([token]) for token in ids]
    place = pieces.index(">\n<")
    assert "".join(pieces[:place]).endswith("</observation")
    assert paid_at(merged, ids, "section_end")["state_estimation"] == place


@pytest.mark.parametrize("text", ["", "Up", RESPONSE[:-1], RESPONSE.replace("</observation>", ""), RESPONSE + RESPONSE])
def test_a_malformed_response_is_paid_at_the_end_of_the_turn(renderer, tokenizer, text):
    ids = [*byte_ids(tokenizer, text), renderer.end_of_turn_id]
    assert set(paid_at(renderer, ids, "section_end").values()) == {len(ids) - 1}


def test_which_section_a_component_judges():
    sections = {"perception": "", "prediction": "", "answer": ""}
    text = "<perception></perception><prediction></prediction><answer></answer>"
    assert judged_section_end("state_estimation", text, sections) == 25
    assert judged_section_end("transition_modeling", text, sections) == 50
    assert judged_section_end("answer", text, sections) == 67
    assert judged_section_end("task", text, sections) is None
    assert judged_section_end("state_estimation", text, {"answer": ""}) is None
