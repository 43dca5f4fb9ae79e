"""One engine process of the tests, and the points at which a test can stop the world.

A file READY_FILE.fault, `{"point", "pid", "signal"}`, has the signal sent to the process when the engine next comes to
the point: `PATH` (a request is there, nothing is done), `PATH done` (done, not answered), `joining` (about to wait for
the trainer's group), `receiving N` (waits for the N-th bucket of an update), `reading N` (about to read the N-th file
of one). The file goes away as it fires.
"""

import json
import os
import sys
from pathlib import Path

import msgspec

from vagen.actor.local_engine import EngineConfig, run_engine, weights
from vagen.actor.local_engine.server import EngineServer
from vagen.common.config import RunConfig
from vagen.common.logging import setup_logging


class Faults:
    """Fires what the file asks for."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._parts = 0

    def reach(self, point: str) -> None:
        try:
            fault = json.loads(self._file.read_text())
        except FileNotFoundError:
            return
        if fault["point"] == point:
            self._file.unlink()
            os.kill(fault["pid"], fault["signal"])

    def install(self) -> None:
        administer, join_group, broadcast = EngineServer._administer, weights.join_group, weights.broadcast
        load_file = weights.load_file

        async def administer_or_fail(server, kind, handler, http):
            if http.path in ("/begin_weight_update", "/update_weights_from_disk"):
                self._parts = 0
            self.reach(http.path)
            answer = await administer(server, kind, handler, http)
            self.reach(f"{http.path} done")
            return answer

        def join_or_fail(*args, **kwargs):
            self.reach("joining")
            return join_group(*args, **kwargs)

        def load_or_fail(file):
            self.next_part("reading")
            return load_file(file)

        EngineServer._administer = administer_or_fail
        weights.join_group = join_or_fail
        weights.load_file = load_or_fail
        weights.broadcast = lambda group, tensor: broadcast(Watched(group, self), tensor)

    def next_part(self, what: str) -> None:
        self._parts += 1
        self.reach(f"{what} {self._parts}")


class Watched:
    """A group whose waits are seen."""

    def __init__(self, group, faults: Faults) -> None:
        self._group = group
        self._faults = faults

    def broadcast(self, tensors, options):
        work = self._group.broadcast(tensors, options)
        self._faults.next_part("receiving")
        return work


if __name__ == "__main__":
    model_dir, ready, config = sys.argv[1:]
    setup_logging()
    Faults(Path(ready).with_suffix(".fault")).install()
    run_engine(Path(model_dir), msgspec.json.decode(config, type=EngineConfig), RunConfig(), Path(ready))
