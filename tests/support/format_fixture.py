"""A stopped run in the present format of checkpoints and run folders, always of the same bytes.

    PYTHONPATH=.:tests python tests/support/format_fixture.py tests/fixtures/format_1

The ledger of 48 examples in 12 steps on two shards: seven steps in a drained checkpoint, one more in shard 0's own, one
or two more in none. `tests/fixtures/format_1/` is the result of a version that had those in a log of pushes, and stays
as it is: what a later version writes, it must read. A later format gets a folder of its own beside it.
"""

from __future__ import annotations

import os
import shutil
import socket
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from parashard._proto import coordinator_pb2 as pb
from parashard.checkpoints.catalogue import part_of
from parashard.checkpoints.manifest import ShardManifest
from parashard.client.proto_conversion import plan_message
from parashard.job.load import as_toml, job_from_toml
from parashard.launch.run_folders import write_report
from parashard.plan.variables import Float32s
from parashard.process.run_files import CHECKPOINTS, JOB_FILE
from parashard.store import open_store
from parashard.store.claims import Claims
from parashard_coordinator.core.calls import CompletedStep
from parashard_coordinator.core.core import Core
from parashard_coordinator.endpoints.history import HistoryFile
from parashard_coordinator.endpoints.status import StatusView
from parashard_coordinator.run.job_start import new_job_record
from parashard_coordinator.run.report import report
from parashard_coordinator.run.resolve import ResolvedJob
from parashard_coordinator.run.store import RunIdentity, RunStore
from parashard_server.core.shard import Shard
from support.coordinator_cases import Caller, announce
from support.in_process import push
from support.resolved_job import resolved_here
from support.shard_process import ShardProcess

JOB = """
job = { name = "format", epochs = 1, batch_size = 4 }
data = { source = "synthetic", examples = 48, features = 1 }
model = { kind = "ledger" }
optimizer = { kind = "sgd", learning_rate = -1.0 }
consistency = { policy = "async", reduce = "sum" }
checkpoint = { every_s = 3600.0 }
cluster = { shards = 2, workers = 1, pipeline_depth = 1, partitioner = { kind = "fixed-shards" } }
"""
RUN = "f0f0f0f0f0f0f0f0"
STEPS = 12
DRAINED, SAVED, PUSHED = 7, (8, 7), (10, 8)
"""Steps in the drained checkpoint; in each shard's own newest one; and pushed in all."""
NOW_S = 1_800_000_000.0


def write(folder: Path) -> None:
    """Write the run into an empty folder."""
    with (
        mock.patch.object(time, "time", return_value=NOW_S),
        mock.patch.object(socket, "gethostname", return_value="fixture"),
        mock.patch.object(os, "getpid", return_value=1),
        mock.patch("support.shard_process._PROCESSES", iter(range(2))),
        mock.patch("parashard_server.durability.checkpoint_writer.ShardManifest", _with_log),
        mock.patch("parashard.process.best_effort._failed", Counter()),  # of other tests in this process
    ):
        _write(folder)


def ledger_after(steps: int) -> Float32s:
    """Return the ledger once the first steps are in."""
    resolved = resolved_here(job_from_toml(JOB))
    return np.sum([_gradient(resolved, step) for step in range(steps)], axis=0, dtype=np.float32)


def _write(folder: Path) -> None:
    resolved = resolved_here(job_from_toml(JOB))
    job_toml = as_toml(resolved.job)
    (folder / JOB_FILE).write_text(job_toml)
    store = open_store(str(folder / CHECKPOINTS))
    run_store = RunStore(store, Claims(store, "coordinator", "fixture").next())
    run_store.begin_run(RUN, RunIdentity(resolved.digest, resolved.identity, job_toml))
    plan, _ = run_store.open_plan(resolved.plan)
    told = pb.GetJobReply(
        run_id=RUN,
        job_digest=resolved.digest,
        job_toml=job_toml,
        plan=plan_message(plan),
        steps_total=STEPS,
        data_fingerprint=resolved.spec.fingerprint,
    )
    processes = [ShardProcess(store, index, reply=told) for index in range(2)]
    parts = []
    for index, process in enumerate(processes):
        _push(process, resolved, 0, DRAINED)
        parts.append(part_of(process.checkpointer.take()))
        _push(process, resolved, DRAINED, SAVED[index])
    run_store.add_job_manifest(RUN, resolved.digest, plan, DRAINED, parts, final=False)
    for index, process in enumerate(processes):
        if SAVED[index] > DRAINED:
            process.checkpointer.take()
        _push(process, resolved, SAVED[index], PUSHED[index])
    _write_figures(folder, resolved, run_store)


def _write_figures(folder: Path, resolved: ResolvedJob, run_store: RunStore) -> None:
    """Write what the coordinator leaves of a job that was stopped after step 7: its record, history and report."""
    core = Core(new_job_record(resolved, RUN, 1))
    core.job.report_data(resolved.summary(), resolved.spec.warnings)
    for shard in range(2):
        announce(core, shard)
    worker = Caller(core, "worker-0", now_s=1.0)
    while steps := worker.lease(PUSHED[1] - len(core.job.leases.complete), now_s=1.0):
        worker.call(2.0, completed=[CompletedStep(step, [1, 1], 0.0, 4) for step in steps])
    status = StatusView("format", "async")
    HistoryFile(folder, lambda text, over: None).add(status.message(core.job, 3.0))
    run_store.save(core.job.saved())
    core.job.stop("interrupted")
    figures = report(core.job, resolved, status, 3.0, steps_saved=SAVED)
    write_report(folder, {**figures, "run_dir": "/runs/format", "weights": None})


def _push(process: ShardProcess, resolved: ResolvedJob, start: int, stop: int) -> None:
    for step in range(start, stop):
        push(process.shard, step, _part(process.shard, _gradient(resolved, step)))


def _part(shard: Shard, gradient: Float32s) -> Float32s:
    held = [placed.partition for placed in shard.storage.layout]
    return np.concatenate([gradient[p.row_start : p.row_stop].ravel() for p in held])


def _gradient(resolved: ResolvedJob, step: int) -> Float32s:
    """Return the ledger's entries of a step of the first epoch."""
    entries = np.zeros((resolved.spec.examples, 2), np.float32)
    entries[resolved.steps.indices(step)] = 1.0
    return entries


def _with_log(**fields: Any) -> ShardManifest:
    """Return a manifest as versions with a log of pushes wrote it: it also says how many the log had by then."""
    return ShardManifest(**fields, log_position=fields["version"])


if __name__ == "__main__":
    target = Path(sys.argv[1])
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir(parents=True)
    write(target)
