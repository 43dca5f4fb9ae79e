"""Weights in float8: sent in blocks where that is asked for; engines and folders quantised otherwise are refused."""

from __future__ import annotations

import json
import threading
from contextlib import closing
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.integrations.finegrained_fp8 import Fp8Dequantize, Fp8Quantize

from vagen.actor.local_engine import EngineConfig
from vagen.actor.local_engine.model import EngineModel
from vagen.common.block_fp8 import SCALE_SUFFIX, is_quantised
from vagen.common.errors import ConfigError
from vagen.common.weight_transfer import tensor_checksum
from vagen.learner.broadcast import Broadcaster
from vagen.learner.config import BroadcastConfig
from vagen.tools.engine_doctor import EngineDoctor

PLAIN = ("model.embed_tokens.weight", "model.layers.0.mlp.down_proj.weight")


class SGLangLike:
    """Answers as SGLang of a GPU does; has what it was asked in `paths`."""

    def __init__(self, quantization, names):
        answers = {
            "/server_info": {"version": "0.5.23", "device": "cuda", "dtype": "bfloat16", "quantization": quantization},
            "/model_info": {"weight_version": "0"},
            "/weights_checker": {"ranks": [{"checksums": dict.fromkeys(names, "00")}]},
        }
        self.paths = paths = []

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                self.rfile.read(int(self.headers.get("Content-Length", 0)))
                paths.append(self.path)
                content = json.dumps(answers.get(self.path, {})).encode()
                self.send_response(200)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            do_POST = do_GET

            def log_message(self, *_):
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()

    def close(self):
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def serve():
    servers = []

    def start(quantization, *names):
        servers.append(SGLangLike(quantization, names))
        return servers[-1]

    yield start
    for server in servers:
        server.close()


SCALE = "model.layers.0.mlp.down_proj.weight_scale"
QUANTISED = [
    (("fp8", *PLAIN), "its quantization is fp8, and weights are published in bfloat16 without scales"),
    ((None, *PLAIN, SCALE), f"it has {SCALE}, whose weights are quantised"),
    ((None, *PLAIN[:1], "model.layers.0.mlp.down_proj.qweight"), "it has model.layers.0.mlp.down_proj.qweight"),
]


@pytest.mark.parametrize("topology", ["star", "group", "disk"])
@pytest.mark.parametrize(("engine", "message"), QUANTISED)
def test_a_quantised_engine_is_refused_before_it_is_paused(serve, tmp_path, topology, engine, message):
    engines = [serve(*engine) for _ in range(2)]
    config = BroadcastConfig(broadcast_topology=topology, disk_dir=str(tmp_path / "w"), broadcast_timeout_s=10.0)
    with closing(Broadcaster(config)) as broadcaster:
        urls = [engine.url for engine in engines]
        report = broadcaster.publish([("model.norm.weight", torch.zeros(4))], 1, urls)
    assert not report.ok and set(report.failed) == set(urls)
    for url, reason in report.failed.items():
        assert reason.startswith(f"server_info: {url}: {message}")
        assert "start it without --quantization, on the folder that the learner starts from" in reason
    assert {path for engine in engines for path in engine.paths} <= {"/server_info", "/weights_checker"}
    assert list((tmp_path / "w").iterdir()) == []


def test_an_engine_that_is_not_quantised_is_asked_once_and_goes_on(serve):
    engine = serve(None, *PLAIN)
    with closing(Broadcaster(BroadcastConfig(broadcast_timeout_s=1.0))) as broadcaster:
        for _ in range(2):
            # Nobody joins the group: this is no engine.
            assert (
                "group"
                in broadcaster.publish([("model.norm.weight", torch.zeros(4))], 1, [engine.url]).failed[engine.url]
            )
    assert engine.paths.count("/weights_checker") == 1
    assert engine.paths.count("/init_weights_update_group") == 2


def test_the_doctor_says_so(serve):
    findings = list(EngineDoctor(url=serve("fp8", *PLAIN).url).examine())
    (layout,) = [finding for finding in findings if finding.name == "layout"]
    assert not layout.ok and layout.text.startswith("its quantization is fp8")


