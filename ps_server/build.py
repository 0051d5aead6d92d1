"""Builds a shard from what the coordinator says of the job. The only place that reads a job's settings for a shard."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open

from parashard.contracts import plan_from
from parashard.errors import BadData, ConfigurationError
from parashard.job.load import job_from_toml
from parashard.job.schema import Job
from parashard.messages import Target
from parashard.partition import Plan
from parashard.variables import Float32s, Variable
from protos import coordinator_pb2 as pb
from ps_server.assembly import Assemblies
from ps_server.ingest import Immediate, Ingest, Rounds
from ps_server.optimizer import Optimizer
from ps_server.pulled_weights import PulledWeights
from ps_server.shard import Shard
from ps_server.storage import InitialRows, Storage, drawn_from

PULLED_COPIES_MAX = 64
"""Steps whose pulled weights a shard with delay compensation remembers, if `cluster.queue_bytes` has room for them."""


def build_shard(reply: pb.GetJobReply, index: int, incarnation: int) -> tuple[Shard, Job]:
    """Return a shard with its initial values, ready to serve, and the job that it belongs to.

    Raises
    ------
    ConfigurationError
        If the plan has no such shard, or a file of initial values does not fit.
    """
    job = job_from_toml(reply.job_toml)
    plan = plan_from(reply.plan)
    if not 0 <= index < len(plan.shards):
        raise ConfigurationError(f"the job has shards 0..{len(plan.shards) - 1}; this process was started as {index}")
    spec = job.optimizer.resolved(_updates(job, reply.steps_total))
    optimizer = Optimizer(spec)
    optimizer.warm_up()  # compile before the first push, not during it
    storage = Storage(plan, index, optimizer, initial_values(plan, job.job.seed, reply.initial_file))
    identity = Target(reply.run_id, reply.job_digest, plan.version, index, incarnation)
    compensated = job.optimizer.delay_compensation > 0
    shard = Shard(
        identity,
        reply.steps_total,
        storage,
        _ingest(job, storage, reply.steps_total),
        Assemblies(job.cluster.queue_bytes),
        pulled=PulledWeights(storage.elements, _pulled_copies(job, storage)) if compensated else None,
        compensation=job.optimizer.delay_compensation,
    )
    return shard, job


def initial_values(plan: Plan, seed: int, file: str) -> InitialRows:
    """Return the source of first values: the file for the variables that it holds, the seed for the others."""
    drawn = drawn_from(seed)
    if not file:
        return drawn
    try:
        stored = safe_open(file, framework="numpy")
        names = set(stored.keys())  # type: ignore[no-untyped-call]
    except (OSError, SafetensorError) as error:
        raise BadData(f"{file}: cannot be read as safetensors: {error}") from None

    def rows(variable: Variable, start: int, stop: int) -> Float32s:
        if variable.name not in names:
            return drawn(variable, start, stop)
        tensor = stored.get_slice(variable.name)  # type: ignore[no-untyped-call]
        if tuple(tensor.get_shape()) != variable.shape:
            raise BadData(
                f"{Path(file).name}: variable {variable.name!r} has shape {tuple(tensor.get_shape())}, "
                f"the model's has {variable.shape}"
            )
        return np.ascontiguousarray(tensor[start:stop], np.float32)

    return rows


def _pulled_copies(job: Job, storage: Storage) -> int:
    """Return how many copies of the weights the memory for pushes has room for, at least one (P19)."""
    return max(1, min(PULLED_COPIES_MAX, job.cluster.queue_bytes // max(1, storage.weights.nbytes)))


def _updates(job: Job, steps_total: int) -> int:
    """Return how often the weights will move: the unit of learning-rate schedules (P15)."""
    policy = job.consistency.policy
    return -(-steps_total // policy.bound) if policy.kind == "sync" else steps_total


def _ingest(job: Job, storage: Storage, steps_total: int) -> Ingest:
    policy = job.consistency.policy
    if policy.kind == "sync":
        mean = job.consistency.reduce == "mean"
        return Rounds(storage, round_steps=policy.bound, steps_total=steps_total, mean=mean)
    return Immediate(storage, damping=job.optimizer.damping)
