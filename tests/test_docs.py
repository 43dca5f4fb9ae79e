"""What README and docs name is there: links, files, settings, commands with their options, metrics, make targets."""

from __future__ import annotations

import re
import shlex
import textwrap
from collections.abc import Iterator
from pathlib import Path
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

import msgspec
import pytest
import typer
import yaml

from vagen.actor.cli import app as actor_app
from vagen.buffer.cli import app as buffer_app
from vagen.common import metrics
from vagen.learner.cli import app as learner_app
from vagen.tools.cli import app as vagen_app
from vagen.tools.recipe import Recipe

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
FOLDERS = "actor|buffer|common|configs|docs|envs|learner|tests|tools"
SECTIONS = get_type_hints(Recipe)
FILES = ("json", "key", "key_secret", "log", "md", "metrics", "py", "safetensors", "step", "txt", "yaml")
"""Last parts of names with a dot that are files and no settings."""
COLUMNS = ("engine.kind",)
"""Of an archive."""
_FENCED = re.compile(r"^```\w*\n(.*?)^```", re.MULTILINE | re.DOTALL)
_SETTING = re.compile(rf"(?<![\w./-])((?:{'|'.join(SECTIONS)})(?:\.[a-z_]\w*)+)(?![\w/(])")
METRICS = {*metrics.COUNTERS, *metrics.GAUGES, *metrics.HISTOGRAMS}
COMMANDS = {
    "vagen": typer.main.get_command(vagen_app),
    "vagen-actor": typer.main.get_command(actor_app),
    "vagen-buffer": typer.main.get_command(buffer_app),
    "vagen-learner": typer.main.get_command(learner_app),
}


@pytest.fixture(params=PAGES, ids=lambda page: page.name)
def page(request: pytest.FixtureRequest) -> Path:
    return request.param


def code_blocks(page: Path) -> list[str]:
    """Fenced blocks, and indented ones without their indentation; lines that a backslash continues are joined."""
    text = page.read_text()
    indented = re.findall(r"(?:^ {4}.*\n)+", _FENCED.sub("", text), re.MULTILINE)
    blocks = [*_FENCED.findall(text), *map(textwrap.dedent, indented)]
    return [re.sub(r"\\\n\s*", " ", block) for block in blocks]


def inline_code(page: Path) -> list[str]:
    """What stands between backticks, which may go over the end of a line."""
    return [re.sub(r"\s+", " ", code) for code in re.findall(r"`([^`]+)`", _FENCED.sub("", page.read_text()))]


def all_code(page: Path) -> list[str]:
    return [*(line for block in code_blocks(page) for line in block.splitlines()), *inline_code(page)]


def anchors_of(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if target.startswith(("http://", "https://")):
            continue
        name, _, anchor = target.partition("#")
        file = page.parent / name if name else page
        assert file.exists(), target
        assert not anchor or anchor in anchors_of(file), target


def test_files_that_are_named_are_there(page: Path) -> None:
    for code in inline_code(page):
        if re.fullmatch(rf"(?:{FOLDERS})/[\w./-]+\.(?:py|yaml|md|txt|sh|lua)", code):
            assert (ROOT / code).exists(), code


def is_setting(words: list[str], kind: Any) -> bool:
    """Whether a path of keys leads to something in a configuration class."""
    if not words or kind in (dict, Any) or get_origin(kind) is dict:
        return True
    if get_origin(kind) in (Union, UnionType):
        return any(is_setting(words, option) for option in get_args(kind) if option is not type(None))
    if not (isinstance(kind, type) and issubclass(kind, msgspec.Struct)):
        return False
    field = get_type_hints(kind).get(words[0])
    return field is not None and is_setting(words[1:], field)


def test_settings_that_are_named_exist(page: Path) -> None:
    for path in _SETTING.findall("\n".join(all_code(page))):
        section, *keys = path.split(".")
        if keys[-1] not in FILES and path not in COLUMNS:
            assert is_setting(keys, SECTIONS[section]), path


def paths_of(settings: Any) -> Iterator[list[str]]:
    """The keys that lead to each leaf of a nested mapping."""
    if not isinstance(settings, dict):
        yield []
        return
    for key, value in settings.items():
        yield from ([key, *rest] for rest in paths_of(value))


def test_settings_of_yaml_blocks_exist(page: Path) -> None:
    """Of a whole recipe, or of the section `learner` alone."""
    for block in code_blocks(page):
        if re.match(r"[a-z_]+:\s*(?:#.*)?\n", block):
            for keys in paths_of(yaml.safe_load(block)):
                kind, rest = (SECTIONS[keys[0]], keys[1:]) if keys[0] in SECTIONS else (SECTIONS["learner"], keys)
                assert is_setting(rest, kind), ".".join(keys)


def commands_of(page: Path) -> Iterator[list[str]]:
    """The words of each command of ours."""
    for line in all_code(page):
        line = re.sub(r"torchrun --nproc-per-node \d+ -m vagen\.learner", "vagen-learner", line.strip())
        if re.match(r"vagen(?:-\w+)?(?: |$)", line):
            yield shlex.split(re.split(r"\s#|\s\|(?= )", line)[0])


def test_commands_and_their_options_exist(page: Path) -> None:
    for words in commands_of(page):
        command, left = COMMANDS[words[0]], words[1:]
        while left and left[0] in getattr(command, "commands", {}):
            command = command.commands[left.pop(0)]
        if hasattr(command, "commands"):
            assert not left or left[0].startswith("-") or "|" in left[0], f"{shlex.join(words)}: no such command"
        if words[:2] == ["vagen", "bench"]:
            continue
        known = {name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)}
        given = {word.partition("=")[0] for word in left if re.match(r"--[a-z]", word)}
        assert given <= known | {"--help"}, f"{shlex.join(words)}: {given - known}"


def test_metrics_that_are_named_exist(page: Path) -> None:
    names = {
        name for code in inline_code(page) for name in re.findall(r"\bvagen_(?:actor|buffer|engine|learner)_\w+", code)
    }
    assert names <= METRICS, names - METRICS


def test_targets_of_make_exist(page: Path) -> None:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"^make ([a-z][a-z-]*)", "\n".join(all_code(page)), re.MULTILINE)) <= targets
