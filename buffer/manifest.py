"""The sealed batch of one learner step, as it is stored and as every rank reads it."""

from __future__ import annotations

import msgspec


class ManifestEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One trajectory of a batch."""

    trajectory_id: str
    num_bytes: int
    num_tokens: int = 0
    """All tokens of its rows; 0 where it was stored before that was kept."""
    oldest_step: int
    """Learner step of the version of its oldest policy token."""
    staleness: int
    """In learner steps, as of the first claim."""
    group_id: str
    weight: float = 1.0
    """What it counts in the loss, in (0, 1]: less than 1 where it was drawn more often than others."""
    shard: int = 0
    """Of the buffer, which has the payload."""
    replayed: bool = False
    """It was trained before: outside the accounting identity."""


class Drawing(msgspec.Struct, frozen=True, kw_only=True):
    """How the part of a batch was drawn by priority: what its weights mean beside those of another part."""

    beta: float
    num_units: int
    """N: units that were ready, those that filters have dropped meanwhile among them."""
    num_drawn: float
    """Units that were drawn, an estimate of those that filters dropped among them."""
    largest: float
    """`(N p) ** -beta` of the entry that counts 1."""


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """The batch of one learner step; never changes once sealed."""

    step: int
    entries: tuple[ManifestEntry, ...]
    sealed_at: float
    """Unix time in seconds."""
    considered: int = 0
    """Candidates that the filters saw for this step; 0 without filters."""
    filtered: dict[str, int] = {}
    """Those of `considered` that were dropped, by filter, since the process that sealed the batch began the step."""
    drawing: Drawing | None = None
    """Of a part that was drawn by priority."""

    @property
    def ids(self) -> list[str]:
        """Trajectory ids, in order."""
        return [entry.trajectory_id for entry in self.entries]

    @property
    def num_bytes(self) -> int:
        """Payload bytes of the batch."""
        return sum(entry.num_bytes for entry in self.entries)

    @property
    def sizes(self) -> list[int]:
        """What the work on each entry grows with: its tokens, or its bytes where those of some are not known."""
        tokens = [entry.num_tokens for entry in self.entries]
        return tokens if all(tokens) else [entry.num_bytes for entry in self.entries]

    @property
    def num_replayed(self) -> int:
        """Entries that were trained before."""
        return sum(entry.replayed for entry in self.entries)

    @property
    def filtered_share(self) -> float:
        """Dropped share of the candidates."""
        return sum(self.filtered.values()) / self.considered if self.considered else 0.0

    @property
    def has_equal_weights(self) -> bool:
        """Whether every entry counts 1."""
        return all(entry.weight == 1.0 for entry in self.entries)

    @property
    def weight_ess(self) -> float:
        """Effective sample size of the entries' weights over their number, `(sum w)^2 / (n sum w^2)`; 1 if equal."""
        weights = [entry.weight for entry in self.entries]
        squares = sum(weight * weight for weight in weights)
        return sum(weights) ** 2 / (len(weights) * squares) if squares else 0.0
