"""A trainer that dies in the middle of a publish: `trainer_worker.py URL MODEL_DIR PATH`, killed before PATH is posted.

Of `/update_weights_from_distributed` it is the second post, so that the engine has received one bucket by then.
"""

import os
import signal
import sys
from pathlib import Path

from safetensors.torch import load_file

from vagen.actor.local_engine.weights import engine_name
from vagen.learner.broadcast import Broadcaster
from vagen.learner.config import BroadcastConfig
from vagen.learner.engine_control import EngineControl

if __name__ == "__main__":
    url, folder, last = sys.argv[1:]
    post = EngineControl.post
    posted = []

    async def post_or_die(self, path, body=None):
        posted.append(path)
        if path == last and posted.count(path) == (2 if path == "/update_weights_from_distributed" else 1):
            os.kill(os.getpid(), signal.SIGKILL)
        return await post(self, path, body)

    EngineControl.post = post_or_die
    tensors = load_file(Path(folder) / "model.safetensors")
    changed = [(engine_name(name), tensor + 1) for name, tensor in tensors.items()]
    Broadcaster(BroadcastConfig(pause_mode="in_place", bucket_bytes=20_000)).publish(changed, 7, [url])
