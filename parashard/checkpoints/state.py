"""State of a shard, from its newest checkpoint that verifies, or assembled from those of another sharding.

Knows stores, manifests and plans; nothing of optimizers or of a shard's memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from parashard.checkpoints.catalogue import Catalogue, CheckpointId, by_age, initial_folder, initial_name, place_of
from parashard.checkpoints.encoding import sha256_of
from parashard.checkpoints.manifest import InitialManifest, JobManifest, ShardManifest, TableFile
from parashard.checkpoints.row_files import StoredRows, iterate_rows
from parashard.checkpoints.tensors import iterate_files, iterate_tensors, slot_tensor, variable_tensor
from parashard.errors import DamagedCheckpoint, NotStored, StoreFailed
from parashard.plan.embedding import KeyedRows, rows_sha256
from parashard.plan.intervals import IntervalSet
from parashard.plan.partition import Partition, Plan
from parashard.plan.variables import NO_SLOTS, Float32s, Slots, Variable, slots_sha256, values_sha256
from parashard.store import Store


@dataclass(frozen=True)
class ShardState:
    """A shard's state at one moment."""

    applied: IntervalSet  # the steps in the values
    version: int  # pushes applied
    round: int | None  # in `sync:N` the round that starts from these values; else None
    variables: Mapping[Partition, Float32s]  # shape (rows, ...), row-major; may be read-only, as slots
    slots: Mapping[str, Mapping[Partition, Float32s]]
    skipped: IntervalSet = field(default_factory=IntervalSet)  # the applied steps that were skipped with an empty push
    rows: Sequence[tuple[str, StoredRows]] = ()  # (table, rows) of embedding tables; no key twice
    table_files: Sequence[TableFile] = ()  # the rows' files, if of this plan: later checkpoints may share them


def load(store: Store, manifest: ShardManifest) -> ShardState:
    """Return the verified state of a shard's checkpoint."""
    folder = CheckpointId.of(manifest).folder
    named = dict(iterate_tensors(store, folder, manifest, "variables"))
    variables = {p: named[variable_tensor(p)] for p in manifest.held}
    named = dict(iterate_tensors(store, folder, manifest, "slots"))
    slots = {slot: {p: named[slot_tensor(slot, p)] for p in manifest.held} for slot in manifest.slots}
    for slot, arrays in slots.items():
        for p, array in arrays.items():
            if array.shape != variables[p].shape:
                raise DamagedCheckpoint(
                    f"{place_of(store, folder)}: slot {slot!r} of variable {p.variable!r} has shape {array.shape}, "
                    f"the variable's rows have {variables[p].shape}"
                )
    return ShardState(
        manifest.steps,
        manifest.version,
        manifest.round,
        variables,
        slots,
        manifest.skipped_steps,
        tuple(iterate_rows(store, manifest, ended_too=True)),
        manifest.table_files,
    )


def assemble(
    store: Store,
    job: JobManifest,
    old_plan: Plan,
    partitions: Sequence[Partition],
    slots: Sequence[str],
    buckets: tuple[int, int] = (0, 0),
) -> ShardState:
    """Return the state of any partitions, copied bit for bit from the parts of a drained checkpoint.

    Files of parts that hold none of the rows are not read; one file is in memory at a time, besides the result.

    `old_plan` is the one that the checkpoint was made under. The version is the greatest of the parts', and a step that
    one of them skipped counts as skipped. The caller owns the arrays.
    """
    where = f"{store.url}: drained checkpoint j{job.number}"
    if (old_plan.version, len(old_plan.shards)) != (job.plan_version, len(job.parts)):
        raise DamagedCheckpoint(
            f"{where}: {len(job.parts)} parts of plan {job.plan_version}, and plan {old_plan.version} has "
            f"{len(old_plan.shards)} shards"
        )
    catalogue = Catalogue(store)
    parts = [catalogue.part_manifest(job, shard) for shard in range(len(job.parts))]
    for manifest in parts:
        _check_part(manifest, old_plan, parts[0], slots, where)
    variables = _empty(old_plan.variables, partitions)
    state = {slot: _empty(old_plan.variables, partitions) for slot in slots}
    for manifest in parts:
        if not any(_overlap(held, wanted) for held in manifest.held for wanted in partitions):
            continue
        folder = CheckpointId.of(manifest).folder
        places = {variable_tensor(p): (p, variables) for p in manifest.held}
        _copy(iterate_tensors(store, folder, manifest, "variables"), places, old_plan.variables)
        if slots:
            places = {slot_tensor(slot, p): (p, state[slot]) for slot in slots for p in manifest.held}
            _copy(iterate_tensors(store, folder, manifest, "slots"), places, old_plan.variables)
    version = max(manifest.version for manifest in parts)
    skipped = IntervalSet(interval for manifest in parts for interval in manifest.skipped)
    tables = [manifest for manifest in parts if buckets[0] < buckets[1]]
    rows = tuple(found for manifest in tables for found in iterate_rows(store, manifest, buckets, ended_too=True))
    return ShardState(parts[0].steps, version, parts[0].round, variables, state, skipped, rows)


