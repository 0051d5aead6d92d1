"""The core's state as a status message, for the service, the status page and the history, and as Prometheus metrics."""

from __future__ import annotations

import heapq
import math
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import islice

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from parashard._proto import coordinator_pb2 as pb
from parashard._proto import shard_pb2
from parashard.figures import natural
from parashard_coordinator.core.auto_jobs import in_words
from parashard_coordinator.core.job_record import JobRecord
from parashard_coordinator.core.membership import WorkerRecord
from parashard_coordinator.core.progress import quantile
from parashard_coordinator.core.supervision import REASONS, ROLES
from parashard_coordinator.exclusive_core import ExclusiveCore
from parashard_coordinator.shards import HOTTEST_MAX, TABLE_FIGURES, TABLES_MAX, ShardRecord

_UINT64_MAX = (1 << 64) - 1


class StatusView:
    """Renders a job's state and the shards' last known records."""

    def __init__(self, job_name: str, consistency: str) -> None:
        self._job_name = job_name
        self._consistency = consistency
        self._records: dict[int, ShardRecord] = {}
        self._lock = threading.Lock()
        self.http_address = ""

    def saw(self, shard: int, record: ShardRecord) -> None:
        """Remember a shard's record."""
        with self._lock:
            self._records[shard] = record

    def records(self) -> dict[int, ShardRecord]:
        """Return the last known records by shard."""
        with self._lock:
            return dict(self._records)

    def staleness(self) -> Counter[int]:
        """Return the exact staleness counts of all shards together."""
        return sum((record.staleness for record in self.records().values()), Counter[int]())

    def message(self, job: JobRecord, now_s: float) -> pb.GetStatusReply:
        """Return the job's status."""
        records, staleness = self.records(), self.staleness()
        progress, leases = job.progress, job.leases
        latest = job.evaluations.latest
        return pb.GetStatusReply(
            run_id=job.options.run_id,
            job=self._job_name,
            state=job.state.value,  # type: ignore[arg-type]  # the enum's values are the wire's
            reason=job.reason,
            steps_total=job.steps_due,
            steps_complete=len(leases.complete),
            steps_leased=leases.leased,
            examples_per_s=progress.examples_per_s(now_s),
            elapsed_s=progress.elapsed_s(now_s),
            training_loss=job.learning.loss if math.isfinite(job.learning.loss) else None,
            held_out=(latest.metrics or {}) if latest else {},
            workers=[
                self._worker(job, job.workers.by_name[name], now_s) for name in sorted(job.workers.by_name, key=natural)
            ],
            shards=[self._shard(job, shard, records.get(shard)) for shard in range(job.options.shards)],
            staleness_p50=quantile(staleness, 0.5),
            staleness_p95=quantile(staleness, 0.95),
            staleness_max=max(staleness, default=0),
            step_lag_max=max((r.figures.step_lag_max for r in records.values()), default=0),
            workers_wanted=job.workers_wanted,
            events=list(job.events),
            events_total=job.events_total,
            consistency=", ".join(text for text in (self._consistency, in_words(job, now_s)) if text),
            http_address=self.http_address,
            rollbacks=job.rounds.rollbacks,
            problems=job.problems.texts,
            skipped_steps=len(job.skipped.everywhere()),
            partly_skipped_steps=len(job.skipped.partly()),
            tables=_tables(records.values()),
            training={name: value for name, value in job.figures.newest().items() if math.isfinite(value)},
        )

    def _worker(self, job: JobRecord, worker: WorkerRecord, now_s: float) -> pb.WorkerStatus:
        return pb.WorkerStatus(
            name=worker.name,
            incarnation=worker.incarnation,
            live=worker.live,
            device=worker.device,
            steps_complete=worker.steps_complete,
            steps_held=job.leases.holds(worker.name),
            examples_per_s=job.progress.examples_per_s(now_s, worker.name),
            restarts=worker.restarts,
            phases=pb.PhaseSeconds(**worker.phases_s),
            http_address=worker.http_address,
            gpu_memory=pb.GpuMemory(**worker.gpu_memory._asdict()) if worker.gpu_memory else None,
        )

    def _shard(self, job: JobRecord, shard: int, record: ShardRecord | None) -> pb.ShardStatus:
        registration = job.shards.registration(shard)
        return pb.ShardStatus(
            shard=shard,
            address=registration.address if registration else "",
            registered=registration is not None,
            record=record.figures if record else None,
            steps_applied=record.steps_applied if record else 0,
            http_address=registration.http_address if registration else "",
            live=job.shard_live(shard),
        )


