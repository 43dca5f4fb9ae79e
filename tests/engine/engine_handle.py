"""A running engine as a test sees it: its HTTP calls, its faults, and the model whose weights it should have."""

from __future__ import annotations

import base64
import json
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import torch

from vagen.common.vocabulary import forbidding_bias


@dataclass
class EngineHandle:
    """A running engine under test, and the model whose weights it should have."""

    url: str
    api_key: str | None
    admin_key: str | None
    reference: Any
    process: Any = None
    """A `subprocess.Popen` or a `ForkedScript`."""
    model_dir: Path = Path()
    config: dict[str, Any] = field(default_factory=dict)
    fault: Path = Path()
    """Where the engine looks for what is to happen to it."""
    ready: Path = Path()
    """Written once it serves, where it is SGLang."""
    forbidden: Sequence[int] = ()
    threads: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(64))

    def call(
        self, path: str, body: object = None, *, key: str | None = None, timeout_s: float = 120
    ) -> tuple[int, Any]:
        """Status and parsed body; POST where there is a body."""
        headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
        data = None if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, headers)
        try:
            with urllib.request.urlopen(request, timeout=timeout_s) as answer:
                status, text = answer.status, answer.read()
        except urllib.error.HTTPError as error:
            status, text = error.code, error.read()
        return status, json.loads(text) if text[:1] in (b"{", b"[") else text.decode()

    def admin(self, path: str, body: object) -> Any:
        """Body of an administrative call, which must succeed."""
        status, answer = self.call(path, body, key=self.admin_key)
        assert status == 200, answer
        return answer

    def generate(self, ids: Sequence[int], images: Sequence[bytes] = (), **params: Any) -> dict[str, Any]:
        """Answer to a generation, which must succeed; `rid` apart, keywords are sampling parameters.

        Vision tokens are forbidden, as an actor does.
        """
        body: dict[str, Any] = {"input_ids": list(ids), "return_logprob": True}
        if "rid" in params:
            body["rid"] = params.pop("rid")
        if images:
            body["image_data"] = [base64.b64encode(image).decode() for image in images]
        body["sampling_params"] = {"max_new_tokens": 12, "temperature": 1.0, "ignore_eos": True} | params
        body["sampling_params"].setdefault("logit_bias", forbidding_bias(self.forbidden))
        status, answer = self.call("/generate", body, key=self.api_key)
        assert status == 200, answer
        return answer

    def submit(self, *args: Any, **params: Any) -> Future[dict[str, Any]]:
        """`generate` in a thread."""
        return self.threads.submit(self.generate, *args, **params)

    def metric(self, *names: str) -> float:
        """Value of the first of these metrics that the engine has, summed over its labels."""
        lines = self.call("/metrics")[1].splitlines()
        for name in names:
            values = [float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith((name + "{", name + " "))]
            if values:
                return sum(values)
        return 0.0

    def wait_until(self, holds: Callable[[], bool], what: str, timeout_s: float = 30) -> None:
        """Poll the engine until it says so."""
        deadline = time.monotonic() + timeout_s
        while not holds():
            assert time.monotonic() < deadline, f"not within {timeout_s} s: {what}"
            time.sleep(0.005)

    def wait_running(self, count: int = 1) -> None:
        """Until so many requests generate."""
        names = ("vagen_engine_running_requests", "sglang:num_running_reqs")
        self.wait_until(lambda: self.metric(*names) >= count, f"{count} running")

    def version(self) -> str:
        """Version of the weights that the engine reports."""
        return str(self.call("/model_info", key=self.api_key)[1]["weight_version"])

    def checksums(self) -> dict[str, str]:
        """Of the weights in force, by engine name."""
        checksums: dict[str, str] = self.admin("/weights_checker", {"action": "checksum"})["ranks"][0]["checksums"]
        return checksums

    def arm(self, point: str, number: int, pid: int | None = None) -> None:
        """Send a signal, to the engine itself unless told, when it next comes to a point of `engine_worker.py`."""
        partial = self.fault.with_suffix(".partial")
        partial.write_text(json.dumps({"point": point, "pid": pid or self.process.pid, "signal": number}))
        partial.replace(self.fault)

    def signal(self, number: int) -> None:
        """Send a signal to all processes that serve; a launcher of theirs is spared."""
        family = psutil.Process(self.process.pid).children(recursive=True)
        for process in family or [psutil.Process(self.process.pid)]:
            process.send_signal(number)

    def perturbed(self, scale: float = 0.05, only: str = "") -> Any:
        """A copy of the reference with other weights."""
        model = type(self.reference)(self.reference.config).float().eval()
        model.load_state_dict(self.reference.state_dict())
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if only in name:
                    parameter.add_(scale * torch.randn_like(parameter))
        return model
