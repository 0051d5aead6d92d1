"""Replica: what a subscriber holds of each shard, made of the differences that a server sends.

Owns when a version counts: only once all of it is there, only if it is later than the one before and has its steps, and
of another plan only with all its shards. Pure: it is fed values.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from parashard.errors import MalformedFrame
from parashard.plan.embedding import ROWS_MAX, Keys
from parashard.plan.partition import Partition
from parashard.plan.variables import Float32s, Variable
from parashard.serving.published_rows import NO_KEYS, PublishedRows, RowChange
from parashard.serving.versions import PublishedShard, PublishedTable, ShardVersion, follows, has_all

SHARDS_MAX = 1 << 16


class TableAhead(NamedTuple):
    """How many rows of a table follow; `whole`: all of them, so that what is held of it is to be forgotten."""

    table: str
    whole: bool
    rows: int
    gone: int
    token: str


class PartitionAhead(NamedTuple):
    """A partition of a variable; `follows`: its values do, else they are those that are held."""

    partition: Partition
    token: str
    follows: bool


class Begin(NamedTuple):
    """A version, and what of it follows."""

    version: ShardVersion
    shards: int
    tables: tuple[TableAhead, ...]
    elements: int
    partitions: tuple[PartitionAhead, ...]


class RowsPart(NamedTuple):
    """Some rows of a table, and keys without a row; both ascending."""

    table: str
    keys: Keys
    values: Float32s
    gone: Keys


class VariablePart(NamedTuple):
    """Some elements of a partition, flat, from `first` on."""

    partition: Partition
    first: int
    values: Float32s


@dataclass(frozen=True)
class HeldShard:
    """A version of a shard, and by table the token that tells a server which rows these are.

    That of a partition is in the state's digests.
    """

    state: PublishedShard
    tokens: Mapping[str, str]


@dataclass
class _Staged:
    begin: Begin
    rows: dict[str, list[RowsPart]]
    counts: dict[str, tuple[int, int]]
    partitions: dict[Partition, Float32s] = field(default_factory=dict)
    filled: dict[Partition, int] = field(default_factory=dict)
    elements: int = 0


class Replica:
    """A subscriber's state.

    `shards` are in their order and all of one plan, empty until all of a plan are there; they are replaced as one.
    `problem` says why the last version that was offered was not taken. What is held stays when a part is missing.
    """

    def __init__(
        self, row_elements: Mapping[str, int], variables: Mapping[str, Variable], *, fresh: bool = False
    ) -> None:
        self._fresh = fresh
        self.resyncs = 0
        self._row_elements = row_elements
        self._variables = variables
        self.shards: tuple[HeldShard, ...] = ()
        self.problem = ""
        self._next: dict[int, HeldShard] = {}  # of a plan that is not complete yet
        self._staged: _Staged | None = None

    @property
    def versions(self) -> tuple[ShardVersion, ...]:
        """The versions that are held."""
        return tuple(held.state.version for held in self.shards)

    def held(self) -> tuple[HeldShard, ...]:
        """Return every shard of which a server needs to tell only what changed."""
        return tuple(self._next.values()) or self.shards

    def begin(self, begin: Begin) -> None:
        """Begin a version; one that was not ended is forgotten."""
        self._staged = None
        known = set(self._row_elements)
        for ahead in begin.tables:
            if ahead.rows > ROWS_MAX or ahead.gone > ROWS_MAX:
                raise MalformedFrame(f"table {ahead.table!r}: {ahead.rows} rows; allowed: at most {ROWS_MAX}")
        if not begin.version.id.shard < begin.shards <= SHARDS_MAX:
            raise MalformedFrame(f"shard {begin.version.id.shard} of {begin.shards}")
        if {ahead.table for ahead in begin.tables} != known or len(begin.tables) != len(known):
            raise MalformedFrame(f"tables {sorted(ahead.table for ahead in begin.tables)}; due: {sorted(known)}")
        if any(not ahead.whole for ahead in begin.tables) and self._before(begin) is None:
            raise MalformedFrame(f"{begin.version.id}: a difference from a version that is not held")
        if len({ahead.partition for ahead in begin.partitions}) != len(begin.partitions):
            raise MalformedFrame(f"{begin.version.id}: a partition is named twice")
        for partition in (ahead.partition for ahead in begin.partitions if not ahead.follows):
            before = self._before(begin)
            if before is None or partition not in before.state.variables:
                raise MalformedFrame(f"{partition} is to stay as it is held, and is not held")
        self._staged = _Staged(begin, {table: [] for table in known}, dict.fromkeys(known, (0, 0)))

    def rows(self, part: RowsPart) -> None:
        """Take some rows of the version that was begun; raises MalformedFrame as `begin`."""
        staged = self._under_way()
        if part.table not in staged.rows:
            raise MalformedFrame(f"rows of table {part.table!r}, which was not subscribed to")
        rows, gone = staged.counts[part.table]
        rows, gone = staged.counts[part.table] = rows + len(part.keys), gone + len(part.gone)
        ahead = next(ahead for ahead in staged.begin.tables if ahead.table == part.table)
        if rows > ahead.rows or gone > ahead.gone:
            raise MalformedFrame(f"table {part.table!r}: more than the {ahead.rows} rows and {ahead.gone} keys told of")
        staged.rows[part.table].append(part)

    def variable(self, part: VariablePart) -> None:
        """Take some elements of the version that was begun; raises MalformedFrame as `begin`."""
        staged = self._under_way()
        partition = part.partition
        variable = self._variables.get(partition.variable)
        if variable is None or not 0 <= partition.row_start < partition.row_stop <= variable.rows:
            raise MalformedFrame(f"{partition} is of no variable that was subscribed to")
        if not any(ahead.partition == partition and ahead.follows for ahead in staged.begin.partitions):
            raise MalformedFrame(f"{partition} was not told to follow")
        if partition not in staged.partitions:
            elements = partition.rows * variable.row_elements
            staged.elements += elements
            if staged.elements > staged.begin.elements:
                raise MalformedFrame(f"{staged.elements} elements of variables came, {staged.begin.elements} were told")
            staged.partitions[partition], staged.filled[partition] = np.empty(elements, np.float32), 0
        into, filled = staged.partitions[partition], staged.filled[partition]
        if part.first != filled or filled + len(part.values) > len(into):
            raise MalformedFrame(
                f"{partition}: {len(part.values)} elements from {part.first} on; due: from {filled} on"
            )
        into[filled : filled + len(part.values)] = part.values
        staged.filled[partition] = filled + len(part.values)

    def end(self) -> bool:
        """End the version that was begun; return whether it, or a plan with it, counts now."""
        staged, self._staged = self._under_way(), None
        begin = staged.begin
        due = {ahead.partition for ahead in begin.partitions if ahead.follows}
        if (
            staged.elements != begin.elements
            or set(staged.partitions) != due
            or any(staged.filled[partition] != len(values) for partition, values in staged.partitions.items())
        ):
            raise MalformedFrame(f"{begin.version.id}: elements of variables are missing")
        before = self._before(begin)
        tables = {
            ahead.table: PublishedTable(self._table(ahead, staged.rows[ahead.table], before)) for ahead in begin.tables
        }
        kept = {} if before is None else before.state.variables
        variables = {p: staged.partitions[p] if follows else kept[p] for p, _, follows in begin.partitions}
        digests = {ahead.partition: ahead.token for ahead in begin.partitions}
        shard = PublishedShard(begin.version, variables, tables, digests)
        held = HeldShard(shard, {ahead.table: ahead.token for ahead in begin.tables})
        return self._take(held, begin.shards)

    def _take(self, held: HeldShard, shards: int) -> bool:
        version, before = held.state.version, self.versions
        if before and version.id.plan_version == before[0].id.plan_version and len(before) == shards:
            place = version.id.shard
            if not follows(version, before[place], fresh=self._fresh):
                self.problem = f"the server has {version.id}, which lacks steps of {before[place].id}: that one is kept"
                return False
            self.shards = self._covered((*self.shards[:place], held, *self.shards[place + 1 :]))
            self.resyncs += version.id.incarnation != before[place].id.incarnation
        else:
            if before and version.id.plan_version <= before[0].id.plan_version:
                self.problem = f"the server has {version.id}, of an older plan than {before[0].id}: that one is kept"
                return False
            if not self._fresh and not has_all(version.steps, before):
                self.problem = f"the server has {version.id}, which lacks steps of what is held: that is kept"
                return False
            if any(other.state.version.id.plan_version != version.id.plan_version for other in self._next.values()):
                self._next = {}
            self._next[version.id.shard] = held
            if set(self._next) != set(range(shards)):
                return False
            complete, self._next = tuple(self._next[place] for place in range(shards)), {}
            self.shards = self._covered(complete)
            self.resyncs += bool(before)
        self.problem = ""
        return True

    def _covered(self, shards: tuple[HeldShard, ...]) -> tuple[HeldShard, ...]:
        """Return shards whose partitions are each variable, every row once."""
        rows = dict.fromkeys(self._variables, 0)
        for partition in sorted(partition for held in shards for partition in held.state.variables):
            if rows[partition.variable] != partition.row_start:
                raise MalformedFrame(f"{partition} does not follow row {rows[partition.variable]}")
            rows[partition.variable] = partition.row_stop
        short = sorted(name for name, stop in rows.items() if stop != self._variables[name].rows)
        if short:
            raise MalformedFrame(f"variable {short[0]!r}: the shards have {rows[short[0]]} rows of it")
        return shards

    def _before(self, begin: Begin) -> HeldShard | None:
        """Return what is held of the shard under the same plan."""
        id_ = begin.version.id
        same = [held for held in self.held() if held.state.version.id[:2] == (id_.plan_version, id_.shard)]
        return same[0] if same else None

    def _table(self, ahead: TableAhead, parts: list[RowsPart], before: HeldShard | None) -> PublishedRows:
        elements = self._row_elements[ahead.table]
        keys = np.concatenate([NO_KEYS, *(part.keys for part in parts)])
        gone = np.concatenate([NO_KEYS, *(part.gone for part in parts)])
        values = np.concatenate([np.empty((0, elements), np.float32), *(part.values for part in parts)])
        if (len(keys), len(gone)) != (ahead.rows, ahead.gone) or not (_ascending(keys) and _ascending(gone)):
            raise MalformedFrame(f"table {ahead.table!r}: rows are missing, or not in the order of keys")
        gone = gone[~np.isin(gone, keys)]
        rows = PublishedRows.empty(elements)
        if not ahead.whole:
            assert before is not None
            rows = before.state.tables[ahead.table].rows
        return rows.with_change(RowChange(keys, values, np.zeros(len(keys), np.uint32), gone), 0).forgetting()

    def _under_way(self) -> _Staged:
        if self._staged is None:
            raise MalformedFrame("a part of a version that was not begun")
        return self._staged


def _ascending(keys: npt.NDArray[np.uint64]) -> bool:
    return bool((keys[1:] > keys[:-1]).all())
