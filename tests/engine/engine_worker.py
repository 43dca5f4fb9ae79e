"""One engine process of the tests: `engine_worker.py MODEL_DIR READY_FILE CONFIG_JSON`."""

import sys
from pathlib import Path

import msgspec

from vagen.actor.local_engine import EngineConfig, run_engine
from vagen.common.config import RunConfig
from vagen.common.logging import setup_logging

if __name__ == "__main__":
    setup_logging()
    config = msgspec.json.decode(sys.argv[3], type=EngineConfig)
    run_engine(Path(sys.argv[1]), config, RunConfig(), Path(sys.argv[2]))
