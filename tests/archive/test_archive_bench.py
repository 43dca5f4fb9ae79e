"""`vagen bench archive` measures what the files of an archive are."""

from __future__ import annotations

import json

from typer.testing import CliRunner

from vagen.buffer.archive.reader import open_archive
from vagen.common.wire import encode_trajectory
from vagen.tools.cli import app


def test_the_bench_counts_payloads_and_files(archive_of):
    folder = archive_of(steps=2, count=5)
    done = CliRunner().invoke(app, ["bench", "archive", "--json", "--option", f"archive={folder}"])
    assert done.exit_code == 0, done.output
    figures = {name: figure["value"] for name, figure in json.loads(done.stdout)["figures"].items()}
    records = list(open_archive(folder).iterate())
    assert figures["trajectories"] == 10
    assert figures["payload_bytes"] == sum(len(encode_trajectory(record.trajectory)[1]) for record in records)
    files = {name: sum(path.stat().st_size for path in folder.glob(f"{name}-*")) for name in ("trajectories", "images")}
    assert figures["trajectory_file_bytes"] == files["trajectories"]
    assert figures["image_file_bytes"] == files["images"]
    assert figures["write_cpu_ms"] > 0 and figures["read_cpu_ms"] > 0
    done = CliRunner().invoke(app, ["bench", "archive"])
    assert done.exit_code == 2 and "expected --option archive=DIR" in done.stderr
