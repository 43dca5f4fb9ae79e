"""The local engine: an inference server for laptops and CI that speaks the subset of SGLang's HTTP an RL client needs.

    server.py    HTTP, authorisation          -> requests.py  JSON to requests and back
    engine.py    the loop of the one thread that owns the model: schedule, run, postprocess
    model.py     parameters, KV cache, forward passes     sampling.py   logits to tokens
    weights.py   receiving new weights while generation goes on

Importing this package, or its `config`, imports no torch.
"""

from __future__ import annotations

from pathlib import Path

from vagen.actor.local_engine.config import EngineConfig
from vagen.common.config import RunConfig

__all__ = ["EngineConfig", "run_engine"]


def run_engine(model_dir: Path, config: EngineConfig, run: RunConfig, ready_file: Path | None = None) -> None:
    """Serve `model_dir` until SIGTERM or SIGINT; see `main.run_engine`."""
    from vagen.actor.local_engine import main

    main.run_engine(model_dir, config, run, ready_file)
