"""Differences: what a subscriber lacks of a shard, as parts of bounded size, made as they are sent.

Nothing is kept for a subscriber: each difference is computed from the version that is served, and from what the
subscriber says that it has. Pure.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from parashard.checkpoints.catalogue import CheckpointId
from parashard.plan.embedding import KEY_BYTES, Keys
from parashard.plan.partition import ELEMENT_BYTES, Partition
from parashard.plan.variables import Float32s
from parashard.serving.published_rows import NO_KEYS
from parashard.serving.replica import Begin, PartitionAhead, RowsPart, TableAhead, VariablePart
from parashard.serving.versions import PublishedShard, PublishedTable

PART_BYTES = 1 << 20

Part = Begin | RowsPart | VariablePart | None
"""None: the version is whole."""


class Shown(NamedTuple):
    """What a subscriber has of a shard: its version, and what it was told to show of tables and partitions."""

    age: tuple[CheckpointId, int]
    tokens: Mapping[str, str]
    digests: Mapping[Partition, str]

    @property
    def id(self) -> CheckpointId:
        """The name of the version."""
        return self.age[0]


def lacks(shards: Sequence[PublishedShard], held: Sequence[Shown]) -> list[PublishedShard]:
    """Return the shards of which a subscriber has an older version, or none; none of a plan older than its own."""
    own = {shown.id.shard: shown.age for shown in held}
    plan = max((id_.plan_version for id_, _ in own.values()), default=0)
    found = []
    for shard in shards:
        id_ = shard.version.id
        mine = own.get(id_.shard)
        if id_.plan_version > plan or (id_.plan_version == plan and (mine is None or mine < shard.version.age)):
            found.append(shard)
    return found


def difference(
    shard: PublishedShard,
    shards: int,
    tables: Collection[str],
    variables: Collection[str],
    held: Sequence[Shown],
    part_bytes: int = PART_BYTES,
) -> Iterator[Part]:
    """Yield what a subscriber lacks of a shard: rows that changed, and partitions of variables with other values."""
    id_ = shard.version.id
    mine = next((shown for shown in held if shown.id[:2] == id_[:2]), None)
    ahead, changes = [], {}
    for name in sorted(tables):
        table = shard.tables[name]
        keys, values, gone, whole = _changed(table, None if mine is None else mine.tokens.get(name))
        ahead.append(TableAhead(name, whole, len(keys), len(gone), table.token))
        changes[name] = keys, values, gone
    own = {} if mine is None else mine.digests
    partitions = tuple(
        PartitionAhead(p, digest, own.get(p) != digest)
        for p, digest in shard.digests.items()
        if p.variable in variables
    )
    moved = [ahead.partition for ahead in partitions if ahead.follows]
    elements = sum(shard.variables[p].size for p in moved)
    yield Begin(shard.version, shards, tuple(ahead), elements, partitions)
    for name, (keys, values, gone) in changes.items():
        at_once = max(1, part_bytes // (KEY_BYTES + ELEMENT_BYTES * values.shape[1]))
        for begin in range(0, len(keys), at_once):
            yield RowsPart(name, keys[begin : begin + at_once], values[begin : begin + at_once], NO_KEYS)
        for begin in range(0, len(gone), max(1, part_bytes // KEY_BYTES)):
            yield RowsPart(name, NO_KEYS, values[:0], gone[begin : begin + max(1, part_bytes // KEY_BYTES)])
    for partition in moved:
        flat = np.ascontiguousarray(shard.variables[partition]).reshape(-1)
        for begin in range(0, len(flat), max(1, part_bytes // ELEMENT_BYTES)):
            yield VariablePart(partition, begin, flat[begin : begin + max(1, part_bytes // ELEMENT_BYTES)])
    yield None


def _changed(table: PublishedTable, token: str | None) -> tuple[Keys, Float32s, Keys, bool]:
    mark = table.marks.get(token) if token is not None else None
    since = table.rows.since(mark) if mark is not None else None
    if since is not None:
        return (*since, False)
    rows = table.rows.all_rows()
    return rows.keys, rows.values, NO_KEYS, True
