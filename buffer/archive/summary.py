"""What an archive holds, in numbers; reads no tokens and no bytes of images."""

from __future__ import annotations

from collections import Counter

import msgspec
import pyarrow.compute as pc

from vagen.buffer.archive.layout import IMAGES_NAME, TRAJECTORIES_NAME, parts
from vagen.buffer.archive.reader import Archive, read_column
from vagen.buffer.archive.record import NO_STEP

__all__ = ["ArchiveSummary", "format_summary", "summarise"]

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")
_REFERENCES = ("rows.list.element.images.list.element.content_hash", "bootstrap.images.list.element.content_hash")


class ArchiveSummary(msgspec.Struct, frozen=True, kw_only=True):
    """Counts are of trajectories where nothing else is said."""

    path: str
    trajectories: int
    episodes: int
    groups: int
    runs: tuple[str, ...]
    steps: int
    """Learner steps that trained at least one."""
    first_step: int | None
    last_step: int | None
    untrained: int
    """Those that no step has trained."""
    behaviour_unknown: int
    success: float
    """Share."""
    reward_mean: float
    reward_by_component: dict[str, float]
    """Mean over all trajectories."""
    turns: int
    tokens: int
    """Of all rows, expanded image placeholders among them."""
    policy_tokens: int
    staleness: dict[int, int]
    """In learner steps -> count; -1 are those that no step has claimed."""
    policy_versions: tuple[int, int]
    """Oldest and newest of all tokens; -1 where unknown."""
    images: int
    """Distinct ones."""
    image_bytes: int
    """Encoded bytes of the distinct images: what the archive stores."""
    image_bytes_in_payloads: int
    """The same with each image once a trajectory, as payloads carry them."""
    image_bytes_in_rows: int
    """The same with each image once a placeholder, as if nothing were shared."""
    trajectory_file_bytes: int
    image_file_bytes: int


def summarise(archive: Archive) -> ArchiveSummary:
    """Read the light columns of all parts."""
    names = ["trajectory_id", "episode_id", "group_id", "run_id", "step", "staleness", "success", "total_reward"]
    names += ["num_turns", "num_tokens", "num_policy_tokens", "oldest_version", "newest_version", "behaviour_known"]
    table = archive.table([*names, "reward_by_component"])
    count = archive.num_trajectories
    components: Counter[str] = Counter()
    for entries in table["reward_by_component"].to_pylist():
        for entry in entries:
            components[entry["name"]] += entry["value"]
    in_payloads, in_rows, distinct = _image_bytes(archive)
    steps = archive.steps
    return ArchiveSummary(
        path=str(archive.path),
        trajectories=count,
        episodes=pc.count_distinct(table["episode_id"]).as_py(),
        groups=pc.count_distinct(table["group_id"]).as_py(),
        runs=tuple(sorted(pc.unique(table["run_id"]).to_pylist())),
        steps=len(steps),
        first_step=steps[0] if steps else None,
        last_step=steps[-1] if steps else None,
        untrained=int((table["step"].to_numpy() == NO_STEP).sum()),
        behaviour_unknown=count - pc.sum(table["behaviour_known"]).as_py(),
        success=pc.mean(table["success"]).as_py(),
        reward_mean=pc.mean(table["total_reward"]).as_py(),
        reward_by_component={name: total / count for name, total in sorted(components.items())},
        turns=pc.sum(table["num_turns"]).as_py(),
        tokens=pc.sum(table["num_tokens"]).as_py(),
        policy_tokens=pc.sum(table["num_policy_tokens"]).as_py(),
        staleness=dict(sorted(Counter(table["staleness"].to_pylist()).items())),
        policy_versions=(pc.min(table["oldest_version"]).as_py(), pc.max(table["newest_version"]).as_py()),
        images=archive.num_images,
        image_bytes=distinct,
        image_bytes_in_payloads=in_payloads,
        image_bytes_in_rows=in_rows,
        trajectory_file_bytes=_file_bytes(archive, TRAJECTORIES_NAME),
        image_file_bytes=_file_bytes(archive, IMAGES_NAME),
    )


def _image_bytes(archive: Archive) -> tuple[int, int, int]:
    """Encoded bytes of images once a trajectory, once a placeholder, and once an archive."""
    names = read_column(archive.path, IMAGES_NAME, "content_hash").to_pylist()
    size = dict(zip(names, read_column(archive.path, IMAGES_NAME, "num_bytes").to_pylist(), strict=True))
    in_payloads = in_rows = 0
    for table in archive.iterate_tables(_REFERENCES):
        for record in table.to_pylist():
            holders = [*record["rows"], *([record["bootstrap"]] if record["bootstrap"] else [])]
            hashes = [image["content_hash"] for holder in holders for image in holder["images"]]
            in_rows += sum(size[name] for name in hashes)
            in_payloads += sum(size[name] for name in set(hashes))
    return in_payloads, in_rows, sum(size.values())


def _file_bytes(archive: Archive, name: str) -> int:
    return sum(path.stat().st_size for path in parts(archive.path, name))


def format_summary(summary: ArchiveSummary) -> str:
    """A table for people."""
    s = summary
    spans = f"{s.first_step}-{s.last_step}" if s.steps else "none"
    rewards = ", ".join(f"{name} {value:.4g}" for name, value in s.reward_by_component.items())
    staleness = ", ".join(f"{'unclaimed' if key < 0 else key}: {value}" for key, value in s.staleness.items())
    rows = {
        "trajectories": f"{s.trajectories} of {s.episodes} episodes in {s.groups} groups, runs {', '.join(s.runs)}",
        "steps": f"{s.steps} ({spans}), {s.untrained} trajectories trained by none",
        "success": f"{s.success:.3f}",
        "reward": f"{s.reward_mean:.4g} ({rewards})",
        "turns": f"{s.turns}, {s.turns / s.trajectories:.2f} a trajectory",
        "tokens": f"{s.tokens}, of the policy {s.policy_tokens}",
        "staleness": staleness,
        "versions": f"{s.policy_versions[0]}-{s.policy_versions[1]}"
        + (f", behaviour unknown of {s.behaviour_unknown}" if s.behaviour_unknown else ""),
        "images": f"{s.images} distinct, {_size(s.image_bytes)}; as payloads carry them "
        f"{_size(s.image_bytes_in_payloads)}, one a placeholder {_size(s.image_bytes_in_rows)}",
        "files": f"trajectories {_size(s.trajectory_file_bytes)}, images {_size(s.image_file_bytes)}",
    }
    return "\n".join(f"{name:<14}{text}" for name, text in rows.items())


def _size(num_bytes: int) -> str:
    power = min(max(num_bytes.bit_length() - 1, 0) // 10, len(_UNITS) - 1)
    return f"{num_bytes / (1 << 10 * power):.{1 if power else 0}f} {_UNITS[power]}"
