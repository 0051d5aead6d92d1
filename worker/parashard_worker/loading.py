"""Loads a worker's task: the job's data, model and device, checked against the coordinator's description.

A model or data that a program passes are not loaded again. Knows no shard and makes no call.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from parashard._proto import coordinator_pb2 as pb
from parashard.client.proto_conversion import plan_from
from parashard.data import open_source
from parashard.data.base import DataSource, DataSpec
from parashard.encodings import codec
from parashard.errors import WrongRun
from parashard.job.digest import changed_keys, differences, identity_digest, in_words, job_identity
from parashard.job.embeddings import tables_of
from parashard.job.layers import Override
from parashard.job.load import job_from_toml
from parashard.job.schema import Job
from parashard.models.base import Model
from parashard.models.building import build_model, code_sha256
from parashard.models.looking_up import check_looks_up
from parashard.plan.partition import Plan
from parashard.plan.steps import StepPlan
from parashard.process.logs import log
from parashard.process.resources import limit_threads, thread_variables
from parashard.process.starts import WorkerStart
from parashard_worker.computing import Task
from parashard_worker.device import Device, open_device
from parashard_worker.round_weights import round_weights


class OwnTask(NamedTuple):
    """A program's own model and data; None: those that the job names."""

    model: Model | None = None  # computes gradients
    source: DataSource | None = None  # the examples
    model_sha256: str = ""  # digest of the model's code in the job's declaration
    check: Callable[[Job], None] | None = None  # raises if the coordinator's job is not the program's


NAMED_BY_JOB = OwnTask()
"""The job names both model and data."""
ANY_WORKER = WorkerStart(connect="")
"""The next free name, on the job's device."""


def job_of(reply: pb.GetJobReply, overrides: Sequence[Override] = ()) -> Job:
    """Return the coordinator's job, with this machine's overrides, such as a path."""
    return job_from_toml(reply.job_toml, overrides)


def limit_compute_threads(job: Job, *, own_process: bool) -> int:
    """Limit every library's threads before the model is imported, by the environment only if `own_process`."""
    threads = job.compute_threads(os.environ)
    if own_process:
        os.environ.update(thread_variables(threads, os.environ, override=job.cluster.worker_threads > 0))
    limit_threads(threads)
    return threads


def fix_algorithms(job: Job) -> None:
    """Make PyTorch's cuDNN deterministic if weights must be bit-identical in all processes (P13)."""
    # cuDNN may choose algorithms by their speed, and some add in any order. This overrides a script's settings in
    # `sync:N`, unless `cluster.allow_mixed` waives the promise.
    torch = sys.modules.get("torch")
    if torch is not None and job.consistency.policy.kind == "sync" and not job.cluster.allow_mixed:
        torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = True, False


def load_task(
    reply: pb.GetJobReply,
    job: Job,
    own: OwnTask = NAMED_BY_JOB,
    start: WorkerStart = ANY_WORKER,
    *,
    threads: int | None,
) -> Task:
    """Return a worker's task in the coordinator's job; `job` is the same job with this machine's overrides."""
    # `threads` limits compute libraries again after the data are opened; None: no limit. Raises WrongRun if data, model
    # or another part of the job is not the coordinator's.
    device = open_device(start.device or job.cluster.device, start.name)
    source = open_source(job.data) if own.source is None else own.source
    if threads is not None:
        limit_threads(threads)  # again: a data source may have loaded another BLAS
    spec = source.spec
    _check_data(job, spec, reply)
    plan = plan_from(reply.plan)
    codec.warm_up(plan.variables.values())
    folder = start.model_folder or (Path(reply.model_folder) if reply.model_folder else None)
    _check_identity(job, spec, plan, reply, code_sha256(job.model, folder) if own.model is None else own.model_sha256)
    tables = tables_of(job)
    model = build_model(job.model, spec, job.job.seed, folder, tables) if own.model is None else own.model
    check_looks_up(model, {table.name: table for table in tables})
    return task_of(job, job.steps(spec.examples, batched=spec.batched), plan, model, source, device)


def task_of(job: Job, steps: StepPlan, plan: Plan, model: Model, source: DataSource, device: Device) -> Task:
    """Return the task of a model in a job, on a device."""
    policy = job.consistency.policy
    return Task(
        model=model,
        source=source,
        steps=steps,
        plan=plan,
        device=device,
        clip_norm=job.step_clip_norm,
        variable_clip_norm=job.optimizer.variable_clip_norm,
        round_steps=policy.bound if policy.kind == "sync" else None,
        tables={table.name: table for table in tables_of(job)},
        weights=round_weights(job, steps, source, model),
        tells_norm=job.batch_clip_norm is not None,
    )


def _check_data(job: Job, spec: DataSpec, reply: pb.GetJobReply) -> None:
    """Raise WrongRun unless this machine's data are the job's."""
    if spec.fingerprint != reply.data_fingerprint:
        by_script = job.data.source == "script"
        where = "the script loads others here" if by_script else f"data.path is {getattr(job.data, 'path', 'built in')}"
        raise WrongRun(
            f"this machine's data differ from the job's: fingerprint {spec.fingerprint[:12]} is not "
            f"{reply.data_fingerprint[:12]} ({where})"
        )


def _check_identity(job: Job, spec: DataSpec, plan: Plan, reply: pb.GetJobReply, code: str) -> None:
    """Raise WrongRun if this worker would compute another job: overrides may change paths, not results."""
    first = reply.initial_sha256
    mine = job_identity(job, spec, plan.variables, initial_sha256=first, model_sha256=code)
    if identity_digest(mine) != reply.job_digest:
        theirs = job_identity(job_of(reply), spec, plan.variables, initial_sha256=first, model_sha256=code)
        changed = changed_keys(theirs, mine)
        log.info("job-differs", keys=changed)  # all of them
        named = in_words(differences(theirs, mine, "there", "here"))
        code = "another version of the model's code"
        if job.model.kind == "script":
            code = "the script, or a module of its folder that it imports, was edited, or only one of both imports it"
        named = named or f"{code}, or another version of parashard"
        raise WrongRun(f"this worker would compute another job than the coordinator's: {named}")
