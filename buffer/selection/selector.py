"""Chooses the batch of a learner step: propose, filter, refill, seal.

      propose --> judge --> enough? --yes--> seal: manifest and drops at once --> Manifest
         ^          |          |no
         |          v          v
         +--- wait <------- drop: counted as filtered, room and credits come back

    consumes      units that are ready, by the order; what is kept for replay, up to its share
    waits for     as many ready as the step lacks
    unblocked by  the ingest, which wakes it

Only the seal and the drop change anything, each in one script that checks that the candidates are what they were:
a crash anywhere between leaves them ready, and whoever comes first to the seal decides for all. What was kept of an
earlier look is remembered, so that a step that waits for its refill judges no unit alone.
"""

from __future__ import annotations

import logging
import random
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Protocol

import msgspec

from vagen.buffer.manifest import Drawing, Manifest, ManifestEntry
from vagen.buffer.selection.config import SelectionConfig
from vagen.buffer.selection.filters import make_filters
from vagen.buffer.selection.units import Candidate, Proposal, Unit

__all__ = ["Decision", "SelectionStore", "Selector", "UnitDecision", "fit"]

logger = logging.getLogger(__name__)

_REMIND_S = 15.0
_LOOK_FURTHER = 4
"""Times as many candidates are looked at where whole units do not add up to the batch."""
_REMEMBERED = 4096
"""Dropped units of a step that filters are shown again, at least."""


class UnitDecision(msgspec.Struct, frozen=True, kw_only=True):
    """What becomes of one unit; the three sets of ids are all its members."""

    unit: str
    take: list[str] = []
    keep: list[str] = []
    drop: dict[str, list[str]] = {}
    """By the filter's name."""


class Decision(msgspec.Struct, frozen=True, kw_only=True):
    """What is to be done in one script, or not at all."""

    units: list[UnitDecision]
    replay: list[str] = []
    num_bytes: int = 0
    """Of what is taken."""
    drawn: bool = False
    """Whether the units were drawn by their exponential keys."""


class SelectionStore(Protocol):
    """What a selector needs of the buffer."""

    def propose(
        self, step: int, wanted: int, limit: int, order: str, seed: int, replayed: int
    ) -> Proposal | Manifest | None:
        """Candidates, or the manifest of a step that is sealed, or None while too few are ready."""

    def decide(self, step: int, decision: Decision, manifest: Manifest | None) -> tuple[Manifest | None, list[str]]:
        """The sealed manifest and, where nothing was done, the units that are not what they were."""

    def wait_ready(self, timeout_s: float) -> None:
        """Return when enough is ready, or after `timeout_s`."""


