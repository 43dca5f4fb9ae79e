"""The one table of metric names, and the exporter that every process starts.

Each process uses the entries of its own prefix. Names follow Prometheus: base units, `_total` for counters.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Mapping, Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, start_http_server

from vagen.common.errors import ConfigError

logger = logging.getLogger(__name__)

_SECONDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100)

COUNTERS: Mapping[str, tuple[str, Sequence[str]]] = {
    "vagen_actor_episodes_total": ("Episodes that ended, by outcome", ("outcome",)),
    "vagen_actor_turns_total": ("Turns played", ()),
    "vagen_actor_tokens_total": ("Tokens sampled for training", ()),
    "vagen_actor_trajectories_total": ("Trajectories by fate: journalled, acked, refused, resent", ("fate",)),
    "vagen_actor_wait_seconds_total": ("Seconds that episode slots waited, by what for", ("what",)),
    "vagen_actor_engine_requests_total": (
        "Requests by engine and outcome: stop, length, abort, failed (sent again, tokens discarded)",
        ("engine", "outcome"),
    ),
    "vagen_actor_engine_moves_total": ("Episodes that went on at another engine, by where they went", ("engine",)),
    "vagen_engine_requests_total": ("Generation requests, by finish reason", ("reason",)),
    "vagen_engine_tokens_total": ("Tokens processed, by phase: prefill or decode", ("phase",)),
    "vagen_engine_weight_updates_total": ("Weight updates completed", ()),
    "vagen_engine_busy_seconds_total": ("Seconds spent in forward passes", ()),
    "vagen_engine_paused_seconds_total": ("Seconds spent paused", ()),
    "vagen_buffer_trajectories_total": (
        "Trajectories by what ingest did: stored, duplicate, refused, stale",
        ("fate",),
    ),
    "vagen_buffer_refused_total": ("Refused trajectories, by field", ("field",)),
    "vagen_buffer_stored_bytes_total": ("Payload bytes stored", ()),
    "vagen_buffer_grants_total": ("Start credits granted", ()),
    "vagen_buffer_failed_episodes_total": ("Episodes that ended as infrastructure failures", ()),
    "vagen_buffer_refused_peers_total": (
        "Handshakes and messages refused for the key, drops of all connections for memory",
        ("what",),
    ),
    "vagen_buffer_quarantined_total": ("Refused payloads, by whether the quarantine kept or skipped them", ("fate",)),
    "vagen_buffer_redis_outages_total": ("Times Redis went away", ()),
    "vagen_buffer_wait_seconds_total": ("Seconds the ingest waited, by what for", ("what",)),
    "vagen_learner_steps_total": ("Learner steps", ()),
    "vagen_learner_trajectories_total": ("Trajectories trained on", ()),
    "vagen_learner_filtered_trajectories_total": ("Candidates that filters dropped, by filter", ("filter",)),
    "vagen_learner_replayed_trajectories_total": ("Trajectories trained on again", ()),
    "vagen_learner_mixed_version_trajectories_total": ("Trained trajectories with tokens of several versions", ()),
    "vagen_learner_tokens_total": ("Tokens trained on, by role: policy or context", ("role",)),
    "vagen_learner_seconds_total": ("Seconds of the learner by stage", ("stage",)),
    "vagen_learner_publishes_total": ("Publishes by outcome", ("outcome",)),
    "vagen_learner_publish_bytes_total": ("Bytes of weights that publishes sent, to all engines together", ()),
    "vagen_learner_publish_overlap_seconds_total": (
        "Seconds of publishes by part: waited for by the loop, or hidden beside its work",
        ("part",),
    ),
    "vagen_learner_snapshots_replaced_total": ("Copies of weights never published, since a newer one came", ()),
    "vagen_learner_alarms_total": ("Collapse alarms raised", ("alarm",)),
    "vagen_learner_archived_total": ("Trained trajectories by what the archive did: written, lost", ("fate",)),
    "vagen_learner_archive_seconds_total": ("Seconds of the archive's thread", ()),
    "vagen_learner_checkpoints_total": ("Durable checkpoints", ()),
    "vagen_learner_checkpoint_seconds_total": (
        "Seconds in which checkpoints were written, and those of them during which training went on, by part",
        ("part",),
    ),
    "vagen_learner_hub_uploads_total": ("Uploads of the model by outcome: ok, failed, left_out", ("outcome",)),
    "vagen_learner_hub_upload_seconds_total": ("Seconds of uploads, beside training", ()),
    "vagen_learner_skipped_steps_total": ("Optimizer steps skipped for a non-finite gradient", ()),
}

GAUGES: Mapping[str, tuple[str, Sequence[str]]] = {
    "vagen_actor_running_episodes": ("Episodes running now", ()),
    "vagen_actor_in_flight": ("Trajectories journalled and unacked", ()),
    "vagen_actor_success": ("Success of recent episodes, exponential average", ()),
    "vagen_actor_engine_in_flight": ("Requests of this actor that an engine has", ("engine",)),
    "vagen_actor_engine_limit": ("Requests of this actor that an engine may have", ("engine",)),
    "vagen_actor_engine_kv_usage": ("Share of an engine's KV cache in use, at the last probe", ("engine",)),
    "vagen_actor_engine_usable": ("Whether an engine answers and is admitted to take traffic", ("engine",)),
    "vagen_actor_engine_waiting": ("Requests that wait for a slot of any engine", ()),
    "vagen_engine_running_requests": ("Requests generating now", ()),
    "vagen_engine_waiting_requests": ("Requests queued", ()),
    "vagen_engine_kv_usage": ("Tokens held over tokens that all slots can hold", ()),
    "vagen_engine_policy_version": ("Version of the weights", ()),
    "vagen_buffer_ready": ("Trajectories ready to be claimed", ()),
    "vagen_buffer_awaiting": ("Trajectories that await the rest of their group", ()),
    "vagen_buffer_claimed": ("Trajectories claimed and not done", ()),
    "vagen_buffer_evicted": ("Trajectories evicted by buffer.when_full so far", ()),
    "vagen_buffer_claimed_bytes": ("Payload bytes claimed and not done", ()),
    "vagen_buffer_room_bytes": ("Bytes promised to incomplete groups", ()),
    "vagen_buffer_capacity_bytes": ("Bytes that may be held, as it is in force", ()),
    "vagen_buffer_quarantine_bytes": ("Disk space taken by quarantined payloads", ()),
    "vagen_buffer_ready_staleness": (
        "Staleness of ready units for the next step, in learner steps, by statistic: mean or max",
        ("statistic",),
    ),
    "vagen_buffer_running": ("Task leases held by actors", ()),
    "vagen_buffer_bytes": ("Payload bytes held", ()),
    "vagen_buffer_accounting": ("Terms of the accounting identity", ("term",)),
    "vagen_buffer_filtered": ("Filtered trajectories, by reason", ("reason",)),
    "vagen_learner_step": ("Learner step", ()),
    "vagen_learner_policy_version": ("Version last published", ()),
    "vagen_learner_success": ("Success of the last trained batch", ()),
    "vagen_learner_reward": ("Mean total reward of the last trained batch", ()),
    "vagen_learner_loss": ("Loss of the last step, by part", ("part",)),
    "vagen_learner_logprob_mismatch": ("Mean |engine - learner| log-probability on the probe, last publish", ()),
    "vagen_learner_selection": (
        "Choice of the last batch, by statistic: filtered_share, replayed_share, weight_ess",
        ("statistic",),
    ),
    "vagen_learner_ratio": ("Importance ratio of the last batch, by statistic", ("statistic",)),
}

HISTOGRAMS: Mapping[str, tuple[str, Sequence[str], Sequence[float]]] = {
    "vagen_actor_episode_seconds": ("Duration of an episode", (), _SECONDS),
    "vagen_buffer_commit_seconds": ("Duration of one durable commit", (), _SECONDS),
    "vagen_learner_publish_seconds": ("Duration of one publish", (), _SECONDS),
    "vagen_learner_staleness": (
        "Staleness of trained trajectories, in learner steps",
        (),
        (0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32),
    ),
}


class Metrics:
    """The metrics of one process, and its exporter."""

    def __init__(self, prefix: str, run: str) -> None:
        """`prefix` is `vagen_` and the name of the process; `run` becomes a constant label."""
        self.registry = CollectorRegistry()
        self._run = run
        self._counters = {
            name: Counter(name, text, ("run", *labels), registry=self.registry)
            for name, (text, labels) in COUNTERS.items()
            if name.startswith(prefix + "_")
        }
        self._gauges = {
            name: Gauge(name, text, ("run", *labels), registry=self.registry)
            for name, (text, labels) in GAUGES.items()
            if name.startswith(prefix + "_")
        }
        self._histograms = {
            name: Histogram(name, text, ("run", *labels), registry=self.registry, buckets=buckets)
            for name, (text, labels, buckets) in HISTOGRAMS.items()
            if name.startswith(prefix + "_")
        }

    def count(self, name: str, amount: float = 1.0, **labels: str) -> None:
        """Add to a counter of the table."""
        self._counters[name].labels(run=self._run, **labels).inc(amount)

    def gauge(self, name: str, value: float, **labels: str) -> None:
        """Set a gauge of the table."""
        self._gauges[name].labels(run=self._run, **labels).set(value)

    def observe(self, name: str, value: float, **labels: str) -> None:
        """Add one observation to a histogram of the table."""
        self._histograms[name].labels(run=self._run, **labels).observe(value)

    def forget(self, name: str, **labels: str) -> None:
        """Drop one sample of a gauge of the table, if there is one: what it is about is gone."""
        with contextlib.suppress(KeyError):
            self._gauges[name].remove(self._run, *labels.values())

    def serve(self, port: int, host: str = "127.0.0.1") -> int:
        """Start the HTTP exporter in a daemon thread and return its port; 0 picks a free one.

        Raises `ConfigError` when the port is taken.
        """
        try:
            server, _ = start_http_server(port, addr=host, registry=self.registry)
        except OSError as error:
            raise ConfigError(f"metrics port {port} on {host}: {error.strerror}") from error
        logger.info("metrics on http://%s:%d/metrics", host, server.server_port)
        return int(server.server_port)
