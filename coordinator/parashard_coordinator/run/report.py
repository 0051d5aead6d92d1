"""The end of a job: read the final weights, write and audit them, and write the report of figures."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from parashard.checkpoints.row_files import RowsDigest
from parashard.data.preprocessing import Preprocessing, as_json
from parashard.errors import StoreFailed
from parashard.job.embeddings import tables_of
from parashard.launch.run_folders import write_report
from parashard.models.base import AuditsRows
from parashard.models.due_rows import Applied
from parashard.plan.embedding import candidates_of
from parashard.plan.row_rules import NO_RULES
from parashard.plan.variables import values_sha256
from parashard.process.best_effort import failed_writes, why_failed
from parashard.process.durable import replace_durably, write_durably
from parashard.process.run_files import PREPROCESSING_FILE, REPORT_FILE, WEIGHTS_FILE
from parashard.store.arrays import write_arrays
from parashard.telemetry.transfer import Bytes, Overlap
from parashard_coordinator.core import auto_jobs
from parashard_coordinator.core.job_record import DueCheckpoint, JobRecord
from parashard_coordinator.core.learning import pipeline_advice
from parashard_coordinator.core.progress import Staleness, quantile
from parashard_coordinator.core.training_figures import finite
from parashard_coordinator.endpoints.status import StatusView
from parashard_coordinator.run.resolve import ResolvedJob
from parashard_coordinator.run.store import SavedModel

DIGEST_ROWS_MAX = 1 << 22
"""Most rows that the end of a job reads to digest them."""


def report(
    job: JobRecord,
    resolved: ResolvedJob,
    status: StatusView,
    now_s: float,
    final: DueCheckpoint | None = None,
    steps_saved: Sequence[int] = (),
) -> dict[str, Any]:
    """Return the figures of a job; NaN becomes None, which JSON can hold."""
    # Without a `final` checkpoint they describe the present progress. `steps_saved` are the numbers of steps in each
    # shard's manifest of it; if empty, the shards' last records are used.
    records = status.records()
    staleness, judged_steps = status.staleness(), job.evaluations.judged_steps()
    training_s = job.progress.training_s()
    latest = job.evaluations.latest
    metrics: Mapping[str, float] = (latest.metrics or {}) if latest else {}
    state, reason, steps = job.state_name, job.reason, job.leases.target
    shards = range(job.options.shards)
    steps_applied = list(steps_saved) or [records[i].steps_applied if i in records else 0 for i in shards]
    if final is not None:
        metrics = final.metrics or {}
        state, reason, steps = "done", job.done_reason, final.steps
    workers = status.message(job, now_s).workers
    overlap = Overlap.of(worker.phases for worker in workers)
    figures = [record.figures for record in records.values()]
    moved = Bytes.of(figures)
    return {
        "job": resolved.job.job.name,
        "run_id": job.options.run_id,
        "state": state,
        "reason": reason,
        "consistency": str(resolved.job.consistency.policy),
        **auto_jobs.figures(job),
        "shards": job.options.shards,
        "workers": job.workers_wanted,
        "steps_total": steps,
        "steps_applied": steps_applied,
        "duplicate_pushes": sum(f.duplicate_pushes for f in figures),
        "refused_pushes": sum(f.refused_pushes for f in figures),
        "skipped_steps": len(job.skipped.everywhere()),
        "partly_skipped": len(job.skipped.partly()),
        "problems": job.problems.texts,
        "not_learned": job.not_learned,
        "speculative_leases": job.leases.speculative_leases,
        "examples_per_s": round(job.figures.examples / training_s, 3) if training_s > 0 else None,
        "wall_s": round(job.progress.elapsed_s(now_s), 3),
        "training_loss": finite(job.learning.loss),
        "held_out": {name: finite(value) for name, value in sorted(metrics.items())},
        "evaluations": [
            {
                "steps": after_step,
                **({"judged_steps": judged_steps[after_step]} if after_step in judged_steps else {}),
                **{name: finite(value) for name, value in sorted(found.items())},
            }
            for after_step, found in sorted(job.evaluations.results().items())
        ],
        "epochs": [
            {"epoch": job.options.first_epoch + epoch} | {name: finite(value) for name, value in found.items()}
            for epoch, found in job.figures.history().items()
        ],
        "callbacks": {
            "stopped_after": job.callback_progress.stopped_by,
            "stop_lag_steps": None
            if job.callback_progress.stopped_by is None
            else steps - job.callback_progress.stopped_by,
            "learning_rates": [
                {
                    "after_steps": rate.after_steps,
                    "first_step": rate.first_step,
                    "lag_steps": rate.first_step - rate.after_steps,
                    "learning_rate": rate.learning_rate,
                }
                for rate in job.callback_progress.rates
                if job.callback_progress.governs(rate)
                and rate.first_step < steps  # an early stop may have come before it
            ],
        },
        "data": resolved.spec.figures(),
        "dropped_examples": resolved.steps.dropped,  # in each pass
        "parameters": resolved.parameters,
        "staleness": {
            "p50": quantile(staleness, 0.5),
            "p95": quantile(staleness, 0.95),
            "mean": round(Staleness.of(staleness).mean, 3),
            "max": max(staleness, default=0),
        },
        "step_lag": {"max": max((f.step_lag_max for f in figures), default=0)},
        "network": {
            "transfer_s": round(overlap.transfer_s, 3),
            "waited_s": round(overlap.waited_s, 3),
            "overlapped_share": _rounded(overlap.share),
            "step_share": _rounded(overlap.step_share),
            "workers": {worker.name: _rounded(Overlap.of([worker.phases]).step_share) for worker in workers},
            "pipeline": pipeline_advice(
                resolved.job.consistency.policy, resolved.job.cluster.pipeline_depth, overlap.hideable_share
            ),
        },
        "bytes": {**moved._asdict(), "saved_share": _rounded(moved.saved_share)},
        "worker_restarts": job.supervision.worker_restarts,
        "shard_restarts": job.shard_restarts,
        "coordinator_restarts": job.coordinator_restarts,
        "rollbacks": job.rounds.rollbacks,
        "checkpoints": {
            "stored": sum(f.checkpoints for f in figures),
            "failed": sum(f.failed_checkpoints for f in figures),
            "stall_s": max((f.checkpoint_stall_s for f in figures), default=0.0),
        },
        "failed_writes": failed_writes(),
    }


def audited(resolved: ResolvedJob, model: SavedModel) -> dict[str, Any]:
    """Return the digest of the final weights, the number of rows of tables, and the result of the model's own audit."""
    found: dict[str, Any] = {"weights_sha256": values_sha256(model.variables)}
    if resolved.job.tables:
        found |= _of_tables(resolved, model)
    if resolved.auditor is not None:
        found.update(resolved.auditor.audit(model.variables, resolved.job.job.epochs))
    if isinstance(resolved.auditor, AuditsRows):
        found.update(resolved.auditor.audit_rows(model.rows(), resolved.job.job.epochs, _applied(resolved)))
    return found