@pytest.mark.parametrize("section", [None, "text_config"])
def test_a_quantised_model_folder_is_refused_by_engine_and_learner(tmp_path, section):
    from vagen.learner.model.actor_critic import VisionLanguageActorCritic

    quantised = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
    config = {"model_type": "qwen2"} | (quantised if section is None else {section: quantised})
    (tmp_path / "config.json").write_text(json.dumps(config))
    path = "quantization_config" if section is None else f"{section}.quantization_config"
    message = f"config.json: {path}: expected none, got quant_method fp8: the weights are quantised"
    with pytest.raises(ConfigError, match=message):
        EngineModel(tmp_path, EngineConfig())
    with pytest.raises(ConfigError, match=message):
        VisionLanguageActorCritic.load_hf(tmp_path)


@pytest.fixture(scope="module")
def engines(start_engines):
    """One in float32, one in bfloat16."""
    return [start_engines(1, dtype=dtype, max_context=256)[0] for dtype in ("float32", "bfloat16")]


def by_transformers(weights, dtype):
    """The weights as transformers would have them back; each matrix of the tiny model is one block at most."""
    quantiser = Fp8Quantize(SimpleNamespace(quantization_config=SimpleNamespace(weight_block_size=None, scale_fmt="")))
    back = {}
    for name, tensor in weights:
        back[name] = tensor.to(dtype)
        if is_quantised(name, tensor.shape):
            assert max(tensor.shape) <= 128
            quantised, scale = quantiser.convert({name: tensor}).values()
            back[name] = Fp8Dequantize(None)._dequantize_one(quantised, scale, dtype)
    return back


@pytest.mark.parametrize("topology", ["star", "disk"])
def test_engines_compute_with_what_comes_back_from_float8(engines, lab, tmp_path, topology):
    config = BroadcastConfig(
        broadcast_topology=topology, disk_dir=str(tmp_path / "w"), quantise=True, bucket_bytes=30_000
    )
    model, weights = lab.new_weights(engines[0])
    version = 1 + int(engines[0].version())
    with closing(Broadcaster(config)) as broadcaster:
        report = broadcaster.publish(weights, version, [engine.url for engine in engines])
    assert not report.failed
    for engine, dtype in zip(engines, (torch.float32, torch.bfloat16), strict=True):
        expected = by_transformers(weights, dtype)
        assert engine.checksums() == {name: tensor_checksum(tensor) for name, tensor in expected.items()}
    quantised = by_transformers(weights, torch.float32)
    with torch.no_grad():
        for (name, _), parameter in zip(weights, model.parameters(), strict=True):
            parameter.copy_(quantised[name])
    lab.assert_serves(engines[0], model, version)


def test_float8_without_scales_changes_nothing(engines, lab, tmp_path):
    engine = engines[0]
    config = BroadcastConfig(broadcast_topology="disk", disk_dir=str(tmp_path / "w"), quantise=True)
    with closing(Broadcaster(config)) as broadcaster:
        assert broadcaster.publish(lab.new_weights(engine)[1], 50, [engine.url]).ok
    before = engine.checksums()
    (file,) = (tmp_path / "w").glob("v*/*.safetensors")
    tensors = load_file(file)
    name = next(name for name in sorted(tensors) if name.endswith(SCALE_SUFFIX))
    weight = name.removesuffix(SCALE_SUFFIX)
    for left_out, message in ((name, f"{weight} came without {name}"), (weight, "lacks 1 parameters")):
        save_file({key: tensor for key, tensor in tensors.items() if key != left_out}, file)
        (file.parent / "model.safetensors.index.json").unlink(missing_ok=True)
        status, answer = engine.call("/update_weights_from_disk", {"model_path": str(file.parent)})
        assert status == 400 and message in answer["message"]
    assert engine.checksums() == before and engine.version() == "50"


def test_sglang_with_fp8_gets_blocks_where_nothing_speaks_against_it(serve):
    """Which has never been tried: SGLang's float8 wants a GPU."""
    config = BroadcastConfig(broadcast_timeout_s=1.0, quantise=True)
    blocks, channels = serve("fp8", *PLAIN), serve("fp8", *PLAIN, SCALE)
    with closing(Broadcaster(config)) as broadcaster:
        report = broadcaster.publish([(PLAIN[1], torch.ones(4, 4))], 1, [blocks.url, channels.url])
    assert report.failed[blocks.url].startswith("group: ") and SCALE in report.failed[channels.url]
