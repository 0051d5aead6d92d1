"""Resolves a job file against the declared data and model: variables, plan, number of steps, digest.

Every mismatch between a job, its data and its model is a ConfigurationError before any step runs. Opens neither data
nor model: `parashard.models.declaration` does, here or in another process.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from parashard.checkpoints.manifest import InitialManifest
from parashard.checkpoints.state import initial_sha256
from parashard.data.base import DataSpec
from parashard.encodings.encoding import Encoding
from parashard.errors import BadData, ConfigurationError
from parashard.figures import counted
from parashard.job.digest import identity_digest, job_identity
from parashard.job.embeddings import tables_of
from parashard.job.keys import dotted
from parashard.job.schema import Job, apply_settings
from parashard.job.sections import ClusterOptions, received_bytes
from parashard.models.base import Audited
from parashard.models.declaration import DeclaredJob
from parashard.plan.embedding import KeyedRows
from parashard.plan.partition import ELEMENT_BYTES, Plan, place, split
from parashard.plan.state import COUNTER, ROUND_STEPS_MAX, SUM
from parashard.plan.steps import StepPlan
from parashard.plan.variables import NO_SLOTS, Float32s, Slots, Variable, as_imported
from parashard.store.arrays import read_arrays

SHARDS_DEFAULT: int = ClusterOptions.model_fields["shards"].default


class ResolvedJob(NamedTuple):
    """A job with everything derived from its data and model."""

    job: Job
    spec: DataSpec
    auditor: Audited | None  # the model, if it can judge final weights and is in this process
    plan: Plan
    steps: StepPlan
    identity: dict[str, Any]
    digest: str
    initial: Mapping[str, Float32s]  # initial values that the store does not have yet
    initial_sha256: str  # of the initial values in the store or to be stored; "": all are drawn from the seed
    initial_rows: Mapping[str, KeyedRows] = MappingProxyType({})  # of tables
    initial_slots: Slots = NO_SLOTS  # an optimizer's state

    @property
    def parameters(self) -> int:
        """Number of elements of the model's variables."""
        return sum(math.prod(variable.shape) for variable in self.plan.variables.values())

    @property
    def warnings(self) -> tuple[str, ...]:
        """Warnings about the data, and about idle workers and left-out examples."""
        told = [self._idle_workers(), self._left_out()]
        return (*filter(None, told), *self.spec.warnings)

    def _left_out(self) -> str:
        if not self.steps.dropped:
            return ""
        return f"drop_last leaves out {self.steps.dropped:,} of {self.spec.examples:,} examples in each pass"

    def _idle_workers(self) -> str:
        """Return a warning if `auto` has fewer parts than workers, or ""."""
        policy, workers = self.job.consistency.policy, self.job.cluster.workers
        if policy.kind != "auto" or workers <= policy.bound:
            return ""
        return (
            f"consistency.policy {policy}: a batch has {counted(policy.bound, 'part')}, so that "
            f"{workers - policy.bound} of {workers} workers wait for the others; larger batches can have more parts"
        )

    def summary(self) -> str:
        """Return the model and the data, on one line."""
        model = f"{self.job.model.kind} with {self.parameters:,} parameters"
        parts = self.job.consistency.policy.parts
        shared = f"; workers share each batch in {parts} parts" if parts > 1 else ""
        return f"{self.spec.summary()}; {model}{shared}"


