"""Uploads beside training, over huggingface_hub to a server on this machine that answers as its API describes."""

from __future__ import annotations

import base64
import json
import threading
from hashlib import sha256
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from safetensors.torch import load

from vagen.common.config import read_recipe, section
from vagen.common.errors import ConfigError
from vagen.common.metrics import Metrics
from vagen.learner.checkpoints import CheckpointFolder
from vagen.learner.config import LearnerConfig
from vagen.learner.hub import HubUploader
from vagen.learner.replay import ReplayOptions
from vagen.learner.replay_run import run_replay
from vagen.tools.export import ExportOptions

REPOSITORY = "somebody/walker"
SETTINGS = ("learner.batch_size=6", "learner.minibatch_rows=8", "learner.total_steps=4", "learner.checkpoint_every=2")


class Hub(ThreadingHTTPServer):
    """Repositories of models in memory. Large files go through git-lfs."""

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Answer)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.is_refusing = False
        self.created: list[dict] = []
        self.blobs: dict[str, bytes] = {}
        self.files: dict[str, bytes] = {}
        self.commits: list[str] = []
        threading.Thread(target=self.serve_forever, daemon=True).start()


class Answer(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self):
        if not self.path.startswith(f"/api/models/{REPOSITORY}/tree/main"):
            return self.answer({"error": "not here"}, status=404)
        return self.answer(
            [{"type": "file", "path": path, "size": len(x), "oid": "0"} for path, x in self.server.files.items()]
        )

    def do_PUT(self):
        content = self.body()
        self.server.blobs[sha256(content).hexdigest()] = content
        self.answer({})

    def do_POST(self):
        body = self.body()
        if self.server.is_refusing:
            return self.answer({"error": "this token may not write"}, status=403)
        assert self.headers["Authorization"] == "Bearer hf_of_the_test"
        models = f"/api/models/{REPOSITORY}"
        if self.path == "/api/repos/create":
            self.server.created.append(json.loads(body))
            return self.answer({"url": f"{self.server.url}/{REPOSITORY}"})
        if self.path == "/api/validate-yaml":
            return self.answer({"errors": [], "warnings": []})
        if self.path == f"{models}/preupload/main":
            return self.answer({"files": [self.mode(file["path"]) for file in json.loads(body)["files"]]})
        if self.path == f"/{REPOSITORY}.git/info/lfs/objects/batch":
            return self.answer({"transfer": "basic", "objects": [*map(self.place, json.loads(body)["objects"])]})
        assert self.path == f"{models}/commit/main", self.path
        self.commit([json.loads(line) for line in body.splitlines()])
        return self.answer({"commitUrl": f"{self.server.url}/{REPOSITORY}/commit/1", "commitOid": "1"})

    def mode(self, path):
        return {"path": path, "shouldIgnore": False, "uploadMode": "lfs" if path.endswith("safetensors") else "regular"}

    def place(self, wanted):
        upload = {"href": f"{self.server.url}/lfs/{wanted['oid']}", "header": {}}
        return {**wanted, "actions": {"upload": upload}}

    def commit(self, lines):
        for line in lines:
            value = line["value"]
            if line["key"] == "header":
                self.server.commits.append(value["summary"])
            elif line["key"] == "file":
                self.server.files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                self.server.files[value["path"]] = self.server.blobs[value["oid"]]
            elif line["key"] == "deletedFile":
                del self.server.files[value["path"]]

    def body(self):
        return self.rfile.read(int(self.headers.get("Content-Length", 0)))

    def answer(self, content, status=200):
        text = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *_):
        pass


@pytest.fixture
def hub(monkeypatch):
    """Where child processes upload to."""
    server = Hub()
    monkeypatch.setenv("HF_ENDPOINT", server.url)
    monkeypatch.setenv("HF_TOKEN", "hf_of_the_test")
    monkeypatch.setenv("HF_HUB_DISABLE_XET", "1")
    yield server
    server.shutdown()
    server.server_close()


@pytest.fixture
def train(make_archive, model_dir, tmp_path):
    """Four steps with checkpoints after two and four; returns the step reached."""

    def run(*settings):
        recipe = read_recipe("frozenlake", [*SETTINGS, *settings])
        return run_replay(recipe, model_dir, tmp_path / "run", ReplayOptions(path=make_archive(num_steps=4)))

    return run


@pytest.mark.slow
def test_the_model_of_each_due_step_is_uploaded_with_its_card(hub, train, tmp_path):
    hub.files = {"model-00001-of-00002.safetensors": b"of an older, larger one", "LICENSE": b"kept"}
    assert train("learner.hub_every=2", f"learner.hub_repository={REPOSITORY}") == 4
    assert hub.commits == ["Learner step 2", "Learner step 4"]
    expected = {"name": "walker", "organization": "somebody", "visibility": "private"}
    assert hub.created[0] | expected == hub.created[0]
    learner = tmp_path / "run" / "learner"
    trained = load((learner / "export" / "model.safetensors").read_bytes())
    uploaded = load(hub.files["model.safetensors"])
    assert uploaded.keys() == trained.keys() and all(uploaded[name].equal(trained[name]) for name in trained)
    names = {"LICENSE", "README.md", "training_curves.svg", "config.json", "tokenizer.json", "preprocessor_config.json"}
    assert names <= hub.files.keys() and "model-00001-of-00002.safetensors" not in hub.files
    assert "after 4 learner steps" in hub.files["README.md"].decode()
    assert list((learner / "hub").iterdir()) == [], "nothing is left behind"


@pytest.mark.slow
def test_a_hub_that_refuses_costs_a_warning_and_a_count(hub, train, tmp_path, caplog):
    hub.is_refusing = True
    settings = ("learner.hub_every=4", f"learner.hub_repository={REPOSITORY}")
    assert train(*settings) == 4
    (warning,) = [record.getMessage() for record in caplog.records if "was not uploaded" in record.getMessage()]
    assert REPOSITORY in warning and "403" in warning

    metrics = Metrics("vagen_learner", "run")
    uploader = HubUploader(
        tmp_path / "run", section(read_recipe("frozenlake", [*SETTINGS, *settings]), "learner", LearnerConfig), metrics
    )
    uploader.submit(CheckpointFolder(tmp_path / "run" / "learner" / "checkpoints", keep=2).path_of(4), 4)
    uploader.close()
    labels = {"run": "run", "outcome": "failed"}
    assert metrics.registry.get_sample_value("vagen_learner_hub_uploads_total", labels) == 1


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (("learner.hub_every=2",), r"\$.learner.hub_repository: expected OWNER/NAME of a repository of yours"),
        (("learner.hub_every=3", "learner.hub_repository=a/b"), r"\$.learner.hub_every: expected a multiple of"),
        (("learner.hub_every=2", "learner.hub_repository=b"), r"\$.learner.hub_repository: expected OWNER/NAME"),
    ],
)
def test_a_repository_that_nobody_chose_is_refused_before_anything_starts(settings, message):
    with pytest.raises(ConfigError, match=message):
        section(read_recipe("frozenlake", [*SETTINGS, *settings]), "learner", LearnerConfig)
    assert section(read_recipe("frozenlake", SETTINGS), "learner", LearnerConfig).hub_every is None


def test_an_export_is_not_pushed_to_the_placeholder(tmp_path):
    with pytest.raises(ConfigError, match=r"\$.push: expected OWNER/NAME of a repository of yours"):
        ExportOptions(source=tmp_path, out=tmp_path / "out", push="your-name/your-model")
