"""One of two ranks that torchrun starts anew: `restart_worker.py FOLDER`.

The first rank of the first start is killed when both share a group. Ranks of the second leave a file of their number.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

from vagen.learner.model.collectives import count_votes
from vagen.learner.model.parallel import parallel_session

if __name__ == "__main__":
    with parallel_session(timeout_s=60) as place:
        assert count_votes(True) == [2]
        if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            if place.rank == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            count_votes(True)
        (Path(sys.argv[1]) / str(place.rank)).touch()
