"""A job of one table whose shards commit checkpoints, as a server's tests see it: what is in each is decided here.

`Committer` writes plans, increments and whole tables into a store as shards do, and says in plain dictionaries which
rows each version has.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from parashard.checkpoints.catalogue import CheckpointId
from parashard.checkpoints.manifest import ShardManifest, TableFile
from parashard.checkpoints.row_files import StoredRows, TableChange, TableWriter
from parashard.plan.embedding import Keys, RowDtype, bucket_ranges, buckets_of, kept_as, mixed
from parashard.plan.intervals import IntervalSet
from parashard.plan.partition import Plan
from parashard.serving.checkpoint_watcher import CheckpointWatcher
from parashard.store import Store
from support.checkpoint_cases import PLAN, state_of, write_plan, write_state

TABLE = "user"
ELEMENTS = 2
ROW_ELEMENTS = {TABLE: ELEMENTS}

Rows = dict[int, tuple[float, ...]]
"""By mixed key."""


def keys_of_shard(shard: int, number: int, shards: int = 2) -> Keys:
    """Return the first mixed keys that belong to a shard, ascending."""
    words = mixed(np.arange(number * shards * 8))
    first, stop = bucket_ranges(shards)[shard]
    mine = words[(buckets_of(words) >= first) & (buckets_of(words) < stop)][:number]
    return np.sort(mine)


def stored_rows(
    rows: Mapping[int, tuple[float, ...]], last_use: Mapping[int, int] | None = None, dtype: RowDtype = "float32"
) -> StoredRows:
    """Return rows in a checkpoint's form, with a slot that no reader wants."""
    keys = np.array(sorted(rows), np.uint64)
    values = np.array([rows[int(key)] for key in keys], np.float32).reshape(len(keys), ELEMENTS)
    uses = np.array([(last_use or {}).get(int(key), 0) for key in keys], np.uint32)
    slots = {"accumulator": np.zeros_like(values)}
    return StoredRows(keys, np.ones(len(keys), np.uint32), uses, kept_as(values, dtype), slots)


@dataclass
class ShardLife:
    """What a shard has, and what it has written of it."""

    shard: int
    incarnation: int = 1
    number: int = 0
    applied: IntervalSet = field(default_factory=IntervalSet)
    files: tuple[TableFile, ...] = ()
    rows: Rows = field(default_factory=dict)

    def copy(self) -> ShardLife:
        """Return what another incarnation would restore from here."""
        return replace(self, applied=self.applied.copy(), rows=dict(self.rows))


@dataclass
class Committer:
    """Commits checkpoints of a plan's shards."""

    store: Store
    plan: Plan = PLAN
    dtype: RowDtype = "float32"

    def write_plan(self) -> None:
        """Store the plan."""
        write_plan(self.store, self.plan)

    def commit(
        self,
        life: ShardLife,
        steps: Iterable[int],
        rows: Mapping[int, tuple[float, ...]],
        gone: Iterable[int] = (),
        *,
        anew: bool = False,
        last_use: Mapping[int, int] | None = None,
        seed: int | None = None,
        **changed: Any,
    ) -> ShardManifest:
        """Apply steps, set rows, drop others, and commit that, with the variables that a seed gives, else others.

        `anew`: with all rows, and no file of before.
        """
        life.number += 1
        for step in steps:
            life.applied.add(step)
        gone = sorted(set(gone) - set(rows))
        life.rows = {key: row for key, row in {**life.rows, **rows}.items() if key not in gone}
        id_ = CheckpointId(self.plan.version, life.shard, life.incarnation, life.number)
        writer = TableWriter(self.store, id_)
        written = life.rows if anew else dict(rows)
        lost = np.array([] if anew else gone, np.uint64)
        if written or len(lost):
            writer.write(TableChange(TABLE, stored_rows(written, last_use, self.dtype), lost))
        life.files = (*(() if anew else life.files), *writer.files)
        state = state_of(self.plan, life.shard, seed=seed or life.number, applied=tuple(life.applied.intervals()))
        fields: dict[str, Any] = {
            "tables": ((TABLE, len(life.rows)),) if life.rows else (),
            "table_files": life.files,
        }
        return write_state(self.store, self.plan, id_, state, **{**fields, **changed})


def watcher_of(store: Store) -> CheckpointWatcher:
    """Return a watcher of the job."""
    return CheckpointWatcher(store, ROW_ELEMENTS)


def rows_of(table: Any) -> Rows:
    """Return the rows that published rows have, by mixed key."""
    block = table.all_rows()
    return {int(key): tuple(row) for key, row in zip(block.keys, block.values.tolist(), strict=True)}


def served_rows(watcher: CheckpointWatcher) -> Rows:
    """Return all rows that a watcher publishes, of all shards."""
    assert watcher.published is not None
    return {key: row for shard in watcher.published.shards for key, row in rows_of(shard.tables[TABLE].rows).items()}
