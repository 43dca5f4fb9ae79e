"""A trainer that a fault ends: `trainer_worker.py URL MODEL_DIR FAULT_FILE [API_KEY ADMIN_KEY]`.

Publishes version 7 to one engine.

Waits until the fault (see `engine_worker.py`) is armed. Never enters the group of the point `joining`, and never sends
the bucket of the point `receiving N`, so that the engine is waiting when the trainer ends.
"""

import json
import sys
import threading
import time
from pathlib import Path

from safetensors.torch import load_file

from vagen.actor.local_engine.weights import engine_name
from vagen.learner import engine_links, weight_buckets
from vagen.learner.broadcast import Broadcaster
from vagen.learner.config import BroadcastConfig


def never(*args, **kwargs):
    threading.Event().wait()


if __name__ == "__main__":
    url, folder, fault, *keys = sys.argv[1:]
    while not Path(fault).exists():
        time.sleep(0.01)
    point, _, number = json.loads(Path(fault).read_text())["point"].partition(" ")
    if point == "joining":
        engine_links.join_group = never
    if point == "receiving":
        sends = [weight_buckets.broadcast] * (int(number) - 1) + [never]
        weight_buckets.broadcast = lambda group, tensor: sends.pop(0)(group, tensor)
    tensors = load_file(Path(folder) / "model.safetensors")
    changed = [(engine_name(name), tensor + 1) for name, tensor in tensors.items()]
    config = BroadcastConfig(
        pause_mode="in_place",
        bucket_bytes=20_000,
        broadcast_timeout_s=120.0,
        **dict(zip(("api_key", "admin_api_key"), keys, strict=False)),
    )
    Broadcaster(config).publish(changed, 7, [url])
