"""What an archive of a run takes on disk and in processor time, against the payloads it was made of."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from vagen.buffer.archive.layout import IMAGES_NAME, TRAJECTORIES_NAME, parts
from vagen.buffer.archive.reader import open_archive
from vagen.buffer.archive.record import ArchivedTrajectory
from vagen.buffer.archive.writer import ArchiveWriter
from vagen.common.errors import ConfigError
from vagen.common.wire import decode_trajectory, encode_trajectory
from vagen.tools.bench import Figure, Figures, benchmark

__all__ = ["archive"]


@benchmark("archive")
def archive(options: Mapping[str, str]) -> Figures:
    """Bytes and processor time of a saved buffer; option archive=DIR names it."""
    if set(options) != {"archive"}:
        raise ConfigError("bench archive: expected --option archive=DIR, and no other")
    source = open_archive(options["archive"])
    count = source.num_trajectories
    payload_bytes = image_bytes = 0
    with tempfile.TemporaryDirectory(prefix="vagen-bench-") as folder:
        busy = _Stopwatch()
        with ArchiveWriter(Path(folder)) as writer:
            for step in source.steps:
                payloads = [(r, encode_trajectory(r.trajectory)[1]) for r in source.read_step(step)]
                payload_bytes += sum(len(payload) for _, payload in payloads)
                image_bytes += sum(len(image) for r, _ in payloads for image in r.trajectory.images.values())
                with busy:
                    writer.write_step(step, _decoded(payloads))
        sizes = {
            name: sum(path.stat().st_size for path in parts(Path(folder), name))
            for name in (TRAJECTORIES_NAME, IMAGES_NAME)
        }
        reading = _Stopwatch()
        with reading:
            assert sum(1 for _ in open_archive(folder).iterate()) == count
    return {
        "trajectories": Figure(value=count, unit="trajectories"),
        "payload_bytes": Figure(value=payload_bytes, unit="bytes"),
        "payload_image_bytes": Figure(value=image_bytes, unit="bytes"),
        "trajectory_file_bytes": Figure(value=sizes[TRAJECTORIES_NAME], unit="bytes"),
        "image_file_bytes": Figure(value=sizes[IMAGES_NAME], unit="bytes"),
        "write_cpu_ms": Figure(value=1000 * busy.seconds / count, unit="ms/trajectory"),
        "read_cpu_ms": Figure(value=1000 * reading.seconds / count, unit="ms/trajectory"),
    }


def _decoded(payloads: list[tuple[ArchivedTrajectory, bytes]]) -> Iterator[ArchivedTrajectory]:
    """As the learner's archive gets them: decoded from the buffer's payloads while it writes."""
    for record, payload in payloads:
        yield ArchivedTrajectory(
            trajectory=decode_trajectory(payload),
            step=record.step,
            position=record.position,
            oldest_step=record.oldest_step,
            staleness=record.staleness,
            version_steps=record.version_steps,
            weight=record.weight,
        )


class _Stopwatch:
    """Processor time of all threads of this process, summed over its blocks."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __enter__(self) -> None:
        self._started = time.process_time()

    def __exit__(self, *_: object) -> None:
        self.seconds += time.process_time() - self._started