class Selector:
    """Claims batches for the one rank that decides."""

    def __init__(
        self, store: SelectionStore, config: SelectionConfig, *, seed: int | None = None, remind_s: float = _REMIND_S
    ) -> None:
        """Raises `ConfigError` for a filter that is not there. A `seed` makes the order `uniform` repeatable."""
        self._store = store
        self._config = config
        self._filters = make_filters(config.filters)
        self._random = random.Random(seed)
        self._remind_s = remind_s
        self._round = _Round(-1)

    def use(self, config: SelectionConfig) -> None:
        """Choose by other settings from the next claim on.

        A step that waits for more begins again: all that is ready is judged anew, by the new filters alone; what was
        dropped stays dropped and counted. Raises `ConfigError` for a filter that is not there, and changes nothing.
        """
        self._filters = make_filters(config.filters)
        self._config = config
        self._round = self._round.again()

    def claim(self, step: int, num_trajectories: int, timeout_s: float) -> Manifest | None:
        """The sealed batch of a step, whole units only; none when too few pass the filters within `timeout_s`.

        What is too stale for `step` is evicted and counted, what a filter drops is counted as filtered. A step that was
        claimed before returns the identical manifest. Where groups of odd sizes do not add up, it exceeds
        `num_trajectories` by less than one group.
        """
        if self._round.step != step:
            self._round = _Round(step)
        deadline = time.monotonic() + timeout_s
        while (manifest := self._attempt(step, num_trajectories)) is None:
            self._remind(num_trajectories)
            left = deadline - time.monotonic()
            if left <= 0:
                return None
            self._store.wait_ready(left)
        return manifest

    def _attempt(self, step: int, wanted: int) -> Manifest | None:
        """The manifest, or None where more must be ready."""
        this, further = self._round, 1
        replayed = int(self._config.replay.share * wanted)
        while True:
            lacking = max(1, wanted - this.num_kept)
            limit = this.num_kept + further * max([lacking, *(f.pool(lacking) for _, f in self._filters)])
            seed = self._random.getrandbits(31)
            proposal = self._store.propose(step, wanted, limit, self._config.order, seed, replayed)
            if proposal is None or isinstance(proposal, Manifest):
                return proposal
            looked_at_all = this.add(proposal)
            dropped = self._judge()
            fresh = wanted - len(proposal.replayed)
            units = fit(this.kept, fresh)
            count = sum(map(len, units))
            manifest = None
            if count == fresh or (count > fresh and (looked_at_all or further > 1)):
                manifest = self._manifest(units, proposal.replayed[: max(0, wanted - count)])
            elif count > fresh:
                further = _LOOK_FURTHER
            elif not dropped:
                return None
            if manifest is not None or dropped:
                sealed = self._decide(dropped, units if manifest else [], manifest)
                if sealed is not None:
                    return sealed

    def _judge(self) -> dict[str, dict[str, list[str]]]:
        """What the filters drop of what is kept: ids by unit and filter."""
        this = self._round
        units = this.shown
        dropped: dict[str, dict[str, list[str]]] = {}
        for name, function in self._filters:
            ids = frozenset(function(units))
            for unit in units:
                present = this.present.get(unit.name, ())
                if gone := [
                    m.trajectory_id for m in unit.members if m.trajectory_id in ids and m.trajectory_id in present
                ]:
                    dropped.setdefault(unit.name, {}).setdefault(name, []).extend(gone)
            units = [left for unit in units if (left := _without(unit, ids)).members]
        for unit_name, by_filter in dropped.items():
            this.present[unit_name] -= {trajectory_id for ids in by_filter.values() for trajectory_id in ids}
        return dropped

    def _decide(
        self, dropped: dict[str, dict[str, list[str]]], taken: Sequence[Unit], manifest: Manifest | None
    ) -> Manifest | None:
        this = self._round
        names = dict.fromkeys([*(unit.name for unit in taken), *dropped])
        takes = {unit.name for unit in taken}
        decisions = [
            UnitDecision(
                unit=name,
                take=sorted(this.present[name]) if name in takes else [],
                keep=[] if name in takes else sorted(this.present[name]),
                drop=dropped.get(name, {}),
            )
            for name in names
        ]
        replay, num_bytes = [], 0
        if manifest is not None:
            replay = [entry.trajectory_id for entry in manifest.entries if entry.replayed]
            num_bytes = sum(entry.num_bytes for entry in manifest.entries if not entry.replayed)
            manifest = msgspec.structs.replace(manifest, filtered=dict(this.filtered + _count(dropped)))
        decision = Decision(units=decisions, replay=replay, num_bytes=num_bytes, drawn=self._config.order == "priority")
        sealed, changed = self._store.decide(this.step, decision, manifest)
        if changed:
            for unit_name, by_filter in dropped.items():
                this.present[unit_name] |= {trajectory_id for ids in by_filter.values() for trajectory_id in ids}
            this.forget(changed)
        else:
            this.filtered += _count(dropped)
            this.num_dropped += sum(not this.present[name] for name in dropped)
            this.trim()
        return sealed

    def _manifest(self, units: Sequence[Unit], replayed: Sequence[Candidate]) -> Manifest:
        this, beta = self._round, self._config.beta
        weights = [1.0] * len(units)
        if self._config.order == "priority":
            weights = [this.expected_draws[unit.name] ** -beta for unit in units]
        largest = max([*weights, *([1.0] if replayed else ())])
        entries = [
            _entry(member, weight / largest, is_replayed=False)
            for unit, weight in zip(units, weights, strict=True)
            for member in unit.members
        ]
        entries += [_entry(candidate, 1.0 / largest, is_replayed=True) for candidate in replayed]
        drawing = None
        if self._config.order == "priority":
            num_kept = sum(map(bool, this.present.values()))
            drawing = Drawing(
                beta=beta,
                num_units=this.num_ready + this.num_dropped,
                num_drawn=len(units) * this.num_judged / max(1, num_kept),
                largest=largest,
            )
        return Manifest(
            step=this.step,
            entries=tuple(entries),
            sealed_at=time.time(),
            considered=this.considered if self._filters or this.filtered else 0,
            drawing=drawing,
        )

    def _remind(self, wanted: int) -> None:
        """Say why a step waits, where filters are the reason."""
        this, now = self._round, time.monotonic()
        if not this.filtered or now - this.reminded < self._remind_s:
            return
        this.reminded = now
        logger.warning(
            "step %d waits for %d trajectories after %.0f s: of %d candidates the filters dropped %d (%s), %d are kept",
            this.step,
            wanted - this.num_kept,
            now - this.started,
            this.considered,
            this.filtered.total(),
            ", ".join(f"{name} {count}" for name, count in this.filtered.most_common()),
            this.num_kept,
        )


