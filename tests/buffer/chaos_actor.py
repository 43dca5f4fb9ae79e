"""An actor without engine and episodes: `chaos_actor.py BUFFER_URL DATA_DIR NOTES MAX_IMAGE_BYTES`, until SIGTERM or a
kill.

Real sender and spool. Produces for every task that it is granted, as fast as it can, and notes what a test compares:
`journalled SEQ ID CHECKSUM` before a trajectory is first sent, `acked ID` or `refused ID` before it is forgotten, and
`drained JOURNALLED IN_FLIGHT` at the end.
"""

from __future__ import annotations

import asyncio
import random
import signal
import sys
from pathlib import Path

import numpy as np
import xxhash
from ulid import ULID

sys.path.append(str(Path(__file__).parents[1]))
from builders import make_trajectory

from vagen.actor.sender import Presence, Sender
from vagen.actor.spool import Entry, Spool
from vagen.common.metrics import Metrics
from vagen.common.trajectory import BootstrapPrompt, End, Trajectory
from vagen.common.wire import EngineAnnouncement, TaskGrant

GROUP_SIZE = 4
MAX_SPOOL_BYTES = 64 << 20


class Notes:
    """Lines that outlive a kill; the first is empty, in case the last of a former process was cut off."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("ab", buffering=0)
        self._file.write(b"\n")

    def add(self, *words: object) -> None:
        self._file.write((" ".join(map(str, words)) + "\n").encode())


class NotedSpool(Spool):
    notes: Notes

    async def note(self, entry: Entry) -> None:
        _, payload = await self.load(entry.actor_seq)
        key = ULID.from_bytes(entry.trajectory_id)
        self.notes.add("journalled", entry.actor_seq, key, xxhash.xxh3_64_hexdigest(payload))

    async def journal(self, trajectory: Trajectory) -> Entry:
        entry = await super().journal(trajectory)
        await self.note(entry)
        return entry


class NotedSender(Sender):
    notes: Notes

    def _settle(self, trajectory_id: bytes, fate: str) -> None:
        self.notes.add(fate, ULID.from_bytes(trajectory_id))
        super()._settle(trajectory_id, fate)


def trajectories_of(grant: TaskGrant, actor_id: str, version: int, max_bytes: int) -> list[Trajectory]:
    """By turns of four tasks: a group, four that are alone, a group of episodes that are cut in two."""
    kind = grant.task_index // GROUP_SIZE % 3
    fields = {
        "actor_id": actor_id,
        "task_index": grant.task_index,
        "attempt": grant.attempt,
        "episode_id": str(ULID()),
        "group_id": f"group-{grant.task_index // GROUP_SIZE}" if kind != 1 else f"alone-{grant.task_index}",
        "group_size": GROUP_SIZE if kind != 1 else 1,
        "version": version,
    }
    size = random.randint(max_bytes // 10, max_bytes)
    if kind != 2:
        return [make_trajectory(num_bytes=size, **fields)]
    prompt = BootstrapPrompt(token_ids=np.array([1, 2], np.int32))
    first = make_trajectory(num_bytes=size, is_last=False, end=End.CUT, bootstrap=prompt, **fields)
    return [first, make_trajectory(num_bytes=size // 2, fragment_index=1, **fields)]


async def produce(sender: Sender, spool: Spool, presence: Presence, stop: asyncio.Event, max_bytes: int) -> None:
    while not stop.is_set():
        tasks = () if spool.is_full else await sender.request(8)
        if not tasks:
            await sender.changed.wait(0.05)
            continue
        assert sender.status is not None
        running = {(task.task_index, task.attempt) for task in tasks}
        presence.running |= running
        version = sender.status.policy_version
        made = [t for task in tasks for t in trajectories_of(task, spool.actor_id, version, max_bytes)]
        await asyncio.gather(*map(sender.put, made))
        presence.running -= running


async def main(url: str, data_dir: Path, notes: Notes, max_bytes: int) -> None:
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    spool, presence = NotedSpool(data_dir, "run", MAX_SPOOL_BYTES), Presence()
    spool.notes = notes
    for entry in spool.entries():
        await spool.note(entry)
    presence.engines = (EngineAnnouncement(url="http://engine", kind="local", incarnation="engine"),)
    sender = NotedSender(url, spool, presence, Metrics("vagen_actor", "run"), run_id="run", window=16, heartbeat_s=0.2)
    sender.notes = notes
    sender.open()
    work = asyncio.create_task(sender.run())
    await sender.wait_for_buffer(120.0)
    await produce(sender, spool, presence, stop, max_bytes)
    assert await sender.flush(120.0), spool.in_flight
    work.cancel()
    await asyncio.gather(work, return_exceptions=True)
    await sender.close()
    await spool.close()
    notes.add("drained", spool.journalled, spool.in_flight)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], Path(sys.argv[2]), Notes(Path(sys.argv[3])), int(sys.argv[4])))
