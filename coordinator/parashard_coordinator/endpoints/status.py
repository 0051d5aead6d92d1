"""StatusView: the core's state as one message. Called by the service, the status page and the history."""

from __future__ import annotations

import heapq
import math
import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice

from parashard._proto import coordinator_pb2 as pb
from parashard._proto import shard_pb2
from parashard.figures import natural
from parashard_coordinator.core.auto_jobs import in_words
from parashard_coordinator.core.job_record import JobRecord
from parashard_coordinator.core.membership import WorkerRecord
from parashard_coordinator.core.progress import merged, quantile
from parashard_coordinator.shards.shard_reports import HOTTEST_MAX, TABLE_FIGURES, TABLES_MAX, ShardRecord

PROBLEMS_MAX = 64  # in one message
_UINT64_MAX = (1 << 64) - 1


class StatusView:
    """Renders a core, with the shards' last known records."""

    def __init__(self, job_name: str, consistency: str, shards: int) -> None:
        self._job_name = job_name
        self._consistency = consistency
        self._records: dict[int, ShardRecord] = {}
        self._shards = shards
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
        return merged(record.staleness.items() for record in self.records().values())

    def message(self, job: JobRecord, now_s: float) -> pb.GetStatusReply:
        """Return how the job goes."""
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
            shards=[self._shard(job, shard, records.get(shard)) for shard in range(self._shards)],
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
            problems=[*job.problems.texts, *_storage_problems(records)][:PROBLEMS_MAX],
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
            steps_held=len(job.leases.held_by(worker.name)),
            examples_per_s=job.progress.examples_per_s(now_s, worker.name),
            restarts=worker.restarts,
            phases=pb.PhaseSeconds(**worker.phases_s),
            http_address=worker.http_address,
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


def _storage_problems(records: Mapping[int, ShardRecord]) -> Iterator[str]:
    """Yield what keeps shards from saving, as they last told."""
    for shard, record in sorted(records.items()):
        if record.figures.checkpoint_error:
            yield f"shard-{shard}: checkpoint failed: {record.figures.checkpoint_error}"


def _tables(records: Iterable[ShardRecord]) -> list[pb.TableStatus]:
    """Return the embedding tables over all shards, as these last told."""
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
    told = (one.hottest_keys for one in tables if one.hottest_keys)  # each from the most often pushed on
    hottest = islice(heapq.merge(*told, key=lambda hot: (-hot.pushes, hot.key)), HOTTEST_MAX)
    return shard_pb2.TableFigures(table=name, **sums, hottest_keys=hottest)