def initial_sha256(arrays: Mapping[str, Float32s], rows: Mapping[str, KeyedRows], slots: Slots = NO_SLOTS) -> str:
    """Return SHA-256 (hex) of a job's initial values: of its variables, and of rows and slots if there are any."""
    sha256 = values_sha256(arrays)
    if rows:
        sha256 = sha256_of(f"{sha256} {rows_sha256(rows)}".encode())
    return sha256_of(f"{sha256} {slots_sha256(slots)}".encode()) if slots else sha256


def first_values(
    store: Store, job_digest: str, variables: Mapping[str, Variable], partitions: Iterable[Partition]
) -> dict[Partition, Float32s]:
    """Return stored initial values of partitions, without drawn variables; one file at a time is in memory."""
    manifest = Catalogue(store).initial_manifest(job_digest)
    if manifest is None:
        raise DamagedCheckpoint(f"{place_of(store, initial_name(job_digest))}: the run's first values are not there")
    stored = dict(manifest.variables)
    values = _empty(variables, [p for p in partitions if p.variable in stored])
    if values:
        places = {variable_tensor(p): (p, values) for p in whole_variables(stored)}
        _copy(iterate_initial(store, manifest), places, variables)
    return values


def first_slots(
    store: Store, job_digest: str, variables: Mapping[str, Variable], partitions: Iterable[Partition]
) -> dict[str, dict[Partition, Float32s]]:
    """Return a job's initial optimizer state, by slot, for those partitions that have one."""
    manifest = Catalogue(store).initial_manifest(job_digest)
    if manifest is None or not manifest.slots:
        return {}
    wanted = list(partitions)
    kept = {
        slot: _empty(variables, [p for p in wanted if (slot, p.variable) in manifest.slots])
        for slot in {slot for slot, _ in manifest.slots}
    }
    shapes = dict(manifest.variables)
    whole = {name: Partition(name, 0, shapes[name][0]) for _, name in manifest.slots}
    places = {slot_tensor(slot, whole[name]): (whole[name], kept[slot]) for slot, name in manifest.slots}
    _copy(iterate_initial_slots(store, manifest), places, variables)
    return kept


def iterate_initial_slots(store: Store, manifest: InitialManifest) -> Iterator[tuple[str, Float32s]]:
    """Yield the names and tensors of a job's initial optimizer state; raises as `iterate_files`."""
    shapes = dict(manifest.variables)
    due = {slot_tensor(slot, Partition(name, 0, shapes[name][0])): shapes[name][0] for slot, name in manifest.slots}
    return iterate_files(store, initial_folder(manifest.job_digest, manifest.incarnation), manifest.slot_files, due)


def iterate_initial(store: Store, manifest: InitialManifest) -> Iterator[tuple[str, Float32s]]:
    """Yield the names and tensors of initial values; raises as `iterate_files`."""
    due = {variable_tensor(p): p.rows for p in whole_variables(dict(manifest.variables))}
    folder = initial_folder(manifest.job_digest, manifest.incarnation)
    return iterate_files(store, folder, manifest.files, due)


def whole_variables(shapes: Mapping[str, tuple[int, ...]]) -> list[Partition]:
    """Return the partitions that are whole variables, in name order."""
    return [Partition(name, 0, shapes[name][0]) for name in sorted(shapes)]


def whole_model(store: Store, job: JobManifest) -> dict[str, Float32s]:
    """Return every variable of a drained checkpoint by name, with its own shape; raises as `assemble`."""
    return {p.variable: array for p, array in _whole(store, job, ()).variables.items()}


def whole_slots(store: Store, job: JobManifest, slots: Sequence[str]) -> dict[str, dict[str, Float32s]]:
    """Return the optimizer's state of a drained checkpoint, by slot and variable; raises as `assemble`."""
    state = _whole(store, job, slots)
    return {slot: {p.variable: array for p, array in of_slot.items()} for slot, of_slot in state.slots.items()}


