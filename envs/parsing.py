"""Response formats and the actions inside a response.

Owns the table of formats, the strict match, and which section a reward component judges; knows no environment's actions
and gives no rewards. The caller strips the model's end-of-turn token before parsing.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from vagen.envs.base import ParsedResponse

# A tag is a name with text inside, or a name with tags inside.
Tag = str | tuple[str, tuple[str, ...]]

ANSWER = "answer"

_FORMATS: dict[str, tuple[Tag, ...]] = {
    "no_think": (ANSWER,),
    "free_think": ("think", ANSWER),
    "grounding": (("think", ("observation", "reasoning")), ANSWER),
    "worldmodeling": (("think", ("reasoning", "prediction")), ANSWER),
    "grounding_worldmodeling": (("think", ("observation", "reasoning", "prediction")), ANSWER),
    "wm": ("perception", "reasoning", "prediction", ANSWER),
}


@dataclass(frozen=True)
class ResponseFormat:
    """A sequence of tags, `answer` last, that makes up the whole of a response."""

    name: str
    tags: tuple[Tag, ...]

    @cached_property
    def sections(self) -> tuple[str, ...]:
        """The tags that hold text, in order."""
        leaves: list[str] = []
        for tag in self.tags:
            leaves.extend((tag,) if isinstance(tag, str) else tag[1])
        return tuple(leaves)

    @cached_property
    def _pattern(self) -> re.Pattern[str]:
        names = sorted({*self.sections, *(tag[0] for tag in self.tags if not isinstance(tag, str))})
        # No tag of the format may occur inside a section: a second answer must not hide in the first.
        body = rf"(?:(?!</?(?:{'|'.join(names)})>).)*"
        return re.compile(self._assemble(lambda name: rf"<{name}>(?P<{name}>{body})</{name}>", r"\s*"), re.DOTALL)

    def _assemble(self, section: Callable[[str], str], gap: str) -> str:
        """All tags around what `section` makes of each leaf, with `gap` around every tag."""
        parts = [
            section(tag) if isinstance(tag, str) else gap.join((f"<{tag[0]}>", *map(section, tag[1]), f"</{tag[0]}>"))
            for tag in self.tags
        ]
        return gap.join(("", *parts, ""))

    def match(self, response: str) -> dict[str, str] | None:
        """Section -> stripped text when the whole response has this shape; white space around tags is free."""
        found = self._pattern.fullmatch(response)
        return None if found is None else {name: text.strip() for name, text in found.groupdict().items()}

    def render(self, sections: Mapping[str, str]) -> str:
        """A response of this shape; a section that is not given is left empty."""
        return self._assemble(lambda name: f"<{name}>{sections.get(name, '')}</{name}>", "")


FORMATS: Mapping[str, ResponseFormat] = {name: ResponseFormat(name, tags) for name, tags in _FORMATS.items()}

REWARD_SECTIONS: Mapping[str, tuple[str, ...]] = {
    "state_estimation": ("observation", "perception"),
    "transition_modeling": ("prediction",),
}
"""Reward component -> the sections it may judge, whichever the format has. One named like a section judges that one."""


def judged_section_end(component: str, response: str, sections: Mapping[str, str]) -> int | None:
    """Characters of `response` up to and with the closing tag of the section that a reward component judges.

    `sections` are those of the parsed response: none when it is malformed. None for a component that judges the whole
    turn, and where its section is missing.
    """
    for name in REWARD_SECTIONS.get(component, (component,)):
        closing = f"</{name}>"
        # No tag of a format occurs inside a section, so the last one is its own whatever thinking came before.
        start = response.rfind(closing) if name in sections else -1
        if start >= 0:
            return start + len(closing)
    return None


_UNANCHORED_ANSWER = re.compile(rf"<{ANSWER}>((?:(?!</?{ANSWER}>).)*)</{ANSWER}>", re.DOTALL)


class ResponseParser:
    """Turns a response into actions of one environment.

    `action_names` are matched without regard to case. With `strict_format` a response of the wrong shape has no
    actions; without it the actions of the last complete `<answer>` anywhere in the text are used, `format_ok` staying
    false.
    """

    def __init__(
        self,
        response_format: ResponseFormat,
        action_names: Sequence[str],
        *,
        separator: str,
        max_actions: int,
        strict_format: bool,
    ) -> None:
        self._format = response_format
        self._actions = {name.lower(): name for name in action_names}
        self._separator = separator
        self._max_actions = max_actions
        self._strict_format = strict_format

    def parse(self, response: str) -> ParsedResponse:
        sections = self._format.match(response)
        if sections is not None:
            answer = sections[ANSWER]
        elif self._strict_format or not (answers := _UNANCHORED_ANSWER.findall(response)):
            return ParsedResponse(format_ok=False, action_valid=False, actions=())
        else:
            answer = answers[-1]
        actions, all_known = self._read_actions(answer)
        return ParsedResponse(
            format_ok=sections is not None,
            action_valid=bool(actions) and all_known,
            actions=actions,
            sections=sections or {},
        )

    def _read_actions(self, answer: str) -> tuple[tuple[str, ...], bool]:
        actions: list[str] = []
        for word in answer.split(self._separator)[: self._max_actions]:
            action = self._actions.get(word.strip().lower())
            if action is None:
                return tuple(actions), False
            actions.append(action)
        return tuple(actions), True
