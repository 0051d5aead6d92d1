"""Checkpoints of a small job, written as shards and a coordinator write them: what several tests share."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from parashard.checkpoints.catalogue import CheckpointId, job_name, part_of, plan_name
from parashard.checkpoints.encoding import encode
from parashard.checkpoints.manifest import JobManifest, PlanRecord, ShardManifest
from parashard.checkpoints.state import ShardState
from parashard.checkpoints.tensors import slot_tensor, variable_tensor, write_tensors
from parashard.plan.intervals import IntervalSet
from parashard.plan.partition import Plan, fixed_shards, place, split
from parashard.plan.variables import Float32s, Variable
from parashard.store import Store

RUN, DIGEST = "run-1", "d" * 64
VARIABLES = {v.name: v for v in (Variable("dense/bias", (5,)), Variable("dense/weight", (8, 4)))}
PLAN = place(VARIABLES, split(VARIABLES, fixed_shards(2)), 2)
SLOTS = ("m", "v")
STEPS = 9


def model_of(seed: int, variables: Mapping[str, Variable] = VARIABLES) -> dict[str, Float32s]:
    """Return random bits for each variable, NaNs and denormals among them: a checkpoint is not to care."""
    random = np.random.default_rng(seed)
    return {
        name: random.integers(0, 2**32, v.elements, np.uint32).view(np.float32).reshape(v.shape)
        for name, v in sorted(variables.items())
    }


def slots_of(seed: int, variables: Mapping[str, Variable] = VARIABLES) -> dict[str, dict[str, Float32s]]:
    """Return what `model_of` returns, for each slot."""
    return {slot: model_of(seed + 1 + i, variables) for i, slot in enumerate(SLOTS)}


def state_of(plan: Plan, shard: int, seed: int, applied: Iterable[tuple[int, int]] = ((0, STEPS),)) -> ShardState:
    """Return a shard's rows of `model_of(seed)` and `slots_of(seed)`."""
    held = plan.shards[shard]
    model, slots = model_of(seed, plan.variables), slots_of(seed, plan.variables)
    return ShardState(
        applied=IntervalSet(applied),
        version=len(IntervalSet(applied)),
        round=None,
        variables={p: model[p.variable][p.row_start : p.row_stop] for p in held},
        slots={s: {p: slots[s][p.variable][p.row_start : p.row_stop] for p in held} for s in SLOTS},
    )


def write_state(
    store: Store, plan: Plan, id_: CheckpointId, state: ShardState, *, file_bytes: int = 64, **changed: Any
) -> ShardManifest:
    """Write a shard's checkpoint; `changed` are fields of its manifest that shall not be the true ones."""
    variables = {variable_tensor(p): array for p, array in state.variables.items()}
    slots = {slot_tensor(name, p): array for name, arrays in state.slots.items() for p, array in arrays.items()}
    files = write_tensors(store, id_.folder, variables, "variables", file_bytes=file_bytes)
    files += write_tensors(store, id_.folder, slots, "slots", file_bytes=file_bytes)
    fields: dict[str, Any] = {
        "run_id": RUN,
        "job_digest": DIGEST,
        "plan_version": id_.plan_version,
        "shard": id_.shard,
        "incarnation": id_.incarnation,
        "number": id_.number,
        "round": state.round,
        "version": state.version,
        "applied": tuple(state.applied.intervals()),
        "slots": tuple(state.slots),
        "partitions": tuple((p.variable, p.row_start, p.row_stop) for p in plan.shards[id_.shard]),
        "files": tuple(files),
        "written_at": 1.5,
    }
    manifest = ShardManifest(**{**fields, **changed})
    store.create(id_.manifest_name, encode(manifest))
    return manifest


def write_shard(store: Store, id_: CheckpointId, *, seed: int = 0, **changed: Any) -> ShardManifest:
    """Write a checkpoint of one of PLAN's shards."""
    return write_state(store, PLAN, id_, state_of(PLAN, id_.shard, seed), **changed)


def write_job(store: Store, number: int, manifests: Sequence[ShardManifest], **changed: Any) -> JobManifest:
    """Write the manifest of a drained checkpoint that is made of some shards' checkpoints."""
    parts = tuple(map(part_of, manifests))
    fields: dict[str, Any] = {
        "run_id": RUN,
        "job_digest": DIGEST,
        "number": number,
        "plan_version": manifests[0].plan_version,
        "coordinator_incarnation": 1,
        "steps": STEPS,
        "final": False,
        "parts": parts,
        "written_at": 2.5,
    }
    job = JobManifest(**{**fields, **changed})
    store.create(job_name(number), encode(job))
    return job


def write_plan(store: Store, plan: Plan = PLAN) -> None:
    """Write a plan's record."""
    store.create(plan_name(plan.version), encode(PlanRecord.of(plan, source=None, coordinator_incarnation=1)))


def write_drained(store: Store, *, seed: int = 0, number: int = 1, job_digest: str = DIGEST) -> JobManifest:
    """Write a drained checkpoint of PLAN and, for the first one, the plan."""
    if number == 1:
        write_plan(store)
    shards = [write_shard(store, CheckpointId(1, s, 1, number), seed=seed, job_digest=job_digest) for s in range(2)]
    return write_job(store, number, shards, job_digest=job_digest)
