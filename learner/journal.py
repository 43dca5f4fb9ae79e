"""What the learner says about each step: one JSON line in `metrics.jsonl` and the Prometheus metrics.

Owns the names of the fields. A step that is repeated after a restart is written again; the last line of a step counts.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vagen.buffer.manifest import Manifest
from vagen.common.files import flush, make_directory
from vagen.common.metrics import Metrics
from vagen.learner.alarms import AlarmConfig, CollapseAlarms

if TYPE_CHECKING:
    from vagen.learner.checkpointer import DurableCheckpoint
    from vagen.learner.feeder import Feed
    from vagen.learner.publish_thread import PublishTally
    from vagen.learner.publisher import Published
    from vagen.learner.summary import BatchSummary
    from vagen.learner.update import UpdateStats

__all__ = ["StepJournal"]

logger = logging.getLogger(__name__)


_OPTIONAL_LOSSES = ("reference_kl", "reference_loss", "value_clamped_share")
"""Present where their option is on."""


class StepJournal:
    """Writes one line a step, flushed to disk before the step's checkpoint, and raises the alarms of its numbers."""

    def __init__(self, file: Path, metrics: Metrics, alarms: AlarmConfig | None = None) -> None:
        """Continues the file of an interrupted run: its lines are what the alarms take for normal."""
        make_directory(file.parent)
        self._alarms = CollapseAlarms(alarms or AlarmConfig())
        self._file = file.open("a")
        flush(file.parent)
        _drop_torn_line(file)
        self._replay(file)
        self._metrics = metrics
        self._started = time.time()
        self._checkpoint: DurableCheckpoint | None = None

    def close(self) -> None:
        """Flush and close the file."""
        self._file.close()

    def note_checkpoint(self, checkpoint: DurableCheckpoint) -> None:
        """Count a checkpoint that is durable; the next line tells of it."""
        self._checkpoint = checkpoint
        self._metrics.count("vagen_learner_checkpoints_total")
        self._metrics.count("vagen_learner_checkpoint_seconds_total", checkpoint.write_s, part="written")
        self._metrics.count("vagen_learner_checkpoint_seconds_total", checkpoint.hidden_s, part="hidden")

    def write(
        self,
        step: int,
        feed: Feed,
        summary: BatchSummary,
        stats: UpdateStats,
        published: Sequence[Published],
        tally: PublishTally,
        seconds: dict[str, float],
        settings: Mapping[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Record a step and return its line.

        `summary` is that of the global batch, `published` and `tally` are those since the last line, `seconds` those of
        the loop's stages, `settings` the live settings that have changed since the last line.
        """
        durable, self._checkpoint = self._checkpoint, None
        line = {
            "step": step,
            "time": time.time(),
            "wall_s": time.time() - self._started,
            **summary.fields(),
            "selection": _selection_fields(feed.manifest),
            **_update_fields(stats),
            "version": published[-1].version if published else None,
            "publishes": [_publish_fields(each) for each in published],
            "probe_mismatch": max((p.mismatch for p in published if p.mismatch is not None), default=None),
            "seconds": seconds,
            **({} if durable is None else {"checkpoint": asdict(durable)}),
            **({"settings": dict(settings)} if settings else {}),
            **({} if feed.notes is None else {"replay": dict(feed.notes)}),
        }
        self._watch(line)
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()
        os.fsync(self._file.fileno())
        self._export(line, summary, published, tally)
        return line

    def _replay(self, file: Path) -> None:
        for text in file.read_text().splitlines():
            self._alarms.observe(json.loads(text))

    def _watch(self, line: dict[str, Any]) -> None:
        for event in self._alarms.observe(line):
            if event.is_raised:
                self._metrics.count("vagen_learner_alarms_total", alarm=event.name)
            logger.log(
                logging.WARNING if event.is_raised else logging.INFO,
                "step %d: alarm %s %s: %.4g, bound %.4g",
                line["step"],
                event.name,
                "raised" if event.is_raised else "cleared",
                event.value,
                event.bound,
            )
        line["alarms"] = self._alarms.active

    def _export(
        self, line: dict[str, Any], summary: BatchSummary, published: Sequence[Published], tally: PublishTally
    ) -> None:
        m = self._metrics
        m.count("vagen_learner_steps_total")
        m.count("vagen_learner_trajectories_total", line["num_trajectories"])
        m.count("vagen_learner_mixed_version_trajectories_total", line["mixed_version_trajectories"])
        m.count("vagen_learner_tokens_total", line["policy_tokens"], role="policy")
        m.count("vagen_learner_tokens_total", line["context_tokens"], role="context")
        m.count("vagen_learner_skipped_steps_total", line["skipped_updates"])
        for stage, spent in line["seconds"].items():
            if stage != "total":
                m.count("vagen_learner_seconds_total", spent, stage=stage)
        m.gauge("vagen_learner_step", line["step"] + 1)
        m.gauge("vagen_learner_success", line["success"])
        m.gauge("vagen_learner_reward", line["reward_mean"])
        for part, value in line["loss"].items():
            m.gauge("vagen_learner_loss", value, part=part)
        for name, count in line["selection"]["filtered"].items():
            m.count("vagen_learner_filtered_trajectories_total", count, filter=name)
        m.count("vagen_learner_replayed_trajectories_total", line["selection"]["replayed"])
        for statistic in ("filtered_share", "replayed_share", "weight_ess"):
            m.gauge("vagen_learner_selection", line["selection"][statistic], statistic=statistic)
        for statistic, value in line["ratio"].items():
            m.gauge("vagen_learner_ratio", value, statistic=statistic)
        for staleness in summary.staleness:
            m.observe("vagen_learner_staleness", staleness)
        if line["probe_mismatch"] is not None:
            m.gauge("vagen_learner_logprob_mismatch", line["probe_mismatch"])
        for each in published:
            m.gauge("vagen_learner_policy_version", each.version)
            m.observe("vagen_learner_publish_seconds", each.report.seconds)
            m.count("vagen_learner_publish_bytes_total", each.report.sent_bytes)
            m.count("vagen_learner_publishes_total", len(each.report.ok), outcome="ok")
            m.count("vagen_learner_publishes_total", len(each.report.failed), outcome="failed")
        spent_s = sum(each.report.seconds for each in published)
        m.count("vagen_learner_publish_overlap_seconds_total", min(spent_s, tally.waited_s), part="waited")
        m.count("vagen_learner_publish_overlap_seconds_total", max(0.0, spent_s - tally.waited_s), part="hidden")
        m.count("vagen_learner_snapshots_replaced_total", tally.num_replaced)


def _drop_torn_line(file: Path) -> None:
    """A kill or a power cut may cut a line off; the step is repeated, and its line must not continue that one."""
    content = file.read_bytes()
    os.truncate(file, content.rfind(b"\n") + 1)


def _selection_fields(manifest: Manifest) -> dict[str, Any]:
    """Of the global batch."""
    return {
        "considered": manifest.considered,
        "filtered": dict(manifest.filtered),
        "filtered_share": manifest.filtered_share,
        "replayed": manifest.num_replayed,
        "replayed_share": manifest.num_replayed / len(manifest.entries),
        "weight_ess": manifest.weight_ess,
    }


def _update_fields(stats: UpdateStats) -> dict[str, Any]:
    ratio = stats.ratio
    return {
        "entropy": stats.entropy,
        "loss": {
            "policy": stats.losses["policy_surrogate"],
            "value": stats.losses["value_loss"],
            "kl": stats.losses["behaviour_kl"],
            "total": stats.losses["total_loss"],
            **{name: stats.losses[name] for name in _OPTIONAL_LOSSES if name in stats.losses},
        },
        "grad_norm": stats.grad_norm,
        "lr": stats.lr,
        **({} if stats.critic_lr is None else {"critic_lr": stats.critic_lr}),
        "clip_fraction": stats.losses["clip_share"],
        "ratio": {
            "mean": ratio.mean,
            "max": ratio.max,
            "p99": ratio.p99,
            "ess": ratio.effective_sample_size,
            "truncated_share": ratio.capped_share,
            "rejected_share": stats.losses["rejected_share"],
            "clamped_share": ratio.clamped_share,
        },
        "mismatch_current_version": ratio.fresh.mean_abs_log_ratio if ratio.fresh.num_tokens else None,
        "mismatch_stale": ratio.stale.mean_abs_log_ratio if ratio.stale.num_tokens else None,
        "explained_variance": stats.explained_variance,
        "num_updates": stats.num_updates,
        "skipped_updates": stats.skipped_updates,
    }


def _publish_fields(published: Published) -> dict[str, Any]:
    report = published.report
    return {
        "version": published.version,
        "step": published.step,
        "seconds": report.seconds,
        "stall_s": report.stall_s,
        "sent_bytes": report.sent_bytes,
        "ok": list(report.ok),
        "failed": dict(report.failed),
        "probe_mismatch": published.mismatch,
    }