def _applied(resolved: ResolvedJob) -> Applied | None:
    """Return the inputs that determine the rows of the first table with row rules; None if no table has rules."""
    job = resolved.job
    ruled = [table.rules for table in tables_of(job) if table.rules != NO_RULES]
    if not ruled:
        return None
    policy = job.consistency.policy
    return Applied(resolved.steps, policy.steps_of_update, ruled[0], job.job.seed, ordered=policy.kind == "sync")


def _of_tables(resolved: ResolvedJob, model: SavedModel) -> dict[str, Any]:
    """Return each table's number of rows and, unless there are too many, the digest of rows and candidate keys."""
    names = sorted(resolved.job.tables)
    few = sum(model.row_counts.values()) <= DIGEST_ROWS_MAX
    if not few and not any(table.rules.ends_rows for table in tables_of(resolved.job)):
        return {"rows": {name: model.row_counts.get(name, 0) for name in names}}
    counts = dict.fromkeys(names, 0)
    digests = {name: RowsDigest() for name in names}
    owner = {candidates_of(name): name for name in names} | {name: name for name in names}
    for name, rows in model.rows():
        if name in counts:
            counts[name] += len(rows.keys)
        if few:
            digests[owner[name]].add(rows)
    found: dict[str, Any] = {"rows": counts}
    return found | ({"rows_digest": {name: digest.hex() for name, digest in digests.items()}} if few else {})


def save_weights(folder: Path, variables: Mapping[str, NDArray[Any]], run_id: str) -> Path:
    """Write the weights as safetensors, atomically; durable when this returns."""
    path = folder / WEIGHTS_FILE
    arrays = {name: np.ascontiguousarray(value) for name, value in variables.items()}
    with _store_failures(path):
        replace_durably(path, lambda temporary: write_arrays(temporary, arrays, {"run_id": run_id}))
    return path


def save_preprocessing(folder: Path, preprocessing: Preprocessing | None) -> None:
    """Write the encoding of inputs and the meaning of outputs, durably; nothing for generated data."""
    if preprocessing is not None:
        with _store_failures(folder / PREPROCESSING_FILE):
            write_durably(folder / PREPROCESSING_FILE, as_json(preprocessing))


def save_report(folder: Path, figures: Mapping[str, Any]) -> None:
    """Write the report atomically, with the paths of the run's files and final weights; durable when this returns."""
    weights = str(folder.absolute() / WEIGHTS_FILE) if figures["state"] == "done" else None
    where = {"run_dir": str(folder.absolute()), "weights": weights}
    with _store_failures(folder / REPORT_FILE):
        write_report(folder, {**figures, **where})


@contextmanager
def _store_failures(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise StoreFailed(f"{path} cannot be written: {why_failed(error)}") from error


def _rounded(share: float | None) -> float | None:
    return None if share is None else round(share, 4)