def resolve(
    job: Job, declared: DeclaredJob, init_file: Path | None = None, *, kept: InitialManifest | None = None
) -> ResolvedJob:
    """Check a job against its declared data and model, and place the variables."""
    # `kept` are the stored initial values of a run that has begun; they override those that the model returns.
    spec, arrays, rows, slots = declared.spec, declared.arrays, declared.rows, declared.slots
    _check_targets(job, spec)
    variables = apply_settings(declared.variables, job.variables)
    _check_tables(job, variables)
    _check_encodings(job, variables)
    _check_state(job, variables)
    if kept is not None:
        arrays, rows, slots, sha256 = {}, {}, {}, kept.sha256
    else:
        if init_file is not None:
            arrays = _checked_file(init_file, variables)
        sha256 = initial_sha256(arrays, rows, slots) if arrays else ""
        _check_state_of_updates(job, slots)
    identity = job_identity(job, spec, variables, initial_sha256=sha256, model_sha256=declared.model_sha256)
    _check_shards(job, variables)
    _check_memory(job, variables, memory_bytes())
    plan = place(variables, split(variables, job.cluster.partitioner.build(job.cluster.shards)), job.cluster.shards)
    _check_push_memory(job, plan)
    steps = job.steps(spec.examples, batched=spec.batched)
    if declared.auditor is not None and (job.job.drop_last or job.job.steps_per_epoch):
        raise ConfigurationError(
            f"model {job.model.kind!r} counts each example once in each epoch; allowed: neither job.drop_last nor "
            "job.steps_per_epoch"
        )
    digest = identity_digest(identity)
    return ResolvedJob(job, spec, declared.auditor, plan, steps, identity, digest, arrays, sha256, rows, slots)


def _check_state_of_updates(job: Job, slots: Slots) -> None:
    """Refuse `updates_before` without the optimizer state that these updates left."""
    if job.job.updates_before and job.optimizer.slots and not slots:
        raise ConfigurationError(
            f"job.updates_before = {job.job.updates_before}: counts the updates of an optimizer's state, and this job "
            "begins with none; leave it out: scripts set it, and first_epoch is what schedules count from"
        )


def _checked_file(path: Path, variables: dict[str, Variable]) -> dict[str, Float32s]:
    """Return the initial values in a file, which must have exactly the model's variables."""
    stored = as_imported(read_arrays(path))
    missing, extra = sorted(set(variables) - set(stored)), sorted(set(stored) - set(variables))
    if extra or missing:
        raise BadData(
            f"{path}: does not hold this model's variables; missing: {', '.join(missing) or 'none'}; "
            f"unknown: {', '.join(extra) or 'none'}"
        )
    for name, array in stored.items():
        if array.shape != variables[name].shape or array.dtype != np.float32:
            raise BadData(
                f"{path}: variable {name!r} is {array.dtype} {array.shape}; "
                f"the model's is float32 {variables[name].shape}"
            )
        if not np.isfinite(array).all():
            raise BadData(f"{path}: the values of variable {name!r} are not all finite")
    return stored


def _check_encodings(job: Job, variables: dict[str, Variable]) -> None:
    """Check encodings that the model declares, which the job file's own checks have not seen."""
    for variable in variables.values():
        try:
            encoding = Encoding.parse(variable.encoding)
        except ConfigurationError as error:
            raise ConfigurationError(f"variable {variable.name!r}: {error}") from None
        if job.consistency.policy.kind == "sync" and encoding.has_residue and not variable.frozen:
            raise ConfigurationError(
                f"variable {variable.name!r}: encoding {encoding} with consistency.policy {job.consistency.policy}; "
                "allowed in sync: float32, bfloat16, float16"
            )


def _check_state(job: Job, variables: Mapping[str, Variable]) -> None:
    """Check state without gradients against the job's consistency."""
    policy = job.consistency.policy
    for name, variable in variables.items():
        if variable.state == SUM and policy.kind != "sync" and not variable.frozen:
            raise ConfigurationError(
                f"variable {name!r}: state {SUM}, with consistency.policy {policy}: differences from weights of "
                "unequal age grow without bound; allowed: sync:N, or state average:M or counter"
            )
        if variable.state == COUNTER and policy.steps_of_update > ROUND_STEPS_MAX:
            raise ConfigurationError(
                f"variable {name!r}: state {COUNTER}, with consistency.policy {policy}; allowed: at most "
                f"{policy.kind}:{ROUND_STEPS_MAX}"
            )


def _check_tables(job: Job, variables: Mapping[str, Variable]) -> None:
    """Refuse an invalid table, or one with a variable's name: a model receives both by name."""
    for table in tables_of(job):
        if table.name in variables:
            raise ConfigurationError(
                f"{dotted('tables', table.name)}: the model has a variable of that name; give the table another"
            )


