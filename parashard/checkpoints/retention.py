"""Retention: which of a shard's checkpoints are superseded, and their deletion.

Checkpoints that share a file with all rows of a table are a chain: if that file is damaged, all of them are. So one
checkpoint of the chain before is kept, too (P33).

The choice is a pure function. The deletion removes exactly the files that a manifest lists.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple, Self

from parashard.checkpoints.catalogue import Catalogue, CheckpointId
from parashard.checkpoints.manifest import ShardManifest, TableFile
from parashard.errors import DamagedCheckpoint, NotStored
from parashard.store.claims import Rollback


class StoredCheckpoint(NamedTuple):
    """A checkpoint of a shard that can be restored."""

    id: CheckpointId
    round: int | None  # None except in `sync:N`
    # Incarnation and number of the checkpoint that wrote the oldest file with rows of tables that this one names, the
    # first of its chain; None: it has no rows.
    rows_since: tuple[int, int] | None = None

    @classmethod
    def of(cls, manifest: ShardManifest) -> Self:
        """Return the checkpoint that a manifest belongs to."""
        since = min(((file.incarnation, file.number) for file in manifest.table_files), default=None)
        return cls(CheckpointId.of(manifest), manifest.round, since)


class CommonRounds(NamedTuple):
    """Rounds that all shards have saved (sync mode)."""

    newest: int | None = None  # the newest round of which every shard has a checkpoint; None: there is none yet
    # Earlier rounds to which all shards return if one finds the rows of its newest chain damaged; None: there is one
    # shard, which decides alone.
    kept: frozenset[int] | None = None


def given_up(held: StoredCheckpoint, rollbacks: Iterable[Rollback]) -> bool:
    """Return whether a later incarnation of the shard rolled back to an earlier round, and so discarded this one."""
    # Recomputed rounds are bit-identical only if gradients are, and shards must not start from different computations
    # of a round.
    round_, incarnation = held.round, held.id.incarnation
    return round_ is not None and any(incarnation < later.incarnation and later.round < round_ for later in rollbacks)


def in_order(held: Iterable[StoredCheckpoint], rollbacks: Collection[Rollback]) -> list[StoredCheckpoint]:
    """Return the checkpoints that no rollback has discarded, the oldest first."""
    return [h for h in sorted(held, key=_age) if not given_up(h, rollbacks)]


def of_earlier_chain(oldest_first: Sequence[StoredCheckpoint]) -> StoredCheckpoint | None:
    """Return the newest checkpoint that names no file with rows that the newest one names, or None."""
    since = oldest_first[-1].rows_since if oldest_first else None
    if since is None:
        return None
    return next((h for h in reversed(oldest_first) if (h.id.incarnation, h.id.number) < since), None)


def chain_rounds(oldest_first: Sequence[StoredCheckpoint]) -> list[int]:
    """Return the first round of each chain, ascending (sync mode)."""
    first: dict[tuple[int, int], int] = {}
    for h in oldest_first:
        if h.round is not None and h.rows_since is not None:
            first.setdefault(h.rows_since, h.round)
    return sorted(set(first.values()))


def superseded(
    held: Sequence[StoredCheckpoint],
    *,
    keep: int,
    keep_every: int,
    pinned: Collection[str],
    common: CommonRounds,
    rollbacks: Collection[Rollback] = (),
    earlier_chain: bool = True,
) -> list[CheckpointId]:
    """Return the checkpoints of a shard that may be deleted, the oldest first.

    Kept are: the newest `keep`; the newest one of the chain before; each whose number is a multiple of `keep_every`;
    parts of drained checkpoints; and in `sync:N` all that a rollback may still need. Discarded ones are kept only as
    parts of a drained checkpoint.

    `held` are one shard's of one plan, without damaged ones: a damaged one must not supersede an intact one. `pinned`
    are folders of parts of drained checkpoints. Without `earlier_chain` the chain before is not kept, as there is no
    room.
    """
    assert keep >= 1, keep
    good = in_order(held, rollbacks)
    void = [h for h in sorted(held, key=_age) if h not in good]
    before = of_earlier_chain(good) if earlier_chain and common.kept is None else None
    rounds = common.kept if earlier_chain and common.kept else ()
    return [h.id for h in void if h.id.folder not in pinned] + [
        h.id
        for h in good[:-keep]
        if not (keep_every and h.id.number % keep_every == 0)
        and h.id.folder not in pinned
        and (h.round is None or (common.newest is not None and h.round < common.newest))
        and h != before
        and h.round not in rounds
    ]


def collect(catalogue: Catalogue, id_: CheckpointId) -> None:
    """Delete a checkpoint: its manifest first, so that it never exists in part, then the files that only it lists.

    Without effect if its manifest is gone.

    The files of a damaged manifest are unknown: then nothing is deleted. After a `StoreFailed` some of the files may be
    left.
    """
    try:
        manifest = catalogue.manifest(id_)
    except NotStored:
        return
    catalogue.store.delete(id_.manifest_name)
    for file in manifest.files:
        catalogue.store.delete(f"{id_.folder}/{file.name}")
    if manifest.table_files:
        _collect_rows(catalogue, manifest)


def _collect_rows(catalogue: Catalogue, manifest: ShardManifest) -> None:
    """Delete the files of rows that a deleted manifest named, and no other one of the shard does."""
    needed = {
        _place(file)
        for id_ in catalogue.shard_checkpoints(manifest.plan_version, manifest.shard)
        for file in _undamaged_files(catalogue, id_)
    }
    for file in manifest.table_files:
        if _place(file) not in needed:
            folder = CheckpointId(manifest.plan_version, manifest.shard, file.incarnation, file.number).folder
            catalogue.store.delete(f"{folder}/{file.name}")


def _undamaged_files(catalogue: Catalogue, id_: CheckpointId) -> Sequence[TableFile]:
    try:
        return catalogue.manifest(id_).table_files
    except (DamagedCheckpoint, NotStored):  # nothing is restored from it
        return ()


def _age(held: StoredCheckpoint) -> tuple[int, CheckpointId]:
    return -1 if held.round is None else held.round, held.id


def _place(file: TableFile) -> tuple[int, int, str]:
    return file.incarnation, file.number, file.name
