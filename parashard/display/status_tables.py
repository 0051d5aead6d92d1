"""The figures of a job's status, with one list of names for all views, and the summary of its report."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from google.protobuf.json_format import MessageToDict
from rich.console import Console
from rich.text import Text

from parashard._proto import coordinator_pb2 as pb
from parashard._proto.shard_pb2 import TableFigures
from parashard.display.text_table import Column
from parashard.figures import count, counted, duration, gibibytes, mebibytes, metric, metric_name, percent, rate
from parashard.process.run_files import WEIGHTS_FILE, short_path
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
    """Return as text the transfers' share of a step, and how much of it overlaps with computing."""
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
        Column("leased", tuple(count(worker.steps_held) for worker in rows), rank=8),
        Column("restarts", tuple(count(worker.restarts) for worker in rows), rank=7),
        Column("lease %", tuple(share[0] for share in shares), rank=9),
        Column("compute %", tuple(share[1] for share in shares), rank=4),
        Column("transfer %", tuple(percent(share).removesuffix(" %") for share in transfers), rank=3),
        *(_gpu_columns(rows) if any(map(_has_gpu, rows)) else []),
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
    """Return the table of embedding tables; it has no rows if the job has none."""
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


def _has_gpu(worker: pb.WorkerStatus) -> bool:
    return worker.HasField("gpu_memory")


def _gpu_columns(workers: list[pb.WorkerStatus]) -> list[Column]:
    """Return the memory that all processes use and the total, and the share of computing that waits for the GPU."""
    return [
        Column("GPU GiB", tuple(map(_gpu_memory, workers)), rank=5),
        Column("GPU wait %", tuple(map(_gpu_wait, workers)), rank=6),
    ]


def _gpu_wait(worker: pb.WorkerStatus) -> str:
    phases = worker.phases
    return f"{100 * phases.gpu_wait / phases.compute:.0f}" if _has_gpu(worker) and phases.compute > 0 else "-"


def _gpu_memory(worker: pb.WorkerStatus) -> str:
    memory = worker.gpu_memory
    return f"{gibibytes(memory.used_bytes)}/{gibibytes(memory.total_bytes)}" if _has_gpu(worker) else "-"


def _phase_shares(phases: pb.PhaseSeconds) -> list[str]:
    total = phases.lease + phases.pull + phases.compute + phases.push or 1.0
    return [f"{100 * part / total:.0f}" for part in (phases.lease, phases.compute)]


def status_dict(status: pb.GetStatusReply) -> dict[str, Any]:
    """Return the whole status under the names of `protos/coordinator.proto`, ready for JSON."""
    # 64-bit counts are texts and a figure that is not finite is "NaN" or "Infinity", as in protobuf's JSON. Only
    # `training_loss` can be missing, before the first step.
    return MessageToDict(status, preserving_proto_field_name=True, always_print_fields_with_no_presence=True)


STATE_STYLES = {"done": "green", "stopped": "yellow"}


def print_summary(report: Mapping[str, Any], run_dir: Path, console: Console, copy: Path | None = None) -> None:
    """Print the figures of a report; a path stays on one line, so that it can be copied."""
    for line in summary_lines(report, run_dir, copy):
        console.print(line, soft_wrap=True)


def summary_lines(report: Mapping[str, Any], run_dir: Path, copy: Path | None = None) -> list[Text]:
    """Return the figures of a report, one per line, and where a copy of the weights is."""
    rows = _rows(report, run_dir, copy)
    width = max(len(name) for name, _ in rows)
    state, learned = f"{report['state']}: ", not not_learned(report)
    style = STATE_STYLES.get(report["state"], "red") if learned else "yellow"
    lines = [Text.assemble((f"{report['job']:<{width}}  ", "bold"), (state, style), report["reason"])]
    lines += [Text.assemble((f"{name:<{width}}  ", "dim"), value) for name, value in rows]
    return lines if learned else [*lines, Text(not_learned(report), style="bold yellow")]


def not_learned(report: Mapping[str, Any]) -> str:
    """Return the last line of the summary if a run is done but its model did not learn, else ""."""
    is_done = report.get("state") == "done"
    text = report.get("not_learned", "") if is_done else ""  # an earlier version's report has none
    return f"done, but the model did not learn: {text}" if text else ""


def _rows(report: Mapping[str, Any], run_dir: Path, copy: Path | None) -> list[tuple[str, str]]:
    staleness, moved, problems = report["staleness"], report["bytes"], report.get("problems", ())
    speed = "" if report["examples_per_s"] is None else f"{rate(report['examples_per_s'])} examples/s"
    rows = [
        *(("problem", problem) for problem in problems if problem not in not_learned(report)),
        ("steps", _steps(report["steps_total"], report["steps_applied"])),
        ("throughput", f"{speed} over {duration(report['wall_s'])}" if speed else "not known"),
        *metric_figures((name, value) for name, value in report["held_out"].items() if value is not None),
    ]
    if report["training_loss"] is not None:
        rows.append((TRAINING_LOSS, metric(report["training_loss"])))
    last = (report.get("epochs") or [{}])[-1]  # an earlier version's report has none
    shown = ((name, value) for name, value in last.items() if name not in ("epoch", "loss") and value is not None)
    rows += metric_figures(shown, TRAINING)
    if report["skipped_steps"]:
        rows.append(("steps skipped", count(report["skipped_steps"])))
    if report.get("partly_skipped"):
        rows.append(("partly skipped", f"{count(report['partly_skipped'])}, on some of the shards only"))
    p50, p95, most = (count(staleness[name]) for name in ("p50", "p95", "max"))
    rows += [
        ("staleness", f"p50 {p50}, p95 {p95}, max {most} pushes"),
        ("step lag", f"max {count(report['step_lag']['max'])} steps"),
        *_transfers(report["network"]),
        ("traffic", f"{mebibytes(moved['pushed'])} MiB pushed, {mebibytes(moved['pulled'])} MiB pulled"),
        (SAVED, percent(moved["saved_share"])),
        (REPEATED, count(report["duplicate_pushes"])),
    ]
    rows += [(name, count(report[name])) for name in ("ledger_wrong", "rows_wrong", "torn") if name in report]
    if "rows" in report:
        rows.append(("rows of tables", ", ".join(f"{name} {count(number)}" for name, number in report["rows"].items())))
    restarts = [(report[f"{role}_restarts"], role) for role in ("worker", "shard", "coordinator")]
    if any(times for times, _ in restarts):
        rows.append(("restarts", ", ".join(counted(times, role) for times, role in restarts if times)))
    if "weights_sha256" in report:
        rows.append(("weights", short_path(run_dir / WEIGHTS_FILE)))
        if copy is not None:
            rows.append(("copied to", short_path(copy)))
        rows.append(("sha256", report["weights_sha256"][:16]))
    return [*rows, ("run", short_path(run_dir))]


def _transfers(network: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the transfers' share of a step, and the effect of a pipeline; earlier versions' reports have neither."""
    if "step_share" not in network:
        return []
    told = in_words(network["step_share"], network["overlapped_share"])
    return [(TRANSFERS, "; ".join(text for text in (told, network["pipeline"]) if text))]


def _steps(total: int, applied: Sequence[int]) -> str:
    least, most = min(applied, default=0), max(applied, default=0)
    if least == most:
        return f"{count(least)} of {count(total)}, applied by every shard"
    return f"{count(least)} to {count(most)} of {count(total)}, applied by the shards"
