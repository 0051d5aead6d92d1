"""Verification: reads every file that the records of a store list, and names each damaged one.

For a shard with damaged checkpoints it names the one that a restart uses instead.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import suppress
from functools import partial

from parashard.checkpoints.catalogue import COORDINATORS, Catalogue, CheckpointId
from parashard.checkpoints.manifest import ShardManifest
from parashard.checkpoints.retention import StoredCheckpoint, in_order
from parashard.checkpoints.row_files import iterate_initial_rows, iterate_rows, read_change
from parashard.checkpoints.state import iterate_initial, iterate_initial_slots
from parashard.checkpoints.tensors import iterate_tensors, read_file
from parashard.errors import DamagedCheckpoint, NotStored
from parashard.figures import counted
from parashard.store.claims import Claims


def damage_in_store(catalogue: Catalogue, damaged: set[CheckpointId] | None = None) -> Iterator[str]:
    """Yield a message for each damaged file of the store: records, manifests and arrays.

    A checkpoint that is deleted meanwhile is not damaged. One file is in memory at a time. A damaged file with rows is
    reported for each checkpoint that names it.

    The damaged checkpoints of shards are added to `damaged`.
    """
    yield from _damage(catalogue.run)
    for version in catalogue.plans():
        yield from _damage_of_plan(catalogue, version)
    for number in catalogue.job_checkpoints():
        yield from damage_in_job(catalogue, number, arrays=False)
    for digest in catalogue.initial_manifests():
        yield from _damage(partial(_read_initial, catalogue, digest))
    for name in catalogue.store.names(COORDINATORS):
        yield from _damage(partial(catalogue.check_record, f"{COORDINATORS}/{name}"))
    for id_ in catalogue.checkpoints():
        found = list(damage_in_shard(catalogue, id_))
        if catalogue.has(id_):
            if found and damaged is not None:
                damaged.add(id_)
            yield from found


def restarts_from(catalogue: Catalogue, damaged: Collection[CheckpointId]) -> Iterator[str]:
    """Yield, for each shard of the newest plan whose newest checkpoint is damaged, the one that a restart uses."""
    newest_plan = max(catalogue.plans(), default=0)
    for shard in sorted({id_.shard for id_ in damaged if id_.plan_version == newest_plan}):
        manifests: dict[CheckpointId, ShardManifest] = {}
        for id_ in catalogue.shard_checkpoints(newest_plan, shard):
            with suppress(DamagedCheckpoint, NotStored):
                manifests[id_] = catalogue.manifest(id_)
        held = list(map(StoredCheckpoint.of, manifests.values()))
        rollbacks = Claims(catalogue.store, f"shard-{shard}", "verify").rollbacks(0) if _has_rounds(held) else []
        oldest_first = [h.id for h in in_order(held, rollbacks)]
        sound = [id_ for id_ in oldest_first if id_ not in damaged]
        if sound and sound[-1] == oldest_first[-1]:
            continue  # the damaged ones are older, or discarded
        found = "what its plan began with: no checkpoint of it is sound"
        if sound:
            found, steps = str(sound[-1]), len(manifests[oldest_first[-1]].steps)
            found += f", with {len(manifests[sound[-1]].steps):,} of {counted(steps, 'step')}"
            found += ", and all shards from the newest round that each has" if _has_rounds(held) else ""
        yield f"shard {shard} restarts from {found}; what is newer is computed again"


def _has_rounds(held: Iterable[StoredCheckpoint]) -> bool:
    return any(h.round is not None for h in held)


def damage_in_job(catalogue: Catalogue, number: int, *, arrays: bool = True) -> Iterator[str]:
    """Yield a message for each damaged file of a drained checkpoint, its plan and its parts."""
    try:
        job = catalogue.job_manifest(number)
    except DamagedCheckpoint as error:
        yield str(error)
        return
    yield from _damage_of_plan(catalogue, job.plan_version)
    for shard in range(len(job.parts)):
        try:
            manifest = catalogue.part_manifest(job, shard)
        except DamagedCheckpoint as error:
            yield str(error)
            continue
        if arrays:
            yield from _damage_of_files(catalogue, manifest)


def damage_in_shard(catalogue: Catalogue, id_: CheckpointId) -> Iterator[str]:
    """Yield a message for each damaged file of a shard's checkpoint."""
    try:
        manifest = catalogue.manifest(id_)
    except (DamagedCheckpoint, NotStored) as error:
        yield str(error)
        return
    yield from _damage_of_files(catalogue, manifest)


def _read_initial(catalogue: Catalogue, job_digest: str) -> None:
    manifest = catalogue.initial_manifest(job_digest)
    if manifest is not None:
        for _ in iterate_initial(catalogue.store, manifest):
            pass
        for _ in iterate_initial_rows(catalogue.store, job_digest):
            pass
        for _ in iterate_initial_slots(catalogue.store, manifest):
            pass


def _damage_of_plan(catalogue: Catalogue, version: int) -> Iterator[str]:
    return _damage(lambda: catalogue.plan(version).to_plan())


def _damage_of_files(catalogue: Catalogue, manifest: ShardManifest) -> Iterator[str]:
    """Read as a restore does; only if that fails check each file separately."""
    folder = CheckpointId.of(manifest).folder
    try:
        for _ in iterate_tensors(catalogue.store, folder, manifest, "variables"):
            pass
        for _ in iterate_tensors(catalogue.store, folder, manifest, "slots"):
            pass
        for _ in iterate_rows(catalogue.store, manifest):
            pass
    except DamagedCheckpoint as error:
        found = [text for file in manifest.files for text in _damage(partial(read_file, catalogue.store, folder, file))]
        found += [
            text
            for file in manifest.table_files
            for text in _damage(partial(read_change, catalogue.store, manifest, file))
        ]
        yield from found or [str(error)]


def _damage(read: Callable[[], object]) -> Iterator[str]:
    try:
        read()
    except (DamagedCheckpoint, NotStored) as error:
        yield str(error)
