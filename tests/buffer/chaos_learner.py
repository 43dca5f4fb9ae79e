"""A learner without a model: `chaos_learner.py REDIS_URL FOLDER`, until SIGTERM (then it drains the buffer), or a kill.

Real `LearnerStore`, in the order in which `vagen.learner.loop` calls it. A checkpoint is a file of the folder that
holds the ids and the checksums of all that its steps have "trained". Notes what a test compares: `claimed MANIFEST`
each time, and the other stages by name.
"""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path
from typing import Any

import msgspec
import xxhash

from vagen.buffer.learner_store import LearnerStore, Manifest
from vagen.common.files import flush, make_directory

BATCH_SIZE = 12
CHECKPOINT_EVERY = 3


class ChaosLearner:
    def __init__(self, redis_url: str, folder: Path) -> None:
        self._folder = folder
        make_directory(folder / "checkpoints")
        self._notes = (folder / "notes").open("ab", buffering=0)
        self._notes.write(b"\n")
        self._stopping: list[int] = []
        signal.signal(signal.SIGTERM, lambda number, _: self._stopping.append(number))
        self._store = LearnerStore.connect(redis_url, "run", timeout_s=120)
        self._trained: dict[int, list[Any]] = {}

    def run(self) -> None:
        step = self._resume()
        self._publish(step)
        while (manifest := self._claim(step)) is not None:
            self._note("claimed", msgspec.json.encode(manifest).decode())
            if (ahead := self._store.claim(step + 1, BATCH_SIZE, 0)) is not None:
                self._note("claimed", msgspec.json.encode(ahead).decode())
            payloads = self._store.fetch(manifest.ids)
            self._note("fetched")
            self._trained[step] = [
                [name, xxhash.xxh3_64_hexdigest(p)] for name, p in zip(manifest.ids, payloads, strict=True)
            ]
            self._store.mark_trained(step)
            self._note("trained")
            step += 1
            self._publish(step)
            if step % CHECKPOINT_EVERY == 0:
                self._save(step)
        self._save(step)

    def _resume(self) -> int:
        saved = sorted(int(path.stem) for path in (self._folder / "checkpoints").glob("*.json"))
        step = saved[-1] if saved else 0
        self._store.done([pending for pending in self._store.pending_manifests() if pending < step])
        self._store.register("learner", step=step, batch_size=BATCH_SIZE, max_staleness=1_000_000)
        self._store.rollback(step - 1)
        self._note("resumed", step)
        return step

    def _publish(self, step: int) -> None:
        self._version = self._store.next_version()
        self._store.record_version(self._version, "learner", step, "checksum")
        self._tend()

    def _tend(self) -> None:
        for engine in self._store.engines():
            self._store.admit_engine(engine.url, engine.incarnation, self._version)

    def _claim(self, step: int) -> Manifest | None:
        """None when told to stop and nothing is left."""
        while True:
            wanted = BATCH_SIZE
            if self._stopping:
                status = self._store.status()
                if not status.ready and not status.awaiting_group and step not in self._store.pending_manifests():
                    return None
                wanted = max(1, min(BATCH_SIZE, status.ready))
            manifest = self._store.claim(step, wanted, 0.25)
            if manifest is not None:
                return manifest
            self._tend()

    def _save(self, step: int) -> None:
        """The checkpoint before `step`, then `done` for what it contains."""
        if not self._trained:
            return
        file = self._folder / "checkpoints" / f"{step:08d}.json"
        partial = file.with_suffix(".partial")
        partial.write_text(json.dumps(self._trained))
        flush(partial)
        partial.rename(file)
        flush(file.parent)
        self._note("saved")
        self._store.done(list(self._trained))
        self._note("done")
        self._trained = {}

    def _note(self, *words: object) -> None:
        self._notes.write((" ".join(map(str, words)) + "\n").encode())


if __name__ == "__main__":
    ChaosLearner(sys.argv[1], Path(sys.argv[2])).run()
