"""One of two ranks of a learner that waits for data which never comes: `waiting_worker.py REDIS_URL`.

Prints `waiting`, and `stopped at STEP` when its loop has ended, or why it could not go on. SIGTERM tells this rank
alone to stop.
"""

from __future__ import annotations

import signal
import sys
import threading
from typing import Any

from vagen.buffer.learner_store import LearnerStore
from vagen.buffer.selection.config import SelectionConfig
from vagen.buffer.selection.selector import Selector
from vagen.common.errors import RankLostError
from vagen.learner.config import LearnerConfig
from vagen.learner.feeder import BatchFeeder
from vagen.learner.loop import Learner
from vagen.learner.model.collectives import recognise_lost_ranks
from vagen.learner.model.parallel import parallel_session
from vagen.learner.sources import BufferSource


def main(redis_url: str) -> None:
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    unused: Any = None
    with parallel_session(timeout_s=120) as place, recognise_lost_ranks():
        stores = [LearnerStore.connect(redis_url, "run") for _ in range(2)]
        selector = Selector(stores[1], SelectionConfig()) if place.rank == 0 else None
        source = BufferSource(*stores, batch_size=4, selector=selector)
        feeder = BatchFeeder(source, unused, dp_rank=place.dp_rank, dp_size=place.dp_size)
        learner = Learner(
            config=LearnerConfig(),
            trainer=unused,
            update=unused,
            feeder=feeder,
            source=source,
            checkpoints=unused,
            journal=unused,
            stop=stop,
            first_step=3,
            last_step=10,
            is_first_rank=place.rank == 0,
            probe=None,
        )
        print("waiting", flush=True)
        try:
            print("stopped at", learner.run(), flush=True)
        finally:
            feeder.close()


if __name__ == "__main__":
    try:
        main(sys.argv[1])
    except RankLostError as error:
        print(error, flush=True)
