"""Uploads of the model to a hub while training goes on: one at a time, by `vagen export --push` in a child process.

    loop    checkpoint is durable and due -> submit: its files are linked aside, so that retention may delete it
    thread  child process exports it, with a card of the run so far, and uploads the folder

An upload that fails is a warning and a count; training never waits for one before its end. Of those that become due
while one runs, the newest is uploaded and the others are left out. A learner that is killed leaves a running child,
which reads linked files and ends by itself.
"""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

from vagen.common.metrics import Metrics
from vagen.learner.config import LearnerConfig

__all__ = ["HubUploader"]

logger = logging.getLogger(__name__)

_LAST_UPLOAD_S = 1800.0
"""How long the end of a run waits for what is being uploaded."""


class HubUploader:
    """Only the first rank of a run with `hub_every` has one."""

    def __init__(self, run_dir: Path, config: LearnerConfig, metrics: Metrics) -> None:
        self._run_dir = run_dir
        self._folder = run_dir / "learner" / "hub"
        self._config = config
        self._metrics = metrics
        self._condition = threading.Condition()
        self._next: Path | None = None
        self._is_closed = False
        self._child: subprocess.Popen[str] | None = None
        shutil.rmtree(self._folder, ignore_errors=True)
        self._thread = threading.Thread(target=self._serve, name="hub", daemon=True)
        self._thread.start()

    def submit(self, checkpoint: Path, step: int) -> None:
        """Upload the model of a durable checkpoint, if it is due: after every `hub_every` steps and the last."""
        every = self._config.hub_every
        if every is None or (step % every and step != self._config.total_steps):
            return
        held = self._folder / checkpoint.name
        try:
            shutil.copytree(checkpoint, held, copy_function=os.link)
        except OSError as error:
            self._tell(held, str(error))
            return
        with self._condition:
            left_out, self._next = self._next, held
            self._condition.notify()
        if left_out is not None:
            logger.info("%s is left out of the uploads: a newer one is due", left_out.name)
            self._metrics.count("vagen_learner_hub_uploads_total", outcome="left_out")
            shutil.rmtree(left_out, ignore_errors=True)

    def close(self, timeout_s: float = _LAST_UPLOAD_S) -> None:
        """Finish what is due and stop; an upload that takes longer than `timeout_s` is given up."""
        with self._condition:
            self._is_closed = True
            self._condition.notify()
        self._thread.join(timeout_s)
        if self._thread.is_alive() and self._child is not None:
            with self._condition:
                self._next = None
            self._child.kill()
            self._thread.join()

    def _serve(self) -> None:
        while (held := self._take()) is not None:
            started = time.monotonic()
            problem = self._upload(held)
            self._tell(held, problem)
            self._metrics.count("vagen_learner_hub_upload_seconds_total", time.monotonic() - started)
            shutil.rmtree(held, ignore_errors=True)

    def _take(self) -> Path | None:
        with self._condition:
            self._condition.wait_for(lambda: self._next is not None or self._is_closed)
            held, self._next = self._next, None
            return held

    def _upload(self, held: Path) -> str | None:
        """Why it failed, None where it did not."""
        out = self._folder / "export"
        words = [str(held), str(out), "--force", "--run", str(self._run_dir), "--push", self._config.hub_repository]
        words.append("--private" if self._config.hub_private else "--public")
        try:
            self._child = subprocess.Popen(
                [sys.executable, "-m", "vagen.tools.cli", "export", *words],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
            )
            _, errors = self._child.communicate()
        except OSError as error:
            return str(error)
        finally:
            shutil.rmtree(out, ignore_errors=True)
        if self._child.returncode == 0:
            return None
        lines = errors.strip().splitlines()
        return lines[-1] if lines else f"exit code {self._child.returncode}"

    def _tell(self, held: Path, problem: str | None) -> None:
        outcome = "ok" if problem is None else "failed"
        self._metrics.count("vagen_learner_hub_uploads_total", outcome=outcome)
        if problem is None:
            logger.info("%s uploaded to %s", held.name, self._config.hub_repository)
        else:
            logger.warning("%s was not uploaded to %s: %s", held.name, self._config.hub_repository, problem)
