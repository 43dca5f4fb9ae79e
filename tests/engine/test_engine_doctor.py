"""`vagen doctor engine` against engines that are fit to train with, and against each fault that it is there to find."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from vagen.common.errors import ConfigError
from vagen.tools.engine_doctor import EngineDoctor

SGLANG = [pytest.mark.sglang, pytest.mark.slow, pytest.mark.timeout(900)]
VAGEN = Path(sys.executable).with_name("vagen")


@pytest.fixture(scope="module", params=["local", pytest.param("sglang", marks=SGLANG)])
def engine(request, lab, tiny_model):
    if request.param == "sglang":
        return request.getfixturevalue("start_sglang")(*tiny_model)
    return request.getfixturevalue("start_engines")(api_key=lab.api_key, admin_api_key=lab.admin_key)[0]


def load(engine, folder):
    """Bring the weights of a folder to the engine."""
    version = int(engine.version()) + 1 if engine.version().isdecimal() else 1
    engine.admin("/update_weights_from_disk", {"model_path": str(folder), "weight_version": str(version)})


@pytest.fixture
def serves_the_folder(engine, tiny_model):
    """The engine has the weights of the model folder again, whatever other tests did."""
    folder, engine.reference = tiny_model
    load(engine, folder)


def examine(engine, **changes):
    """name -> (ok, text)."""
    arguments = {
        "url": engine.url,
        "model_dir": engine.model_dir,
        "api_key": engine.api_key,
        "admin_api_key": engine.admin_key,
    }
    findings = EngineDoctor(**(arguments | changes)).examine()
    return {finding.name: (finding.ok, finding.text) for finding in findings}


def test_a_fit_engine_passes_and_is_left_with_its_weights(engine, serves_the_folder):
    before = engine.admin("/weights_checker", {"action": "checksum"})
    findings = examine(engine, update=True)
    assert all(ok for ok, _ in findings.values()), findings
    assert {"engine", "keys", "version", "names", "weights", "pictures", "logprobs", "vision cache"} <= set(findings)
    assert "another than that of generation" in findings["keys"][1]
    assert "an update reaches a picture seen before" in findings["vision cache"][1]
    assert engine.admin("/weights_checker", {"action": "checksum"}) == before
    assert len(engine.generate([10, 11])["output_ids"]) == 12


def test_the_command_says_the_same(engine, serves_the_folder):
    keys = ["--api-key", engine.api_key, "--admin-api-key", engine.admin_key]
    words = [VAGEN, "doctor", "engine", engine.url, "--model", engine.model_dir, *keys]
    done = subprocess.run([*words, "--json"], capture_output=True, text=True, timeout=240, check=False)
    answer = json.loads(done.stdout)
    assert done.returncode == 0 and answer["ok"], answer
    assert {"name", "ok", "text"} == set(answer["findings"][0])
    done = subprocess.run([*words[:4], *keys[:2]], capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 1
    assert "NO  keys" in done.stdout and "publishes fail" in done.stdout


def test_other_weights_are_named(engine, serves_the_folder, tmp_path):
    engine.perturbed(only="visual.blocks.1.attn.qkv.bias").save_pretrained(tmp_path / "changed")
    load(engine, tmp_path / "changed")
    ok, text = examine(engine)["weights"]
    assert not ok and text.endswith("tensors differ, first visual.blocks.1.attn.qkv.bias")


def test_an_engine_with_another_layout_lacks_names(engine, serves_the_folder, start_text_engines, lab):
    (text_engine,) = start_text_engines(api_key=lab.api_key, admin_api_key=lab.admin_key)
    ok, text = examine(engine, url=text_engine.url)["names"]
    assert not ok and "unknown to the engine, first visual." in text


def test_an_open_engine_is_told_apart_from_a_guarded_one(start_engines, tiny_model):
    (engine,) = start_engines()
    ok, text = examine(engine, model_dir=None, api_key=None, admin_api_key=None)["keys"]
    assert ok and text == "anyone may pause it and change its weights: only this machine reaches it"


def test_an_engine_that_is_paused_is_noticed(start_engines, lab):
    (engine,) = start_engines(pause_timeout_s=30.0)
    engine.admin("/pause_generation", {"mode": "retract"})
    ok, text = examine(engine, timeout_s=3.0)["generation"]
    assert not ok and "is it paused?" in text


def test_no_engine_is_one_line():
    (finding,) = EngineDoctor(url="http://127.0.0.1:9").examine()
    assert not finding.ok and finding.text.startswith("http://127.0.0.1:9: /server_info: ")
    with pytest.raises(ConfigError, match="expected http://HOST:PORT"):
        EngineDoctor(url="127.0.0.1:9")


@pytest.mark.sglang
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_sglang_with_its_vision_cache_and_with_unscaled_logprobs_is_refused(start_sglang, tiny_model, monkeypatch):
    monkeypatch.setenv("SGLANG_VLM_CACHE_SIZE_MB", "100")
    monkeypatch.setenv("SGLANG_RETURN_ORIGINAL_LOGPROB", "1")
    engine = start_sglang(*tiny_model, "--max-running", "16")
    findings = examine(engine, update=True)
    ok, text = findings["logprobs"]
    assert not ok and "they leave the temperature out" in text
    ok, text = findings["vision cache"]
    assert not ok and "SGLANG_VLM_CACHE_SIZE_MB=0" in text