def _check_shards(job: Job, variables: Mapping[str, Variable]) -> None:
    """Refuse more shards than there are rows, which are never cut, except up to the default number."""
    rows = sum(variable.rows for variable in variables.values())
    allowed = max(rows, SHARDS_DEFAULT)
    if job.cluster.shards > allowed:
        raise ConfigurationError(
            f"cluster.shards = {job.cluster.shards}: the model's variables have {counted(rows, 'row')} in all, and "
            f"a row is not cut; allowed: at most {allowed}"
        )


def _check_memory(job: Job, variables: Mapping[str, Variable], machine_bytes: int) -> None:
    """Check that this machine's memory can hold the state of all shards, if all run here."""
    cluster = job.cluster
    if cluster.launcher != "local":
        return
    slots = len(job.optimizer.slots) if cluster.shard_device == "cpu" else 0  # else they are on the GPU
    of_each = {name: ELEMENT_BYTES * math.prod(variable.shape) for name, variable in variables.items()}
    needed_bytes = (1 + slots) * sum(of_each.values())
    if needed_bytes > machine_bytes:
        largest = max(sorted(of_each), key=lambda name: of_each[name])
        beside = f" and {slots} times as much for optimizer.kind = {job.optimizer.kind!r}" if slots else ""
        raise ConfigurationError(
            f"the model's variables{beside} need {_gib(needed_bytes)}, and this machine's memory is "
            f"{_gib(machine_bytes)}; the largest variable is {largest!r} of shape {variables[largest].shape}: "
            f"{_gib(of_each[largest])}"
        )


def memory_bytes() -> int:
    """Return the size of this machine's memory."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _gib(size_bytes: int) -> str:
    return f"{size_bytes / (1 << 30):,.1f} GiB"


def _check_push_memory(job: Job, plan: Plan) -> None:
    """Check that the memory for pushes holds the largest push, and with rounds all gradients of a round."""
    cluster, policy = job.cluster, job.consistency.policy
    largest_bytes = ELEMENT_BYTES * max(plan.shard_elements(shard) for shard in range(len(plan.shards)))
    largest_bytes += sum(table.push_bytes_max for table in tables_of(job))
    budget_bytes = cluster.push_memory_bytes(largest_bytes, job.depth_max)
    if largest_bytes > budget_bytes:
        raise ConfigurationError(
            f"cluster.queue_bytes = {budget_bytes}: a push to the largest shard has {largest_bytes} bytes and would "
            "never fit; allowed: at least as much, or 0, which is enough"
        )
    slots_bytes = cluster.workers * largest_bytes + received_bytes(largest_bytes)
    if cluster.transport == "shm" and slots_bytes > budget_bytes:
        raise ConfigurationError(
            f'cluster.queue_bytes = {budget_bytes} with cluster.transport = "shm": {cluster.workers} workers hold '
            f"{largest_bytes} bytes each and leave as much to others; allowed: at least {slots_bytes}, or 0"
        )
    together = policy.steps_of_update
    if together > 1 and together * largest_bytes > budget_bytes:
        raise ConfigurationError(
            f"consistency.policy {policy}: a shard may hold {together} gradients of {largest_bytes} bytes, "
            f"more than cluster.queue_bytes = {budget_bytes}; raise it, use more shards or shorter rounds"
        )


def _check_targets(job: Job, spec: DataSpec) -> None:
    keys = ("target_accuracy", "target_loss", "target_mean_squared_error")
    targets = [key for key in keys if getattr(job.evaluation, key) is not None]
    other, what = ("target_mean_squared_error", "classes") if spec.classes else ("target_accuracy", "values")
    if other in targets and ":" not in job.model.kind:  # a user's own model may have any metric
        allowed = "target_accuracy" if spec.classes else "target_mean_squared_error"
        raise ConfigurationError(
            f"evaluation.{other}: the data's targets are {what}; allowed: evaluation.{allowed}, evaluation.target_loss"
        )
    if targets and not spec.held_out:
        raise ConfigurationError(
            f"evaluation.{targets[0]} needs held-out examples to judge, and the data have none (data.held_out is 0)"
        )
