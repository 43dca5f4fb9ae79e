"""The packages on disk, those declared and those in the wheel are the same."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("actor", "buffer", "common", "configs", "envs", "learner", "tools")
NAMED_BY_THE_USER = (
    *("torch", "megatron-core", "transformer-engine", "sglang", "pyzmq", "msgpack"),
    *("redis", "transformers", "gymnasium", "pillow", "prometheus-client", "typer"),
)


@pytest.fixture(scope="module")
def project() -> dict:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def packages_on_disk() -> set[str]:
    found = {path.parent for folder in FOLDERS for path in (ROOT / folder).rglob("__init__.py")}
    return {"vagen." + ".".join(path.relative_to(ROOT).parts) for path in found}


def test_every_folder_with_code_is_a_package():
    folders = {path.parent for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")}
    assert {folder for folder in folders if not (folder / "__init__.py").exists()} == set()


def test_declared_packages_are_those_on_disk(project):
    assert set(project["tool"]["setuptools"]["packages"]) == packages_on_disk()


def test_the_twelve_packages_the_user_named_are_declared(project):
    declared = list(project["project"]["dependencies"])
    for extra in project["project"]["optional-dependencies"].values():
        declared += extra
    names = {re.split(r"[\[<>=!;~ ]", requirement)[0].lower() for requirement in declared}
    assert set(NAMED_BY_THE_USER) <= names


def test_no_vagen_folder_at_the_root():
    assert not (ROOT / "vagen").exists()


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--quiet", "-w", out, ROOT]
    subprocess.run(command, check=True, timeout=240)
    (built,) = out.glob("*.whl")
    return built


def test_the_wheel_holds_every_source_file_and_data_file(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    for pattern in ("*.py", "*.lua", "*.yaml", "*.html", "py.typed"):
        for folder in FOLDERS:
            for path in (ROOT / folder).rglob(pattern):
                assert f"vagen/{path.relative_to(ROOT)}" in names


@pytest.mark.parametrize("script", ["vagen-actor", "vagen-buffer", "vagen-learner", "vagen"])
def test_commands_start_from_the_wheel(wheel, tmp_path, script):
    unpacked = tmp_path / "site"
    zipfile.ZipFile(wheel).extractall(unpacked)
    entry = next(unpacked.glob("*.dist-info")) / "entry_points.txt"
    module, attribute = re.search(rf"^{script} = (.+):(.+)$", entry.read_text(), re.M).groups()
    # Without the finder of an editable install, which would serve the checkout instead of the wheel.
    code = f"""
import sys
sys.path.insert(0, {str(unpacked)!r})
sys.meta_path[:] = [finder for finder in sys.meta_path if "editable" not in repr(finder).lower()]
sys.argv[1:] = ["--help"]
from {module} import {attribute} as app
app()
"""
    done = subprocess.run([sys.executable, "-I", "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "Usage" in done.stdout