class _Round:
    """What is known of one step while its batch is chosen."""

    def __init__(self, step: int) -> None:
        self.step = step
        self.seen: dict[str, Unit] = {}
        """Units as they were proposed, in the order in which they were first seen."""
        self.present: dict[str, set[str]] = {}
        """Members that no filter has dropped; empty where all are."""
        self.expected_draws: dict[str, float] = {}
        """Number of ready units times the probability of each to be drawn, as of its proposal."""
        self.num_ready = 0
        """Units, as of the last proposal."""
        self.num_judged = 0
        """Units that were proposed."""
        self.num_dropped = 0
        """Those of them that were dropped, and so are ready no more."""
        self.considered = 0
        self.filtered: Counter[str] = Counter()
        self.started = self.reminded = time.monotonic()

    def again(self) -> _Round:
        """The step from its beginning, with what is counted of it so far."""
        fresh = _Round(self.step)
        fresh.considered, fresh.filtered = self.filtered.total(), self.filtered
        fresh.num_judged = fresh.num_dropped = self.num_dropped
        fresh.started, fresh.reminded = self.started, self.reminded
        return fresh

    @property
    def kept(self) -> list[Unit]:
        """Units that may be taken, without the members that were dropped."""
        units = []
        for name, unit in self.seen.items():
            present = self.present[name]
            if present:
                members = tuple(member for member in unit.members if member.trajectory_id in present)
                units.append(msgspec.structs.replace(unit, members=members))
        return units

    @property
    def shown(self) -> list[Unit]:
        """What filters see: every unit as it was proposed, marked where all of it was dropped."""
        return [
            unit if self.present[name] else msgspec.structs.replace(unit, was_dropped=True)
            for name, unit in self.seen.items()
        ]

    @property
    def num_kept(self) -> int:
        """Trajectories of `kept`."""
        return sum(map(len, self.present.values()))

    def add(self, proposal: Proposal) -> bool:
        """Take in what is new; returns whether the proposal was all that is ready."""
        self.num_ready = proposal.num_units
        for unit in proposal.units:
            self.num_judged += unit.name not in self.present
            if self.present.get(unit.name) == {member.trajectory_id for member in unit.members}:
                continue
            self.considered += len(unit) - len(self.present.get(unit.name, ()))
            self.seen.pop(unit.name, None)
            self.seen[unit.name] = unit
            self.present[unit.name] = {member.trajectory_id for member in unit.members}
            weight, total = unit.weight, proposal.total_weight
            self.expected_draws[unit.name] = proposal.num_units * weight / total if weight > 0 else 1.0
        return len(proposal.units) == proposal.num_units

    def forget(self, names: Iterable[str]) -> None:
        """Units that are not what they were: proposed again, or gone."""
        for name in names:
            for known in (self.seen, self.present, self.expected_draws):
                known.pop(name, None)

    def trim(self) -> None:
        """Forget the oldest of the units that were dropped, so that a long wait does not fill the memory."""
        gone = [name for name, present in self.present.items() if not present]
        self.forget(gone[: -max(_REMEMBERED, _LOOK_FURTHER * self.num_kept)])


def fit(units: Sequence[Unit], wanted: int) -> list[Unit]:
    """Whole units in order that make up `wanted` trajectories, passing over those that would exceed it.

    Where the sizes do not add up, the first that was passed over is taken after all, so that odd groups cannot block
    the learner. Fewer than `wanted` where there are fewer.
    """
    taken: list[Unit] = []
    count, skipped = 0, None
    for unit in units:
        if count == wanted:
            break
        if count + len(unit) <= wanted:
            taken.append(unit)
            count += len(unit)
        elif skipped is None:
            skipped = unit
    if count < wanted and skipped is not None:
        taken.append(skipped)
    return taken


def _entry(candidate: Candidate, weight: float, *, is_replayed: bool) -> ManifestEntry:
    return ManifestEntry(
        trajectory_id=candidate.trajectory_id,
        num_bytes=candidate.num_bytes,
        num_tokens=candidate.num_tokens,
        oldest_step=candidate.oldest_step,
        staleness=candidate.staleness,
        group_id=candidate.group_id,
        weight=weight,
        replayed=is_replayed,
    )


def _without(unit: Unit, ids: frozenset[str]) -> Unit:
    members = tuple(member for member in unit.members if member.trajectory_id not in ids)
    return unit if len(members) == len(unit) else msgspec.structs.replace(unit, members=members)


def _count(dropped: dict[str, dict[str, list[str]]]) -> Counter[str]:
    counts: Counter[str] = Counter()
    for by_filter in dropped.values():
        for name, ids in by_filter.items():
            counts[name] += len(ids)
    return counts
