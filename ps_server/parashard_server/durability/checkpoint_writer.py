"""Writes a checkpoint to a store: tensors first, then the manifest that commits them; removes the files of a failure.

Knows no thread and no schedule: the snapshot is complete before the call, and rows of tables come in pieces, each of
them under the shard's lock.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from parashard.checkpoints.catalogue import CheckpointId
from parashard.checkpoints.encoding import encode
from parashard.checkpoints.manifest import ShardManifest, TableFile
from parashard.checkpoints.row_files import FILE_BYTES, TableChange, TableWriter
from parashard.checkpoints.tensors import slot_tensor, variable_tensor, write_tensors
from parashard.errors import QueueFull, StoreFailed, Superseded, Unavailable
from parashard.plan.variables import Float32s
from parashard.process import failpoints
from parashard.process.logs import log
from parashard.store import Store
from parashard.store.claims import Claims
from parashard_server.core.shard import Cut, Shard
from parashard_server.shard_host import ShardHost
from parashard_server.state.rows.embedding_tables import TablesCut
from parashard_server.state.rows.row_saving import RowSaving


def write_cut(
    store: Store,
    id_: CheckpointId,
    cut: Cut,
    host: ShardHost,
    claims: Claims,
    held: Callable[[float], None] = lambda seconds: None,
) -> ShardManifest:
    """Store a cut with a complete snapshot under an id not used before, and return the manifest that commits it.

    Of the shard only the shapes of its variables are read, and its lock is taken for pieces of tables; `held` is called
    with the seconds for which each piece kept it. `claims` are checked just before the manifest is written.

    Raises
    ------
    StoreFailed
        If the store failed; the files are removed as far as it allows.
    Superseded
        If another process has claimed the shard since; likewise.
    Unavailable, QueueFull
        If pushes changed more rows of a table meanwhile than their images have room, or kept the lock; likewise.
    """
    mine, snapshot = cut.identity, cut.snapshot
    variables, slots = {}, {}
    for placed in snapshot.layout:
        p, run = placed.partition, slice(placed.offset, placed.stop)
        shape = (p.rows, *host.shard.storage.variables[p.variable].shape[1:])
        variables[variable_tensor(p)] = snapshot.weights[run].reshape(shape)
        for name, slot in snapshot.slots.items():
            slots[slot_tensor(name, p)] = slot[run].reshape(shape)
    try:
        files = write_tensors(store, id_.folder, variables, "variables")
        files += write_tensors(store, id_.folder, slots, "slots")
        table_files = (*cut.tables.kept, *write_rows(store, id_, cut.tables, host, held))
        failpoints.hit("shard.checkpoint.files")
        manifest = ShardManifest(
            run_id=mine.run_id,
            job_digest=mine.job_digest,
            plan_version=mine.plan_version,
            shard=mine.shard,
            incarnation=mine.incarnation,
            number=id_.number,
            round=cut.round,
            version=cut.version,
            applied=tuple(cut.applied.intervals()),
            skipped=tuple(cut.skipped.intervals()),
            slots=tuple(snapshot.slots),
            partitions=tuple(
                (placed.partition.variable, placed.partition.row_start, placed.partition.row_stop)
                for placed in snapshot.layout
            ),
            files=tuple(files),
            written_at=time.time(),
            tables=tuple(sorted(cut.tables.counts.items())),
            table_rules=cut.tables.rules,
            table_files=table_files,
        )
        claims.check()  # a superseded process commits nothing
        store.create(id_.manifest_name, encode(manifest))
    except (StoreFailed, Superseded, Unavailable, QueueFull):
        _undo(store, id_)
        raise
    return manifest


def write_rows(
    store: Store,
    id_: CheckpointId,
    cut: TablesCut,
    host: ShardHost,
    held: Callable[[float], None] = lambda seconds: None,
) -> list[TableFile]:
    """Write the rows of a cut's tables piece by piece, and return the files; arguments and errors as in `write_cut`."""
    writer = TableWriter(store, id_)
    for name, saving in cut.savings.items():
        saving.prepare()
        gone = saving.gone()
        for begin in range(0, len(gone), FILE_BYTES // gone.itemsize):
            writer.write(TableChange(name, saving.without_rows(), gone[begin : begin + FILE_BYTES // gone.itemsize]))
            failpoints.hit("shard.rows.gone")
        room, filled, more = saving.room(FILE_BYTES), 0, True
        while more:
            count = _next_piece(host, saving, room[filled:], held)
            more = count > 0
            filled += count
            if filled and (filled == len(room) or not more):
                writer.write(TableChange(name, saving.stored(room[:filled]), np.empty(0, np.uint64)))
                if saving.full:
                    failpoints.hit("shard.rows.all")
                else:
                    failpoints.hit("shard.rows.moved")
                filled = 0
    return writer.files


def _next_piece(host: ShardHost, saving: RowSaving, room: Float32s, held: Callable[[float], None]) -> int:
    def timed(_: Shard) -> int:
        started_s = time.monotonic()
        count = saving.next_piece(room)
        held(time.monotonic() - started_s)
        return count

    return host.run_exclusive(timed)


def _undo(store: Store, id_: CheckpointId) -> None:
    """Remove the files of a failed checkpoint: a full disk must not be filled further."""
    try:
        for name in store.names(id_.folder):
            store.delete(f"{id_.folder}/{name}")
    except StoreFailed as error:
        log.warning("checkpoint-not-removed", id=str(id_), error=str(error))