def _whole(store: Store, job: JobManifest, slots: Sequence[str]) -> ShardState:
    plan = plan_of(store, job)
    whole = whole_variables({name: variable.shape for name, variable in plan.variables.items()})
    return assemble(store, job, plan, whole, slots)


def plan_of(store: Store, job: JobManifest) -> Plan:
    """Return the plan of a drained checkpoint."""
    return Catalogue(store).plan(job.plan_version).to_plan()


def _check_part(manifest: ShardManifest, plan: Plan, first: ShardManifest, slots: Sequence[str], where: str) -> None:
    """Check a part against the plan; then, by the plan's invariant, every row exists exactly once."""
    if manifest.held != plan.shards[manifest.shard]:
        raise DamagedCheckpoint(f"{where}: shard {manifest.shard} has other partitions than plan {plan.version} says")
    if manifest.round != first.round:
        raise DamagedCheckpoint(f"{where}: shard {manifest.shard} is at round {manifest.round}, 0 at {first.round}")
    missing = [slot for slot in slots if slot not in manifest.slots]
    if missing:
        raise DamagedCheckpoint(
            f"{where}: shard {manifest.shard} has the optimizer slots {', '.join(manifest.slots) or 'none'}; "
            f"due: {', '.join(slots)}"
        )


def _overlap(a: Partition, b: Partition) -> bool:
    return a.variable == b.variable and a.row_start < b.row_stop and b.row_start < a.row_stop


def _empty(variables: Mapping[str, Variable], partitions: Sequence[Partition]) -> dict[Partition, Float32s]:
    assert all(p.row_stop <= variables[p.variable].rows for p in partitions), partitions
    return {p: np.empty((p.rows, *variables[p.variable].shape[1:]), np.float32) for p in partitions}


def _copy(
    tensors: Iterable[tuple[str, Float32s]],
    places: Mapping[str, tuple[Partition, dict[Partition, Float32s]]],
    variables: Mapping[str, Variable],
) -> None:
    """Copy the wanted rows of each tensor to their partitions."""
    for name, array in tensors:
        if name not in places:
            continue  # a slot that is not wanted
        source, wanted = places[name]
        variable = variables[source.variable]
        if array.size != source.rows * variable.row_elements:
            raise DamagedCheckpoint(f"tensor {name!r} has shape {array.shape}, the plan's variable {variable.shape}")
        shaped = array.reshape(source.rows, *variable.shape[1:])
        for target, rows in wanted.items():
            if _overlap(source, target):
                start = max(source.row_start, target.row_start)
                stop = min(source.row_stop, target.row_stop)
                rows[start - target.row_start : stop - target.row_start] = shaped[
                    start - source.row_start : stop - source.row_start
                ]


Skipped = list[tuple[CheckpointId, StoreFailed]]
"""The checkpoints that were skipped, and why: most are damaged."""


def newest_verified(
    catalogue: Catalogue,
    plan_version: int,
    shard: int,
    usable: Callable[[ShardManifest], bool] = lambda manifest: True,
) -> tuple[ShardState | None, ShardManifest | None, Skipped]:
    """Return the state of a shard's newest checkpoint that verifies, its manifest, and the damaged ones skipped.

    The caller compares the manifest's run and job digest with its own.

    Checkpoints that are not `usable` are neither loaded nor reported as skipped. The round of a damaged manifest is
    unknown, so some of the skipped ones may be older than the result. Raises `StoreFailed` if the store cannot be
    listed, or nothing verifies and a checkpoint could not be read: an unavailable store must not look like an empty
    one.
    """
    skipped: Skipped = []
    unanswered: StoreFailed | None = None
    manifests: list[ShardManifest] = []
    for id_ in reversed(catalogue.shard_checkpoints(plan_version, shard)):
        try:
            manifest = catalogue.manifest(id_)
        except NotStored:
            continue  # deleted since it was listed
        except StoreFailed as error:
            skipped.append((id_, error))
            unanswered = unanswered or _unless_damaged(error)
        else:
            if usable(manifest):
                manifests.append(manifest)
    for manifest in sorted(manifests, key=by_age, reverse=True):
        try:
            return load(catalogue.store, manifest), manifest, skipped
        except StoreFailed as error:
            skipped.append((CheckpointId.of(manifest), error))
            unanswered = unanswered or _unless_damaged(error)
    if unanswered is not None:
        raise unanswered
    return None, None, skipped


def _unless_damaged(error: StoreFailed) -> StoreFailed | None:
    return None if isinstance(error, DamagedCheckpoint) else error
