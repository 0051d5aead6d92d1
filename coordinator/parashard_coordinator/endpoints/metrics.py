"""The coordinator's Prometheus metrics, read from its core when they are scraped."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from parashard._proto import coordinator_pb2 as pb
from parashard_coordinator.core.job_record import JobRecord
from parashard_coordinator.core.pod_ledger import REASONS, ROLES
from parashard_coordinator.endpoints.status import StatusView
from parashard_coordinator.exclusive_core import ExclusiveCore


def coordinator_families(core: ExclusiveCore, status: StatusView) -> list[Metric]:
    """Return every family of a job, all of one moment."""
    return core.run_exclusive(lambda core, now_s: list(_families(core.job, status.message(core.job, now_s), now_s)))


def _families(job: JobRecord, status: pb.GetStatusReply, now_s: float) -> Iterator[Metric]:
    live = sum(worker.live for worker in status.workers)
    yield _gauge("steps", "Steps of the job.", status.steps_total)
    # No counter: it falls when a shard comes back without some of them.
    yield _gauge("steps_complete", "Steps that every shard has acknowledged.", status.steps_complete)
    yield _counter("examples", "Examples of steps that are complete, each step once.", job.figures.examples)
    yield _gauge("leases", "Steps leased now.", status.steps_leased)
    yield _counter(
        "speculative_leases", "Steps leased a second time to pass a straggler.", job.leases.speculative_leases
    )
    yield _gauge("workers_live", "Workers heard of within their lease time.", live)
    yield _gauge("workers_wanted", "Workers that the launcher keeps alive.", status.workers_wanted)
    yield _gauge("shards", "Shards of the plan.", job.options.shards)
    yield _gauge("shards_live", "Shards that have registered and answer.", job.shards_live)
    restarts = job.supervision.worker_restarts
    yield _counter("worker_restarts", "Workers that joined again under their name.", restarts)
    yield _counter("rollbacks", "Times that all shards returned to an earlier round.", job.rounds.rollbacks)
    text = "Steps given up that some shards have as a gradient, and others empty."
    yield _gauge("partly_skipped_steps", text, status.partly_skipped_steps)
    yield _counter("shard_restarts", "Shards that were started again.", job.shard_restarts)
    yield _counter("worker_exits", "Worker processes that the launcher saw end.", job.supervision.worker_exits)
    ends = CounterMetricFamily(
        "parashard_coordinator_pod_ends", "Ends of pods and of their containers.", labels=["role", "reason"]
    )
    for role in ROLES:
        for reason in REASONS:
            ends.add_metric([role, reason], job.supervision.pod_ends[role, reason])
    yield ends
    errors = job.supervision.pod_watch_errors
    yield _counter("pod_watch_errors", "Times that following the pods broke off with an error.", errors)
    loss = status.training_loss if status.HasField("training_loss") else math.nan
    yield _gauge("training_loss", "Training loss, smoothed over steps.", loss)
    lag = 0 if job.controller is None else job.controller.lag
    yield _gauge("lag", "Batches of an auto job that may be leased beside the lowest incomplete one.", lag)
    yield _gauge("step_lag_max", "Greatest step lag at an apply, of all shards.", status.step_lag_max)
    yield _gauge("job_state", "1 starting, 2 running, 3 draining, 4 done, 5 failed.", job.state.value)
    since_s = 0.0 if job.progress.last_step_s is None else now_s - job.progress.last_step_s
    yield _gauge("last_progress_timestamp_seconds", "When the last step became complete.", time.time() - since_s)


def _gauge(name: str, text: str, value: float) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"parashard_coordinator_{name}", text, value=value)


def _counter(name: str, text: str, value: float) -> CounterMetricFamily:
    return CounterMetricFamily(f"parashard_coordinator_{name}", text, value=value)
