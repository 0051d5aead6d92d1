"""The report oracle: what a finished run says of itself, against what it left behind.

Reads a run directory and its store: the shards' own manifests of the last checkpoint, the final weights
and the held-out examples. Knows no process. A report may be wrong where the training was right: evaluations of weights
that were lost, steps that only the coordinator believes in.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from safetensors.numpy import load_file

from parashard.checkpoints.catalogue import COORDINATORS, Catalogue, parse_job_id
from parashard.checkpoints.encoding import decode
from parashard.checkpoints.manifest import JobManifest, ShardManifest
from parashard.checkpoints.state import whole_model
from parashard.data import open_source
from parashard.job.embeddings import tables_of
from parashard.job.load import load_job
from parashard.launch.stored_rows import StoredTables
from parashard.models.building import build_model
from parashard.plan.intervals import IntervalSet
from parashard.plan.partition import place
from parashard.plan.steps import StepPlan
from parashard.plan.variables import values_sha256
from parashard.process.run_files import JOB_FILE, WEIGHTS_FILE
from parashard.store import Store, open_store
from parashard_coordinator.core.saved import Saved
from parashard_worker.computing import Task
from parashard_worker.device import Cpu

TOLERANCE = 1e-5  # of metrics: a sum over chunks of examples, in another process


def unsaved(store: Store, report: Mapping[str, Any]) -> list[str]:
    """Return what a finished run's report says of steps otherwise than its shards' last manifests (P1, P7, P24)."""
    _, parts = _last(Catalogue(store), report)
    found = []
    whole = IntervalSet([(0, report["steps_total"])])
    if len(parts) != report["shards"]:
        found.append(f"shards is {report['shards']}, and {len(parts)} have saved")
    for shard, part in enumerate(parts):
        if part.steps != whole:
            found.append(f"shard {shard} saved the steps {list(part.steps.intervals())}, not 0 to {whole.stop() - 1}")
    applied = [len(part.steps) for part in parts]
    if report["steps_applied"] != applied:
        found.append(f"steps_applied is {report['steps_applied']}, and the shards saved {applied} steps")
    return found + _skips(report, parts)


def store_of(run_dir: Path) -> Store:
    """Return the store that a run's shards saved to."""
    return open_store(load_job(run_dir / JOB_FILE, environ={}).job.checkpoint.url or str(run_dir / "checkpoints"))


def misreported(run_dir: Path, report: Mapping[str, Any]) -> list[str]:
    """Return what a finished run's report says otherwise than its files; empty if they agree."""
    store = store_of(run_dir)
    found = unsaved(store, report)
    manifest, _ = _last(Catalogue(store), report)
    weights = load_file(run_dir / WEIGHTS_FILE)
    saved = values_sha256(whole_model(store, manifest))
    for name, sha256 in (("the report", report["weights_sha256"]), ("the weights file", values_sha256(weights))):
        if sha256 != saved:
            found.append(f"{name} has the weights {sha256[:12]}, the last checkpoint {saved[:12]}")
    fresh = fresh_metrics(run_dir, weights)
    found += [f"held-out {name} is reported but was not evaluated" for name in report["held_out"] if name not in fresh]
    for name, value in fresh.items():
        told = report["held_out"].get(name)
        if told is None or not math.isclose(told, value, rel_tol=TOLERANCE, abs_tol=TOLERANCE):
            found.append(f"held-out {name} is {told}, and the final weights have {value:.6f}")
    return found


def _last(catalogue: Catalogue, report: Mapping[str, Any]) -> tuple[JobManifest, list[ShardManifest]]:
    number = parse_job_id(str(report["checkpoint"]))
    assert number is not None, report["checkpoint"]
    manifest = catalogue.job_manifest(number)
    return manifest, [catalogue.part_manifest(manifest, shard) for shard in range(len(manifest.parts))]


def _skips(report: Mapping[str, Any], parts: Sequence[ShardManifest]) -> list[str]:
    """Compare the counts of steps given up with those that the shards' manifests have as empty pushes (P24)."""
    each = [set(_members(part.skipped)) for part in parts]
    everywhere = set.intersection(*each)
    counts = {"skipped_steps": len(everywhere), "partly_skipped": len(set.union(*each) - everywhere)}
    return [
        f"{name} is {report[name]}, and the shards saved {count}"
        for name, count in counts.items()
        if report[name] != count
    ]


def _members(intervals: Iterable[tuple[int, int]]) -> Iterator[int]:
    for start, stop in intervals:
        yield from range(start, stop)


def evaluations_of(run_dir: Path) -> dict[int, Any]:
    """Return the metrics that a finished run recorded, by the step after which its weights were judged."""
    record = max((run_dir / "checkpoints" / COORDINATORS).glob("i*.json"))
    return decode(Saved, record.read_bytes(), str(record)).evaluations


def fresh_metrics(run_dir: Path, weights: Mapping[str, Any]) -> dict[str, float]:
    """Judge final weights by the run's held-out examples, as a worker does; nothing where there are none."""
    job = load_job(run_dir / JOB_FILE, environ={}).job
    source = open_source(job.data)
    if not source.spec.held_out:
        return {}
    tables = {table.name: table for table in tables_of(job)}
    model = build_model(job.model, source.spec, job.job.seed, None, tuple(tables.values()))
    steps = StepPlan(source.spec.examples, job.job.batch_size, job.job.epochs, job.job.seed)
    task = Task(model, source, steps, place({}, [], 1), Cpu(), None, None, tables)
    keys = task.held_out_keys()
    rows = StoredTables(run_dir, job).rows(keys) if keys else {}
    return dict(task.metrics({**weights, **rows}, nullcontext, keys))