def _tables(records: Iterable[ShardRecord]) -> list[pb.TableStatus]:
    """Return the embedding tables, summed over the shards' last records."""
    by_name: dict[str, list[shard_pb2.TableFigures]] = {}
    for record in records:
        for table in record.tables:
            by_name.setdefault(table.table, []).append(table)
    return [
        pb.TableStatus(total=_total(name, tables), fullest=max(one.rows / max(1, one.rows_max) for one in tables))
        for name, tables in sorted(by_name.items())[:TABLES_MAX]
    ]


def _total(name: str, tables: list[shard_pb2.TableFigures]) -> shard_pb2.TableFigures:
    fields = [field for field in TABLE_FIGURES if field != "table"]
    sums = {field: min(sum(getattr(one, field) for one in tables), _UINT64_MAX) for field in fields}
    told = (one.hottest_keys for one in tables if one.hottest_keys)  # each sorted by pushes, descending
    hottest = islice(heapq.merge(*told, key=lambda hot: (-hot.pushes, hot.key)), HOTTEST_MAX)
    return shard_pb2.TableFigures(table=name, **sums, hottest_keys=hottest)


def coordinator_families(core: ExclusiveCore, status: StatusView) -> list[Metric]:
    """Return all metric families of a job, from one consistent state."""
    return core.run_exclusive(lambda core, now_s: list(_families(core.job, status.message(core.job, now_s), now_s)))


def _families(job: JobRecord, status: pb.GetStatusReply, now_s: float) -> Iterator[Metric]:
    live = sum(worker.live for worker in status.workers)
    yield _gauge("steps", "Steps of the job.", status.steps_total)
    # A gauge: it falls when a restored shard lacks some of them.
    yield _gauge("steps_complete", "Steps that every shard has acknowledged.", status.steps_complete)
    yield _counter("examples", "Examples of steps that are complete, each step once.", job.figures.examples)
    yield _gauge("leases", "Steps leased now.", status.steps_leased)
    yield _counter(
        "speculative_leases", "Steps of stragglers that a second worker leased.", job.leases.speculative_leases
    )
    yield _gauge("workers_live", "Workers that renewed their leases in time.", live)
    yield _gauge("workers_wanted", "Workers that the launcher keeps running.", status.workers_wanted)
    yield _gauge("shards", "Shards of the plan.", job.options.shards)
    yield _gauge("shards_live", "Shards that have registered and answer.", job.shards_live)
    restarts = job.supervision.worker_restarts
    yield _counter("worker_restarts", "Workers that restarted under their name.", restarts)
    yield _counter("rollbacks", "Rollbacks of all shards to an earlier round.", job.rounds.rollbacks)
    text = "Skipped steps that some shards applied and others got without a gradient."
    yield _gauge("partly_skipped_steps", text, status.partly_skipped_steps)
    yield _counter("shard_restarts", "Shards that were restarted.", job.shard_restarts)
    yield _counter("worker_exits", "Worker processes that the launcher saw end.", job.supervision.worker_exits)
    ends = CounterMetricFamily(
        "parashard_coordinator_pod_ends", "Ends of pods and of their containers.", labels=["role", "reason"]
    )
    for role in ROLES:
        for reason in REASONS:
            ends.add_metric([role, reason], job.supervision.pod_ends[role, reason])
    yield ends
    errors = job.supervision.pod_watch_errors
    yield _counter("pod_watch_errors", "Errors that interrupted the watch of the pods.", errors)
    loss = status.training_loss if status.HasField("training_loss") else math.nan
    yield _gauge("training_loss", "Training loss, smoothed over steps.", loss)
    lag = 0 if job.controller is None else job.controller.lag
    yield _gauge("lag", "Batches of an auto job that may be leased beside the lowest incomplete one.", lag)
    yield _gauge("step_lag_max", "Greatest step lag at an apply, of all shards.", status.step_lag_max)
    yield _gauge("job_state", "1 starting, 2 running, 3 draining, 4 done, 5 failed.", job.state.value)
    since_s = 0.0 if job.progress.last_step_s is None else now_s - job.progress.last_step_s
    yield _gauge(
        "last_progress_timestamp_seconds", "Unix time at which the last step became complete.", time.time() - since_s
    )


def _gauge(name: str, text: str, value: float) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"parashard_coordinator_{name}", text, value=value)


def _counter(name: str, text: str, value: float) -> CounterMetricFamily:
    return CounterMetricFamily(f"parashard_coordinator_{name}", text, value=value)
