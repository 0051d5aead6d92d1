"""Differences of a shard from a subscriber's version, as messages of bounded size, and the replica that they build.

A server keeps no state of subscribers: it computes each difference from the served version, and from the versions that
the subscriber reports. `Replica` decides when a version counts: only once it is complete, only if it is later than the
one before and, unless live, has its steps, and of another plan only with all its shards.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from parashard._proto import serving_pb2 as pb
from parashard.errors import MalformedFrame
from parashard.plan.embedding import KEY_BYTES, ROWS_MAX, Keys
from parashard.plan.partition import ELEMENT_BYTES, Partition
from parashard.plan.variables import Float32s, Variable
from parashard.serving.messages import bytes_of, floats_of, id_of, keys_of, version_message, version_of
from parashard.serving.published_rows import NO_KEYS, PublishedRows, RowChange
from parashard.serving.versions import PublishedShard, PublishedTable, ShardVersion, age_of, follows, has_all

PART_BYTES = 1 << 20
SHARDS_MAX = 1 << 16


def lacks(shards: Sequence[PublishedShard], held: Sequence[pb.HeldShard]) -> list[PublishedShard]:
    """Return the shards that a subscriber lacks, or has in an older version; none of a plan older than its own."""
    own = {shown.version.shard: age_of(id_of(shown.version), shown.version.parts_from) for shown in held}
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
    held: Sequence[pb.HeldShard],
    part_bytes: int = PART_BYTES,
) -> Iterator[pb.SubscribeReply]:
    """Yield a shard's difference for a subscriber: changed rows, and partitions of variables with other values."""
    mine = next((shown for shown in held if id_of(shown.version)[:2] == shard.version.id[:2]), pb.HeldShard())
    tokens = {table.table: table.token for table in mine.tables}
    own = {_partition_of(partition): partition.token for partition in mine.partitions}
    begin = pb.ShardBegin(version=version_message(shard.version, steps=True), shards=shards)
    changes = {}
    for name in sorted(tables):
        table = shard.tables[name]
        keys, values, gone, whole = _changed(table, tokens.get(name))
        begin.tables.add(table=name, whole=whole, rows=len(keys), gone=len(gone), token=table.token)
        changes[name] = keys, values, gone
    moved = []
    for p, digest in shard.digests.items():
        if p.variable in variables:
            ahead = begin.partitions.add(variable=p.variable, row_start=p.row_start, row_stop=p.row_stop, token=digest)
            ahead.follows = own.get(p) != digest
            if ahead.follows:
                moved.append(p)
    begin.elements = sum(shard.variables[p].size for p in moved)
    yield pb.SubscribeReply(begin=begin)
    for name, (keys, values, gone) in changes.items():
        at_once = max(1, part_bytes // (KEY_BYTES + ELEMENT_BYTES * values.shape[1]))
        for first in range(0, len(keys), at_once):
            some = slice(first, first + at_once)
            yield pb.SubscribeReply(
                rows=pb.RowsPart(table=name, keys=bytes_of(keys[some]), rows=bytes_of(values[some]))
            )
        at_once = max(1, part_bytes // KEY_BYTES)
        for first in range(0, len(gone), at_once):
            yield pb.SubscribeReply(rows=pb.RowsPart(table=name, gone=bytes_of(gone[first : first + at_once])))
    at_once = max(1, part_bytes // ELEMENT_BYTES)
    for partition in moved:
        name, start, stop = partition
        flat = np.ascontiguousarray(shard.variables[partition]).reshape(-1)
        for first in range(0, len(flat), at_once):
            part = pb.VariablePart(variable=name, row_start=start, row_stop=stop, first=first)
            part.values = bytes_of(flat[first : first + at_once])
            yield pb.SubscribeReply(variable=part)
    yield pb.SubscribeReply(end=pb.ShardEnd())


def _changed(table: PublishedTable, token: str | None) -> tuple[Keys, Float32s, Keys, bool]:
    mark = table.marks.get(token) if token is not None else None
    since = table.rows.since(mark) if mark is not None else None
    if since is not None:
        return (*since, False)
    rows = table.rows.all_rows()
    return rows.keys, rows.values, NO_KEYS, True


def _partition_of(message: pb.PartitionBegin | pb.HeldPartition | pb.VariablePart) -> Partition:
    return Partition(message.variable, message.row_start, message.row_stop)


@dataclass
class _Staged:
    """A version that is being received: its announcement, and its parts so far."""

    begin: pb.ShardBegin
    version: ShardVersion
    partitions: Mapping[Partition, pb.PartitionBegin]
    rows: dict[str, list[tuple[Keys, Float32s, Keys]]]  # by table: keys, their rows, and keys without one
    counts: dict[str, tuple[int, int]]  # of keys with and without a row, by table
    values: dict[Partition, Float32s] = field(default_factory=dict)
    filled: dict[Partition, int] = field(default_factory=dict)
    elements: int = 0


class Replica:
    """A subscriber's copy of the shards.

    `shards` are in their order and all of one plan, empty until a plan is complete; they are replaced atomically.
    `problem` says why the last version that was offered was rejected. Held versions stay when a part is missing.
    """

    def __init__(
        self, row_elements: Mapping[str, int], variables: Mapping[str, Variable], *, fresh: bool = False
    ) -> None:
        self._fresh = fresh
        self.resyncs = 0
        self._row_elements = row_elements
        self._variables = variables
        self.shards: tuple[PublishedShard, ...] = ()
        self.problem = ""
        self._next: dict[int, PublishedShard] = {}  # of a plan that is not complete yet
        self._staged: _Staged | None = None

    @property
    def versions(self) -> tuple[ShardVersion, ...]:
        """The held versions."""
        return tuple(shard.version for shard in self.shards)

    def held(self) -> list[pb.HeldShard]:
        """Return the held shards, for a server that then sends only differences."""
        found = []
        for shard in self._newest():
            held = pb.HeldShard(version=version_message(shard.version))
            held.tables.extend(pb.HeldTable(table=name, token=table.token) for name, table in shard.tables.items())
            for (name, start, stop), token in shard.digests.items():
                held.partitions.add(variable=name, row_start=start, row_stop=stop, token=token)
            found.append(held)
        return found

    def feed(self, message: pb.SubscribeReply) -> bool:
        """Process a part of a version; return whether it completed a newer version, or plan, which now counts."""
        # Raises MalformedFrame for a part that cannot be right.
        match message.WhichOneof("part"):
            case "begin":
                self._begin(message.begin)
            case "rows":
                self._rows(message.rows)
            case "variable":
                self._variable(message.variable)
            case "end":
                return self._end()
            case other:
                raise MalformedFrame(f"{other or 'nothing'} where a part of a version is due")
        return False

    def _begin(self, begin: pb.ShardBegin) -> None:
        """Begin a version; discard one that is incomplete."""
        self._staged = None
        known, version = sorted(self._row_elements), version_of(begin.version)
        for table in begin.tables:
            if table.rows > ROWS_MAX or table.gone > ROWS_MAX:
                raise MalformedFrame(f"table {table.table!r}: {table.rows} rows; allowed: at most {ROWS_MAX}")
        if not version.id.shard < begin.shards <= SHARDS_MAX:
            raise MalformedFrame(f"shard {version.id.shard} of {begin.shards}")
        if sorted(table.table for table in begin.tables) != known:
            raise MalformedFrame(f"tables {sorted(table.table for table in begin.tables)}; due: {known}")
        before = self._before(version)
        if before is None and not all(table.whole for table in begin.tables):
            raise MalformedFrame(f"{version.id}: a difference from a version that is not held")
        partitions = {_partition_of(ahead): ahead for ahead in begin.partitions}
        if len(partitions) != len(begin.partitions):
            raise MalformedFrame(f"{version.id}: a partition is named twice")
        for partition, ahead in partitions.items():
            if not ahead.follows and (before is None or partition not in before.variables):
                raise MalformedFrame(f"{partition} is to stay as it is held, and is not held")
        self._staged = _Staged(begin, version, partitions, {name: [] for name in known}, dict.fromkeys(known, (0, 0)))

    def _rows(self, part: pb.RowsPart) -> None:
        staged = self._under_way()
        ahead = next((ahead for ahead in staged.begin.tables if ahead.table == part.table), None)
        if ahead is None:
            raise MalformedFrame(f"rows of table {part.table!r}, which was not subscribed to")
        keys, gone = keys_of(part.keys), keys_of(part.gone)
        values = floats_of(part.rows, self._row_elements[part.table])
        if len(keys) != len(values):
            raise MalformedFrame(f"table {part.table!r}: {len(keys)} keys and {len(values)} rows")
        rows, lost = staged.counts[part.table]
        rows, lost = staged.counts[part.table] = rows + len(keys), lost + len(gone)
        if rows > ahead.rows or lost > ahead.gone:
            raise MalformedFrame(f"table {part.table!r}: more than the {ahead.rows} rows and {ahead.gone} keys told of")
        staged.rows[part.table].append((keys, values, gone))

    def _variable(self, part: pb.VariablePart) -> None:
        staged = self._under_way()
        partition, values = _partition_of(part), floats_of(part.values)
        variable = self._variables.get(partition.variable)
        if variable is None or not 0 <= partition.row_start < partition.row_stop <= variable.rows:
            raise MalformedFrame(f"{partition} is of no variable that was subscribed to")
        ahead = staged.partitions.get(partition)
        if ahead is None or not ahead.follows:
            raise MalformedFrame(f"{partition} was not told to follow")
        if partition not in staged.values:
            elements = partition.rows * variable.row_elements
            staged.elements += elements
            told = staged.begin.elements
            if staged.elements > told:
                raise MalformedFrame(f"{staged.elements} elements of variables came, {told} were told")
            staged.values[partition], staged.filled[partition] = np.empty(elements, np.float32), 0
        into, filled = staged.values[partition], staged.filled[partition]
        if part.first != filled or filled + len(values) > len(into):
            raise MalformedFrame(f"{partition}: {len(values)} elements from {part.first} on; due: from {filled} on")
        into[filled : filled + len(values)] = values
        staged.filled[partition] = filled + len(values)

    def _end(self) -> bool:
        staged, self._staged = self._under_way(), None
        due = {partition for partition, ahead in staged.partitions.items() if ahead.follows}
        if (
            staged.elements != staged.begin.elements
            or set(staged.values) != due
            or any(staged.filled[partition] != len(values) for partition, values in staged.values.items())
        ):
            raise MalformedFrame(f"{staged.version.id}: elements of variables are missing")
        before = self._before(staged.version)
        kept = {} if before is None else before.variables
        tables = {
            ahead.table: PublishedTable(self._table(ahead, staged.rows[ahead.table], before), token=ahead.token)
            for ahead in staged.begin.tables
        }
        variables = {p: staged.values[p] if ahead.follows else kept[p] for p, ahead in staged.partitions.items()}
        digests = {partition: ahead.token for partition, ahead in staged.partitions.items()}
        return self._take(PublishedShard(staged.version, variables, tables, digests), staged.begin.shards)

    def _take(self, shard: PublishedShard, shards: int) -> bool:
        version, before = shard.version, self.versions
        if before and version.id.plan_version == before[0].id.plan_version and len(before) == shards:
            place = version.id.shard
            if not follows(version, before[place], fresh=self._fresh):
                self.problem = f"the server has {version.id}, which lacks steps of {before[place].id}: that one is kept"
                return False
            self.shards = self._covered((*self.shards[:place], shard, *self.shards[place + 1 :]))
            self.resyncs += version.id.incarnation != before[place].id.incarnation
        else:
            if before and version.id.plan_version <= before[0].id.plan_version:
                self.problem = f"the server has {version.id}, of an older plan than {before[0].id}: that one is kept"
                return False
            if not self._fresh and not has_all(version.steps, before):
                self.problem = f"the server has {version.id}, which lacks steps of what is held: that is kept"
                return False
            if any(other.version.id.plan_version != version.id.plan_version for other in self._next.values()):
                self._next = {}
            self._next[version.id.shard] = shard
            if set(self._next) != set(range(shards)):
                return False
            complete, self._next = tuple(self._next[place] for place in range(shards)), {}
            self.shards = self._covered(complete)
            self.resyncs += bool(before)
        self.problem = ""
        return True

    def _covered(self, shards: tuple[PublishedShard, ...]) -> tuple[PublishedShard, ...]:
        """Return the shards; MalformedFrame unless their partitions cover every row of each variable once."""
        rows = dict.fromkeys(self._variables, 0)
        for partition in sorted(partition for shard in shards for partition in shard.variables):
            if rows[partition.variable] != partition.row_start:
                raise MalformedFrame(f"{partition} does not follow row {rows[partition.variable]}")
            rows[partition.variable] = partition.row_stop
        short = sorted(name for name, stop in rows.items() if stop != self._variables[name].rows)
        if short:
            raise MalformedFrame(f"variable {short[0]!r}: the shards have {rows[short[0]]} rows of it")
        return shards

    def _newest(self) -> tuple[PublishedShard, ...]:
        return tuple(self._next.values()) or self.shards

    def _before(self, version: ShardVersion) -> PublishedShard | None:
        """Return the held version of the shard under the same plan, or None."""
        return next((shard for shard in self._newest() if shard.version.id[:2] == version.id[:2]), None)

    def _table(
        self, ahead: pb.TableBegin, parts: list[tuple[Keys, Float32s, Keys]], before: PublishedShard | None
    ) -> PublishedRows:
        rows = PublishedRows.empty(self._row_elements[ahead.table])
        nothing = NO_KEYS, rows.base.values, NO_KEYS
        keys, values, gone = (np.concatenate(arrays) for arrays in zip(nothing, *parts, strict=True))
        if (len(keys), len(gone)) != (ahead.rows, ahead.gone) or not (_ascending(keys) and _ascending(gone)):
            raise MalformedFrame(f"table {ahead.table!r}: rows are missing, or not in the order of keys")
        gone = gone[~np.isin(gone, keys)]
        if not ahead.whole:
            assert before is not None
            rows = before.tables[ahead.table].rows
        return rows.with_change(RowChange(keys, values, np.zeros(len(keys), np.uint32), gone), 0).forgetting()

    def _under_way(self) -> _Staged:
        if self._staged is None:
            raise MalformedFrame("a part of a version that was not begun")
        return self._staged


def _ascending(keys: Keys) -> bool:
    return bool((keys[1:] > keys[:-1]).all())
