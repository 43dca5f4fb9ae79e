"""Response formats: what counts as well-formed, and which actions come out."""

from __future__ import annotations

import pytest

from vagen.envs.parsing import FORMATS, ResponseParser

ACTIONS = ("Left", "Down", "Right", "Up")


def _parser(
    name: str = "free_think", *, max_actions: int = 3, strict: bool = True, separator: str = ","
) -> ResponseParser:
    return ResponseParser(FORMATS[name], ACTIONS, separator=separator, max_actions=max_actions, strict_format=strict)


@pytest.mark.parametrize(
    ("response", "actions"),
    [
        ("<think>down right</think><answer>Right</answer>", ("Right",)),
        ("<think></think><answer>up</answer>", ("Up",)),
        ("<think>a</think>\n  <answer> LEFT </answer>\n", ("Left",)),
        ("<think>if x < 3 and\ny > 2</think><answer>Down</answer>", ("Down",)),
        ("<think>a</think><answer>Left, down ,UP</answer>", ("Left", "Down", "Up")),
        ("<think>a</think><answer>Left,Left,Left,Left,jump</answer>", ("Left", "Left", "Left")),
    ],
)
def test_valid_turns(response: str, actions: tuple[str, ...]) -> None:
    parsed = _parser().parse(response)
    assert (parsed.format_ok, parsed.action_valid, parsed.actions) == (True, True, actions)


@pytest.mark.parametrize(
    ("answer", "executed"),
    [
        ("Jump", ()),
        ("", ()),
        ("Right,Jump,Left", ("Right",)),
        ("Right,,Left", ("Right",)),
        ("Right Left", ()),
        (",Up", ()),
    ],
)
def test_an_unknown_action_stops_the_rest_and_makes_the_turn_invalid(answer: str, executed: tuple[str, ...]) -> None:
    parsed = _parser().parse(f"<think>a</think><answer>{answer}</answer>")
    assert (parsed.format_ok, parsed.action_valid, parsed.actions) == (True, False, executed)


MALFORMED = [
    "",
    "Right",
    "<answer>Right</answer>",
    "<think>a</think>",
    "<think>a</think><answer>Right",
    "<think>a<answer>Right</answer>",
    "a</think><answer>Right</answer>",
    "so: <think>a</think><answer>Right</answer>",
    "<think>a</think>so<answer>Right</answer>",
    "<think>a</think><answer>Right</answer>.",
    "<think>a</think><answer>Right</answer><|im_end|>",
    "<answer>Right</answer><think>a</think>",
    "<think>a</think><answer>Left</answer><answer>Right</answer>",
    "<think>a</think><think>b</think><answer>Right</answer>",
    "<think><think>a</think></think><answer>Right</answer>",
    "<think>a</think><answer><answer>Right</answer></answer>",
    "<Think>a</Think><answer>Right</answer>",
    "<think>a</think>< answer>Right</answer>",
]


@pytest.mark.parametrize("response", MALFORMED)
def test_a_malformed_turn_has_no_action(response: str) -> None:
    parsed = _parser().parse(response)
    assert (parsed.format_ok, parsed.action_valid, parsed.actions) == (False, False, ())
    assert parsed.sections == {}


@pytest.mark.parametrize("response", MALFORMED)
def test_salvage_takes_the_last_complete_answer_without_format_credit(response: str) -> None:
    parsed = _parser(strict=False).parse(response)
    found = "<answer>Right</answer>" in response
    assert (parsed.format_ok, parsed.action_valid) == (False, found)
    assert parsed.actions == (("Right",) if found else ())


def test_salvage_does_not_change_a_well_formed_turn() -> None:
    response = "<think>a</think><answer>Up</answer>"
    assert _parser(strict=False).parse(response) == _parser().parse(response)


def test_another_separator() -> None:
    parsed = _parser(separator="|").parse("<think>a</think><answer>Left|Up</answer>")
    assert parsed.actions == ("Left", "Up")
    assert _parser().parse("<think>a</think><answer>Left|Up</answer>").actions == ()


@pytest.mark.parametrize(
    ("name", "response"),
    [
        ("no_think", "<answer>Up</answer>"),
        ("free_think", "<think>t</think> <answer>Up</answer>"),
        ("grounding", "<think><observation>o</observation> <reasoning>r</reasoning></think><answer>Up</answer>"),
        ("worldmodeling", "<think> <reasoning>r</reasoning><prediction>p</prediction> </think><answer>Up</answer>"),
        (
            "grounding_worldmodeling",
            "<think><observation>o</observation><reasoning>r</reasoning><prediction>p</prediction></think>"
            "<answer>Up</answer>",
        ),
        ("wm", "<perception>o</perception><reasoning>r</reasoning><prediction>p</prediction><answer>Up</answer>"),
    ],
)
def test_every_format_accepts_its_own_shape_only(name: str, response: str) -> None:
    accepting = {other for other in FORMATS if _parser(other).parse(response).format_ok}
    # A free thought may contain anything but its own tags.
    assert accepting - {"free_think"} == {name} - {"free_think"}
    assert ("free_think" in accepting) == ("<think>" in response)
    sections = _parser(name).parse(response).sections
    assert sections["answer"] == "Up"
    assert {tag: text for tag, text in sections.items() if tag != "answer"} == {
        tag: {"think": "t", "observation": "o", "perception": "o", "reasoning": "r", "prediction": "p"}[tag]
        for tag in FORMATS[name].sections
        if tag != "answer"
    }
    assert FORMATS[name].render(sections) == response.replace("> <", "><")


def test_a_long_malformed_response_is_refused_quickly() -> None:
    response = "<think>" + "<answer>" * 20_000 + "x" * 200_000
    assert not _parser(strict=False).parse(response).format_ok
