"""Pacing by the learner's pace: what the freshest order leaves behind, and that nobody waits for a credit in vain.

Runs in virtual time over both stores on a real Valkey: the ingest's clock is the test's, and what the server knows of
its own clock is set to it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
from msgspec.structs import replace

from vagen.buffer.admission import Pacing, start_credits
from vagen.buffer.connection import make_client
from vagen.buffer.keys import Key, Keys
from vagen.buffer.requests import Ask, Beat
from vagen.buffer.selection.config import ReplayConfig
from vagen.buffer.settings import change_settings
from vagen.buffer.store import IngestStore
from vagen.buffer.tempo import Tempo, startable
from vagen.common.wire import CreditRequest

BATCH = 16
MAX_STALENESS = 4
TICK_S = 1 / 8
KNOWN = Tempo(is_waiting=False, since_asked_s=0.5, step_s=2.0, episode_s=0.5)


@pytest.mark.parametrize(
    ("change", "ready", "running", "credits"),
    [
        # 32 a step and a slack of 2; 1/4 of a step has passed and an episode takes another.
        ({}, 0, 0, 18),
        ({}, 10, 3, 5),
        ({}, 20, 0, 0),
        ({"since_asked_s": 2.0}, 0, 0, 42),
        ({"since_asked_s": 1e9}, 0, 0, 42),  # a learner that is away for long asks for no more
        ({"is_waiting": True}, 0, 0, 50),
        ({"is_waiting": True}, 31, 0, 19),
        ({"is_waiting": True, "since_asked_s": 20.0}, 31, 0, 331),  # but one that waits does, whatever it waits for
        ({"step_s": None}, 0, 0, 34),
        ({"episode_s": None}, 0, 0, 34),
        ({"step_s": None, "is_waiting": True}, 0, 0, 66),
        ({"fresh_share": 0.5}, 0, 0, 10),
        ({"fresh_share": 0.5, "is_waiting": True}, 0, 0, 50),  # nothing may be left to replay
        ({"filtered": 32}, 0, 0, 34),
        ({"filtered": 96, "is_waiting": True}, 31, 0, 70),  # 4 are played for one that passes
        ({"group_size": 8}, 0, 0, 24),
    ],
)
def test_rule(change, ready, running, credits):
    tempo = replace(KNOWN, **change)
    assert startable(tempo, 32, ready, running) == credits
    values = {"max_running": 1000, "batch_size": 32, "max_staleness": 100, "untrained": 64, "engines": 1}
    granted, why = start_credits(Pacing(**values, ready=ready, running=running, tempo=tempo))
    assert granted == credits and ("learner's pace" in why) == (credits == 0)


@dataclass
class Episode:
    """One that runs."""

    ends_at: float
    task: int
    version: int


@dataclass
class Run:
    """A learner with prefetch whose steps take a second, and actors that play as many episodes as they are granted."""

    bench: Any
    client: Any
    selector: Any
    episode_s: Callable[[int], float]
    slots: int = 64
    group_size: int = 1
    succeeds: Callable[[int], bool] = lambda task: True
    now: float = 0.0
    version: int = 1
    step: int = 0
    waited_s: float = 0.0
    episodes: list[Episode] = field(default_factory=list)
    ends: list[tuple[int, int]] = field(default_factory=list)
    """Version at the start and at the end of each episode that was stored."""
    _asked: tuple[bytes | None, float] = (None, 0.0)
    _trains_until: float | None = None
    _has_next: bool = False

    def until(self, step: int, within_s: float) -> None:
        """Let time pass until a step is trained; it must not take longer."""
        deadline = self.now + within_s
        while self.step < step:
            assert self.now < deadline, f"step {self.step}: {self.bench.learner.status()}"
            self.tick()
            self.learn()
        accounting = self.bench.learner.accounting()
        assert accounting.accounted == len(self.ends), "the identity"

    def tick(self) -> None:
        """`TICK_S` pass for actors and buffer."""
        self.now += TICK_S
        self.bench.now += TICK_S
        key = Keys("run")[Key.PACE]
        if (step := self.client.hget(key, "asked")) is not None:
            if step != self._asked[0]:
                self._asked = (step, self.now - TICK_S)
            seconds, micros = self.client.time()
            self.client.hset(key, "asked_at", str(seconds + micros / 1e6 - (self.now - self._asked[1])))
        ended = [episode for episode in self.episodes if episode.ends_at <= self.now]
        self.episodes = [episode for episode in self.episodes if episode.ends_at > self.now]
        outcomes = self.bench.commit(*map(self._put, ended))
        assert {outcome.verdict for outcome in outcomes} <= {"stored", "stale"}
        self.ends += [(episode.version, self.version) for episode in ended]
        self.start()

    def start(self) -> int:
        """Ask for an episode for each free slot; returns how many are granted."""
        want = self.slots - len(self.episodes)
        (outcome,) = self.bench.commit(Ask(b"peer", CreditRequest(run_id="run", actor_id="actor-0", want=want)))
        indices = [task.task_index for task in outcome.tasks]
        self.episodes += [Episode(self.now + self.episode_s(index), index, self.version) for index in indices]
        return len(indices)

    def learn(self) -> None:
        """End a step that is over, begin the next where its batch is there, claim the one after."""
        if self._trains_until is not None and self.now >= self._trains_until:
            self.bench.learner.mark_trained(self.step, 1.0)
            self.bench.learner.done([self.step])
            self.step += 1
            self.version = self.bench.publish(self.step)
            self._trains_until = None
        if self._trains_until is None:
            if self._claim(self.step):
                self._trains_until, self._has_next = self.now + 1.0, False
            else:
                self.waited_s += TICK_S
        if self._trains_until is not None:
            self._claim(self.step + 1)

    def share(self, fate: str) -> float:
        """Of all that was produced."""
        return getattr(self.bench.learner.accounting(), fate) / len(self.ends)

    @property
    def mixed_share(self) -> float:
        """Of all episodes, those that weights overtook."""
        return sum(start != end for start, end in self.ends) / len(self.ends)

    def _claim(self, step: int) -> bool:
        if not self._has_next:
            manifest = self.selector.claim(step, BATCH, 0)
            self._has_next = manifest is not None
            entries = () if manifest is None else manifest.entries
            assert all(entry.replayed or entry.staleness <= MAX_STALENESS for entry in entries)
        return self._has_next

    def _put(self, episode: Episode) -> Any:
        return self.bench.put(
            task_index=episode.task,
            version=sorted([episode.version, self.version, self.version]),
            success=self.succeeds(episode.task),
            group_id=f"group-{episode.task // self.group_size}",
            group_size=self.group_size,
        )


@pytest.fixture
def run(bench, heartbeat):
    """A run of B = 16 and max_staleness = 4, with one admitted engine."""

    def make(
        episode_s: float | Callable[[int], float] = 0.25,
        *,
        filters: tuple[str, ...] = (),
        max_staleness: int = MAX_STALENESS,
        replay_max_bytes: int = 0,
        selection: dict[str, Any] | None = None,
        **fields: Any,
    ) -> Run:
        made = bench(lease_s=1e4, heartbeat_timeout_s=1e6)
        more = {"group_size": fields.get("group_size", 1), "replay_max_bytes": replay_max_bytes}
        made.learn(batch_size=BATCH, max_staleness=max_staleness, replay_max_staleness=64, **more)
        made.commit(Beat(b"peer", heartbeat()))
        assert made.learner.admit_engine("http://engine", "e1", 1)
        seconds = episode_s if callable(episode_s) else lambda task: float(episode_s)
        selector = made.selector(filters, **(selection or {}))
        return Run(made, make_client(made.valkey.url), selector, seconds, **fields)

    return make


def use_order(run: Run, order: str) -> None:
    change_settings(run.client, Keys("run"), {"order": order}, "somebody")


def test_a_learner_slower_than_its_actors_leaves_almost_nothing(run):
    paced = run()
    paced.until(12, within_s=13)
    assert paced.share("stale") < 0.03
    assert paced.mixed_share > 0.1, "episodes are on their way whenever weights arrive"
    assert paced.waited_s <= 3 * TICK_S, "for its first batch"


def test_the_rule_of_orders_that_leave_nothing_behind_stays(run):
    paced = run()
    use_order(paced, "oldest")
    for _ in range(8):
        paced.tick()
    assert len(paced.ends) == (MAX_STALENESS + 1) * BATCH
    use_order(paced, "freshest")
    assert paced.start() == 0


@pytest.mark.parametrize("episode_s", [1.0, 3.0])
def test_long_episodes_are_as_many_as_the_learner_takes(run, episode_s):
    paced = run(episode_s)
    paced.until(8, within_s=8 * max(1.0, episode_s / 2) + episode_s + 1)
    assert paced.share("stale") < 0.05 * episode_s


def test_slow_actors_work_all_the_time(run):
    """6 slots play 12 episodes a second of the 16 that the learner could take."""
    paced = run(0.5, slots=6)
    idle = 0
    while paced.step < 6:
        paced.tick()
        idle += paced.slots - len(paced.episodes)
        paced.learn()
    assert idle == 0
    assert paced.share("stale") == 0


@pytest.mark.parametrize("max_staleness", [0, 1, 2])
def test_a_small_bound_keeps_the_learner_busy(run, max_staleness):
    paced = run(max_staleness=max_staleness)
    paced.until(6, within_s=6 * 1.5 + 1)
    assert paced.share("stale") < 0.05


def test_filters_are_played_for(run):
    """3 of 4 groups are dropped: 64 episodes a step, which the actors can play."""
    paced = run(filters=("all_same",), group_size=4, succeeds=lambda task: task % 16 == 0)
    paced.until(6, within_s=9)
    assert paced.share("filtered") > 0.6
    assert paced.share("stale") < 0.1


def test_filters_that_let_nothing_through_for_a_while_do_not_end_the_run(run):
    paced = run(filters=("all_same",), group_size=4, succeeds=lambda task: task > 640 and task % 4 == 0)
    paced.until(2, within_s=20)


def test_groups_whose_slowest_member_takes_long_do_not_stop_the_others(run):
    paced = run(lambda task: 2.5 if task % 4 == 3 else 0.25, group_size=4)
    paced.until(8, within_s=14)
    assert paced.share("stale") < 0.1


def test_what_is_replayed_is_not_played(run):
    replay = ReplayConfig(share=0.5, max_staleness=64)
    paced = run(replay_max_bytes=1 << 20, selection={"replay": replay})
    paced.until(10, within_s=11)
    assert len(paced.ends) < 0.75 * 10 * BATCH
    assert paced.share("stale") < 0.05


def test_a_learner_that_is_away_finds_a_batch_and_no_more(run):
    paced = run()
    paced.until(4, within_s=6)
    for _ in range(80):
        paced.tick()
    ready = paced.bench.learner.status().ready
    assert BATCH <= ready <= 1.5 * BATCH
    waited_s = paced.waited_s
    paced.until(8, within_s=5)
    assert paced.waited_s == waited_s


def test_a_learner_that_is_away_before_it_asks_finds_its_first_batches(run):
    paced = run()
    for _ in range(80):
        paced.tick()
    assert 2 * BATCH <= len(paced.ends) < 2.5 * BATCH
    paced.until(2, within_s=3)
    assert paced.waited_s == 0


def test_a_learner_that_waits_for_a_shard_without_actors_is_given_more(run):
    """Whatever keeps a claim open, what `max_staleness` allows comes with time."""
    paced = run()
    paced.until(4, within_s=6)
    paced.selector.claim = lambda *claim: paced.bench.learner.evict_stale(claim[0]) and None
    for _ in range(80):
        paced.tick()
        paced.learn()
    assert paced.bench.learner.status().ready == (MAX_STALENESS + 1) * BATCH


def test_a_restarted_ingest_grants_no_more(run):
    paced = run()
    paced.until(4, within_s=6)
    paced.start()
    paced.bench.store = IngestStore(paced.bench.valkey.url, "run", paced.bench.config)
    assert paced.start() <= 1, "milliseconds have passed"


def test_lost_episodes_are_granted_again(run):
    paced = run()
    paced.until(3, within_s=5)
    for _ in range(3):
        paced.tick()
        paced.learn()
    lost = [episode.task for episode in paced.episodes]
    assert lost
    paced.episodes = []
    paced.bench.now += 2e4
    assert paced.bench.tick()[0] == len(lost)
    paced.until(6, within_s=5)
