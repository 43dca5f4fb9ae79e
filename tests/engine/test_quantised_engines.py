"""Engines and model folders whose weights are quantised: refused by name, before anything is done to them."""

from __future__ import annotations

import json
import threading
from contextlib import closing
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import torch

from vagen.actor.local_engine import EngineConfig
from vagen.actor.local_engine.model import EngineModel
from vagen.common.errors import ConfigError
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
