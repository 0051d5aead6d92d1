"""The figures of a job's status and its tables of workers, shards and embedding tables, with their names.

Pure. One list for the live view, `parashard status`, the plain lines and the status page, so that names agree on all of
them. Decides nothing about the layout.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from google.protobuf.json_format import MessageToDict

from parashard._proto import coordinator_pb2 as pb
from parashard._proto.shard_pb2 import TableFigures
from parashard.display.text_table import Column
from parashard.figures import count, mebibytes, metric, metric_name, percent, rate
from parashard.telemetry.transfer import Bytes, Overlap

TRAINING_LOSS = "training loss"
HELD_OUT, TRAINING = "held-out", "training"
TRANSFERS = "transfers"
SAVED = "traffic saved"
REPEATED = "repeated gradients ignored"
DOWN = "down"
HOTTEST_SHOWN = 3  # keys of a table; JSON has five

Figure = tuple[str, str]


def state_of(status: pb.GetStatusReply) -> str:
    """Return the job's state in one word."""
    return pb.JobState.Name(status.state).removeprefix("JOB_STATE_").lower()


def figures_of(status: pb.GetStatusReply) -> list[Figure]:
    """Return (name, value) of the figures of the whole job."""
    staleness = f"p50 {count(status.staleness_p50)}, p95 {count(status.staleness_p95)}"
    transfer = Overlap.of(worker.phases for worker in status.workers)
    return [
        *progress_figures(status),
        ("staleness", f"{staleness}, max {count(status.staleness_max)} pushes"),
        ("step lag", f"max {count(status.step_lag_max)}"),
        (TRANSFERS, in_words(transfer.step_share, transfer.share)),
        (SAVED, percent(Bytes.of(shard.record for shard in status.shards).saved_share)),
    ]


def progress_figures(status: pb.GetStatusReply) -> list[Figure]:
    """Return (name, value) of throughput, loss and the metrics that the model reports."""
    return [
        ("throughput", f"{rate(status.examples_per_s)} examples/s"),
        (TRAINING_LOSS, metric(status.training_loss) if status.HasField("training_loss") else "-"),
        *metric_figures(status.training.items(), TRAINING),
        *metric_figures(status.held_out.items()),
    ]


def in_words(step_share: float | None, overlapped_share: float | None) -> str:
    """Return what transfers take of a step, and how much of that overlaps with computing."""
    overlaps = f", {percent(overlapped_share)} of that while computing" if overlapped_share else ""
    return "-" if step_share is None else f"take {percent(step_share)} of a step{overlaps}"


def metric_figures(metrics: Iterable[tuple[str, float]], of: str = HELD_OUT) -> list[Figure]:
    """Return (name, value) of metrics: an evaluation's, or of an epoch's own batches."""
    return [(f"{of} {metric_name(name)}", metric(value)) for name, value in sorted(metrics)]


def worker_columns(workers: Iterable[pb.WorkerStatus]) -> list[Column]:
    """Return the table of workers; transfers are a share of a step, the other shares of each worker's time."""
    rows = list(workers)
    shares = [_phase_shares(worker.phases) for worker in rows]
    transfers = [Overlap.of([worker.phases]).step_share for worker in rows]
    return [
        Column("worker", tuple(worker.name for worker in rows), is_text=True),
        Column("device", tuple(worker.device if worker.live else DOWN for worker in rows), is_text=True),
        Column("examples/s", tuple(rate(worker.examples_per_s) for worker in rows), rank=1),
        Column("steps", tuple(count(worker.steps_complete) for worker in rows), rank=2),
        Column("leased", tuple(count(worker.steps_held) for worker in rows), rank=7),
        Column("restarts", tuple(count(worker.restarts) for worker in rows), rank=6),
        Column("lease %", tuple(share[0] for share in shares), rank=8),
        Column("compute %", tuple(share[1] for share in shares), rank=4),
        Column("transfer %", tuple(percent(share).removesuffix(" %") for share in transfers), rank=3),
    ]


def shard_columns(shards: Iterable[pb.ShardStatus]) -> list[Column]:
    """Return the table of shards."""
    rows = list(shards)
    records = [shard.record for shard in rows]
    memory = [record.variable_bytes + record.slot_bytes for record in records]
    return [
        Column("shard", tuple(f"shard-{shard.shard}" for shard in rows), is_text=True),
        Column("address", tuple(shard.address for shard in rows), is_text=True, rank=7),
        Column("version", tuple(count(shard.record.version) if shard.live else DOWN for shard in rows)),
        Column("memory MiB", tuple(mebibytes(size) for size in memory), rank=3),
        Column("pushed MiB", tuple(mebibytes(record.push_bytes) for record in records), rank=2),
        Column("pulled MiB", tuple(mebibytes(record.pull_bytes) for record in records), rank=1),
        Column("repeats ignored", tuple(count(record.duplicate_pushes) for record in records), rank=5),
        Column("refused", tuple(count(record.refused_pushes) for record in records), rank=4),
    ]


def table_columns(tables: Iterable[pb.TableStatus]) -> list[Column]:
    """Return the table of embedding tables; no rows where the job has none."""
    rows = list(tables)
    totals = [table.total for table in rows]
    return [
        Column("table", tuple(total.table for total in totals), is_text=True),
        Column("rows", tuple(count(total.rows) for total in totals)),
        Column("fullest shard", tuple(percent(table.fullest) for table in rows), rank=1),
        Column("memory MiB", tuple(mebibytes(total.memory_bytes) for total in totals), rank=2),
        Column("keys found", tuple(_found(total) for total in totals), rank=4),
        Column("keys waiting", tuple(count(total.candidates) for total in totals), rank=5),
        Column("added since start", tuple(count(total.added_rows) for total in totals), rank=6),
        Column("evicted since start", tuple(count(total.evicted_rows) for total in totals), rank=3),
        Column("pushed most (times)", tuple(_hottest(total) for total in totals), is_text=True, rank=7),
    ]


def _found(total: TableFigures) -> str:
    """Return the share of pulled keys that had a row."""
    return percent(total.pulled_rows / total.pulled_keys) if total.pulled_keys else "-"


def _hottest(total: TableFigures) -> str:
    """Return the keys that were pushed the most often, and how often since their rows began."""
    return ", ".join(f"{hot.key} ({count(hot.pushes)})" for hot in total.hottest_keys[:HOTTEST_SHOWN]) or "-"


def _phase_shares(phases: pb.PhaseSeconds) -> list[str]:
    total = phases.lease + phases.pull + phases.compute + phases.push or 1.0
    return [f"{100 * part / total:.0f}" for part in (phases.lease, phases.compute)]


def status_dict(status: pb.GetStatusReply) -> dict[str, Any]:
    """Return the whole status under the names of `protos/coordinator.proto`, ready for JSON.

    64-bit counts are texts and a figure that is not finite is "NaN" or "Infinity", as in protobuf's JSON. No key
    is missing but `training_loss` before the first step.
    """
    return MessageToDict(status, preserving_proto_field_name=True, always_print_fields_with_no_presence=True)
